"""``halox run --compare``, as a user types it, and its digest beside integers of Python."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.cli import main
from halox.cli.recording import digest
from halox.decomposition import FieldLayout, FieldSpec, decompose
from tests import support
from tests.support import full

DEMO = Path(__file__).with_name("stale_halos.py")
EXAMPLES = Path(__file__).parents[3] / "examples"


def line_of(code: str) -> int:
    """Return the number of the demo's line with this code."""
    return 1 + DEMO.read_text().splitlines().index(code)


def test_old_halos_are_found() -> None:
    """The potential vorticity, the first field computed from the halos of u and v, is the first that differs."""
    ended = support.halox("run", str(DEMO), "-n", "4", "--compare", "1")
    assert ended.returncode == 1, ended.stderr
    assert (
        "4 ranks beside 1 rank: the first difference is in exchange of q, call 19" in ended.stdout
    )
    assert f"stale_halos.py:{line_of('    fill(q)')}: fill(q)" in ended.stdout
    # The northern neighbours of the cells in row 11 are on another rank.
    assert re.search(r"first at \(\d+, \d+\): \S+ on 4 ranks, \S+ on 1 rank\n", ended.stdout)
    assert f":{line_of('    fill(fn, is_v=True)')}: fill(fn" in ended.stdout.partition("cause")[2]
    assert re.findall(r"its halo is old: exchange of (\w+)", ended.stdout) == ["u", "v"]
    assert f":{line_of('    fill(u)')}: fill(u)" in ended.stdout.partition("exchange of u")[2]


@pytest.mark.parametrize(
    "words",
    [
        f"{DEMO} -n 2 --compare=1 right",
        *full(
            f"{DEMO} -n 2 --compare=3 right",
            f"{EXAMPLES}/heat.py -n 4 --compare=1 --steps 20",
            f"{EXAMPLES}/shallow_water.py -n 4 --compare=1 --cells 50 8",
            "stencil2d -n 4 --compare=1 --scaling strong --custom-size 30,30 --num-iters 3",
        ),
    ],
)
def test_programs_that_agree(words: str) -> None:
    ended = support.halox("run", *words.split())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"all [1-9]\d* calls of grids agree, bit for bit\n$", ended.stdout)


VARYING = """
import os
import halox
grid = halox.Grid((6, 5), periodic=True)
u = grid.ones()
for step in range(3):
    grid.exchange(u)
if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and grid.rank == 1:
    grid.interior(u)[1, 2] += {change}
total = grid.sum(u)
{more}
"""


@pytest.mark.parametrize(("change", "status"), [(1e-3, 1), *full((1e-12, 0))])
def test_the_largest_difference_without_gpus(change: float, status: int, tmp_path: Path) -> None:
    script = tmp_path / "varying.py"
    script.write_text(VARYING.format(change=change, more=""))
    ended = support.halox("run", "-n", "2", "--compare", "cpu", str(script))
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert (
        f"the largest difference is {change:.1e} of the largest value, in sum of u" in ended.stdout
    )
    assert "at (4, 2): 1.0 on 2 ranks, 1.00" in ended.stdout


FORGETFUL = """
import halox
grid = halox.Grid((9, 6), periodic=True, device="cpu")
u = grid.random(1)
for step in range(4):
    if step != 2:
        grid.exchange(u)
    u[1:-1, 1:-1] += 0.1 * (u[2:, 1:-1] - u[1:-1, 1:-1])
    grid.norm(u)
"""


SPLIT = """
import halox
grid = halox.Grid((9, 6), periodic=True, device="cpu")
u, v = grid.random(1), grid.zeros()
for step in range(3):
    grid.exchange(u, axes="y")  # and the step reads along x
    v[1:-1, 1:-1] = 0.9 * u[1:-1, 1:-1] + 0.1 * u[2:, 1:-1]
    u, v = v, u
"""


@pytest.mark.parametrize(
    ("text", "first", "old"),
    [
        *full(
            (FORGETFUL, "norm of u, call 5", "u, call 3"),
            (SPLIT, "exchange of u, call 3", "u, call 2"),
        ),
    ],
)
def test_the_old_halo_is_named(text: str, first: str, old: str, tmp_path: Path) -> None:
    """Also of arrays that swap their names, and if only the halo along another axis was filled."""
    script = tmp_path / "forgetful.py"
    script.write_text(text)
    ended = support.halox("run", str(script), "-n", "3", "--compare", "2")
    assert f"first difference is in {first}\n" in ended.stdout, ended.stdout
    assert re.findall(r"its halo is old: exchange of (.*)", ended.stdout) == [old]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("grid.exchange(u) if grid.size == 2 else grid.sum(u)", r"differ\n2 ranks: exchange of u"),
        *full(("if grid.size == 2: grid.max(u)", r"2 ranks: max of u, call 5\n.*\n1 rank: no further call")),
        *full(("grid.allreduce(grid.rank)", r"difference is in allreduce, call 5\n.*\n.*\(\): 1 on 2")),
    ],
)  # fmt: skip
def test_calls_and_results_that_differ(more: str, found: str, tmp_path: Path) -> None:
    script = tmp_path / "varying.py"
    script.write_text(VARYING.format(change=0, more=more))
    ended = support.halox("run", "-n", "2", "--compare", "1", str(script))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(found, ended.stdout), ended.stdout


@pytest.mark.parametrize("value", ["0", "gpu", ""])
def test_other_values_are_errors(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    for program in (str(DEMO), "stencil2d"):
        assert main(["run", program, "--compare", value]) == 2
        assert "--compare: expected a number of ranks" in capsys.readouterr().err


def mixed(x: int) -> int:
    """Return the last steps of SplitMix64, on integers of Python."""
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@pytest.mark.parametrize(
    ("dtype", "spec"),
    [
        ("f8", FieldSpec(((1, 2), (0, 1)))),
        ("c16", FieldSpec(((1, 1), (1, 1)), components_before=(2,), components_after=(3,))),
        ("?", FieldSpec(((0, 0), (1, 1)), staggered=(True, False))),
        ([("a", "f4"), ("b", "i2")], FieldSpec(((1, 1), (2, 2)), parity="even")),
    ],
)
def test_the_digest_does_not_depend_on_the_division(
    dtype: Any, spec: FieldSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halox.cli.recording._BLOCK", 7)
    random = np.random.default_rng(1)
    shape = FieldLayout(decompose((6, 8), 1, periodic=False), 0, spec).global_shape
    nbytes = np.dtype(dtype).itemsize * int(np.prod(shape))
    whole = random.integers(0, 2, nbytes, "u1").view(dtype).reshape(shape)
    width = 2 if isinstance(dtype, list) else min(np.dtype(dtype).itemsize, 8)
    words = whole.reshape(-1).view(f"u{width}").tolist()
    expected = sum(mixed(word + (n + 1) * 0x9E3779B97F4A7C15) for n, word in enumerate(words))
    for proc_shape in itertools.product((1, 3), (1, 2)):
        ranks = proc_shape[0] * proc_shape[1]
        domain = decompose((6, 8), ranks, periodic=False, proc_shape=proc_shape)
        total = 0
        for rank in range(ranks):
            layout = FieldLayout(domain, rank, spec)
            before, after = (slice(None),) * len(spec.components_before), spec.components_after
            total += digest(np, whole[(*before, *layout.owned)], layout)
            assert not after or whole.ndim == len(layout.padded_shape)
        assert total % 2**64 == expected % 2**64
