"""The kernels compiled by NVRTC, without a GPU."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import pytest

import halox
from halox.packing.strided import _ELEMENTS
from halox.paths.peer.table import MANY_THREADS, Kind
from halox.plans.wall_launch import EXACT
from halox.reductions.device.field_plans import field_row, plan_field
from halox.reductions.device.kernel_plans import (
    plan_oneshot,
    plan_scattered,
    plan_wide,
)
from halox.reductions.field_operations import EXACT_OPERATIONS, FIELD_OPERATIONS
from halox.runtime.gpu.compiler import OPTIONS, preamble, source
from halox.sampling.random_numbers import kernel_defines
from tests.fakes.kept import digest, made_once
from tests.fakes.nvrtc import Compiled, by_nvrtc
from tests.support import full, require

require("nvrtc")

ARCHITECTURES = [pytest.param(80, marks=pytest.mark.full), 90]
WAYS = ("pack", "unpack")
_FIGURES = re.compile(r"ptxas (info\b|\s+\.)")
DIVISION = r"\b(div|rem)\."
FEW = 64
"""Limit on register bytes spilled to memory; a few bytes differ between compilers and do no harm."""


def strided(levels: int, word: int, in_flight: int, table: int, threads: int = 256, tiled: int = 0):
    """Return the name and the parameters of a strided kernel, as in ``Plan.defines``."""
    names = ("MAX_LEVELS", "WORD_BYTES", "IN_FLIGHT", "TABLE_REGIONS", "MAX_THREADS", "TILED")
    values = (levels, word, in_flight, table, threads, tiled)
    return ("strided_copy", tuple(zip(names, map(str, values), strict=True))[: 6 if tiled else 5])


KERNELS = [
    strided(1, 16, 1, 1),
    strided(3, 16, 4, 6, 1024),
    strided(3, 0, 2, 30),
    strided(5, 0, 4, 0),
    ("strided_copy", (("TABLE_REGIONS", "6"), ("MARKED", "1"))),
    strided(5, 0, 4, 20, 1024),
    strided(2, 4, 4, 1, tiled=4),
    strided(3, 8, 2, 1, tiled=2),
    strided(3, 16, 1, 6, tiled=1),
    strided(2, 1, 4, 1, tiled=4),
    strided(2, 2, 4, 1, tiled=6),
    strided(3, 0, 4, 6, 1024, tiled=7),
    ("traversal", ()),
    ("workunits", ()),
    *(("strided_add", (("ELEMENT", element),)) for element in sorted(set(_ELEMENTS.values()))),
]


@cache
def compiled(
    name: str,
    defines: tuple[tuple[str, str], ...],
    target: str,
    options: tuple[str, ...] = (),
) -> Compiled:
    """Compile a kernel file to PTX, and for ``sm_NN`` to machine code; the result is cached between runs."""
    text = preamble(defines) + source(name)
    words = (*OPTIONS, *options, f"--gpu-architecture={target}", "--ptxas-options=-v")

    def make(path: Path) -> None:
        made = by_nvrtc(text, f"{name}.cu", words)
        path.write_bytes(b"\0".join((made.log.encode(), made.ptx.encode(), made.code)))

    kept = made_once(f"{digest(compiler(), text, *words)}.ptx", make)
    log, ptx, code = kept.read_bytes().split(b"\0", 2)
    found = Compiled(ptx.decode(), code, log.decode())
    said = [line for line in found.log.splitlines() if not _FIGURES.match(line)]
    assert not any(said), f"compiler warnings:\n{found.log}"
    return found


def spilled(name: str, defines: tuple[tuple[str, str], ...]) -> list[int]:
    """Return the register bytes that each function of a kernel file spills, on compute capability 9."""
    log = compiled(name, defines, "sm_90").log
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert found
    return [int(stores) + int(loads) for stores, loads in found]


@cache
def compiler() -> str:
    """Return the exact version of the compiler's package; the compiler itself reports a shorter one."""
    found = [d for d in distributions() if "nvrtc" in (d.metadata["Name"] or "")]
    return " ".join(sorted(f"{d.metadata['Name']} {d.version}" for d in found))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("name", "defines"), KERNELS, ids=str)
@pytest.mark.part(3)
def test_packing_kernels(name, defines, architecture):
    """Machine code without warnings; words in registers, moved 16 bytes at once, and no division."""
    found = compiled(name, defines, f"sm_{architecture}")
    function = name.encode() + rb"(_(un)?pack\w*)?\0"
    assert found.code.startswith(b"\x7fELF") and re.search(function, found.code)
    assert ".local" not in found.ptx, "the compiler failed to keep an array in registers"
    wide = r"\.v(2\.[ubf]64|4\.[ubf]32)"
    if dict(defines).get("WORD_BYTES") in ("1", "2"):
        wide = r"\.[ub]32"  # tiles with sides of four bytes
    # Loads of the table have .nc, loads of cells do not. Inline assembly makes addresses generic.
    assert re.search(rf"ld(\.global)?{wide}", found.ptx)
    assert re.search(rf"st(\.global)?{wide}", found.ptx)
    assert "mul.hi.u" in found.ptx and not re.search(DIVISION, found.ptx)


def peer(levels: int, word: int, in_flight: int, table: int):
    """Return the parameters of the peer kernel, as in ``PeerPlan.defines``."""
    names = ("MAX_LEVELS", "WORD_BYTES", "IN_FLIGHT", "TABLE_SEGMENTS", "MAX_THREADS")
    values = (levels, word, in_flight, table, MANY_THREADS)
    return tuple(zip(names, map(str, values), strict=True))


def newest() -> int:
    """Return the newest architecture that the compiler supports."""
    from cuda.bindings import nvrtc

    _, architectures = nvrtc.nvrtcGetSupportedArchs()
    return max(architectures)


# Other architectures take long to compile, and run in the whole matrix only. Kernels ask whether an architecture is at
# least 90, so that the newest one compiles the code of 90.
OTHERS = [90, *full(75)]


@pytest.mark.parametrize(
    "defines", [peer(3, 8, 1, 12), peer(5, 0, 4, 0), (*peer(3, 16, 4, 0), ("TILED", "1"))], ids=str
)
@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.part(3)
def test_peer_kernels(defines, architecture):
    """Flags have release and acquire semantics in the system's scope; accesses of 16 bytes are single accesses."""
    found = compiled("peer", defines, f"sm_{architecture}")
    assert found.code.startswith(b"\x7fELF") and b"peer_exchange\0" in found.code
    if architecture < 90:
        return
    assert ".local" not in found.ptx and not re.search(DIVISION, found.ptx)
    for access in ("ld.acquire.sys", "st.release.sys", "st.relaxed.sys"):
        assert f"{access}.global.u32" in found.ptx
    for access in ("ld.relaxed.sys", "st.relaxed.sys"):
        assert f"{access}.global.b128" in found.ptx


class TestKindsOfSegments:
    def test_what_is_not_there_is_not_compiled(self):
        everything = peer(3, 8, 1, 4)
        packets = (*everything, ("KINDS", str(1 << Kind.SEND_LL | 1 << Kind.TAKE_LL)))
        whole, part = (compiled("peer", d, "compute_90").ptx for d in (everything, packets))
        assert ".b128" in whole and ".b128" not in part
        assert len(part) < len(whole) / 2

    @pytest.mark.parametrize("kinds", ["LL", "WIDE", "STAGED", "DIRECT", "COPY LL", "COPY WIDE"])
    @pytest.mark.part(3)
    def test_registers_suffice(self, kinds):
        """With one word width, kernels of small exchanges spill no register."""
        mask = sum(1 << kind for kind in Kind if set(kind.name.split("_")) & set(kinds.split()))
        assert max(spilled("peer", (*peer(3, 8, 1, 12), ("KINDS", str(mask))))) == 0

    @pytest.mark.parametrize("word", [4, 8, 16])
    def test_registers_suffice_for_tiles(self, word):
        mask = sum(1 << kind for kind in (Kind.COPY, Kind.SEND_DIRECT, Kind.TAKE_DIRECT))
        defines = (*peer(3, word, 4, 0), ("KINDS", str(mask)), ("TILED", str(max(1, 16 // word))))
        assert max(spilled("peer", defines)) <= FEW


@pytest.mark.parametrize(
    "name",
    [
        "peer",
        *(f"allreduce_{what}" for what in ("oneshot", "wide", "scattered", "field")),
        "exact_field",
    ],
)
class TestDependentLaunches:
    def test_wait_for_the_kernel_ahead_before_memory_is_looked_at(self, name):
        ptx = compiled(name, (), "compute_90").ptx
        entries = ptx.split(".entry ")[1:]
        access = re.compile(r"\b(ld|st|atom|red)\.(?!param|shared|const|local)")
        for entry in entries:
            first = access.search(entry)
            assert first and 0 < entry.find("griddepcontrol.wait") < first.start()

    def test_gpus_that_have_none_do_not_wait(self, name):
        assert "griddepcontrol" not in compiled(name, (), "compute_80").ptx


REDUCTIONS = [
    *(
        (plan.function, plan.defines)
        for plan in (
            plan_oneshot(np.dtype("f8"), "sum", 8, 2),
            plan_oneshot(np.dtype("c16"), "prod", 8, 2),
            plan_oneshot(np.dtype("c8"), "sum", 8, 12),
            plan_wide(np.dtype("f8"), "sum", 8192, 2),
            plan_wide(np.dtype("c8"), "prod", 8192, 12),
            plan_wide(np.dtype("i1"), "min", 65536, 2),
            plan_scattered(np.dtype("f8"), "sum", 8, 2),
            plan_scattered(np.dtype("?"), "logical_xor", 8, 2),
        )
    ),
    *(
        (plan.function, plan.defines)
        for operation, dtype, row in (
            (FIELD_OPERATIONS["norm"], "f8", field_row(0, (4, 4, 4), (512, 64, 8), 8)),
            (FIELD_OPERATIONS["sum"], "c16", field_row(0, (4, 4, 4), (1024, 128, 16), 16)),
            (
                FIELD_OPERATIONS["dot"],
                "c8",
                field_row(0, (4, 4, 4), (512, 64, 8), 8, (0, (512, 64, 8))),
            ),
            (
                FIELD_OPERATIONS["dot"],
                "f4",
                field_row(0, (2,) * 5, (6561, 729, 81, 27, 4), 4, (0, (1,) * 5)),
            ),
            (FIELD_OPERATIONS["max"], "f4", field_row(0, (9,), (4,), 4)),
            (EXACT_OPERATIONS["norm"], "f8", field_row(0, (4, 4, 4), (512, 64, 8), 8)),
            (EXACT_OPERATIONS["sum"], "c8", field_row(0, (9,), (8,), 8)),
            (EXACT_OPERATIONS["dot"], "c16", field_row(0, (9,), (16,), 16, (0, (16,)))),
        )
        for plan in (plan_field(operation, np.dtype(dtype), row, 2, sms=132),)
    ),
]


@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize(("name", "defines"), REDUCTIONS, ids=str)
@pytest.mark.part(3)
def test_reductions(name, defines, architecture):
    """Packets are single accesses, turns an ordered atomic addition; flags have release and acquire semantics."""
    found = compiled(name, defines, f"sm_{architecture}")
    assert name.encode() + b"\0" in found.code
    if architecture < 90:
        return
    assert ".local" not in found.ptx and not re.search(DIVISION, found.ptx)
    assert max(spilled(name, defines)) <= FEW
    expected = {
        "allreduce_wide": ("ld.relaxed.sys.global.b128", "st.relaxed.sys.global.b128"),
        "allreduce_scattered": ("ld.acquire.sys.global.u32", "st.release.sys.global.u32"),
    }.get(name, ("ld.volatile.global.v2.u64", "st.volatile.global.v2.u64"))
    assert all(access in found.ptx for access in expected)
    assert "atom.acq_rel.gpu.global.add.u64" in found.ptx


def test_exact_sums_round_each_product():
    """No fused multiply-add, and no copy of the slices in local memory."""
    row = field_row(0, (9,), (16,), 16, (0, (16,)))
    plan = plan_field(EXACT_OPERATIONS["dot"], np.dtype("c16"), row, 1, sms=132)
    for finish in ("Plain", "Words"):
        defines = tuple((dict(plan.defines) | {"FINISH": finish}).items())
        ptx = compiled(plan.function, defines, "compute_90").ptx
        assert "mul.rn.f64" in ptx and "fma" not in ptx
    assert "fma" in compiled("allreduce_field", (("LOCAL", "Square"),), "compute_90").ptx


@pytest.mark.parametrize("architecture", [*OTHERS, *full(newest())])
@pytest.mark.parametrize("element", ["double", "Complex<float>", "unsigned char"])
def test_combine_compiles(element, architecture):
    code = compiled("combine", (("ELEMENT", element), ("OP", "Prod")), f"sm_{architecture}").code
    assert all(name + b"\0" in code for name in (b"combine", b"copy_marked"))


def walls(levels: int, in_flight: int, table: int, rules: int, element: str, complex_: int = 0):
    """Return the parameters of the kernel that fills halos at walls, as in ``FillPlan.defines``."""
    names = ("MAX_LEVELS", "IN_FLIGHT", "TABLE_REGIONS", "RULES", "TYPE", "COMPLEX")
    values = (levels, in_flight, table, rules, element, complex_)
    return tuple(zip(names, map(str, values), strict=True))


@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize(
    "defines",
    [
        walls(3, 2, 27, 3, "double"),
        walls(2, 4, 36, 3, "float"),
        walls(5, 1, 0, 4, "double", 1),
        walls(5, 4, 0, 4, "unsigned short"),
    ],
    ids=str,
)
@pytest.mark.part(2)
def test_walls_compile(defines, architecture):
    found = compiled("walls", defines, f"sm_{architecture}", EXACT)
    assert b"fill_walls\0" in found.code
    assert "fma.rn.f" not in found.ptx  # NumPy rounds products
    assert ".local" not in found.ptx
    assert max(spilled("walls", defines)) <= FEW
    assert not re.search(DIVISION, found.ptx)


@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize(
    "defines",
    [(), (("TYPE", "unsigned char"), ("SUM", "unsigned char"), ("WEIGHTED", "0"), ("ADD", "1"))],
    ids=str,
)
def test_points_compile(defines, architecture):
    found = compiled("points", defines, f"sm_{architecture}")
    assert b"points\0" in found.code and ".local" not in found.ptx


@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize("dist", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.part(2)
def test_random_fields_compile(dtype, dist, architecture):
    defines = kernel_defines(np.dtype(dtype), dist)
    found = compiled("random_field", defines, f"sm_{architecture}")
    assert b"random_field\0" in found.code
    assert not re.search(r"\b(div|rem)\.[us]", found.ptx)
    if dist == "uniform":
        assert ".local" not in found.ptx


def test_mark_compiles():
    """Stores of the mark's words are volatile; the two words of a failure are one store."""
    ptx = compiled("mark", (), "sm_90").ptx
    stores = {line.split()[0] for line in ptx.splitlines() if "st.volatile" in line}
    assert stores == {"st.volatile.global.u32", "st.volatile.global.u64"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_look_compiles(architecture):
    """The only function outside is the one that the driver supplies."""
    found = compiled("look", (("FLAG", "unsigned short"),), f"sm_{architecture}")
    assert b"look\0" in found.code
    assert re.findall(r"\.extern \.func (\w+)", found.ptx) == ["cudaGraphSetConditional"]
    assert ("griddepcontrol.wait" in found.ptx) is (architecture >= 90)


def test_a_broken_kernel_is_noticed():
    with pytest.raises(AssertionError, match="no_such_name"):
        compiled("strided_add", (("ELEMENT", "no_such_name"),), "sm_90")


STEP = """
extern "C" __global__ void step(halox::Halo<2> halo, int field, const float* u, int nx, int ny)
{
    const int y = 1 + blockIdx.x * blockDim.x + threadIdx.x;
    const int x = 1 + blockIdx.y * blockDim.y + threadIdx.y;
    if (x <= nx && y <= ny) {
        halo.wait({x, y});
        const float* at = u + x * (ny + 2) + y;
        halo.store(field, {x, y}, at[-1] + at[1] + at[-ny - 2] + at[ny + 2]);
    }
}
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("debug", [False, True])
def test_stores_from_a_users_kernel(debug, architecture):
    """The argument stays where the launch puts it, and flags have the order of the whole system."""
    text = halox.device_header(debug=debug) + STEP
    found = by_nvrtc(text, "step.cu", (*OPTIONS, f"--gpu-architecture=compute_{architecture}"))
    assert not found.log
    assert ".local" not in found.ptx
    assert "cvta.param" not in found.ptx, "the parameter's address was taken"
    flags = "ld.acquire.sys.global.u32", "fence.acq_rel.sys", "st.relaxed.sys.global.u32"
    assert all(access in found.ptx for access in flags)


@pytest.mark.parametrize("architecture", OTHERS)
def test_migration_compiles(architecture):
    for axes, word in ((3, "unsigned long long"), (1, "unsigned char")):
        defines = (("AXES", str(axes)), ("WORD", word))
        found = compiled("migrate", defines, f"sm_{architecture}")
        assert {"find", "pack", "keep", "place"} <= {*re.findall(r"\.entry (\w+)", found.ptx)}
