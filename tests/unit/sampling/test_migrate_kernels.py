"""The kernels of migration, compiled for the CPU, on simulated ranks: the same particles as on the host."""

from __future__ import annotations

import ctypes
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.errors import FieldError
from halox.runtime.gpu.compiler import preamble, source
from halox.sampling import device_migration
from halox.sampling.device_migration import DeviceMigration
from halox.sampling.migration import Migration, rules_of
from tests.fakes.cpu_kernels import SHIM, shared_library
from tests.support import require

require("cxx")

RANKS = 6


class GpuArray(np.ndarray):
    """An array of NumPy with the members of CuPy's arrays that migrations use."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, memset_async=lambda *_: self.fill(0))

    def get(self, out: Any = None) -> Any:
        if out is None:
            return np.array(self)
        out[...] = self
        return out

    def set(self, values: Any, stream: object) -> None:
        self[...] = values


def gpu(array: Any) -> Any:
    return np.array(array).view(GpuArray)


CUPY = SimpleNamespace(
    empty=lambda shape, dtype: gpu(np.full(shape, 77, dtype)),
    zeros=lambda shape, dtype: gpu(np.zeros(shape, dtype)),
    asarray=lambda values, dtype=None: gpu(np.asarray(values, dtype)),
    cuda=SimpleNamespace(
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None, ptr=0),
    ),
)


def pinned(nbytes: int) -> Any:
    array = np.full(nbytes, 77, "u1")
    return SimpleNamespace(array=array, nbytes=nbytes, device_pointer=array.ctypes.data)


@cache
def library(defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    return shared_library(f"""{preamble(defines)}
#include "{SHIM}"
using std::isnan;
template <class T> static T atomicAdd(T* at, T value)
{{
    const T before = *at;
    *at += value;
    return before;
}}
// Each thread is alone in its turn.
static unsigned __activemask() {{ return 1u << (threadIdx.x & 31); }}
static unsigned __match_any_sync(unsigned lanes, unsigned long long) {{ return lanes; }}
static unsigned long long __shfl_sync(unsigned, unsigned long long value, int) {{ return value; }}
static int __popc(unsigned bits) {{ return __builtin_popcount(bits); }}
static int __ffs(unsigned bits) {{ return __builtin_ffs(int(bits)); }}
{source("migrate").replace("THREADS = 128, ROWS = 8", "THREADS = 8, ROWS = 3")}
extern "C" void run_find(unsigned blocks, bool backwards, const Grid* grid, const Particles* particles, i64 n,
                         i64* list, u64* counters)
{{
    launch_with_barriers(blocks, 8, backwards, find, grid, particles, n, list, counters);
}}
extern "C" void run_pack(unsigned blocks, bool backwards, const Grid* grid, const Particles* particles, const i64* list,
                         u64* counters, Word* sent)
{{
    launch_on_cpu(blocks, 8, backwards, pack, grid, particles, list, counters, sent);
}}
extern "C" void run_keep(unsigned blocks, bool backwards, const Grid* grid, const Particles* particles, const i64* list,
                         u64* counters, i64 after, i64* holes)
{{
    launch_on_cpu(blocks, 8, backwards, keep, grid, particles, list, counters, after, holes);
}}
extern "C" void run_place(unsigned blocks, bool backwards, const Grid* grid, const Particles* particles,
                          const Word* arrivals, i64 first, i64 rows, i64 before, i64 after, i64 left, u64* counters,
                          const i64* holes)
{{
    launch_on_cpu(blocks, 8, backwards, place, grid, particles, arrivals, first, rows, before, after, left, counters,
                  holes);
}}
""")


class Launch:
    """A launch on the CPU; threads run backwards in every second one."""

    runs = 0

    def __init__(self, function: Any, blocks: int, threads: int, args: list[Any], *, device: int):
        name, defines = function
        self._call, self._blocks, self.args = getattr(library(defines), f"run_{name}"), blocks, args

    def launch(self, stream: int) -> None:
        Launch.runs += 1
        self._call(ctypes.c_uint(self._blocks), Launch.runs % 2 == 0, *self.args)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_migration, "cupy", lambda: CUPY)
    monkeypatch.setattr(device_migration, "PreparedLaunch", Launch)
    monkeypatch.setattr(
        device_migration, "kernel", lambda file, name, device, defines: (name, defines)
    )
    monkeypatch.setattr(device_migration, "stream_pointer", lambda: 0)
    monkeypatch.setattr(device_migration, "pinned", pinned)
    monkeypatch.setattr(device_migration, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(device_migration, "_BLOCKS", 2)


class Arena:
    """Memory that all simulated ranks map."""

    def array(self, shape: Any, dtype: Any) -> Any:
        return CUPY.empty(shape, dtype)

    def locate(self, start: int, end: int) -> int:
        return start

    def handles(self, places: Any) -> list[int]:
        return [*places]

    def open(self, handles: list[int]) -> None:
        assert len(handles) == 1

    def pointer(self, place: int) -> int:
        return place


def domains(shape: tuple[int, ...], periodic: tuple[bool, ...], *, maps: bool = True) -> list[Any]:
    """Return the domains of all ranks, which map one another's memory or not."""
    grid = decompose(shape, RANKS, periodic=periodic)
    spec = FieldSpec(((0, 0),) * len(shape))
    return [
        SimpleNamespace(
            plain=FieldLayout(grid, rank, spec),
            decomposition=grid,
            device_id=0,
            context=SimpleNamespace(
                use_device=lambda device: Arena(),
                once=lambda find: find(None),
                find_gpus=lambda: SimpleNamespace(all_map=maps),
            ),
            world=SimpleNamespace(rank=rank, size=RANKS, ranks=SimpleNamespace()),
        )
        for rank in range(RANKS)
    ]


def migrate(migrations: list[Any], ranks: list[list[Any]], flips: list[bool]) -> list[list[Any]]:
    """Migrate the particles of all ranks, each a list of arrays with 500 rows, of which NaN positions are unused."""
    sizes = [int(np.count_nonzero(~np.isnan(arrays[0][:, 0]))) for arrays in ranks]
    for _ in range(2):  # the first one as if another rank had an error
        found = [
            m.find(arrays, flips, n) for m, arrays, n in zip(migrations, ranks, sizes, strict=True)
        ]
        counts = np.array([one for one, _ in found])
        records = [
            m.pack(arrays, counts[rank], counts[:, rank])
            for rank, (m, arrays) in enumerate(zip(migrations, ranks, strict=True))
        ]
    places = counts.cumsum(axis=1) - counts
    packed = [
        np.array(m._outbox.memory if isinstance(m, DeviceMigration) else m._sent).reshape(-1)
        for m in migrations
    ]
    for rank, migration in enumerate(migrations):

        def swap_rows(
            sent: Any, received: Any, mine: Any, theirs: Any, step: str, to: int = rank
        ) -> None:
            """Set the rows to receive from what other ranks have packed."""
            assert sent.tobytes() == packed[to][: sent.size].tobytes()
            width = received.shape[1]
            cuts = np.stack([places, places + counts])[:, :, to] * width
            parts = [rows[start:end] for rows, start, end in zip(packed, *cuts, strict=True)]
            received[...] = np.concatenate(parts).reshape(-1, width)

        migration._world.ranks.swap_rows = swap_rows
        migration.keep()
        migration.swap(records, places[:, rank])
        after = sizes[rank] - found[rank][1] + int(counts[:, rank].sum())
        ranks[rank][0][after:] = np.nan
    return ranks


@pytest.mark.parametrize("case", [0, 1, 2, 3])
def test_the_same_particles_as_on_the_host(case: int) -> None:
    ndim = 2 + case % 2
    shape, periodic = ((9, 7), (True, False)) if ndim == 2 else ((5, 4, 3), (False, True, False))
    walls: Any = [("reflect", "absorb"), "reflect", ("absorb", "reflect")][:ndim]
    if case > 1:
        periodic, walls = (False,) * ndim, "reflect"
    rng = np.random.default_rng(case)
    places = domains(shape, periodic, maps=case < 2)
    rules = rules_of(walls, places[0].decomposition)
    host, device = ([kind(one, rules) for one in places] for kind in (Migration, DeviceMigration))
    first: list[list[Any]] = []
    for rank in range(RANKS):
        n = 80 * (rank != 2)
        position = np.full((500, ndim), np.nan)
        position[:n] = rng.random((n, ndim)) * 60 - 20
        key = np.arange(500) + 500 * rank
        v = rng.integers(1, 9, (500, ndim)).astype("f4")
        z = (v + 2j * v).astype("c16")
        first.append([position, key, v, z] + [key % 2 == 0] * (ndim == 3))
    flips = [False, False, True, True, False][: len(first[0])]
    theirs = [[gpu(array) for array in arrays] for arrays in first]
    for most in (0, 0.3, 1, 40, 1000, 0):
        jumps = (rng.random((500 * RANKS, ndim)) - 0.5) * most
        for ranks in (first, theirs):
            for arrays in ranks:
                arrays[0] += jumps[arrays[1]]
        migrate(host, first, flips)
        migrate(device, theirs, flips)
        for mine, other in zip(first, theirs, strict=True):
            orders = []
            for arrays in (mine, other):
                used = np.flatnonzero(~np.isnan(np.asarray(arrays[0])[:, 0]))
                assert used.tolist() == list(range(len(used)))
                orders.append(used[np.argsort(np.asarray(arrays[1])[used])])
            for a, b in zip(mine, other, strict=True):
                assert a[orders[0]].tobytes() == np.asarray(b)[orders[1]].tobytes()


def test_a_particle_without_a_place() -> None:
    domain = domains((9, 7), (False, True))[3]
    migration = DeviceMigration(domain, rules_of("keep", domain.decomposition))
    for bad in (np.nan, np.inf, -0.75, 8.5, 2.0**53):
        x = gpu(np.ones((40, 2)))
        x[17, 0] = bad
        with pytest.raises(FieldError, match="particle 17"):
            migration.find([x], [False], 40)
