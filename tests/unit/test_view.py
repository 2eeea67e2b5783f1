"""Pictures of checkpoints: what is drawn, against the array that was saved; mistakes on the command line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halox
from halox.checkpoint import chunks
from halox.cli import drawing, main
from tests import support

pytest.importorskip("matplotlib")
pytest.importorskip("zarr")

CELLS = (6, 8, 10)
RNG = np.random.default_rng(5)
U = RNG.normal(size=CELLS)
C = RNG.normal(size=(2, *CELLS, 3)) + 1j * RNG.normal(size=(2, *CELLS, 3))
FACE = RNG.integers(0, 99, (6, 9, 10)).astype("i2")
EVEN = RNG.normal(size=(6, 8, 5)).astype("f4")


def save(path: Path, compressors: Any = None, **attrs: Any) -> Path:
    support.require("mpi")
    with halox.Grid(CELLS, device="cpu", checkerboard=True) as grid:
        c = grid.scatter(C, out=grid.zeros("c16", components=2, components_after=3))
        pairs = grid.zeros([("a", "f4"), ("b", "f4")])
        face, even = grid.scatter(FACE, staggered=1), grid.scatter(EVEN, parity="even")
        fields = {"c": c, "even": even, "face": face, "pairs": pairs, "u": grid.scatter(U)}
        grid.save(path, fields, attrs=attrs, compressors=compressors)
    return path


def edit(path: Path, **attributes: Any) -> None:
    """Change attributes of the group, as other ranks would have written them."""
    found = json.loads((path / "zarr.json").read_text())
    found["attributes"].update(attributes)
    (path / "zarr.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of many small chunks, which tests do not change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "SHARD_BYTES", 300)
        return save(tmp_path_factory.mktemp("view") / "run.zarr", step=7, time=0.25, name="x")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of drawing, which writes nothing."""
    found: list[Any] = []
    monkeypatch.setattr(drawing, "draw", lambda *given, log: found.append(given))
    return found


@pytest.mark.parametrize(
    ("words", "expected", "what", "dims"),
    [
        ("--field u", U[:, :, 5], "u at z = 5", "x y"),
        ("--field u --slice z=-1", U[:, :, 9], "u at z = 9", "x y"),
        ("--field u --slice x=3", U[3], "u at x = 3", "y z"),
        ("--field u --slice x=3 --slice z=0", U[3, :, 0], "u at x = 3, z = 0", "y"),
        ("--field u --project y=max", U.max(1), "max of u over y", "x z"),
        (
            "--field u --project y=mean --project x=mean",
            U.mean((0, 1)),
            "mean of u over x, y",
            "z",
        ),
        ("--field u --slice x=1 --project z=mean", U[1].mean(1), "mean of u over z at x = 1", "y"),
        ("", abs(C[0, ..., 5, 0]), "|c[0, 0]| at z = 5", "x y"),
        (
            "--component 1,2 --project z=mean",
            abs(C[1, ..., 2]).mean(2),
            "mean of |c[1, 2]| over z",
            "x y",
        ),
        ("--field face --slice y=8", FACE[:, 8], "face at y_face = 8", "x z"),
        ("--field face --slice y_face=8", FACE[:, 8], "face at y_face = 8", "x z"),
        ("--field even --slice z=4", EVEN[..., 4], "even at z_even = 4", "x y"),
        ("--field even --project x=max", EVEN.max(0), "max of even over x", "y z_even"),
    ],
)
def test_slices_and_projections(
    words: str, expected: Any, what: str, dims: str, saved: Path, drawn: list[Any]
) -> None:
    assert main(["view", str(saved), *words.split()]) == 0
    ((frame,), path, _, limits) = drawn[0]
    np.testing.assert_allclose(frame.values, expected, rtol=1e-12)
    assert (frame.what, " ".join(frame.dims)) == (what, dims)
    assert frame.where == "run.zarr, step 7, time 0.25"
    assert limits == pytest.approx((expected.min(), expected.max()))
    field = words.split()[1] if words.startswith("--field") else "c"
    assert path == saved.with_name(f"run.zarr.{field}.png")


def test_no_picture_overwrites_that_of_another_field_or_checkpoint(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run", "run.zarr"):
        shutil.copytree(saved, tmp_path / name)
    np.save(tmp_path / "run.npy", U)
    before = {path.name for path in tmp_path.iterdir()}
    drawn = {
        "run.zarr": "run.zarr.c.png",
        "run.zarr --field u": "run.zarr.u.png",
        "run --field u": "run.u.png",
        "run.npy": "run.npy.png",
        "run.zarr run --field u": "run.zarr.u.gif",
        "run.npy run.npy": "run.npy.gif",
    }
    for words, picture in drawn.items():
        checkpoints = [str(tmp_path / word) for word in words.split() if word.startswith("run")]
        options = [word for word in words.split() if not word.startswith("run")]
        assert main(["view", *checkpoints, *options]) == 0
        assert capsys.readouterr().out.startswith(f"{tmp_path / picture}: ")
    assert {path.name for path in tmp_path.iterdir()} == before | {*drawn.values()}


def test_compressed_chunks(tmp_path: Path, drawn: list[Any]) -> None:
    path = save(tmp_path / "run.zarr", "zstd")
    assert main(["view", str(path), "--field", "u", "--slice", "y=2"]) == 0
    assert (drawn[0][0][0].values == U[:, 2]).all()


@pytest.mark.parametrize("chunk_bytes", [300, 1 << 20])
def test_npy(
    chunk_bytes: int, tmp_path: Path, drawn: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halox.checkpoint.reading.SHARD_BYTES", chunk_bytes)
    np.save(tmp_path / "u.npy", U)
    np.save(tmp_path / "w.npy", np.array(C[..., :2].transpose(1, 2, 3, 0, 4)))
    for words in ("u.npy", "u.npy --project x=mean", "w.npy --slice axis_4=1"):
        name, *others = words.split()
        assert main(["view", str(tmp_path / name), *others]) == 0
    found = [frames[0].values for (frames, *_) in drawn]
    assert (found[0] == U[..., 5]).all()
    np.testing.assert_allclose(found[1], U.mean(0), rtol=1e-12)
    assert (found[2] == abs(C[1, :, :, 5, 1])).all()


def test_only_chunks_of_the_slice_are_read(saved: Path, tmp_path: Path, drawn: list[Any]) -> None:
    path = shutil.copytree(saved, tmp_path / "run.zarr")
    others = [c for c in (path / "u").glob("c/*/*/*") if c.parts[-3] != "3"]
    assert len(others) == 20
    for chunk in others:
        chunk.unlink()
    assert main(["view", str(path), "--field", "u", "--slice", "x=3"]) == 0
    assert (drawn[0][0][0].values == U[3]).all()


def test_large_fields_are_thinned(
    saved: Path, drawn: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_MOST_POINTS", {1: 5, 2: 4})
    for words in ("--slice x=3", "--slice x=3 --slice y=0", "--project x=max"):
        assert main(["view", str(saved), "--field", "u", *words.split()]) == 0
    frames = [frames[0] for (frames, *_) in drawn]
    assert (frames[0].values == U[3, ::2, ::3]).all() and frames[0].steps == (2, 3)
    assert (frames[1].values == U[3, 0, ::2]).all()
    assert (frames[2].values == U.max(0)[::2, ::3]).all()


def test_values_that_are_not_finite_are_outside_of_the_range(
    tmp_path: Path, drawn: list[Any]
) -> None:
    odd = U[0].copy()
    odd[0, :3] = np.nan, np.inf, -np.inf
    np.save(tmp_path / "odd.npy", odd)
    np.save(tmp_path / "none.npy", np.full((3, 4), np.nan))
    for words in ("odd.npy", "odd.npy --project y=mean", "none.npy"):
        name, *others = words.split()
        assert main(["view", str(tmp_path / name), *others]) == 0
    finite = odd[np.isfinite(odd)]
    assert [limits for *_, limits in drawn][::2] == [(finite.min(), finite.max()), (0, 1)]
    assert np.isnan(drawn[1][0][0].values[0])


def test_logarithmic_colours(saved: Path, tmp_path: Path) -> None:
    """Each power of ten between the ends has the colour at its share of the map; what is below has the lowest."""
    from matplotlib import colormaps, image

    np.save(tmp_path / "u.npy", 10.0 ** np.array([[-9, -1, 0, 1], [-9, 2, 3, 3]]).repeat(9, 0))
    for words, decades in (("", 4), ("--range 1e-3 1e3", 6)):
        assert main(["view", str(tmp_path / "u.npy"), "--log", *words.split()]) == 0
        pixels = image.imread(tmp_path / "u.npy.png")[..., :3]
        for power in (-9, -1, 0, 1, 2, 3):
            share = max(0, 1 - (3 - power) / decades)
            colour = np.array(colormaps["viridis"](share)[:3])
            assert (abs(pixels - colour).max(-1) < 0.01).sum() > 1000, power
    assert (
        main(["view", str(saved), "--field", "u", "--slice", "x=0", "--slice", "y=0", "--log"]) == 0
    )


def test_blocks(saved: Path, tmp_path: Path, drawn: list[Any]) -> None:
    path = shutil.copytree(saved, tmp_path / "run.zarr")
    edit(path, halox_proc_shape=[2, 1, 3], halox_blocks=[4, 2, 8, 2, 4, 4])
    for words in ("u --slice y=0", "u", "even --slice y=0", "face --slice x=0", "u --slice y=0"):
        assert main(["view", str(path), "--blocks", "--field", *words.split()]) == 0
    found = [frames[0].borders for (frames, *_) in drawn[:4]]
    assert found == [((4,), (2, 6)), ((4,), ()), ((4,), (1, 3)), ((), (2, 6))]


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One half has the colour of the range's lower end, one that of its upper end; the border is white."""
    from matplotlib import colormaps, image

    with halox.Grid((40, 30), device="cpu") as grid:
        grid.save(
            tmp_path / "a.zarr", u=grid.scatter(np.repeat([[1.0], [3.0]], 20, 0) + np.zeros(30))
        )
    edit(tmp_path / "a.zarr", halox_proc_shape=[2, 1], halox_blocks=[20, 20, 30])
    picture = tmp_path / "a.zarr.u.png"
    for words in ([], ["--blocks", "--cmap", "magma"], ["--slice", "y=3", "--blocks"]):
        picture.unlink(missing_ok=True)
        assert main(["view", str(tmp_path / "a.zarr"), *words]) == 0
        pixels = np.rint(255 * image.imread(picture)[..., :3])
        if words[:1] == ["--slice"]:
            continue
        ends = [
            255 * np.array(colormaps[words[2] if words else "viridis"](end)[:3])
            for end in (0.0, 1.0)
        ]
        # Columns of the picture, in the rows at its middle.
        rows = pixels[250:350].mean(0)
        low, high = (np.flatnonzero(abs(rows - end).max(1) < 1) for end in ends)
        assert len(low) > 150 and abs(len(low) - len(high)) < 60
        assert low.max() < high[:150].min()
        between = rows[low.max() + 1 : high[0]]
        assert bool(words) == (len(between) > 0 and between.max() > 200)
    assert capsys.readouterr().out.splitlines()[0] == f"{picture}: u, from 1 to 3"


def test_an_animation_has_a_frame_a_checkpoint_and_one_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.axes import Axes
    from PIL import Image

    given: list[Any] = []
    imshow = Axes.imshow

    def spy(axes: Any, values: Any, **options: Any) -> Any:
        given.append((values, options))
        return imshow(axes, values, **options)

    monkeypatch.setattr(Axes, "imshow", spy)
    names = []
    for step in range(3):
        names.append(str(tmp_path / f"u{step}.npy"))
        np.save(names[-1], step * U[0])
    assert main(["view", *names]) == 0
    assert f"{tmp_path / 'u0.npy.gif'}: 3 frame(s), u0, from" in capsys.readouterr().out
    with Image.open(tmp_path / "u0.npy.gif") as found:
        assert (found.n_frames, found.format) == (3, "GIF")
        frames = []
        for number in range(3):
            found.seek(number)
            frames.append(np.asarray(found.convert("RGB"), float))
    assert len({frame.tobytes() for frame in frames}) == 3
    ((values, options),) = given
    assert values.shape == (10, 8) and options["origin"] == "lower"
    assert options["extent"] == (-0.5, 7.5, -0.5, 9.5)
    assert (options["norm"].vmin, options["norm"].vmax) == (2 * U[0].min(), 2 * U[0].max())
    # The range is that of the last one, so that the first one, which is zero, has a colour in the middle of the map.
    assert (
        main(["view", names[1], "--gif", str(tmp_path / "one.gif"), "--range", "-1e-3", ".5"]) == 0
    )
    norm = given[-1][1]["norm"]
    assert (norm.vmin, norm.vmax) == (-1e-3, 0.5)
    with Image.open(tmp_path / "one.gif") as found:
        assert found.n_frames == 1


def test_all_checkpoints_of_an_animation_show_the_field_of_the_first(
    saved: Path, tmp_path: Path, drawn: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "b.zarr"
    with halox.Grid(CELLS, device="cpu") as grid:
        grid.save(other, a=grid.scatter(U), u=grid.scatter(2 * U))
    assert main(["view", str(saved), str(other), "--field", "u"]) == 0
    assert (drawn[0][0][1].values == 2 * U[..., 5]).all()
    assert main(["view", str(saved), str(other)]) == 2
    assert f"{other} has no field c; it has a, u" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("nothing.zarr", "there is no checkpoint"),
        ("nothing.npy", "there is no file"),
        ("run.zarr/u", "run.zarr/u is one field of a checkpoint; give the path of the whole, "),
        ("text", "is a file, and a checkpoint is a folder"),
        ("empty", "is no Zarr group, or its metadata is damaged"),
        ("cut.npy", "cut.npy has 200 bytes, expected 3968: it was cut off"),
        ("text.npy", "text.npy is no .npy file"),
        (
            "fortran.npy",
            "expected an array in C order, found Fortran order; write it by np.save(path, ",
        ),
        ("objects.npy", "expected elements of fixed size, found Python objects; convert them"),
        ("none.npy", "has an array of shape (0, 3), without cells"),
        ("cut.zarr --field u --slice x=3", 'u/c/3/0/0": Existing shard has size of 10 bytes'),
        ("run.zarr --field q", "run.zarr has no field q; it has c, even, face, pairs, u"),
        ("run.zarr --field pairs", "whose elements are no numbers; give another field"),
        ("run.zarr --slice w=1", "--slice: c has no axis w; its grid axes are x, y, z"),
        ("run.zarr --field u --slice z=10", "expected 0 to 9, or -10 to -1 from the end"),
        ("run.zarr --field u --slice z=-11", "z=-11 is outside of the field, which has 10 points"),
        ("run.zarr --project w=max", "--project: c has no axis w"),
        ("run.zarr --slice z=1 --project z=max", "axis z is given twice"),
        ("run.zarr --slice x=0 --slice y=0 --slice z=0", "no axis of c is left to draw"),
        ("run.zarr --project x=max --project y=mean", "expected one of max and mean for all"),
        ("run.zarr --component 1", "components of shape (2, 3), got 1; give an index along each"),
        ("run.zarr --component 2,0", "components of shape (2, 3), got 2,0"),
        ("run.zarr --field u --component 0", "u has no components, got 0; leave it out"),
        ("u.npy --blocks", "a .npy file has no place for them"),
        ("old.zarr --blocks", "an earlier version of halox wrote it: save it again"),
        ("run.zarr --range 1 1", "expected two finite numbers LOW < HIGH, got 1 1"),
        ("run.zarr --log --range 0 1", "LOW < HIGH, above 0 with --log, got 0 1"),
        (
            "negative.npy --log",
            "no value of negative at z = 5 is above 0, the largest is -1; leave",
        ),
        ("run.zarr --range 0 inf", "expected two finite numbers LOW < HIGH, got 0 inf"),
        ("run.zarr --cmap virdis", "Matplotlib has no colour map virdis; it has viridis,"),
        ("run.zarr --png a.gif", "--png: expected the name of a file that ends in .png, got a.gif"),
        ("run.zarr --gif a.png", "--gif: expected the name of a file that ends in .gif, got a.png"),
        ("run.zarr run.zarr --png a.png", "--png is a picture of one checkpoint, and 2 are given"),
        (
            "u.npy run.zarr",
            "u.npy has a real field of shape (6, 8, 10) along x, y, z, and run.zarr",
        ),
        ("u.npy --png nowhere/a.png", "writing nowhere/a.png failed: [Errno 2]"),
        ("u.npy --gif nowhere/a.gif", "writing nowhere/a.gif failed: [Errno 2]"),
    ],
)
def test_mistakes(
    words: str,
    text: str,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run.zarr", "cut.zarr", "old.zarr"):
        if name in words:
            shutil.copytree(saved, name)
    if "cut.zarr" in words:
        (tmp_path / "cut.zarr" / "u" / "c" / "3" / "0" / "0").write_bytes(b"0123456789")
    if "old.zarr" in words:
        edit(tmp_path / "old.zarr", halox_proc_shape=[], halox_blocks=[])
    (tmp_path / "empty").mkdir()
    np.save("u.npy", U)
    np.save("none.npy", np.zeros((0, 3)))
    np.save("fortran.npy", np.asfortranarray(U))
    np.save("objects.npy", np.array([None]))
    np.save("negative.npy", -1 - abs(U - U[0, 0, 5]))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "u.npy").read_bytes()[:200])
    for name in ("text", "text.npy"):
        (tmp_path / name).write_text("no checkpoint")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["view", *words.split()]) == 2
    assert text in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "CHECKPOINT"),
        ("a --slice 3", "expected AXIS=INDEX, such as z=32, got '3'"),
        ("a --slice z=mid", "expected AXIS=INDEX, such as z=32, got 'z=mid'"),
        ("a --project z=min", "expected AXIS=max or AXIS=mean, got 'z=min'"),
        ("a --component x", "expected an index, or several as in 0,2, got 'x'"),
        ("a --png a.png --gif a.gif", "not allowed with argument"),
    ],
)
def test_wrong_command_lines(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["view", *words.split()])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "text"),
    [("matplotlib", "pip install matplotlib"), ("tensorstore", "`pip install tensorstore`")],
)
def test_a_package_that_is_missing(
    package: str,
    text: str,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["view", str(saved)]) == 2
    assert text in capsys.readouterr().err


def test_npy_needs_no_tensorstore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import image

    monkeypatch.setitem(sys.modules, "tensorstore", None)
    np.save(tmp_path / "point.npy", [2.0])
    assert main(["view", str(tmp_path / "point.npy")]) == 0
    blue = np.array([31, 119, 180]) / 255
    pixels = image.imread(tmp_path / "point.npy.png")[..., :3]
    assert (abs(pixels - blue).max(-1) < 0.01).sum() > 5  # the point is there


def test_ranks_of_a_launcher_are_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("halox.cli.launcher.running_ranks", lambda: 4)
    assert main(["view", str(saved)]) == 2
    assert "halox view is one process; run it without a launcher" in capsys.readouterr().err
