"""The engine without a GPU: its errors, and the parts of its GPU code that run without one."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest

from halox import datatypes as dt
from halox.errors import DatatypeError, DeviceError, FieldError
from halox.packing.device_arrays import DeviceArray
from halox.packing.strided import addition_element
from halox.runtime.gpu import compiler, cuda, driver
from halox.runtime.gpu import launch as launches
from halox.runtime.gpu.launch import PreparedLaunch
from tests.support import require


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
    """Replace CuPy by a module, or by None to make it missing."""

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
                r"driver supports CUDA 12\.4, and this CuPy needs CUDA 13\.0.*install cupy-cuda12x",
            ),
            ({"error": "cudaErrorNoDevice: no device"}, "driver shows no GPU"),
            ({"count": 0}, r"shows no GPU \(CUDA_VISIBLE_DEVICES is '7'\)"),
            ({"error": "cudaErrorUnknown: what"}, "cannot be counted .*Unknown"),
            ({"is_hip": True}, r"ROCm.*pip install cupy-cuda13x"),
        ],
    )
    def test_each_reason(self, install, monkeypatch, world, reason):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        install(fake_cupy(**world))
        assert re.search(reason, cuda.why_no_gpu())
        assert cuda.gpu_count() == 0
        with pytest.raises(DeviceError, match=reason):
            cuda.cupy()

    def test_the_bindings_are_not_installed(self, install, monkeypatch):
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
        install(fake_cupy())
        with pytest.warns(UserWarning, match="does not use the GPU: cuda.bindings"):
            assert "pip install 'cuda-bindings==13.*'" in cuda.why_no_gpu()


class TestPreparedLaunch:
    """The arguments of a launch, recorded by a replacement of the driver's function."""

    @pytest.fixture
    def prepare(self, monkeypatch):
        require("nvrtc")  # the bindings belong to the same package
        from cuda.bindings import driver as types

        self.calls, self.codes, self.context, self.woken = [], [], 5, []

        def called(kind, function, grid, block, shared_bytes, stream, params, extra):
            addresses = (ctypes.c_void_p * 2).from_address(params)
            values = (
                ctypes.c_uint64.from_address(addresses[0]).value,
                ctypes.c_uint32.from_address(addresses[1]).value,
            )
            self.calls.append((kind, function, grid, block, shared_bytes, stream, values, extra))
            return types.CUresult(self.codes.pop(0) if self.codes else 0)

        def plain(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, params, extra):
            given = (gx, gy, gz), (bx, by, bz), shared_bytes, stream, params, extra
            code = called("plain", function, *given)
            if code:
                raise RuntimeError(code.name)

        def extended(config, function, params, extra):
            grid = config.gridDimX, config.gridDimY, config.gridDimZ
            block = config.blockDimX, config.blockDimY, config.blockDimZ
            (attribute,) = config.attrs[: config.numAttrs]
            assert attribute.id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
            assert attribute.value.programmaticStreamSerializationAllowed == 1
            given = grid, block, config.sharedMemBytes, int(config.hStream), params, extra
            return (called("dependent", int(function), *given),)

        fake = SimpleNamespace(
            cuLaunchKernelEx=extended,
            cuCtxGetCurrent=lambda: (types.CUresult(0), types.CUcontext(self.context)),
            CUlaunchConfig=types.CUlaunchConfig,
            CUlaunchAttribute=types.CUlaunchAttribute,
            CUlaunchAttributeID=types.CUlaunchAttributeID,
            CUfunction=types.CUfunction,
        )
        monkeypatch.setattr(driver, "bindings", lambda: fake)
        monkeypatch.setattr(driver, "make_context", self.woken.append)
        path = "cupy_backends"
        for name in ("", ".cuda", ".cuda.api", ".cuda.api.driver"):
            monkeypatch.setitem(sys.modules, path + name, ModuleType(path + name))
        sys.modules["cupy_backends.cuda.api.driver"].launchKernel = plain

        def made(dependent=False, supported=True):
            monkeypatch.setattr(launches, "has_dependent_launch", lambda device: supported)
            args = (ctypes.c_void_p(2**47 + 3), ctypes.c_uint32(7))
            function = SimpleNamespace(ptr=99)
            return PreparedLaunch(function, 5, (32, 4), args, device=1, dependent=dependent)

        return made

    @pytest.mark.parametrize("dependent", [True, False])
    @pytest.mark.parametrize("supported", [True, False])
    def test_arguments_are_laid_out_once_and_read_at_each_launch(
        self, prepare, dependent, supported
    ):
        launch = prepare(dependent, supported)
        launch.launch(1234)
        launch.args[1].value = 8
        launch.launch(0)
        launch.launch_at(1234, 5, 6)
        kind = "dependent" if dependent and supported else "plain"
        start = kind, 99, (5, 1, 1), (32, 4, 1), 0
        assert self.calls == [
            (*start, 1234, (2**47 + 3, 7), 0),
            (*start, 0, (2**47 + 3, 8), 0),
            (*start, 1234, (5, 6), 0),
        ]

    @pytest.mark.parametrize("dependent", [True, False])
    def test_a_prepared_step_reads_the_arguments_of_its_time(self, prepare, dependent):
        launch = prepare(dependent)
        steps = [launch.ready(stream) for stream in (1234, 5)]
        for number, step in enumerate((*steps, *steps)):
            launch.args[1].value = number
            step()
        found = [(call[5], call[6][1]) for call in self.calls]
        assert found == [(1234, 0), (5, 1), (1234, 2), (5, 3)]

    def test_a_launch_takes_another_number_of_blocks(self, prepare):
        launch = prepare()
        launch.launch_with(1234, 9, 6)
        launch.launch(0)
        shapes = [((9, 1, 1), (32, 4, 1)), ((5, 1, 1), (32, 4, 1))]
        assert [call[2:4] for call in self.calls] == shapes
        assert [call[5:7] for call in self.calls] == [(1234, (6, 7)), (0, (6, 7))]

    @pytest.mark.parametrize("dependent", [True, False])
    @pytest.mark.parametrize("how", ["launch", "ready"])
    def test_the_first_launch_of_a_thread_makes_its_context(self, prepare, dependent, how):
        launch = prepare(dependent)
        self.codes, self.context = [201], 0
        launch.launch(0) if how == "launch" else launch.ready(0)()
        assert self.woken == [1] and len(self.calls) == 2

    @pytest.mark.parametrize("dependent", [True, False])
    @pytest.mark.parametrize("how", ["launch", "ready"])
    def test_a_refused_launch_names_the_device(self, prepare, dependent, how):
        for codes, context in (([700], 5), ([201, 700], 0)):
            launch = prepare(dependent)
            self.codes, self.context, self.woken[:] = codes, context, []
            with pytest.raises(DeviceError):
                launch.launch(0) if how == "launch" else launch.ready(0)()
            assert bool(self.woken) == (context == 0), "a thread's device is left alone"


class TestBounds:
    """`DeviceArray.check_bounds`: bytes from the array's place to the ends of its allocation."""

    @pytest.mark.parametrize(
        ("count", "fits"), [(0, True), (1, True), (4, True), (5, False), (1000, False)]
    )
    def test_items_outside_the_allocation(self, count, fits):
        array = DeviceArray("source", 4096, 4096, 4096 + 32, 0)
        with nullcontext() if fits else pytest.raises(FieldError):
            array.check_bounds(dt.primitive("f8"), count)

    def test_bytes_before_the_first_element(self):
        below = dt.hindexed([1], [-8], "f8")
        DeviceArray("target", 4096, 4088, 5000, 0).check_bounds(below, 1)
        with pytest.raises(FieldError):
            DeviceArray("target", 4096, 4096, 5000, 0).check_bounds(below, 1)


class TestKernelCache:
    """CuPy's cache of compiled kernels in a folder that is full or read-only."""

    @pytest.fixture
    def compiled(self, install, monkeypatch):
        """Install a CuPy that can cache kernels in memory only; yields its modules."""
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
        with pytest.raises(DatatypeError):
            addition_element(dtype)
