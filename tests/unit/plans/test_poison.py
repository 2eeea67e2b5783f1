"""Poisoned halos on a GPU: the views have the addresses of the cells, in any array of the layout."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.paths.base import Job
from halox.plans.halo import halo_draft
from halox.plans.poison import PoisonChannel
from halox.runtime.arrays import describe
from halox.runtime.gpu import memory as gpu_memory

HALO = ((1, 2), (1, 1))


def on_host(shape: tuple[int, ...], dtype: Any, memory: Any, strides: tuple[int, ...]) -> Any:
    """Take the place of cupy.ndarray, for memory of the host."""
    (address, nbytes), offset = memory
    area = (ctypes.c_char * nbytes).from_address(address)
    return np.ndarray(shape, dtype, area, offset, strides)  # raises outside the area


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        UnownedMemory=lambda pointer, nbytes, owner, device: (pointer, nbytes),
        MemoryPointer=lambda memory, offset: (memory, offset),
    )
    monkeypatch.setattr(gpu_memory, "cupy", lambda: SimpleNamespace(cuda=cuda, ndarray=on_host))


def test_a_view_of_a_flipped_array() -> None:
    whole = np.arange(60.0).reshape(3, 4, 5)
    flipped = whole[::-1, 1:, ::-2]
    strides, pointer = flipped.strides, flipped.ctypes.data
    view = gpu_memory.device_view(pointer, flipped.shape, flipped.dtype, strides, 0)
    assert view.ctypes.data == pointer and np.array_equal(view, flipped)


@pytest.mark.parametrize("order", ["C", "F"])
def test_views_of_a_gpu(order: Any) -> None:
    domain = decompose((6, 8), 1, halo=HALO, periodic=True)
    layout = FieldLayout(domain, 0, FieldSpec(HALO, components_after=(2,)))
    arrays = [np.ones(layout.padded_shape, "f8", order) for _ in range(2)]
    read = [(describe(arrays[0]), layout)]
    draft = halo_draft((arrays[0],), read, operation="copy", corners=True)
    job = Job([describe(arrays[0])], draft.sends, draft.receives)
    channel = PoisonChannel(job, draft.walls, draft.described, device=0)
    for array in arrays:
        channel.bind(channel.views([describe(array).pointer]))
        assert not np.isnan(array).any()
        channel.start()
        assert (array[layout.interior] == 1).all()
        assert np.isnan(array).sum() == array.size - 6 * 8 * 2
