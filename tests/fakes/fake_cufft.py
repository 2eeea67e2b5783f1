"""Stand-ins for CuPy's cuFFT plans, on NumPy. They address memory by cuFFT's documented advanced data layout.

Element (x0, x1, x2) of batch b is at ``b * dist + ((x0 * embed[1] + x1) * embed[2] + x2) * stride``.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from halox.fft import cufft

KINDS = {"C2C": 0x29, "R2C": 0x2A, "C2R": 0x2C, "Z2Z": 0x69, "D2Z": 0x6A, "Z2D": 0x6C}


class Array(np.ndarray):
    """Takes the place of cupy.ndarray."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


def fake(array: Any) -> Any:
    return np.asarray(array).view(Array)


def elements(ptr: int, dtype: str, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the memory at an address as an array, and the element offsets in it."""
    count = int(places.max()) + 1
    memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(ptr)
    return np.frombuffer(memory, dtype), places


def places(shape: Any, embed: Any, stride: int, dist: int, batch: int) -> np.ndarray:
    found = np.arange(shape[0])
    for extent, full in zip(shape[1:], embed[1:], strict=True):
        found = found[..., None] * full + np.arange(extent)
    steps = (np.arange(batch) * dist).reshape(-1, *(1,) * len(shape))
    return np.asarray(found * stride + steps)


class PlanNd:
    """Takes the place of cupy.cuda.cufft.PlanNd."""

    made: ClassVar[int] = 0
    launched: ClassVar[int] = 0

    def __init__(
        self,
        shape: list[int],
        inembed: list[int],
        istride: int,
        idist: int,
        onembed: list[int],
        ostride: int,
        odist: int,
        kind: int,
        batch: int,
        order: str,
        last_axis: int,
        last_size: Any,
    ) -> None:
        assert all(
            type(n) is int for n in (*shape, *inembed, istride, idist, ostride, odist, batch)
        )
        self.kind = next(name for name, number in KINDS.items() if number == kind)
        self.shape, halved = shape, [*shape[:-1], shape[-1] // 2 + 1]
        real_in, real_out = self.kind[0] in "RD", self.kind[-1] in "RD"
        assert inembed[1:] >= [0] * (len(shape) - 1) and len(shape) <= 3
        self.source = places(halved if real_out else shape, inembed, istride, idist, batch)
        self.target = places(halved if real_in else shape, onembed, ostride, odist, batch)
        dtypes = {"C": "c8", "R": "f4", "Z": "c16", "D": "f8"}
        self.dtypes = dtypes[self.kind[0]], dtypes[self.kind[-1]]
        PlanNd.made += 1

    def fft(self, a: Any, out: Any, sign: int) -> None:
        PlanNd.launched += 1
        pair = 8 if self.kind[0] in "CR" else 16
        assert a.data.ptr % pair == 0 and out.data.ptr % pair == 0, "not aligned to complex numbers"
        start, at = elements(a.data.ptr, self.dtypes[0], self.source)
        end, to = elements(out.data.ptr, self.dtypes[1], self.target)
        axes = tuple(range(1, len(self.shape) + 1))
        values = start[at]
        if self.kind[-1] in "RD":
            found = np.fft.irfftn(values, self.shape, axes=axes, norm="forward")
            start[at] = np.nan  # cuFFT may overwrite the input
        elif self.kind[0] in "RD":
            found = np.fft.rfftn(values, axes=axes)
        else:
            found = (np.fft.fftn if sign == -1 else np.fft.ifftn)(
                values, axes=axes, norm="backward" if sign == -1 else "forward"
            )
        end[to] = found


class XtPlanNd(PlanNd):
    """Takes the place of cupy.cuda.cufft.XtPlanNd."""

    def __init__(
        self,
        shape: list[int],
        inembed: list[int],
        istride: int,
        idist: int,
        idtype: str,
        onembed: list[int],
        ostride: int,
        odist: int,
        odtype: str,
        batch: int,
        edtype: str,
        **options: Any,
    ) -> None:
        assert edtype in "FD" and edtype in (idtype, odtype)
        letters = {"f": "R", "d": "D", "F": "C", "D": "Z"}
        kind = KINDS[f"{letters[idtype]}2{letters[odtype]}"]
        layout = (inembed, istride, idist, onembed, ostride, odist, kind, batch)
        super().__init__(shape, *layout, **options)


class Transforms(cufft.CuFFT):
    """halox's cuFFT transforms, applied to NumPy arrays."""

    def begin(self) -> None:
        """Do nothing: there are no streams."""

    def key(self, array: Any) -> object:
        return super().key(fake(array))

    def c2c(self, source: Any, target: Any, axes: Any, **options: Any) -> Any:
        return on_numpy(super().c2c(fake(source), fake(target), axes, **options))

    def r2c(self, source: Any, target: Any, axes: Any, **options: Any) -> Any:
        return on_numpy(super().r2c(fake(source), fake(target), axes, **options))

    def c2r(self, source: Any, target: Any, axes: Any, **options: Any) -> Any:
        return on_numpy(super().c2r(fake(source), fake(target), axes, **options))


def on_numpy(run: Any) -> Any:
    return lambda source, target: run(fake(source), fake(target))


def take_the_hosts_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transforms of NumPy arrays go through the plans of cuFFT."""
    install(monkeypatch)
    monkeypatch.setattr("halox.fft.transform.HostTransforms", Transforms)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch `halox.fft.cufft` to work on the host."""
    names = {f"CUFFT_{name}": number for name, number in KINDS.items()}
    library = SimpleNamespace(PlanNd=PlanNd, XtPlanNd=XtPlanNd, **names)
    module = SimpleNamespace(
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        cuda=SimpleNamespace(cufft=library),
    )
    monkeypatch.setattr(cufft, "cupy", lambda: module)
    monkeypatch.setattr(cufft, "is_capturing", lambda: False)
    PlanNd.made = PlanNd.launched = 0
