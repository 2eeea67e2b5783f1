"""``halox view``: values and pixels of pictures, against the saved arrays; mistakes on the command line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halox
from halox.cli import main
from halox.cli import view as viewing
from tests import support

pytest.importorskip("matplotlib")
pytest.importorskip("xarray")
pytest.importorskip("zarr")

CELLS = (6, 8, 10)
RNG = np.random.default_rng(5)
U = RNG.normal(size=CELLS)
C = RNG.normal(size=(2, *CELLS, 3)) + 1j * RNG.normal(size=(2, *CELLS, 3))
FACE = RNG.integers(0, 99, (6, 9, 10)).astype("i2")
EVEN = RNG.normal(size=(6, 8, 5)).astype("f4")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, which tests do not change."""
    support.require("mpi")
    path = tmp_path_factory.mktemp("view") / "run.zarr"
    with halox.Grid(CELLS, device="cpu", checkerboard=True) as grid:
        c = grid.scatter(C, out=grid.zeros("c16", components=(2, ..., 3)))
        face, even = grid.scatter(FACE, staggered=1), grid.scatter(EVEN, parity="even")
        fields = {"c": c, "even": even, "face": face, "u": grid.scatter(U)}
        grid.save(path, fields, attrs={"step": 7, "time": 0.25, "name": "x"})
    return path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of drawing, which writes nothing."""
    found: list[Any] = []

    def draw(*given: Any) -> tuple[float, float]:
        found.append(given)
        return 0, 1

    monkeypatch.setattr(viewing, "draw", draw)
    return found


def edit(path: Path, **attributes: Any) -> None:
    """Change attributes of a checkpoint, to values that other ranks would have written."""
    found = json.loads((path / "zarr.json").read_text())
    found["attributes"].update(attributes)
    (path / "zarr.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("words", "expected", "title", "dims"),
    [
        ("--field u", U[:, :, 5], "u at z = 5", "x y"),
        ("--field u --slice z=-1", U[:, :, 9], "u at z = 9", "x y"),
        ("--field u --slice x=3 --slice z=0", U[3, :, 0], "u at x = 3, z = 0", "y"),
        (
            "--field u --project y=mean --project x=max",
            U.mean(1).max(0),
            "max of mean of u over y over x",
            "z",
        ),
        ("--field u --slice x=1 --project z=mean", U[1].mean(1), "mean of u over z at x = 1", "y"),
        (
            "",
            abs(C[0, ..., 5, 0]),
            "|c| at c_component_0 = 0, c_component_1 = 0, z = 5",
            "x y",
        ),
        (
            "--slice c_component_0=1 --slice c_component_1=2 --project z=mean",
            abs(C[1, ..., 2]).mean(2),
            "mean of |c| over z at c_component_0 = 1, c_component_1 = 2",
            "x y",
        ),
        ("--field face --slice y_face=8", FACE[:, 8], "face at y_face = 8", "x z"),
        ("--field even --project x=max", EVEN.max(0), "max of even over x", "y z_even"),
    ],
)
def test_slices_and_projections(
    words: str, expected: Any, title: str, dims: str, saved: Path, drawn: list[Any]
) -> None:
    assert main(["view", str(saved), *words.split()]) == 0
    (((frame,), path, *_),) = drawn
    np.testing.assert_allclose(frame.values, expected, rtol=1e-12)
    assert frame.title == f"{title}\nrun.zarr, step 7, time 0.25"
    assert (" ".join(frame.dims), tuple(frame.extents)) == (dims, expected.shape)
    field = words.split()[1] if words.startswith("--field") else "c"
    assert path == saved.with_name(f"run.zarr.{field}.png")


def test_npy(tmp_path: Path, drawn: list[Any]) -> None:
    np.save(tmp_path / "u.npy", U)
    np.save(tmp_path / "w.npy", np.array(C[..., :2].transpose(1, 2, 3, 0, 4)))
    for words in ("u.npy", "u.npy --project x=mean", "w.npy --slice axis_4=1"):
        name, *others = words.split()
        assert main(["view", str(tmp_path / name), *others]) == 0
    found = [frames[0].values for (frames, *_) in drawn]
    assert (found[0] == U[..., 5]).all() and drawn[0][1] == tmp_path / "u.npy.png"
    np.testing.assert_allclose(found[1], U.mean(0), rtol=1e-12)
    assert (found[2] == abs(C[1, :, :, 5, 1])).all()


def test_blocks(saved: Path, tmp_path: Path, drawn: list[Any]) -> None:
    path = shutil.copytree(saved, tmp_path / "run.zarr")
    edit(path, halox_proc_shape=[2, 1, 3], halox_blocks=[4, 2, 8, 2, 4, 4])
    for words in ("u --slice y=0", "c", "even --slice y=0", "face --slice x=0"):
        assert main(["view", str(path), "--blocks", "--field", *words.split()]) == 0
    found = [[list(sizes) for sizes in frames[0].blocks] for (frames, *_) in drawn]
    assert found == [[[4, 2], [2, 4, 4]], [[4, 2], [8]], [[4, 2], [1, 2, 2]], [[8], [2, 4, 4]]]


def limits_of(frame: Any) -> tuple[Any, Any]:
    """Return the limits of the axes of a picture that Matplotlib draws."""
    from matplotlib.figure import Figure

    figure = Figure()
    viewing._show(figure, frame, "viridis", None)
    return figure.axes[0].get_xlim(), figure.axes[0].get_ylim()


def test_axes_have_the_coordinates(tmp_path: Path, drawn: list[Any]) -> None:
    """Ticks are at the centres of cells; uneven coordinates leave the indices."""
    support.require("mpi")
    path = tmp_path / "a.zarr"
    with halox.Grid((4, 5), device="cpu") as grid:
        coords = {"x": [10.0, 12, 14, 16], "y": [1, 2, 4, 8, 16]}
        grid.save(path, u=grid.ones(), coords=coords)
    assert main(["view", str(path)]) == 0
    (((frame,), *_),) = drawn
    assert limits_of(frame) == ((9, 17), (-0.5, 4.5))
    assert main(["view", str(path), "--slice", "y=0"]) == 0
    assert drawn[1][0][0].steps == [(10, 2)]


def test_records_of_an_output(
    tmp_path: Path, drawn: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture is of the last record, an animation of each; of many, of some at even distances, with the last."""
    support.require("mpi")
    path, gif = tmp_path / "run.zarr", ["--gif", str(tmp_path / "a.gif")]
    with halox.Grid((4, 5), device="cpu") as grid:
        u = grid.zeros()
        with halox.Output(grid, path, u=u) as out:
            for n in range(7):
                u[...] = n
                out.append(time=n)
    for most, words, values in (
        (200, [], [6]),
        (200, ["--slice", "time=1"], [1]),
        (200, gif, [0, 1, 2, 3, 4, 5, 6]),
        (3, gif, [0, 3, 6]),
        (5, gif, [0, 2, 4, 6]),
        (200, ["--slice", "time=2", *gif], [2]),
        (200, ["--project", "time=max", *gif], [6]),
        (200, [str(path), *gif], [6, 6]),  # of several outputs, each shows its last record
    ):
        monkeypatch.setattr(viewing, "_MOST_RECORDS", most)
        assert main(["view", str(path), *words]) == 0
        assert [frame.values.max() for frame in drawn[-1][0]] == values
        assert all(frame.values.shape == (4, 5) for frame in drawn[-1][0])


def test_records_with_dates_and_particles(
    tmp_path: Path, drawn: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The title has the date of a record; the first field by name is drawn, and no particles."""
    support.require("mpi")
    path = tmp_path / "run.zarr"
    with halox.Grid((4, 5), device="cpu") as grid:
        p = halox.Particles(grid, [(1, 1)], a=1)
        for name, fields in (("run.zarr", {"u": grid.zeros()}), ("only.zarr", {})):
            with halox.Output(grid, tmp_path / name, fields, p=p) as out:
                for second in ("15.25", "16"):
                    out.append(time=np.datetime64(f"2026-02-28T12:30:{second}"))
    for words, second in ([], "16"), (["--slice", "time=0"], "15.250"):
        assert main(["view", str(path), *words]) == 0
        (frame,) = drawn[-1][0]
        assert frame.title.startswith(f"u at time = 2026-02-28T12:30:{second}\n")
    for name, *words in (
        ("run.zarr", "--field", "p.a"),
        ("run.zarr", "--field", "p_count"),
        ("only.zarr",),
    ):
        assert main(["view", str(tmp_path / name), *words]) == 2
        assert "is of particles" in capsys.readouterr().err


def test_windows_of_an_output(tmp_path: Path, drawn: list[Any]) -> None:
    """The first field by name is no bounds of windows, and missing windows are drawn."""
    support.require("mpi")
    path = tmp_path / "run.zarr"
    with halox.Grid((4, 5), device="cpu") as grid:
        u = grid.zeros()
        for times in ([0, 1], [2], [3, 4, 5]):  # a restart in the middle of a window
            with halox.Output(grid, path, u=u, mean="u", every={"u": 2}, mode="a") as out:
                for time in times:
                    u[...] = time
                    out.append(time=time)
    assert main(["view", str(path), "--gif", str(tmp_path / "a.gif")]) == 0
    means = [float(frame.values[0, 0]) for frame in drawn[-1][0]]
    assert means[::2] == [0.5, 4.5] and np.isnan(means[1])


def pixels(path: Path) -> Any:
    from matplotlib import image

    return image.imread(path)[..., :3]


def colour(share: float, cmap: str = "viridis") -> Any:
    from matplotlib import colormaps

    return np.array(colormaps[cmap](float(share))[:3])


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each half has the colour of its value; the border between the blocks is white."""
    support.require("mpi")
    path, picture = tmp_path / "a.zarr", tmp_path / "a.zarr.u.png"
    with halox.Grid((40, 30), device="cpu") as grid:
        halves = np.repeat([[1.0], [3.0]], 20, 0) + np.zeros(30)
        grid.save(path, u=grid.scatter(halves), v=grid.zeros())
    edit(path, halox_proc_shape=[2, 1], halox_blocks=[20, 20, 30])
    for words in ("", "--field u --blocks --cmap magma"):
        assert main(["view", str(path), *words.split()]) == 0
        rows = pixels(picture)[200:240].mean(0)  # at half height
        ends = [colour(share, words.split()[-1] if words else "viridis") for share in (0, 1)]
        low, high = (np.flatnonzero(abs(rows - end).max(1) < 0.01) for end in ends)
        assert len(low) > 150 and abs(len(low) - len(high)) < 60
        between = rows[low.max() + 1 : high[high > low.max()][0]]
        assert bool(words) == (len(between) > 0 and between.max() > 0.7)
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{picture}: u, from 1 to 3", "fields: u, v", f"{picture}: u, from 1 to 3"]


def test_logarithmic_colours(tmp_path: Path) -> None:
    """Each power of ten has the colour at its share of the map; lower values have the lowest colour."""
    np.save(tmp_path / "u.npy", 10.0 ** np.array([[-9, -1, 0, 1], [-9, 2, 3, 3]]).repeat(9, 0))
    for words, decades in (("", 4), ("--range 1e-3 1e3", 6)):
        assert main(["view", str(tmp_path / "u.npy"), "--log", *words.split()]) == 0
        found = pixels(tmp_path / "u.npy.png")
        for power in (-9, -1, 0, 1, 2, 3):
            share = max(0, 1 - (3 - power) / decades)
            assert (abs(found - colour(share)).max(-1) < 0.01).sum() > 500, power


def test_lines_and_values_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = U[0, 0].copy()
    odd[:3] = np.nan, np.inf, -np.inf
    np.save(tmp_path / "odd.npy", odd)
    np.save(tmp_path / "nan.npy", np.full((3, 4), np.nan))
    np.save(tmp_path / "point.npy", [2.0])
    for name in ("odd", "nan", "point"):
        assert main(["view", str(tmp_path / f"{name}.npy")]) == 0
    said = capsys.readouterr().out
    finite = odd[np.isfinite(odd)]
    assert f"odd, from {finite.min():g} to {finite.max():g}" in said
    assert "point, from 2 to 2" in said
    blue = np.array([31, 119, 180]) / 255
    assert (abs(pixels(tmp_path / "point.npy.png") - blue).max(-1) < 0.01).sum() > 5


def test_an_animation_has_one_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    names = [str(tmp_path / f"u{step}.npy") for step in range(2)]
    for step, name in enumerate(names):
        np.save(name, np.full((9, 9), float(step)))
    assert main(["view", *names]) == 0
    assert f"{tmp_path / 'u0.npy.gif'}: u0, from 0 to 1" in capsys.readouterr().out
    with Image.open(tmp_path / "u0.npy.gif") as found:
        assert (found.n_frames, found.format) == (2, "GIF")
        for step in range(2):
            found.seek(step)
            frame = np.asarray(found.convert("RGB"), float) / 255
            assert (abs(frame - colour(step)).max(-1) < 0.02).sum() > 9000


def test_the_checkpoints_of_an_animation_show_one_field(
    saved: Path, tmp_path: Path, drawn: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "b.zarr"
    with halox.Grid(CELLS, device="cpu") as grid:
        grid.save(other, a=grid.scatter(U), u=grid.scatter(2 * U))
    assert main(["view", str(saved), str(other), "--field", "u"]) == 0
    frames, path, *_ = drawn[0]
    assert (frames[1].values == 2 * U[..., 5]).all() and path.name == "run.zarr.u.gif"
    assert main(["view", str(saved), str(other)]) == 2
    assert f"{other}: No variable named 'c'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def odd_files(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, of which some are damaged, and of other files."""
    folder = tmp_path_factory.mktemp("odd")
    for name in ("run.zarr", "cut.zarr", "missing.zarr"):
        shutil.copytree(saved, folder / name)
    for chunk in (folder / "cut.zarr" / "u").rglob("*"):
        if chunk.is_file() and chunk.name != "zarr.json":
            chunk.write_bytes(b"0123456789")
    for name in ("c", "u"):
        shutil.rmtree(folder / "missing.zarr" / name / "c")
    with halox.Grid(4, device="cpu") as grid:
        halox.Output(grid, folder / "records.zarr", u=grid.zeros()).close()
    (folder / "empty").mkdir()
    np.save(folder / "u.npy", U)
    (folder / "text.npy").write_text("no checkpoint")
    return folder


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("nothing.zarr", "nothing.zarr does not exist"),
        ("empty", "empty"),
        ("text.npy", "text.npy"),
        ("cut.zarr --field u", "cut.zarr"),
        ("run.zarr --field q", "'q'"),
        ("run.zarr --slice w=1", "'w'"),
        ("run.zarr --field u --slice z=10", "z=10"),
        ("missing.zarr --field u", "u/c/0/0/0"),
        ("records.zarr", "records.zarr has no records"),
        ("run.zarr --slice x=0 --slice y=0 --slice z=0", "no axis of c is left to draw"),
        ("run.zarr --slice z=mid", "'z=mid'"),
        ("u.npy --field v", "has no field v"),
        ("u.npy --blocks", "--blocks"),
        ("run.zarr --cmap virdis", "'virdis'"),
        ("run.zarr run.zarr --png a.png", "--png"),
        ("u.npy --png nowhere/a.png", "nowhere/a.png cannot be drawn"),
    ],
)
def test_mistakes(
    words: str,
    text: str,
    odd_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit status is 2, the error names the argument, and no file is written."""
    monkeypatch.chdir(odd_files)
    before = sorted(path.name for path in odd_files.iterdir())
    try:
        status = main(["view", *words.split()])
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    assert text in capsys.readouterr().err
    assert sorted(path.name for path in odd_files.iterdir()) == before


@pytest.mark.parametrize("package", ["matplotlib", "xarray", "zarr"])
def test_a_missing_package(
    package: str, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["view", str(saved)]) == 2
    error = capsys.readouterr().err
    assert f"needs {package} (" in error and "pip install matplotlib xarray zarr" in error
