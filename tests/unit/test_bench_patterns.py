"""The benchmark patterns: published sizes, packing beside loops and slicing, sectors, selection."""

from __future__ import annotations

import numpy as np
import pytest

from halox import datatypes as dt
from halox.packing.host import HostPacker
from halox_bench.common import reference
from halox_bench.common.layouts import Triangle
from halox_bench.pack.applications import LAMMPS_FULL, WRF_INPUTS, vblock
from halox_bench.pack.cases import catalogue, select
from halox_bench.pack.patterns import Case
from halox_bench.pack.sectors import sectors

# Bytes of each case as the benchmark's authors print them.
PUBLISHED = {
    "WRF_y_vec": (90804, 75012, 63168, 55272, 43428),
    "WRF_y_sa": (90804, 75012, 63168, 55272, 43428),
    "WRF_x_vec": (173712, 102648, 63168),
    "WRF_x_sa": (173712, 102648, 63168),
    "MILC_su3_zdown": (98304, 49152, 24576, 12288),
    "NAS_LU_x": (480, 1320, 2560, 4080, 6480, 16320, 40800),
    "NAS_LU_y": (480, 1320, 2560, 4080, 6480, 16320, 40800),
    "NAS_MG_x": (2048, 32768, 131072, 524288),
    "NAS_MG_y": (4096, 65536, 262144, 1048576),
    "NAS_MG_z": (4096, 65536, 262144, 1048576),
    "LAMMPS_full": (195968, 143552, 106368),
    "LAMMPS_atomic": (11664, 6960, 5472),
    "SPECFEM3D_oc": (1972, 3508, 7588, 12900),
    "SPECFEM3D_cm": (26424, 55224, 106248, 177672),
    "SPECFEM3D_mt": (91200, 76800, 67200, 74400),
    "FFT2": tuple(16 * n * n // 4 for n in (256, 512, 768, 1024, 1536)),
    "lower_triangle": tuple(4 * n * (n + 1) for n in (1024, 2048, 4096, 8192)),
    "upper_triangle": tuple(4 * n * (n + 1) for n in (1024, 2048, 4096, 8192)),
    "hypercube": tuple(8 * n**4 for n in (2, 4, 8, 16, 32, 64)),
}

# Contiguous runs, from the same source.
RUNS = {
    "WRF_y_vec": (987,) * 5,
    "WRF_x_sa": (14476, 8554, 5264),
    "MILC_su3_zdown": (32, 32, 32, 16),
}

SMALL = [case for case in select() if case.slab_bytes <= 8 << 20]


def one(name: str) -> Case:
    (case,) = select([name])
    return case


def packed(case: Case, slab: np.ndarray) -> np.ndarray:
    """Return the bytes that the datatype engine packs."""
    datatype, start = case.place(0)
    out = np.empty(case.payload, np.uint8)
    HostPacker(slab[start:], datatype, case.count).pack(out)
    return out


def arrays_of(case: Case, slab: np.ndarray) -> list[np.ndarray]:
    return [slab[at : at + n] for at, n in zip(case.offsets, case.arrays, strict=True)]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_bytes(pattern: str) -> None:
    cases = list(catalogue()[pattern].cases())
    assert tuple(case.payload for case in cases) == PUBLISHED[pattern]


@pytest.mark.parametrize("pattern", RUNS)
def test_published_runs(pattern: str) -> None:
    cases = catalogue()[pattern].cases()
    assert tuple(case.place(0)[0].blocks().n_blocks for case in cases) == RUNS[pattern]


def test_vblock_bytes() -> None:
    n = 4096
    vertices, faces, face_vertices = int(6.8 * n), int(15.5 * n), 81 * n
    total = 4 * (6 + 3 * vertices + 3 * n + 4 * n + faces + face_vertices)
    assert one("HACC_vblock/4Ki").payload == total
    assert len(vblock(n)) == len(one("HACC_particles/4Ki").arrays) == 10


def test_every_case_describes_its_payload() -> None:
    names = []
    for case in select():
        names.append(case.name)
        if case.slab_bytes > 1 << 28:
            continue
        datatype, start = case.place(4096)
        assert datatype.size * case.count == case.payload, case.name
        span = (case.count - 1) * datatype.extent
        assert start + datatype.true_lb >= 4096, case.name
        assert start + datatype.true_ub + span <= 4096 + case.slab_bytes, case.name
        assert case.by_hand is not None, case.name
    assert len(set(names)) == len(names) > 150
    assert all(" " not in name for name in names)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_packing_matches_the_layout_by_hand(case: Case) -> None:
    slab = reference.filled(case.slab_bytes)
    by_hand = np.empty(case.payload, np.uint8)
    case.by_hand.pack(arrays_of(case, slab), by_hand)
    assert np.array_equal(packed(case, slab), by_hand)
    datatype, start = case.place(0)
    assert np.array_equal(reference.expected(datatype.blocks(case.count).shifted(start)), by_hand)


class TestAgainstLoops:
    """The patterns once more, element by element from their definitions."""

    def floats(self, case: Case, dtype: str) -> tuple[np.ndarray, list[np.ndarray]]:
        slab = reference.filled(case.slab_bytes)
        return packed(case, slab).view(dtype), [a.view(dtype) for a in arrays_of(case, slab)]

    def test_wrf(self) -> None:
        (i0, i1), (k0, k1), (j0, j1), (a0, a1), (b0, b1), (c0, c1) = WRF_INPUTS["y"]["8x8"]
        d1, d2, d3 = i1 - i0 + 1, k1 - k0 + 1, j1 - j0 + 1
        box = (
            slice(c0 - j0, c1 - j0 + 1),
            slice(b0 - k0, b1 - k0 + 1),
            slice(a0 - i0, a1 - i0 + 1),
        )
        for kind in ("vec", "sa"):
            found, arrays = self.floats(one(f"WRF_y_{kind}/8x8"), "u4")
            wanted = [a.reshape(d3, d1)[box[0], box[2]] for a in arrays[:4]]
            wanted += [a.reshape(d3, d2, d1)[box] for a in arrays[4:7]]
            wanted += [a.reshape(2, d3, d2, d1)[(1, *box)] for a in arrays[7:]]
            assert np.array_equal(found, np.concatenate([part.ravel() for part in wanted]))

    def test_milc(self) -> None:
        found, (lattice,) = self.floats(one("MILC_su3_zdown/8x8x8x8"), "u4")
        x = y = z = t = 8
        vectors = lattice.reshape(2, t * z * x * y // 2, 6)
        wanted = [
            vectors[half, step * x * y * z // 2 + v]
            for half in range(2)
            for step in range(t)
            for v in range(x * y // 2)
        ]
        assert np.array_equal(found, np.concatenate(wanted))

    def test_lammps(self) -> None:
        case = one("LAMMPS_full/1907-1662")
        found, arrays = self.floats(case, "u8")
        assert found.size == 8 * 1662 and LAMMPS_FULL[2] == (1907, 1662)
        # Which atoms are sent is told by one property; all others must be of the same ones.
        atoms = [int(np.flatnonzero(arrays[1] == tag)[0]) for tag in found[3 * 1662 : 4 * 1662]]
        assert len(set(atoms)) == 1662 and max(atoms) < 1907
        wanted = [arrays[0].reshape(-1, 3)[atoms].ravel()] + [a[atoms] for a in arrays[1:]]
        assert np.array_equal(found, np.concatenate(wanted))

    def test_fft(self) -> None:
        found, (array,) = self.floats(one("FFT2/256"), "c16")
        rows = array.reshape(64, 256).view("u8")
        blocks = [rows[:, 128 * p : 128 * (p + 1)].ravel() for p in range(4)]
        assert np.array_equal(found.view("u8"), np.concatenate(blocks))

    def test_triangles(self) -> None:
        n = 5
        matrix = np.arange(n * n, dtype="f8")
        columns = matrix.reshape(n, n)
        for lower in (True, False):
            wanted = [
                columns[j, i] for j in range(n) for i in range(n) if (i >= j) == lower or i == j
            ]
            out = np.empty(8 * len(wanted), np.uint8)
            Triangle(n, lower).pack([matrix.view("u1")], out)
            assert out.view("f8").tolist() == wanted


class TestReference:
    def test_fill_and_words(self) -> None:
        for lengths, offsets in (([3, 1, 8], [5, 40, 17]), ([8, 16], [64, 0]), ([4, 2], [4, 10])):
            blocks = dt.hindexed(lengths, offsets, "u1").blocks()
            memory = reference.filled(100)
            wanted = np.concatenate(
                [memory[o : o + n] for o, n in zip(offsets, lengths, strict=True)]
            )
            assert np.array_equal(reference.expected(blocks), wanted)

    def test_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        blocks = dt.indexed([5, 1, 9, 2], [40, 3, 10, 0], "f4").blocks()
        whole = np.concatenate(list(reference.word_places(blocks, 4)))
        for at_once in (1, 3, 4, 7):
            monkeypatch.setattr(reference, "_AT_ONCE", at_once)
            assert np.array_equal(np.concatenate(list(reference.word_places(blocks, 4))), whole)


class TestSectors:
    def brute(self, datatype: dt.Datatype, count: int, origin: int) -> int:
        blocks = datatype.blocks(count)
        touched: set[int] = set()
        for offset, length in zip(blocks.offsets.tolist(), blocks.lengths.tolist(), strict=True):
            touched.update(range((origin + offset) // 32, (origin + offset + length - 1) // 32 + 1))
        return len(touched)

    @pytest.mark.parametrize("origin", [0, 8, 31])
    @pytest.mark.parametrize(
        ("datatype", "count"),
        [
            (dt.vector(1000, 1, 3, "f8"), 1),
            (dt.vector(100_000, 1, 5, "u4"), 1),
            (dt.vector(70_001, 3, 7, "u1"), 1),
            (dt.subarray((6, 7, 9), (3, 4, 5), (1, 1, 2), "f8"), 2),
            (dt.hvector(50, 1, -40, "f8"), 1),
            (dt.indexed([3, 1, 2], [9, 0, 4], "f4"), 5),
            (dt.resized(dt.indexed([3, 1], [9, 0], "f4"), 0, 64), 5),
            (dt.resized(dt.indexed([3, 1], [9, 0], "f4"), 0, 32), 5),
            (dt.hindexed([64, 8, 40], [0, 16, 32], "u1"), 1),
            (dt.contiguous(0, "f8"), 3),
        ],
    )
    def test_against_a_set(self, datatype: dt.Datatype, count: int, origin: int) -> None:
        assert sectors(datatype, count, origin) == self.brute(datatype, count, origin)

    def test_x_face(self) -> None:
        case = one("face_x/512")
        datatype, start = case.place(0)
        assert sectors(datatype, case.count, start) == 512 * 512


class TestSelection:
    def test_sizes_and_wildcards(self) -> None:
        assert [case.name for case in select(["NAS_LU_?/12"])] == ["NAS_LU_x/12", "NAS_LU_y/12"]
        assert {case.pattern for case in select(["face_*"])} == {"face_x", "face_y", "face_z"}

    def test_quick_takes_few_but_named_sizes(self) -> None:
        assert [case.size for case in select(["face_*"], quick=True)] == [
            "128",
            "512",
            "512",
            "512",
        ]
        assert [case.size for case in select(["face_x/64"], quick=True)] == ["64"]
