"""The table of all figures with targets: what is measured, where, beside what, and the limit.

``halox bench KIND --targets`` measures the figures of a kind, and the GPU check runs the kinds that `kinds_on` names.
Limits are for H200s; those of NumPy arrays are for any machine. A figure without a limit is for information.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from halox_bench.rows import GRAPH, SELECTED, STREAM

HOST, ONE, APART, SHARED = "host", "one GPU", "a GPU each", "a GPU shared"
"""Arrays of NumPy; on one rank's GPU; on ranks with a GPU each; on ranks that share one."""

US, OVER, FASTER, CHOICE = "us", "over", "faster", "choice"

BEST = "best"
"""Mode: a graph if the method can be captured, else a stream."""

Limits = Mapping[str, float | None]
Ranks = tuple[int, ...]

ANY: Ranks = ()
INFORMATION: Limits = MappingProxyType({STREAM: None})


class Target(NamedTuple):
    """One figure, or one for each mode.

    Forms: `US`, the time, at most the limit; `OVER`, the time over the baseline's, at most the limit; `FASTER`, the
    baseline's over the time, at least the limit; `CHOICE`, the share of all cases of the kind with a well chosen path,
    at least the limit.
    """

    kind: str  # of ``halox bench``
    on: str  # `HOST`, `ONE`, `APART` or `SHARED`
    ranks: Ranks  # the numbers of ranks, empty for all
    name: str  # with ``<ranks>`` and ``<mode>`` in the place of both
    words: str  # of the command line, which select the case
    limits: Limits = INFORMATION  # by mode, None for information
    theirs: tuple[str, ...] = ()  # baselines; the first that was measured counts
    form: str = OVER
    ours: str = SELECTED  # the method
    unit: str = "x"  # of a ratio of speeds
    case: str = ""  # where the words select several
    their_case: str = ""
    relative: bool = False  # whether the limit of a time is a multiple of the baseline's


BY_NCCL, ZERO_COPY = "pack + NCCL + unpack", "zero-copy + mpi4py"
STAGED, MPI_TYPES = "D2H + MPI_Allreduce + H2D", "mpi4py types, Isend/Irecv"
COPY, BY_HAND = "copy of the same bytes", "kernel by hand"

X_FACES = {64: (7.0, 5.0), 128: (8.5, 7.0), 256: (11.0, 9.5), 512: (30.0, 28.0)}
"""Both x-faces of N^3 float64 a rank: most microseconds in a stream and in a graph, between 2 GPUs."""

SIX_FACES = {64: 12.0, 128: None, 256: 22.0, 512: 55.0}
"""All six faces on 8 GPUs, in a stream."""


def exchanges() -> Iterator[Target]:
    """Yield exchanges: of GPUs beside NCCL and MPI by hand, of NumPy arrays beside MPI's types."""
    target = partial(Target, "exchange")
    two, shared = partial(target, APART, (2,)), partial(target, SHARED, (2,))
    for n in (16, 32, *X_FACES):
        name, words = f"both x-faces of {n}^3 float64, <ranks> ranks", f"--sizes {n} --faces x"
        stream, graph = X_FACES.get(n, (None, None))
        limits: Limits = {STREAM: stream, GRAPH: graph}
        yield two(f"{name}, in a <mode>", words, limits, (BY_NCCL, ZERO_COPY), US)
        yield two(f"{name}: over {BY_NCCL}", words, {STREAM: 0.5}, (BY_NCCL,))
        most = 0.7 if n == 512 else 1.0
        over = f"over {ZERO_COPY}"
        yield two(f"{name}: staged {over}", words, {STREAM: most}, (ZERO_COPY,), ours="staged")
        if n in X_FACES:
            yield shared(f"{name}, in a <mode>", words, INFORMATION, (ZERO_COPY,), US)
            most = 0.6 if n > 128 else 1.0
            yield shared(f"{name}: ipc {over}", words, {STREAM: most}, (ZERO_COPY,), ours="ipc")
    for n, limit in SIX_FACES.items():
        words = f"--sizes {n} --faces faces --paths nccl"
        name, step = f"six faces of {n}^3 float64, <ranks> ranks, in a <mode>", (BY_NCCL,)
        yield target(APART, (2, 4), name, words, {STREAM: None, GRAPH: None}, step, US)
        eight = {STREAM: limit, GRAPH: None}
        yield target(APART, (8,), name, words, eight, step, US)
        over, both = f"{name}: nccl over {BY_NCCL}", {STREAM: 1.02, GRAPH: 1.02}
        yield target(APART, ANY, over, words, both, step, ours="nccl")
    name = "both z-faces of 512^3 float64, <ranks> ranks, in a <mode>"
    wire = "--sizes 512 --faces z"
    hop = ("a hop and the bytes at the speed of a copy",)
    yield target(APART, ANY, name, wire, {STREAM: 1.25, GRAPH: None}, hop, US, relative=True)
    name = "all 26 neighbours of 128^3, 4 fields over 1, <ranks> ranks, in a <mode>"
    cases = {"case": "128^3 f8 all 4 fields", "their_case": "128^3 f8 all"}
    words = "--sizes 128 --faces all --fields 1,4"
    yield two(name, words, {STREAM: 2.0, GRAPH: 2.0}, (SELECTED,), **cases)
    name = "share of cases whose chosen path is the best, or takes at most 1.10 x its time"
    yield two(name, "", {STREAM: 0.95}, form=CHOICE)
    host = partial(target, HOST, (2, 4))
    for what, faces, n, least in (
        *(("both x-faces", "x", 64, 1.0), ("both x-faces", "x", 256, 1.0)),
        *(("both z-faces", "z", 64, 1.5), ("both z-faces", "z", 256, 1.5)),
        *(("all 26 neighbours", "all", 32, 1.5), ("all 26 neighbours", "all", 128, 1.0)),
    ):
        name = f"{what} of {n}^3 float64, <ranks> ranks, NumPy: times as fast as {MPI_TYPES}"
        words = f"--sizes {n} --faces {faces} --paths host"
        yield host(name, words, {STREAM: least}, (MPI_TYPES,), FASTER)


def allreduces() -> Iterator[Target]:
    """Yield allreduces beside NCCL, MPI on the host and `halox.Allreduce`, and reductions of fields."""
    target = partial(Target, "allreduce")
    one, words = "allreduce of one float64, <ranks> ranks, in a <mode>", "--dtype f8 --algorithms= "
    words += "--sizes"
    for ranks, stream, graph in ((2, 5.0, 2.0), (4, None, None), (8, 6.0, 2.5)):
        limits = {STREAM: stream, GRAPH: graph}
        yield target(APART, (ranks,), one, f"{words} 8", limits, ("NCCL",), US)
    yield target(SHARED, ANY, one, f"{words} 8", INFORMATION, (STAGED,), US)
    sizes = [
        *("8B", "64B", "1KiB", "8KiB", "64KiB", "256KiB", "1MiB", "4MiB"),
        *("16MiB", "64MiB", "128MiB"),
    ]
    for place, size in enumerate(sizes):
        name, given = f"allreduce of {size} float64, <ranks> ranks", f"{words} {size}"
        over = f"{name}, in a <mode>: over"
        if size in sizes[3:7] or size in sizes[8:]:
            limits = {STREAM: 0.67 if place < 7 else 1.1, GRAPH: None}
            yield target(APART, ANY, f"{over} NCCL", given, limits, ("NCCL",))
        for on, most in ((APART, 0.5), (SHARED, 1.0 if place > 3 else None)):
            yield target(on, ANY, f"{over} {STAGED}", given, {STREAM: most}, (STAGED,))
        if place in (0, 3, 6):
            faster = f"{name}, NumPy: times as fast as MPI_Allreduce"
            yield target(HOST, (2, 4), faster, given, INFORMATION, ("MPI_Allreduce",), FASTER)
    target = partial(Target, "reductions")
    for how, ours, suffix, limit in (
        ("in place", SELECTED, "", 1.3),
        ("without out", "grid.allreduce without out", " without out", None),
    ):
        name = f"grid.allreduce of 8KiB float64 {how}, <ranks> ranks, in a <mode>"
        theirs = (f"halox.Allreduce{suffix}",)
        name = f"{name}: over halox.Allreduce"
        yield target(APART, ANY, name, "--of arrays", {STREAM: limit}, theirs, ours=ours)
    a_rank, copied = "of 512^3 float64 a rank, <ranks> ranks", "copy of the field"
    field = "field of 512^3 float64 a rank"
    for name, ours, beside, most in (
        (f"norm of a {field}, <ranks> ranks: over reading it once", SELECTED, READ, 1.15),
        (f"{SQUARES} {a_rank}: over reading both fields once", SQUARES, copied, 1.10),
        (f"{TWO} of a {field} in one launch, <ranks> ranks: over one", TWO, "one reduction", 1.05),
    ):
        for on, limit in ((APART, most), (SHARED, None)):
            yield target(on, ANY, name, "--of fields", {STREAM: limit}, (beside,), ours=ours)


READ, SQUARES, TWO = "reading at the speed of the copy", "sum of (a - b)**2", "two reductions"


def transposes() -> Iterator[Target]:
    """Yield transposes and Fourier transforms."""
    target = partial(Target, "transpose")
    ways = ("forward", "backward")
    volumes = [("c16", order) for order in ("021", "102", "120", "201", "210")]
    share = "in a <mode>: share of a device copy's speed"
    for (dtype, order), way in product([*volumes, ("f8", "021"), ("f8", "210")], ways):
        name = f"Transpose of 256x384x512 {dtype} axes {order} {way}, {share}"
        words = f"--sizes 256x384x512 --axes {order} --dtype {dtype} --directions {way}"
        words += " --divisions whole"
        yield target(ONE, ANY, name, words, {BEST: 0.80}, (COPY,), FASTER, unit="share")
    for division, order, way in product(("slabs", "pencils"), ("012", "102", "210", "120"), ways):
        name = f"Transpose of 256x256x512 c16 axes {order} {division} {way}, <ranks> ranks"
        name = f"{name}, in a <mode>"
        words = f"--sizes 256x256x512 --axes {order} --dtype c16 --divisions {division}"
        words = f"{words} --directions {way} --paths="
        ranks = (2, 4, 8) if division == "slabs" else (4, 8)
        several = partial(target, APART, ranks)
        yield several(f"{name}: over {BY_NCCL}", words, {BEST: None}, (BY_NCCL,))
        least, peer = (
            None if order == "012" else 0.75,
            "the bytes at the speed of a copy to the peer",
        )
        over = f"{name}: share of the measured speed of a copy to the peer"
        yield several(over, words, {BEST: least}, (peer,), FASTER, unit="share")
        if division == "slabs" and order in ("012", "102"):
            yield target(SHARED, (2,), name, words, {BEST: None}, (COPY,))
    for order, way in product(("012", "021", "210"), ways):
        name = f"Transpose of 128x128x128 c16 axes {order} pencils {way}, <ranks> ranks, NumPy"
        words = f"--sizes 128x128x128 --axes {order} --dtype c16 --divisions pencils"
        words = f"{words} --directions {way} --paths="
        theirs = ("mpi4py Alltoallw",)
        name = f"{name}: times as fast as {theirs[0]}"
        yield target(HOST, (4,), name, words, {STREAM: 1.3}, theirs, FASTER)
    plan, back = ("one plan over all axes",), "halox.FFT backward"
    for ours, label, limit in ((SELECTED, "halox.FFT", 1.15), (back, back, None)):
        name = f"3D FFT of 512^3 complex128, one GPU, {label}: over cuFFT's own 3D plan"
        yield Target("fft", ONE, ANY, name, "--cells 512", {STREAM: limit}, plan, ours=ours)


def packings() -> Iterator[Target]:
    """Yield packing on one GPU, and of NumPy arrays beside MPI_Pack."""
    gpu = partial(Target, "pack", ONE, ANY)
    share = partial(gpu, theirs=(COPY,), form=FASTER, unit="share")
    for block, label, size, least in (
        *((1024, "1KiB", 64, 0.97), (1024, "1KiB", 256, 0.97)),
        *((128, "128B", 64, 0.90), (128, "128B", 256, 0.90)),
    ):
        name = f"vector, blocks of {block} B, {size} MiB: share of a device copy"
        yield share(name, f"--patterns vector/{label}-{size}MiB", {STREAM: least})
    name = "lower_triangle, N = 8192 float64: share of a device copy"
    yield share(name, "--patterns lower_triangle/8192", {STREAM: 0.92})
    for size, dtype, least in ((8192, "f4", 0.80), (8192, "f8", 0.85), (4096, "c16", 0.90)):
        for way in ("pack", "unpack"):
            name = f"matrix transposed by a datatype, {size}x{size} {dtype} vector {way}"
            name = f"{name}, in a <mode>: share of a device copy's speed"
            words = f"--patterns matrix/{size}x{size}-{dtype} --direction {way}"
            yield share(name, words, {BEST: least})
    for pattern, what, least in (
        ("vector/128B-64MiB", "vector, blocks of 128 B", 0.93),
        ("lower_triangle/4096", "indexed (lower triangle, N = 4096)", 0.88),
        ("random_indexed/dense-64MiB", "indexed (lists of random elements)", 0.88),
    ):
        name = f"zero-copy pack to the host, {what}: share of the host link"
        yield share(name, f"--patterns {pattern} --to host", {STREAM: least})
    for (block, label, to, least), size in product(
        (
            *((8, "8B", "device", 5.0), (128, "128B", "device", 1.2)),
            *((4096, "4KiB", "device", 1.0), (8, "8B", "host", 10.0)),
        ),
        (1, 64),
    ):
        name = f"vector, blocks of {block} B, {size} MiB to {to}: times as fast as cudaMemcpy2D"
        words = f"--patterns vector/{label}-{size}MiB --cold --to {to}"
        yield gpu(name, words, {STREAM: least}, ("cudaMemcpy2D",), FASTER)
    for (label, kib, most), block in product(
        (("64KiB", "64 KiB", 1.10), ("1MiB", "1024 KiB", 1.02)), (8, 128)
    ):
        # Of the two packers that take any datatype, workunits took 1.1 to 1.4 of the time of strided here, 2026-11-27.
        name = f"vector, blocks of {block} B, {kib}: the better generic packer over strided"
        words = f"--patterns vector/{block}B-{label} --methods strided,traversal"
        yield gpu(name, words, {STREAM: most}, ("strided",), ours="traversal")
    for pattern in ("HACC_vblock/4Ki", "HACC_vblock/32Ki", "HACC_particles/32Ki"):
        name = f"{pattern}, struct of 10 arrays: times as fast as one copy a field"
        words = f"--patterns {pattern}"
        yield gpu(name, words, {STREAM: 1.5}, ("one copy a block",), FASTER)
    for pattern, cold in (
        *((one, " --cold") for one in ("face_x/512", *LISTS)),
        *((one, "") for one in APPLICATIONS),
    ):
        for way in ("pack", "unpack"):
            words = f"--patterns {pattern} --direction {way}{cold}"
            name = f"{pattern}, {way}{', cold' if cold else ''}, in a <mode>"
            limits = {STREAM: None, GRAPH: None}
            yield gpu(f"{name}: speed over a {BY_HAND}", words, limits, (BY_HAND,), FASTER)
            if not cold:
                name, theirs = f"{pattern}, {way}: speed over MPI_Pack's", ("MPI_Pack",)
                yield Target("pack", HOST, (1,), name, words, {STREAM: 0.95}, theirs, FASTER)
    cached = {"exchange": "exchange (one rank, 26 periodic neighbours, one launch)"}
    cached |= {"pack": "pack call, launch included"}
    for of, limit in (("exchange", None), ("pack", 8.0)):
        name, launch = f"host time of one cached {cached[of]}", "launch of an empty CuPy RawKernel"
        theirs = (f"{launch} with five arguments",)
        yield Target("calls", ONE, ANY, name, f"--of {of}", {STREAM: limit}, theirs, US)


LISTS = ("random_indexed/dense-64MiB", "random_indexed/sparse-64MiB")
APPLICATIONS = (
    *("WRF_x_vec/2x2", "NAS_MG_x/258x130x130", "LAMMPS_full/3534-3062", "SPECFEM3D_cm/c4"),
    "FFT2/1024",
)


def messages() -> Iterator[Target]:
    """Yield messages of DDTBench, and strided messages without packing."""
    baselines = {APART: BY_NCCL, SHARED: ZERO_COPY, HOST: "mpi4py types"}
    for pattern, (on, theirs) in product((*APPLICATIONS[:3], "FFT2/512"), baselines.items()):
        if (pattern, on) != ("FFT2/512", APART):
            name = f"{pattern}, two ranks, {on}, half a round trip in a <mode>: over {theirs}"
            words = f"--patterns {pattern} --paths="
            yield Target("ddtbench", on, (2,), name, words, INFORMATION, (theirs,))
    for label, way in product(("4KiB", "64KiB"), ("one way", "both ways")):
        name = f"1 MiB in blocks of {label}, own arrays, {way}: speed over the host path's"
        words = f"--patterns arrays-{label}/{way.replace(' ', '-')} --paths host,scatter_gather"
        own, least = "scatter_gather", {STREAM: 1.5}
        yield Target(own, HOST, (2,), name, words, least, ("host",), FASTER, own)


def programs() -> Iterator[Target]:
    """Yield stencil steps and checkpoints."""
    target, words = partial(Target, "steps"), "--stencils 7-point"
    name, unit = "weak scaling of a 7-point step at 512^3 a GPU", "of the speed of one"
    name = f"{name}, 1 to <ranks> ranks"
    yield target(APART, ANY, name, words, {STREAM: 0.95}, ("one rank",), FASTER, unit=unit)
    for cells, on in product((256, 1024), (ONE, APART)):
        name = f"5-point step of {cells}^2 float32 a GPU, <ranks> rank(s), fused"
        name, words = f"{name}: over a step with an exchange", f"--stencils fused --cells {cells}"
        yield target(on, ANY, name, words, INFORMATION, ("stencil and exchange",))
    for (ours, plain), on in product(
        (("save", "os.write, fsync"), ("load", "os.read")), (HOST, ONE)
    ):
        name = f"grid.{ours} of 1 GiB, {on}, <ranks> rank(s): over {plain}"
        copy = "copy to the host" if ours == "save" else "copy to the GPU"
        slower = (f"the longer of {plain} and {copy}", plain)
        limit = {STREAM: 1.2 if (ours, on) == ("save", ONE) else 1.3}
        words = "--repeats 3"
        yield Target("checkpoint", on, ANY, name, words, limit, slower, ours=f"grid.{ours}")


TARGETS = (
    *exchanges(),
    *allreduces(),
    *transposes(),
    *packings(),
    *messages(),
    *programs(),
)


def on(where: str, ranks: int, kind: str = "") -> list[Target]:
    return [
        one
        for one in TARGETS
        if one.on == where and ranks in (one.ranks or (ranks,)) and kind in ("", one.kind)
    ]


def place(ranks: int, *, on_gpu: bool, shared_gpu: bool) -> str:
    if not on_gpu:
        return HOST
    return ONE if ranks == 1 else SHARED if shared_gpu else APART


def kinds_on(ranks: int, gpus: int) -> list[str]:
    """Return the kinds with figures on a number of ranks of a machine with so many GPUs, in the order of the table."""
    where = place(ranks, on_gpu=True, shared_gpu=ranks > gpus)
    return list(dict.fromkeys(one.kind for one in on(where, ranks)))
