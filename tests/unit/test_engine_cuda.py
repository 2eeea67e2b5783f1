"""What the engine does where there is no GPU, and what of its GPU code needs none."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from halox.datatypes import StridedBlocks
from halox.errors import DatatypeError, DeviceError, FieldError
from halox.packing.device_arrays import DeviceArray
from halox.packing.strided import addition_element
from halox.runtime.gpu import compiler, cuda, libcuda
from halox.runtime.gpu import dependent_launch as early_launch
from halox.runtime.gpu.dependent_launch import EarlyLaunch
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import pinned, register


class RuntimeFailure(RuntimeError):
    pass


def fake_cupy(*, driver=13000, runtime=13000, count=1, error=None, is_hip=False):
    def device_count():
        if error:
            raise RuntimeFailure(error)
        return count

    module = ModuleType("cupy")
    module.cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            is_hip=is_hip,
            driverGetVersion=lambda: driver,
            runtimeGetVersion=lambda: runtime,
            getDeviceCount=device_count,
            CUDARuntimeError=RuntimeFailure,
        )
    )
    return module


@pytest.fixture
def install(monkeypatch):
    """Put a module, or its absence, in CuPy's place."""

    def put(module):
        monkeypatch.setitem(sys.modules, "cupy", module)
        cuda.why_no_gpu.cache_clear()

    yield put
    cuda.why_no_gpu.cache_clear()


class TestWhyNoGpu:
    def test_a_gpu(self, install):
        install(fake_cupy(count=2))
        assert cuda.why_no_gpu() is None
        assert cuda.gpu_count() == 2

    @pytest.mark.parametrize(
        ("world", "reason"),
        [
            ({"driver": 0}, "no NVIDIA driver is loaded"),
            (
                {"driver": 12040, "error": "cudaErrorInsufficientDriver: too old"},
                r"driver supports CUDA 12\.4, and this CuPy needs CUDA 13\.0.*halox\[cuda12\]",
            ),
            ({"error": "cudaErrorNoDevice: no device"}, "driver shows no GPU"),
            ({"count": 0}, r"shows no GPU \(CUDA_VISIBLE_DEVICES is '7'\)"),
            ({"error": "cudaErrorUnknown: what"}, "cannot be counted .*Unknown"),
            ({"is_hip": True}, r"ROCm.*halox\[cuda13\]"),
        ],
    )
    def test_each_reason(self, install, monkeypatch, world, reason):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        install(fake_cupy(**world))
        assert re.search(reason, cuda.why_no_gpu())
        assert cuda.gpu_count() == 0
        with pytest.raises(DeviceError, match=reason):
            cuda.cupy()

    def test_cupy_is_not_installed(self, install, monkeypatch):
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "cupy":
                    raise ModuleNotFoundError("No module named 'cupy'", name="cupy")

        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
        cuda.why_no_gpu.cache_clear()
        reason = cuda.why_no_gpu()
        assert "not installed" in reason
        assert "halox[cuda12]" in reason
        assert "halox[cuda13]" in reason

    def test_memory_says_why(self, install):
        install(fake_cupy(driver=0))
        for make in (lambda: pinned(8), lambda: register(np.zeros(8, np.uint8))):
            with pytest.raises(DeviceError, match="no NVIDIA driver"):
                make()


def test_only_bytes_are_registered():
    with pytest.raises(FieldError, match="float64"):
        register(np.zeros(8))
    with pytest.raises(FieldError, match="uint8"):
        register(np.zeros(8, np.uint8)[::2])


class TestPreparedLaunch:
    """With the driver's entry replaced: what it would have been handed."""

    def prepare(self, monkeypatch, failures=(), context=5):
        calls, failures = [], list(failures)

        def launch_kernel(function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
            if failures:
                raise RuntimeError(failures.pop())
            addresses = (ctypes.c_void_p * 2).from_address(params)
            values = (
                ctypes.c_uint64.from_address(addresses[0]).value,
                ctypes.c_uint32.from_address(addresses[1]).value,
            )
            calls.append((function, (gx, gy, gz), (bx, by, bz), shared, stream, values, extra))

        woken = []
        runtime = SimpleNamespace(setDevice=woken.append, free=woken.append)
        for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        api = sys.modules["cupy_backends.cuda.api"]
        api.driver = SimpleNamespace(launchKernel=launch_kernel, ctxGetCurrent=lambda: context)
        api.runtime = runtime
        args = (ctypes.c_void_p(2**47 + 3), ctypes.c_uint32(7))
        launch = PreparedLaunch(SimpleNamespace(ptr=99), 5, (32, 4), args, device=1)
        return launch, calls, woken

    def test_arguments_are_laid_out_once_and_read_at_each_launch(self, monkeypatch):
        launch, calls, _ = self.prepare(monkeypatch)
        launch.launch(1234)
        launch.args[1].value = 8
        launch.launch(0)
        first, second = calls
        assert first == (99, (5, 1, 1), (32, 4, 1), 0, 1234, (2**47 + 3, 7), 0)
        assert second == (99, (5, 1, 1), (32, 4, 1), 0, 0, (2**47 + 3, 8), 0)

    def test_the_first_launch_of_a_thread_makes_its_context(self, monkeypatch):
        launch, calls, woken = self.prepare(monkeypatch, ["no context"], context=0)
        launch.launch(0)
        assert woken == [1, 0]
        assert len(calls) == 1

    def test_a_refused_launch_names_the_device(self, monkeypatch):
        for failures, context in ((["bad"], 5), (["bad", "no context"], 0)):
            launch, calls, woken = self.prepare(monkeypatch, failures, context)
            with pytest.raises(DeviceError, match="kernel launch on device 1: bad"):
                launch.launch(0)
            assert not calls
            assert bool(woken) == (context == 0), "a thread's device is left alone"


class TestEarlyLaunch:
    """With the driver's functions replaced, and a GPU that can begin early or not."""

    @pytest.fixture
    def prepare(self, monkeypatch):
        plain, early = [], []

        def launch_kernel_ex(config, function, params, extra):
            found = config._obj
            attribute = early_launch._Attribute.from_address(found.attributes)
            address = ctypes.c_void_p.from_address(params).value
            number = ctypes.c_uint32.from_address(address).value
            early.append((function, list(found.shape), found.stream, number))
            assert (attribute.id, attribute.value, found.count, extra) == (6, 1, 1, None)
            return self.codes.pop(0) if self.codes else 0

        for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        api = sys.modules["cupy_backends.cuda.api"]
        api.driver = SimpleNamespace(
            launchKernel=lambda *given: plain.append(given), ctxGetCurrent=lambda: self.context
        )
        api.runtime = SimpleNamespace(setDevice=self.woken.append, free=self.woken.append)
        monkeypatch.setattr(libcuda, "function", {"cuLaunchKernelEx": launch_kernel_ex}.get)
        monkeypatch.setattr(libcuda, "error_name", "error {}".format)

        def made(can_begin_early=True):
            monkeypatch.setattr(early_launch, "can_begin_early", lambda device: can_begin_early)
            args = (ctypes.c_uint32(7),)
            return EarlyLaunch(SimpleNamespace(ptr=99), 5, (32, 4), args, device=1)

        return made, plain, early

    def setup_method(self):
        self.codes, self.context, self.woken = [], 5, []

    def test_the_driver_is_told_that_it_may_begin_early(self, prepare):
        made, plain, early = prepare
        launch = made()
        launch.launch(1234)
        launch.args[0].value = 8
        launch.launch(0)
        shape = [5, 1, 1, 32, 4, 1]
        assert early == [(99, shape, 1234, 7), (99, shape, None, 8)] and not plain

    def test_each_stream_gets_its_own(self, prepare):
        made, _, early = prepare
        launch, streams = made(), [*range(1, 40), 1, 39, 2]
        for stream in streams:
            launch.launch(stream)
        assert [call[2] for call in early] == streams

    def test_what_is_ready_does_the_same(self, prepare):
        made, plain, early = prepare
        launch = made()
        go, other = launch.ready(1234), launch.ready(5)
        go()
        launch.args[0].value = 8
        go()
        other()
        assert [call[2:] for call in early] == [(1234, 7), (1234, 8), (5, 8)]
        made(False).ready(1234)()
        assert len(plain) == 1 and len(early) == 3
        self.codes = [700]
        with pytest.raises(DeviceError, match="kernel launch on device 1: error 700"):
            go()
        self.codes, self.context = [201], 0
        go()
        assert self.woken == [1, 0]

    def test_a_gpu_that_cannot_is_not_told(self, prepare):
        made, plain, early = prepare
        made(False).launch(1234)
        assert len(plain) == 1 and not early

    def test_errors(self, prepare):
        made, _, early = prepare
        self.codes = [700]
        with pytest.raises(DeviceError, match="kernel launch on device 1: error 700"):
            made().launch(0)
        self.codes, self.context = [201], 0
        made().launch(0)
        assert self.woken == [1, 0] and len(early) == 3

    @pytest.mark.parametrize(
        ("capability", "driver", "can"),
        [("90", 13000, True), ("89", 13000, False), ("90", 12020, False), ("120", 12080, True)],
    )
    def test_which_can(self, monkeypatch, capability, driver, can):
        cuda = SimpleNamespace(
            Device=lambda _: SimpleNamespace(compute_capability=capability),
            runtime=SimpleNamespace(driverGetVersion=lambda: driver),
        )
        monkeypatch.setattr(early_launch, "cupy", lambda: SimpleNamespace(cuda=cuda))
        assert early_launch.can_begin_early.__wrapped__(0) == can


class TestBounds:
    def test_span_of_strided_arrays(self):
        assert StridedBlocks(0, (4, 3), (24, 8), 8).span == (0, 96)
        assert StridedBlocks(5, (4, 3), (-24, 8), 8).span == (5 - 72, 5 + 24)
        assert StridedBlocks(0, (), (), 8).span == (0, 8)

    @pytest.mark.parametrize(
        ("count", "fits"), [(0, True), (1, True), (4, True), (5, False), (1000, False)]
    )
    def test_items_outside_the_allocation(self, count, fits):
        from halox import datatypes as dt

        array = DeviceArray("source", 4096, 4096, 4096 + 32, 0)
        if fits:
            array.check_bounds(dt.primitive("f8"), count)
        else:
            expected = rf"source: {count} item.*\[0, {8 * count}\).*32\)"
            with pytest.raises(FieldError, match=expected):
                array.check_bounds(dt.primitive("f8"), count)

    def test_bytes_before_the_first_element(self):
        from halox import datatypes as dt

        below = dt.hindexed([1], [-8], "f8")
        DeviceArray("target", 4096, 4088, 5000, 0).check_bounds(below, 1)
        with pytest.raises(FieldError, match=r"\[-8, 0\)"):
            DeviceArray("target", 4096, 4096, 5000, 0).check_bounds(below, 1)


class TestKernelCache:
    """CuPy's cache of compiled kernels where its folder is full, or cannot be written to."""

    @pytest.fixture
    def compiled(self, install, monkeypatch):
        """Make kernels of a CuPy that can keep them in memory only; yields the modules made."""
        made = []

        class RawModule:
            def __init__(self, code, options):
                made.append(self)
                if os.environ.get("CUPY_CACHE_IN_MEMORY") != "1":
                    raise OSError(28, "No space left on device")
                self.module = SimpleNamespace(get_function=lambda function: function)

        world = fake_cupy(driver=13000)
        world.cuda.Device = lambda device: nullcontext()
        world.cuda.compiler = SimpleNamespace(CompileException=RuntimeFailure)
        world.cuda.driver = SimpleNamespace(CUDADriverError=RuntimeFailure)
        world.RawModule = RawModule
        monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
        install(world)
        compiler.kernel.cache_clear()
        yield made
        compiler.kernel.cache_clear()

    def test_kernels_are_compiled_all_the_same_with_one_warning(self, compiled):
        with pytest.warns(UserWarning, match="No space left.*CUPY_CACHE_DIR") as caught:
            assert compiler.kernel("strided_copy", "copy", 0) == "copy"
        assert compiler.kernel("strided_copy", "add", 0) == "add"
        assert len(caught) == 1 and len(compiled) == 3


class TestAdditionElement:
    def test_complex_numbers_are_two_elements(self):
        assert addition_element("c8") == ("float", 4)

    @pytest.mark.parametrize("dtype", ["?", "S4", "M8[s]", "m8[s]", ">f8", "g", "G", [("a", "f8")]])
    def test_what_cannot_be_added(self, dtype):
        with pytest.raises(DatatypeError, match="cannot be added"):
            addition_element(dtype)
