"""The local path on a GPU moved to another array: the kernel runs on the CPU, its addresses shifted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.exchange.halo import halo_draft
from halox.packing import device as packing
from halox.packing.refine import Copy
from halox.packing.strided_plan import plan
from halox.paths.base import Job
from halox.paths.local import LocalDeviceChannel
from halox.runtime.arrays import describe
from tests.support import require
from tests.unit.cpu_kernels import aligned, run

require("cxx")


class OnCpu:
    """Takes the place of StridedCopy."""

    def __init__(self, copies: Sequence[Copy], *, device: int) -> None:
        self.planned = plan(copies, sms=4)

    def launch(self, stream: Any = None, shift: int = 0) -> None:
        run("strided_copy", self.planned, source=shift, target=shift)


@pytest.mark.parametrize("dtype", ["f8", "u1", "c16"])
def test_a_moved_channel_exchanges_the_other_array(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(packing, "StridedCopy", OnCpu)
    layout = FieldLayout(
        decompose((6, 9, 5), 1, periodic=True), 0, FieldSpec(((1, 1), (2, 1), (1, 2)))
    )
    nbytes = int(np.prod(layout.padded_shape)) * np.dtype(dtype).itemsize
    arrays = [aligned(nbytes).view(dtype).reshape(layout.padded_shape) for _ in range(3)]
    arrays.sort(key=lambda array: array.ctypes.data)
    first = arrays.pop(1)  # the others lie on both sides of it
    found = replace(describe(first), device=0)
    draft = halo_draft((first,), [(found, layout)], operation="copy", corners=True)
    channel = LocalDeviceChannel(Job([found], draft.sends, draft.receives), 0)
    assert channel.is_movable
    for number, array in enumerate((*arrays, first, *arrays)):
        cells = np.random.default_rng(number).integers(1, 200, (6, 9, 5)).astype(dtype)
        array[...] = 0
        array[layout.interior] = cells
        channel.bind(channel.views([array.ctypes.data]))
        channel.start()
        assert np.array_equal(array, np.pad(cells, ((1, 1), (2, 1), (1, 2)), mode="wrap"))


def test_several_arrays_have_channels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "StridedCopy", OnCpu)
    layout = FieldLayout(decompose((6, 6), 1, periodic=True), 0, FieldSpec(((1, 1), (1, 1))))
    arrays = [np.zeros(layout.padded_shape) for _ in range(2)]
    found = [replace(describe(array), device=0) for array in arrays]
    read = [(one, layout) for one in found]
    draft = halo_draft(tuple(arrays), read, operation="copy", corners=True)
    assert not LocalDeviceChannel(Job(found, draft.sends, draft.receives), 0).is_movable
