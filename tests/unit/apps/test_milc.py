"""The staggered fermions mini-app on one rank: random fields; records and checksums of MILC's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import halox
from apps.milc import lime, random_fields, scidac
from tests import support

SHAPE = (6, 4, 8, 10)
WHOLE = tuple(slice(0, n) for n in SHAPE)


class TestRandomFields:
    BLOCKS = (
        (slice(1, 5), slice(2, 4), slice(0, 3), slice(2, 8)),
        (slice(5, 6), slice(0, 1), slice(7, 8), slice(9, 10)),
        (slice(0, 6), slice(0, 4), slice(0, 8), slice(4, 10)),
    )

    def test_the_same_in_every_block(self) -> None:
        for make in (
            lambda owned: random_fields.random_matrices(SHAPE, owned, 4, 5, 0),
            lambda owned: random_fields.random_vectors(SHAPE, owned, 5, 1),
        ):
            whole = make(WHOLE)
            assert all(np.array_equal(make(block), whole[block]) for block in self.BLOCKS)

    def test_special_unitary(self) -> None:
        found = random_fields.random_matrices(SHAPE, WHOLE, 4, 5, 0)
        products = found @ found.conj().swapaxes(-1, -2)
        assert np.abs(products - np.eye(3)).max() < 1e-13
        assert np.abs(np.linalg.det(found) - 1).max() < 1e-13
        assert np.abs(found.mean(axis=(0, 1, 2, 3))).max() < 0.05

    def test_moments_of_haar_measure(self) -> None:
        """The limits are four standard deviations; rows from a cube's points would miss the fourth moments by six."""
        count = 10_000
        found = random_fields.random_matrices(
            (count, 1, 1, 1), (slice(0, count), *[slice(0, 1)] * 3), 1, 7, 0
        ).reshape(-1, 3, 3)
        squares, trace = np.abs(found) ** 2, np.trace(found, axis1=1, axis2=2)
        for numbers, mean, variance in (
            (squares, 1 / 3, 1 / 18),
            (squares**2, 1 / 6, 1 / 15 - 1 / 36),
            (squares[:, 0, 0] * squares[:, 1, 1], 1 / 8, 1 / 45),
            (np.abs(trace) ** 2, 1, 1),
            (trace.real**3 - 3 * trace.real * trace.imag**2, 1, 6),
            (trace.real, 0, 1 / 2),
        ):
            far = np.abs(numbers.mean(axis=0) - mean).max()
            assert far < 4 * (variance / count) ** 0.5

    def test_seeds_streams_and_sites_differ(self) -> None:
        found = [
            random_fields.uniforms(SHAPE, WHOLE, 4, seed, stream)
            for seed, stream in ((1, 0), (1, 1), (2, 0), (2**64 - 1, 0))
        ]
        numbers = np.concatenate([one.ravel() for one in found])
        assert len(np.unique(numbers)) == numbers.size
        assert -1 <= numbers.min() < -0.99 and 0.99 < numbers.max() < 1
        assert abs(numbers.mean()) < 0.01


class TestLime:
    def test_records(self, tmp_path: Path) -> None:
        path = tmp_path / "some"
        payloads = {"one": b"abc", "two": b"", "three": b"x" * 16}
        parts = [
            lime.header(name, len(p)) + p.ljust(lime.padded(len(p)), b"\0")
            for name, p in payloads.items()
        ]
        path.write_bytes(b"".join(parts))
        found = lime.records(path)
        data = path.read_bytes()
        assert {r.kind: data[r.offset : r.offset + r.size] for r in found} == payloads
        # The last payload may lack its padding.
        path.write_bytes(lime.header("one", 3) + b"abc")
        assert lime.records(path) == [("one", 144, 3)]

    def test_checksums_and_sites_of_milc(self) -> None:
        support.require("mpi")
        data = support.milc_data()
        with halox.Grid((8, 8, 8, 8), device="cpu") as grid:
            sums = {}
            for name, site in (("fat.l8", scidac.LINKS), ("ksvector.src.sample.l8", scidac.VECTOR)):
                found = scidac.contents(str(data / name), grid.grid_shape, site)
                assert found.dtype == np.dtype(">c8")
                block = scidac.read(str(data / name), grid, site).astype(">c8")
                assert scidac.checksums(block, grid) == found.checksums
                sums[name] = found.checksums
                raw = (data / name).read_bytes()[found.offset :][: block.nbytes]
                assert block.tobytes() == raw
        assert sums["fat.l8"] == (0x8A62F398, 0x5766B5AB)
