"""Stores from a user's kernel into the neighbours' halos, run on the CPU and compared with one array by NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from halox.decomposition import Decomposition, FieldSpec, decompose
from halox.errors import ExchangeTimeoutError, FieldError
from halox.paths.peer import stores
from tests.fakes.cpu_halo import Rank, connect
from tests.fakes.cpu_peer import at_once
from tests.fakes.fake_gpu import AREA, Op, Work
from tests.support import require

require("cxx")

POISON = 0xEEEEEEEE


def padded(whole: np.ndarray, domain: Decomposition, halo: Any) -> np.ndarray:
    """Return a whole array, components first, with its halo: periodic, or poison beyond walls."""
    for axis, (periodic, widths) in enumerate(zip(domain.periodic, halo, strict=True), 1):
        pad = [(0, 0)] * whole.ndim
        pad[axis] = widths
        how: dict[str, Any] = {"mode": "wrap"} if periodic else {"constant_values": POISON}
        whole = np.pad(whole, pad, **how)
    return whole


def advanced(whole: np.ndarray, domain: Decomposition, reach: int, diagonal: bool) -> np.ndarray:
    """Return the whole array after a step of ``step_kernel``."""
    widths = [(reach, reach)] * domain.ndim
    around = padded(whole, domain, widths)

    def at(axis: int, distance: int) -> np.ndarray:
        cut = [slice(None)]
        for k, extent in enumerate(whole.shape[1:]):
            start = reach + (distance if diagonal or k == axis else 0)
            cut.append(slice(start, start + extent))
        return around[tuple(cut)]

    value = whole * np.uint32(5)
    value += np.arange(len(whole), dtype="u4").reshape(-1, *(1,) * domain.ndim)
    for axis in range(domain.ndim):
        for i in range(1, reach + 1):
            value = value * np.uint32(3) + at(axis, -i) + at(axis, i) * np.uint32(7)
    return value


def part(rank: Rank, whole: np.ndarray) -> np.ndarray:
    """Return the part of a whole array, components first, that a rank stores, in its axes."""
    spec = rank.layout.spec
    around = padded(whole, rank.domain, spec.halo)
    cuts = zip(rank.layout.stored, spec.halo, strict=True)
    found = around[(slice(None), *(slice(c.start + w[0], c.stop + w[0]) for c, w in cuts))]
    if spec.components_after:
        return np.moveaxis(found, 0, -1)
    return found if spec.components_before else found[0]


def random_whole(domain: Decomposition, components: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    return rng.integers(0, 1 << 32, (components, *domain.grid_shape), np.uint32)


def run(ranks: Sequence[Rank], steps: int, *, diagonal: bool = False, delays: int = 0) -> None:
    """Run steps on all ranks at once without synchronization, and compare every cell with NumPy's."""
    domain, spec = ranks[0].domain, ranks[0].layout.spec
    components = int(np.prod(spec.components_before + spec.components_after))
    reach = min(width for sides in spec.halo for width in sides if width)
    fields = len(ranks[0].arrays)
    wholes = [random_whole(domain, components)]
    for _ in range(steps):
        wholes.append(advanced(wholes[-1], domain, reach, diagonal))
    for rank in ranks:
        rank.arrays[0][...] = part(rank, wholes[0])

    def work(rank: Rank) -> None:
        for n in range(steps):
            field = (n + 1) % fields
            rank.step(field, n % fields, reach, diagonal=diagonal, seed=n, delays=delays)
            owned = rank.layout.interior
            same = (rank.arrays[field][owned] == part(rank, wholes[n + 1])[owned]).all()
            assert same, f"rank {rank.number}, step {n}"

    at_once(work, ranks)
    for rank in ranks:
        state = rank.arena.bytes_of(rank.channel._block)[:8].view("u8")[0]
        assert state % (1 << 32) == 0, "each step adds one to the upper half"
        assert not any(rank.channel.failure.words[:4])
        rank.arena.check_guards()
        for last in range(max(steps - fields + 1, 1), steps + 1):
            found = rank.arrays[last % fields]
            np.testing.assert_array_equal(found, part(rank, wholes[last]), f"rank {rank.number}")


CASES = {
    "one rank with walls": (decompose((6, 7), 1, periodic=(True, False)), ((1, 1),) * 2, {}),
    "two ranks that are neighbours on both sides": (
        decompose((9, 6), 2, periodic=True, proc_shape=(2, 1)),
        ((1, 1),) * 2,
        {},
    ),
    "four ranks, uneven": (decompose((9, 11), 4, proc_shape=(2, 2)), ((1, 1),) * 2, {}),
    "wide halos": (
        decompose((16, 10), 4, periodic=True, proc_shape=(4, 1)),
        ((2, 2), (3, 3)),
        {},
    ),
    "blocks as narrow as the halo": (
        decompose((4, 8), 4, periodic=True, proc_shape=(2, 2)),
        ((2, 2),) * 2,
        {},
    ),
    "three fields, components first": (
        decompose((8, 6), 4, periodic=(True, False), proc_shape=(2, 2)),
        ((1, 1),) * 2,
        {"components_before": (2,), "fields": 3},
    ),
    "components last": (
        decompose((8, 6), 2, periodic=True, proc_shape=(2, 1)),
        ((1, 1), (2, 1)),
        {"components_after": (3,)},
    ),
    "three dimensions": (
        decompose((6, 5, 4), 8, periodic=(True, False, True), proc_shape=(2, 2, 2)),
        ((1, 1), (1, 1), (2, 1)),
        {},
    ),
    "one axis": (decompose((12,), 3, periodic=True), ((2, 2),), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_without_exchanges(name: str) -> None:
    domain, halo, options = CASES[name]
    options = dict(options)
    fields, diagonal = options.pop("fields", 2), domain.ndim > 1
    spec = FieldSpec(halo, **options)
    run(connect(domain, spec, fields=fields), 5, diagonal=diagonal)


@pytest.mark.parametrize("delays", [20, pytest.param(200, marks=pytest.mark.full)])
def test_in_random_orders(delays: int) -> None:
    """Ranks run as far ahead as their flags allow, with flags that are late."""
    domain = decompose((8, 8), 4, periodic=True, proc_shape=(2, 2))
    run(connect(domain, FieldSpec(((1, 1),) * 2)), 20, diagonal=True, delays=delays)


def test_epochs_beyond_32_bits() -> None:
    domain = decompose((8, 6), 2, periodic=True)
    ranks = connect(domain, FieldSpec(((1, 1),) * 2))
    for rank in ranks:
        block = rank.arena.bytes_of(rank.channel._block)
        block[:8].view("u8")[:] = (2**32 - 3) << 32
        block[128:236].view("u4")[:] = 2**32 - 3  # the flags of the peer
    run(ranks, 6, diagonal=True)


def test_faces_only() -> None:
    """Without corners the edges of the halo keep their contents, as in an exchange."""
    domain = decompose((8, 8), 4, periodic=True, proc_shape=(2, 2))
    ranks = connect(domain, FieldSpec(((1, 1),) * 2), corners=False)
    whole = random_whole(domain, 1)
    for rank in ranks:
        rank.arrays[0][...] = part(rank, whole)
    at_once(lambda rank: rank.step(1, 0), ranks)
    for rank in ranks:
        expected = part(rank, advanced(whole, domain, 1, False)).copy()
        expected[:: expected.shape[0] - 1, :: expected.shape[1] - 1] = POISON
        np.testing.assert_array_equal(rank.arrays[1], expected)


@pytest.mark.parametrize("procs", [(2, 2), (1, 4)])
def test_along_one_axis(procs: tuple[int, int]) -> None:
    """The halo along the other axis keeps its contents, as in an exchange along one axis."""
    domain = decompose((8, 8), 4, periodic=True, proc_shape=procs)
    ranks = connect(domain, FieldSpec(((1, 1),) * 2), fixed=(0,))
    whole = random_whole(domain, 1)
    for rank in ranks:
        rank.arrays[0][...] = part(rank, whole)
    at_once(lambda rank: rank.step(1, 0), ranks)
    for rank in ranks:
        expected = part(rank, advanced(whole, domain, 1, False)).copy()
        expected[[0, -1]] = POISON
        np.testing.assert_array_equal(rank.arrays[1], expected)


def test_layout_of_the_argument() -> None:
    for ndim in (1, 2, 3):
        rank = connect(decompose((8,) * ndim, 1), FieldSpec(((1, 1),) * ndim))[0]
        size = ctypes.c_ulong.in_dll(rank.library, "size").value
        assert size == stores.argument_dtype(ndim).itemsize


class TestFailures:
    def ranks(self, limit_s: float = 0.05, **options: Any) -> list[Rank]:
        domain = decompose((8, 6), 2, periodic=(False, True), proc_shape=(2, 1))
        return connect(domain, FieldSpec(((1, 1),) * 2), limit_s=limit_s, **options)

    def test_a_rank_that_does_not_step(self) -> None:
        ranks = self.ranks()
        at_once(lambda rank: rank.step(1, 0), ranks)
        ranks[0].step(0, 1)
        text = "waited for rank 1, beyond the high side of axis 0, in step 2 of plan.device_handle for 0.05 s"
        with pytest.raises(ExchangeTimeoutError, match=text):
            ranks[0].channel.check()
        # Later waits end at once, and no flag tells the peer to go on.
        assert not ranks[0].wait((4, 1))
        block = ranks[1].arena.bytes_of(ranks[1].channel._block)
        flag = block[128 + 4 * 1 :][:4].view("u4")  # beyond the low side of axis 0
        assert flag == 2
        ranks[0].step(1, 0)
        assert flag == 2

    def test_a_rank_that_never_waits(self) -> None:
        ranks = self.ranks()
        at_once(lambda rank: rank.step(1, 0, waits=rank.number == 0), ranks)
        with pytest.raises(ExchangeTimeoutError):
            ranks[0].channel.check()

    def test_only_cells_next_to_the_late_rank_wait(self) -> None:
        ranks = self.ranks()
        for cell in ((1, 1), (3, 3)):  # next to a wall and to the rank itself
            assert ranks[0].wait(cell)
        assert not ranks[0].wait((4, 3))

    def test_a_time_out_that_nobody_has_read_warns(self) -> None:
        ranks = self.ranks()
        ranks[0].step(1, 0)
        with pytest.warns(UserWarning, match="has waited for rank 1"):
            ranks[0].channel.close()
        assert ranks[0].channel.has_failed

    @pytest.mark.parametrize(
        ("field", "cell", "component", "wide", "text"),
        [
            (0, (6, 0), 0, False, "to cell 6 along axis 0, and the array has 6 cells there"),
            (0, (2, -1), 0, False, "to cell -1 along axis 1, and the array has 8 cells there"),
            (2, (2, 2), 0, False, "to field 2, and the plan has 2"),
            (-1, (2, 2), 0, False, "to field -1, and the plan has 2"),
            (0, (2, 2), 1, False, "to component 1, and the fields have 1"),
            (0, (2, 2), 0, True, "a value of 8 bytes, and a cell has 4; convert it to uint32"),
        ],
    )
    def test_checked_stores(
        self, field: int, cell: tuple[int, int], component: int, wide: bool, text: str
    ) -> None:
        rank = self.ranks(debug=True)[0]
        before = [array.copy() for array in rank.arrays]
        rank.wait((3, 3))
        rank.store(1, (4, 1))
        before[1][4, 1] = before[1][4, 7] = 77
        rank.channel.check()
        rank.store(field, cell, component, wide)
        np.testing.assert_array_equal(rank.arrays, before)
        with pytest.raises(FieldError, match=f"stored {text}"):
            rank.channel.check()

    def test_checked_waits(self) -> None:
        """Each owned cell is waited for once in a step: not twice, not in some later step, and not never."""
        text = "did not call halo.wait once for each owned cell"
        domain = decompose((5, 7), 1, periodic=True)
        cells = [(x, y) for x in range(1, 6) for y in range(1, 8)]
        for wrong in (cells[:-1], [*cells, (3, 3)], [*cells[1:], (3, 3)], []):
            rank = connect(domain, FieldSpec(((1, 1),) * 2), debug=True)[0]
            for cell in [*cells, *cells[::-1], (0, 0), (6, 3)]:  # cells of the halo do not count
                assert rank.wait(cell)
            rank.channel.check()
            rank = rank if wrong else connect(domain, FieldSpec(((1, 1),) * 2), debug=True)[0]
            for cell in wrong:
                rank.wait(cell)
            rank.store(0, (2, 2))  # in this step, or in the next one
            for cell in cells if wrong else ():
                rank.wait(cell)
            with pytest.raises(FieldError, match=text):
                rank.channel.check()


# The order of memory accesses, as work on streams: `Work.check_order` finds every pair of unordered accesses.


def cells_of(rank: Rank, near: bool) -> dict[int, list[tuple[int, ...]]]:
    """Return the owned cells by the sides that `wait` finds, or else by the sides that `store` finds."""
    found: dict[int, list[tuple[int, ...]]] = {}
    axes = rank.channel.argument["axis"]
    names = ("near", "far") if near else ("low", "high")
    for cell in np.ndindex(*(int(a["end"] - a["begin"]) for a in axes)):
        at = tuple(int(n + a["begin"]) for n, a in zip(cell, axes, strict=True))
        sides = 0
        for k, (n, a) in enumerate(zip(at, axes, strict=True)):
            sides |= (n < a[names[0]]) << 2 * k | int(n >= a[names[1]]) << (2 * k + 1)
        found.setdefault(sides, []).append(at)
    return found


def sides_of(direction: tuple[int, ...]) -> int:
    return sum(1 << (2 * axis + (side > 0)) for axis, side in enumerate(direction) if side)


def steps_as_work(ranks: Sequence[Rank], steps: int) -> list[list[Op]]:
    """Return the work of an exchange, which only writes halos here, and of some steps.

    Stream 0 is the rank's stream: it records that a step has begun. Each group of cells that wait for the same flags is
    a warp, of two streams: the first lane waits for the flags, the others for the first lane, at the warp's barrier.
    """
    logs: list[list[Op]] = [[] for _ in ranks]
    for rank, log in zip(ranks, logs, strict=True):
        strides = rank.arrays[0].strides
        tables = tables_of(rank)

        def addresses(start: int, cells: Any, strides: Any) -> np.ndarray:
            return (start + np.array(cells) @ np.array(strides))[:, None] + np.arange(4)

        halo = np.ones(rank.arrays[0].shape, bool)
        halo[rank.layout.interior] = False
        written = [addresses(a.ctypes.data, np.argwhere(halo), strides) for a in rank.arrays]
        log.append(Op("kernel", 0, -1, steps_of([], written)))
        for n in range(steps):
            source, target = n % 2, (n + 1) % 2
            log.append(Op("record", 0, n, event=(rank.number, n)))
            groups = cells_of(rank, near=True)
            ends = []
            for number, (sides, group) in enumerate(sorted(groups.items()), 1):
                peers = {
                    region.peer
                    for direction, region in rank.channel._regions.items()
                    if not sides_of(direction) & ~sides and region.peer != rank.number
                }
                barrier = [(rank.number, BARRIERS + 1000 * n + number)] if peers else []
                for lane, cells in enumerate((group[:1], group[1:])[: len(group)]):
                    stream = n * 1000 + 2 * number + lane
                    waits = barrier if lane else [(peer, n) for peer in sorted(peers)]
                    waits = [(rank.number, n), *waits]
                    log += [Op("wait", stream, n, event=event) for event in waits]
                    if lane == 0:
                        log += [Op("record", stream, n, event=event) for event in barrier]
                    around = [
                        addresses(
                            rank.arrays[source].ctypes.data,
                            [np.add(c, d) - 1 for c in cells],
                            strides,
                        )
                        for d in np.ndindex(3, 3)
                    ]
                    written = [addresses(rank.arrays[target].ctypes.data, cells, strides)]
                    stored = cells_of(rank, near=False).items()
                    for direction, (base, _, *there) in tables[target].items():
                        copied = [c for s, some in stored if not direction & ~s for c in some]
                        copied = [c for c in copied if c in set(cells)]
                        if copied:
                            written.append(addresses(base, copied, there))
                    log.append(Op("kernel", stream, n, steps_of(around, written)))
                    ends.append((rank.number, 2 * BARRIERS + stream))
                    log.append(Op("record", stream, n, event=ends[-1]))
            log += [Op("wait", 0, n, event=event) for event in ends]
    return logs


def steps_of(reads: list[np.ndarray], writes: list[np.ndarray]) -> list[tuple[Any, ...]]:
    return [
        *(("expect", place(a.ravel()), b"") for a in reads),
        *(("fill", place(a.ravel()), b"") for a in writes),
    ]


def place(addresses: np.ndarray) -> np.ndarray:
    """Return addresses as `Work` has them: areas by the arrays that contain them."""
    starts = np.array(sorted(_AREAS))
    area = np.searchsorted(starts, addresses, "right") - 1
    assert (area == area[0]).all()
    return area * AREA + addresses - starts[area]


_AREAS: list[int] = []
BARRIERS = 10**6  # numbers of the events of barriers, and twice as much of the events at the ends


def tables_of(rank: Rank) -> list[dict[int, list[int]]]:
    """Return for each field, by the sides of a direction, the address and the strides of the copies there."""
    argument, ndim = rank.channel.argument, len(rank.arrays[0].shape)
    rows = 2 * 3**ndim * (2 + ndim)
    words = np.array((ctypes.c_int64 * rows).from_address(int(argument["copies"])))
    found: list[dict[int, list[int]]] = []
    for field in words.reshape(2, 3**ndim, 2 + ndim).tolist():
        stored = {n: row for n, row in enumerate(field) if int(argument["stored"]) >> n & 1}
        # A digit to the base 3 per axis: none, low, high.
        found.append(
            {
                sum(((1 << n // 3**k % 3) >> 1) << 2 * k for k in range(ndim)): row
                for n, row in stored.items()
            }
        )
    return found


@pytest.fixture(
    scope="module", params=[(2, 2), (4, 1)], ids=["all sides", "own neighbour along rows"]
)
def logs(request: pytest.FixtureRequest) -> list[list[Op]]:
    """Three steps that take two fields in turn, on four ranks."""
    shape = tuple(4 * parts for parts in request.param)
    domain = decompose(shape, 4, periodic=True, proc_shape=request.param)
    ranks = connect(domain, FieldSpec(((1, 1),) * 2))
    _AREAS[:] = [array.ctypes.data for rank in ranks for array in rank.arrays]
    return steps_as_work(ranks, 3)


class TestOrder:
    """Whether all pairs of accesses to a byte, one of them a store, are ordered."""

    def test_has_no_race(self, logs: list[list[Op]]) -> None:
        Work(logs).check_order()

    @pytest.mark.parametrize("which", ["flag", "barrier"])
    def test_needs_each_wait(self, logs: list[list[Op]], which: str) -> None:
        """Without one wait for the flag of another rank, or for the first lane of the warp, there is a race."""
        waits = [
            (0, at)
            for at, op in enumerate(logs[0])
            if op.kind == "wait"
            and (op.event[0] != 0 if which == "flag" else BARRIERS < op.event[1] < 2 * BARRIERS)
        ]
        assert len(waits) >= 6
        for wait in waits[:: -(-len(waits) // 8)]:
            with pytest.raises(AssertionError, match="race"):
                Work(logs, without=wait).check_order()
