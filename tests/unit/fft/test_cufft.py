"""Plans of cuFFT for strided arrays, executed by a NumPy stand-in, against NumPy's own transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halox.fft import cufft
from tests.fakes import fake_cufft
from tests.fakes.fake_cufft import PlanNd, fake
from tests.support import trials


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cufft.install(monkeypatch)


def laid_out(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Return an array with a random layout: contiguous, part of a larger array, transposed or reversed."""
    kind, n = int(rng.integers(5)), len(shape)
    if kind == 0:
        return fake(np.empty(shape, dtype))
    if kind == 1:
        margins = rng.integers(0, 3, size=(n, 2))
        whole = fake(
            np.empty([k + int(a + b) for k, (a, b) in zip(shape, margins, strict=True)], dtype)
        )
        return whole[
            tuple(slice(int(a), int(a) + k) for k, (a, _) in zip(shape, margins, strict=True))
        ]
    if kind == 2:
        return fake(np.empty(shape, dtype, order="F"))
    if kind == 3:
        order = rng.permutation(n)
        return fake(np.empty([shape[k] for k in order], dtype)).transpose(np.argsort(order))
    return fake(np.empty(shape, dtype))[(slice(None, None, -1),) * n]


@pytest.mark.parametrize("number", range(trials(600)))
def test_random_layouts(number: int) -> None:
    rng = np.random.default_rng([7, number])
    ndim = int(rng.integers(1, 6))
    shape = tuple(int(n) for n in rng.integers(1, 9, size=ndim))
    axes = tuple(int(a) for a in rng.permutation(ndim)[: rng.integers(1, ndim + 1)])
    single = bool(rng.integers(2))
    dtype, real = ("c8", "f4") if single else ("c16", "f8")
    kind = ["c2c", "r2c", "c2r"][int(rng.integers(3))]
    halved = tuple(n // 2 + 1 if k == axes[-1] else n for k, n in enumerate(shape))
    values = rng.standard_normal(shape).astype(real)
    engine = cufft.CuFFT()
    if kind == "r2c":
        source, target = laid_out(rng, shape, real), laid_out(rng, halved, dtype)
        run = engine.r2c(source, target, axes, norm="backward")
        wanted = np.fft.rfftn(values, axes=axes)
    elif kind == "c2r":
        source, target = laid_out(rng, halved, dtype), laid_out(rng, shape, real)
        run = engine.c2r(source, target, axes, norm="forward")
        wanted, values = values * 1.0, np.fft.rfftn(values, axes=axes, norm="forward")
    else:
        source = laid_out(rng, shape, dtype)
        target = source if rng.integers(3) == 0 else laid_out(rng, shape, dtype)
        forward = bool(rng.integers(2))
        run = engine.c2c(source, target, axes, forward=forward, norm="")
        values = values + 1j * rng.standard_normal(shape)
        function = np.fft.fftn if forward else np.fft.ifftn
        wanted = function(values, axes=axes, norm="backward" if forward else "forward")
    for _ in range(2):
        source[...] = values
        target[...] = values if source is target else np.nan
        made = PlanNd.made
        run(source, target)
        assert PlanNd.made == made, "a plan was made by a call"
        size = np.sqrt(np.prod([shape[a] for a in axes])) * 4
        assert np.allclose(target, wanted, rtol=0, atol=size * (1e-5 if single else 1e-13)), (
            shape,
            axes,
        )
        if kind != "c2r" and source is not target:
            assert np.array_equal(source, values.astype(source.dtype)), "the source was changed"


def launched(source: Any, target: Any, axes: tuple[int, ...], kind: str = "c2c") -> int:
    engine, options = cufft.CuFFT(), {"forward": True} if kind == "c2c" else {}
    run = getattr(engine, kind)(source, target, axes, norm="", **options)
    source[...] = 0
    before = PlanNd.launched
    run(source, target)
    assert not engine._work, "copied through a work array"
    return PlanNd.launched - before


def test_one_launch_from_the_interior_of_a_field() -> None:
    whole = fake(np.empty((10, 9, 12), "c16"))
    inner, out = whole[1:-1, 1:-1, 2:-2], fake(np.empty((8, 7, 8), "c16"))
    assert launched(inner, out, (0, 1, 2)) == 1
    assert launched(out, inner, (0, 1, 2)) == 1
    assert launched(whole[:, 1:-1, 2:-2], fake(np.empty((10, 7, 8), "c16")), (1, 2)) == 1
    components = fake(np.empty((3, 10, 9, 12), "c16"))[:, 1:-1, 1:-1, 2:-2]
    assert launched(components, fake(np.empty((3, 8, 7, 8), "c16")), (1, 2, 3)) == 1


def test_one_launch_along_any_outer_or_inner_axes() -> None:
    a, b = (fake(np.empty((16, 10, 12), "c16")) for _ in "ab")
    for axes in [(0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]:
        assert launched(a, b, axes) == launched(a, a, axes) == 1, axes
    a, b = (fake(np.empty((4, 5, 6, 7), "c8")) for _ in "ab")
    assert launched(a, b, (0, 1, 2, 3)) == 2


def test_one_launch_of_aligned_real_fields() -> None:
    field, out = fake(np.empty((8, 6, 10))), fake(np.empty((8, 6, 6), "c16"))
    assert field.data.ptr % 16 == 0
    assert launched(field, out, (0, 1, 2), "r2c") == launched(field, out, (2,), "r2c") == 1
    assert launched(out, field, (0, 1, 2), "c2r") == 1
    inner = fake(np.empty((10, 8, 14)))[1:-1, 1:-1, 2:-2]
    assert launched(inner, out, (0, 1, 2), "r2c") == launched(out, inner, (0, 1, 2), "c2r") == 1


def test_real_fields_off_the_alignment_are_copied() -> None:
    engine = cufft.CuFFT()
    inner, out = fake(np.ones((4, 13)))[:, 1:-2], fake(np.empty((4, 6), "c16"))
    assert inner.data.ptr % 16 == 8
    engine.r2c(inner, out, (1,), norm="")(inner, out)
    assert len(engine._work) == 1
    assert np.allclose(out, np.fft.rfft(np.ones((4, 10))))


def test_few_long_launches_take_no_copies_and_many_short_ones_do() -> None:
    engine = cufft.CuFFT()
    array = fake(np.empty((8, 5, 6), "c16"))
    assert launched(array, array, (1,)) == 8
    many = fake(np.ones((40, 5, 60), "c16"))
    before = PlanNd.launched
    engine.c2c(many, many, (1,), forward=True, norm="")(many, many)
    assert PlanNd.launched == before + 1 and len(engine._work) == 1
    assert np.allclose(many[:, 0], 5) and np.allclose(many[:, 1:], 0)


@pytest.mark.parametrize("kind", ["c2c", "r2c", "c2r"])
def test_large_arrays_take_plans_of_64_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, real = fake(np.ones((8, 6, 6), "c16")), fake(np.ones((8, 6, 10)))
    source, target = {"c2c": (pair, pair), "r2c": (real, pair), "c2r": (pair, real)}[kind]
    for largest, made in ((8 * 6 * 10 - 1, kind != "c2c"), (2**31 - 1, False), (100, True)):
        monkeypatch.setattr(cufft, "_LARGEST", largest)
        engine, options = cufft.CuFFT(), {"forward": True} if kind == "c2c" else {}
        getattr(engine, kind)(source, target, (0, 1, 2), norm="", **options)(source, target)
        (plan,) = engine._plans.values()
        assert isinstance(plan, fake_cufft.XtPlanNd) == made, largest
    huge = cufft.Form((2**31, 2), (2, 1), np.dtype("c16"), True)
    assert cufft.launches(huge, huge, (0,)).arguments[0] == (2**31,)
