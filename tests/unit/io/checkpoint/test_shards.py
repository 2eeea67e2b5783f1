"""Shards of fields: sizes, and that each cell has one writer and one owner."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.io.checkpoint import chunks
from halox.io.checkpoint.chunks import ShardGrid, extents, shard_shapes
from tests.limits import cut_shards

SHAPES = [(7,), (16, 16), (13, 10), (9, 8, 11), (4, 6, 4, 5)]


def layouts(shape: tuple[int, ...], ranks: int) -> list[FieldLayout]:
    grid = decompose(shape, ranks)
    spec = FieldSpec(((1, 1),) * len(shape))
    return [FieldLayout(grid, rank, spec) for rank in range(ranks)]


@pytest.mark.parametrize("shape", [(2**29,), (512, 512, 512), (509, 1021, 257), (4096, 1 << 20)])
def test_shards_and_chunks_are_of_the_wanted_size(shape: tuple[int, ...]) -> None:
    shard, chunk = shard_shapes(layouts(shape, 4)[0], 8)
    assert all(one % other == 0 for one, other in zip(shard, chunk, strict=True))
    assert chunks.CHUNK_BYTES / 4 <= 8 * prod(chunk) <= chunks.CHUNK_BYTES
    assert chunks.SHARD_BYTES / 4 <= 8 * prod(shard) <= 1.2 * chunks.SHARD_BYTES


@pytest.mark.parametrize("shard_bytes", [100, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_cell_has_one_writer_and_one_owner(
    shape: tuple[int, ...], ranks: int, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_shards(monkeypatch, shard_bytes)
    written, owned = np.zeros(shape, int), np.zeros(shape, int)
    for rank, layout in enumerate(layouts(shape, ranks)):
        shards = ShardGrid(layout, shard_shapes(layout, 8)[0])
        for shard, cut in zip(shards.shards, shards.own_cuts, strict=True):
            mine = [piece.cut for piece in shard.pieces if piece.rank == rank]
            assert mine == [cut]
            owned[cut] += 1
            if shard.writer == rank:
                written[shard.cut] += 1
                assert sum(prod(extents(one.cut)) for one in shard.pieces) == prod(
                    extents(shard.cut)
                )
    assert (written == 1).all() and (owned == 1).all()


@pytest.mark.parametrize("shard_bytes", [100, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_point_of_a_region_has_one_writer_and_one_owner(
    shape: tuple[int, ...], shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_shards(monkeypatch, shard_bytes)
    whole, rng = np.arange(prod(shape)).reshape(shape), np.random.default_rng(len(shape))
    for _ in range(8):
        ends = [sorted(rng.choice(n + 1, 2, replace=False).tolist()) for n in shape]
        region = tuple(slice(*two, int(rng.integers(1, 5))) for two in ends)
        expected = whole[region]
        written, found = np.zeros(expected.shape, int), np.full(expected.shape, -1)
        for rank, layout in enumerate(layouts(shape, 4)):
            shards = ShardGrid(layout, shard_shapes(layout, 8, region)[0], region)
            cells = whole[layout.owned][shards.own_cells]
            assert found[shards.own].shape == cells.shape
            found[shards.own] = cells
            cuts = shards.own_cuts, shards.local_cuts
            for shard, cut, local in zip(shards.shards, *cuts, strict=True):
                assert [piece.cut for piece in shard.pieces if piece.rank == rank] == [cut]
                assert prod(extents(cut)) > 0 and cells[local].shape == extents(cut)
                if shard.writer == rank:
                    written[shard.cut] += 1
        assert (written == 1).all() and (found == expected).all(), region


def test_equal_blocks_need_no_messages() -> None:
    for layout in layouts((512, 512, 512), 8):
        shards = ShardGrid(layout, shard_shapes(layout, 8)[0])
        assert all(len(shard.pieces) == 1 for shard in shards.shards)
