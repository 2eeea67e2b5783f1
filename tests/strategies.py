"""Random grids and fields by Hypothesis, for one process and for ranks.

``cells``, ``checkerboards``, ``walls`` and ``folds`` return strategies of a `tests.oracle.Case` for a number of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import halox
from tests.oracle import (
    DTYPES,
    PLACES,
    Case,
    Field,
    Halo,
    Side,
    divide,
    factorisations,
)
from tests.support import FULL

Cases = Callable[[int], st.SearchStrategy[Any]]
"""A strategy for a number of ranks."""

# No test fails because the machine is slow.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
WAYS = st.sampled_from(["packed", "in place", "MPI"])
SELDOM = st.sampled_from([False, False, False, True])


def on_ranks(cases: Cases, examples: int, part: int = 1) -> Callable[[Callable[..., None]], Any]:
    """Test random cases on all ranks: rank 0 draws, all ranks get the case, and the outcome is agreed.

    So all ranks shrink a failure alike, to the case that rank 0 prints. The test makes its assertions when its
    collective calls are over, since an error of one rank alone would leave the other ranks waiting.

    One of ``part`` examples is tested on other numbers of ranks than `tests.mpi.conftest.ALL_CASES`, except in the
    whole matrix.
    """

    def decorate(test: Callable[..., None]) -> Any:
        def attempt(comm: Any, case: Any) -> list[str]:
            error = None
            try:
                test(case, comm)
            except Exception:
                error = f"rank {comm.rank}:\n{traceback.format_exc()}"
            return [one for one in comm.allgather(error) if one is not None]

        def run(comm: Any) -> None:
            from tests.mpi.conftest import ALL_CASES, come_together

            if comm.rank:
                errors: list[str] = []
                while True:
                    come_together(comm)
                    if (case := comm.bcast(None)) is None:
                        break
                    errors = attempt(comm, case)
                assert not errors, "rank 0 has the case"
                return

            def draw(case: Any) -> None:
                come_together(comm)
                comm.bcast(case)
                errors = attempt(comm, case)
                assert not errors, "\n".join(errors)

            # The names tell the sequences of cases of tests apart.
            draw.__name__ = draw.__qualname__ = f"{test.__name__}_on_{comm.size}"
            draw.__module__ = test.__module__
            has_all = comm.size == ALL_CASES or bool(os.environ.get(FULL))
            number = examples if has_all else -(-examples // part)
            try:
                settings(PATIENT, max_examples=number, print_blob=True)(
                    given(cases(comm.size))(draw)
                )()
            finally:
                come_together(comm)
                comm.bcast(None)

        functools.update_wrapper(run, test)
        del run.__wrapped__  # type: ignore[attr-defined]
        return run

    return decorate


def sample(cases: st.SearchStrategy[Any], number: int, comm: Any) -> list[Any]:
    """Return the same cases in every run, and on all ranks."""
    drawn: list[Any] = []

    @settings(
        PATIENT, max_examples=number, derandomize=True, database=None, phases=[Phase.generate]
    )
    @given(cases)
    def draw(case: Any) -> None:
        drawn.append(case)

    if comm.rank == 0:
        draw()
    found: list[Any] = comm.bcast(drawn)
    return found


@st.composite
def some_axes(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """Cases whose exchanges are along some axes."""
    case = draw(cases)
    every = st.sampled_from(range(len(case.shape)))
    axes = draw(st.lists(every, min_size=1, max_size=3, unique=True))
    return dataclasses.replace(case, axes=tuple(axes))


@st.composite
def cells(
    draw: st.DrawFn, ranks: int, dtypes: Sequence[Any] = DTYPES, *, wide: bool = False
) -> Case:
    """Fields of all cells; with ``wide`` blocks are thin, and halos may be wider than blocks and periodic axes."""
    ndim = draw(st.integers(1, 4))
    procs = draw(st.sampled_from(factorisations(ranks, ndim)))
    periodic = tuple(draw(st.booleans()) for _ in procs)
    largest = 2 if wide else (39, 11, 5, 2)[ndim - 1]
    is_deep = wide and ndim < 4 and draw(SELDOM)
    if draw(st.booleans()):
        shape = [draw(st.integers(p, p * largest + p - 1)) for p in procs]
        blocks = divide(shape, procs)
    else:
        blocks = tuple(tuple(draw(st.integers(1, largest)) for _ in range(p)) for p in procs)

    def widths() -> Halo:
        found = []
        for sizes, wraps in zip(blocks, periodic, strict=True):
            limit = min(*sizes, 3) if len(sizes) > 1 or wraps else 3
            if wide:
                limit = sum(sizes) * (2 if is_deep and wraps else 1) + (is_deep or not wraps)
            found.append((draw(st.integers(0, limit)), draw(st.integers(0, limit))))
        return tuple(found)

    first, fields = widths(), []
    for _ in range(draw(st.integers(1, 3))):
        halo = first if not fields or draw(st.booleans()) else widths()
        # A staggered axis needs one more point on the high side.
        staggered = tuple(
            draw(SELDOM) and (wide or high < min(sizes) or not (len(sizes) > 1 or wraps))
            for sizes, wraps, (_, high) in zip(blocks, periodic, halo, strict=True)
        )
        before, after = draw(components(ndim))
        least = min((width for pair in halo for width in pair if width), default=0)
        fields.append(
            Field(
                draw(st.sampled_from(dtypes)),
                halo,
                before,
                after,
                staggered,
                offsets=(draw(st.integers(1, least)),) if least and draw(SELDOM) else (),
                mine=draw(st.booleans()),
            )
        )
    return Case(blocks, periodic, fields, not draw(SELDOM), way=draw(WAYS))


@st.composite
def divided(
    draw: st.DrawFn, shape: Sequence[int], procs: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Sizes of blocks of these cells along each axis, even or not."""
    blocks = []
    for n, parts in zip(shape, procs, strict=True):
        sizes = divide((n,), (parts,))[0]
        if parts > 1 and draw(st.booleans()):
            cuts = draw(st.sets(st.integers(1, n - 1), min_size=parts - 1, max_size=parts - 1))
            ends = [0, *sorted(cuts), n]
            sizes = tuple(b - a for a, b in itertools.pairwise(ends))
        blocks.append(sizes)
    return tuple(blocks)


@st.composite
def components(draw: st.DrawFn, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Component axes before and behind the grid's axes, at most six axes in all."""
    before, after = ((), ())
    if draw(st.booleans()):
        before, after = (
            tuple(draw(st.lists(st.integers(1, 3), max_size=2))) for _ in ("before", "after")
        )
    return (() if len(before) + len(after) + ndim > 6 else before), after


@st.composite
def checkerboards(
    draw: st.DrawFn, ranks: int, dtypes: Sequence[Any] = DTYPES, *, wide: bool = False
) -> Case:
    """Fields of one parity; blocks along the last axis begin at even cells."""
    ndim = draw(st.integers(1, 4))
    procs = draw(st.sampled_from(factorisations(ranks, ndim)))
    periodic = tuple(draw(st.booleans()) for _ in procs)
    largest = 3 if wide else (19, 8, 5, 4)[ndim - 1]
    blocks = []
    for axis, parts in enumerate(procs):
        sizes = [draw(st.integers(1, largest)) for _ in range(parts)]
        if axis == ndim - 1:
            sizes = [n + n % 2 for n in sizes]
        sizes[0] += sum(sizes) % 2
        blocks.append(tuple(sizes))

    def widths() -> Halo:
        found = []
        for sizes, wraps in zip(blocks, periodic, strict=True):
            limit = min(*sizes, 5) if len(sizes) > 1 or wraps else 5
            limit = 5 if wide else limit
            found.append((draw(st.integers(0, limit)), draw(st.integers(0, limit))))
        return tuple(found)

    first, fields = widths(), []
    for _ in range(draw(st.integers(1, 3))):
        halo = first if not fields or draw(st.booleans()) else widths()
        least = min((width for pair in halo for width in pair if width), default=3)
        stencils = [(), (1,), (2,), (1, 2), (1, 3), (1, 2, 3), (2, 5)]
        # An exchange also moves nearer layers, which the stencil of a thin block may skip.
        fitting = [one for one in stencils if max(one, default=0) <= (0 if wide else least)]
        extents = [tuple(draw(st.lists(st.integers(1, 3), max_size=1))) for _ in "ab"]
        fields.append(
            Field(
                draw(st.sampled_from(dtypes)),
                halo,
                *extents,
                parity=draw(st.sampled_from(["even", "odd"])),
                offsets=draw(st.sampled_from(fitting)),
                mine=draw(st.booleans()),
            )
        )
    return Case(tuple(blocks), periodic, fields, not draw(SELDOM), way=draw(WAYS))


@st.composite
def walls(
    draw: st.DrawFn,
    ranks: int,
    dtypes: Sequence[Any] = ("f8", "f4", "c16", "i4"),
    *,
    linear: bool = False,
    thin: bool = True,
    whole: bool = True,
) -> Case:
    """Fields with boundaries and phases; with ``linear`` no fill adds numbers of its own.

    With ``thin`` blocks may be as thin as a mirror allows, which reads one cell more than its halo has, and halos
    between two mirrors or periods wider than the grid. Without ``whole`` the exchange may leave out corners.
    """
    ndim = draw(st.integers(1, 3))
    procs = draw(st.sampled_from(factorisations(ranks, ndim)))
    periodic = tuple(draw(SELDOM) for _ in procs)
    halo = tuple((draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in procs)
    is_deep = thin and draw(SELDOM)
    number = draw(st.sampled_from([None, 2]))
    if is_deep:
        shape = [max(n, draw(st.integers(2, 3))) for n in procs]
        # Blocks are filled from both sides.
        halo = tuple(
            (low, high if n == 1 else low) for n, (low, high) in zip(procs, halo, strict=True)
        )
        halo = tuple((2 * low, 2 * high) for low, high in halo)
    elif thin and draw(SELDOM):
        halo = tuple((width, width) for width, _ in halo)
        shape = [max(n, 2, 1 + width) for n, (width, _) in zip(procs, halo, strict=True)]
    else:
        shape = [n * draw(st.integers(5, 7)) for n in procs]
    dtype = draw(st.sampled_from(dtypes))
    is_complex = dtype[0] == "c"

    def side() -> Side:
        kinds = ["edge", "symmetric", "antisymmetric", "reflect", "antireflect", "extrapolate"]
        if is_deep:
            kind = draw(st.sampled_from(kinds[1:5]))
            # Two reflections at a number give a float back without rounding, and in the oracle with it.
            has_number = kind[:4] == "anti" and number and not linear and dtype[0] == "i"
            return (kind, number) if has_number else kind
        kind = draw(st.sampled_from([*kinds, "constant", "gradient", None]))
        if kind in ("constant", "gradient"):
            return kind, 0 if linear else draw(st.integers(-3, 3))
        if kind in ("antireflect", "antisymmetric") and not linear and draw(st.booleans()):
            return kind, draw(st.integers(-3, 3))
        return kind

    def sides() -> tuple[tuple[Side, Side], ...]:
        twist = ("phase", 1j if is_complex else -1)
        return tuple(
            draw(st.sampled_from([(None, None), (twist, twist)])) if wraps else (side(), side())
            for wraps in periodic
        )

    before, after = draw(st.sampled_from([(), (2,)])), draw(st.sampled_from([(), (3,)]))
    by_component = {(): sides()}
    if before + after and draw(st.booleans()):
        by_component[tuple(draw(st.integers(0, n - 1)) for n in before + after)] = sides()
    staggered = tuple(draw(SELDOM) for _ in procs)
    f = Field(dtype, halo, before, after, staggered, sides=by_component, mine=draw(st.booleans()))
    corners = whole or draw(st.booleans())
    return Case(divide(shape, procs), periodic, [f], corners, way=draw(WAYS))


@st.composite
def folds(draw: st.DrawFn, ranks: int, dtypes: Sequence[Any] = ("f8", "i4", "c16", "f4")) -> Case:
    """Two fields on a grid with a fold, a pole, a strip or a helix; blocks may be thinner than the halos."""
    ndim = draw(st.integers(2, 3))
    axis, other = draw(st.permutations(range(ndim)))[:2]
    shape = [draw(st.integers(8, 10)) for _ in range(ndim)]
    periodic = [draw(st.booleans()) for _ in range(ndim)]
    periodic[axis] = False
    kind = draw(st.sampled_from(["fold", "folds", "pole", "poles", "strip", "helix"]))
    staggered = tuple(draw(SELDOM) for _ in range(ndim))
    if kind in ("pole", "poles", "helix"):
        periodic[other] = True
        shape[other] += shape[other] % 2
        shift = shape[other] // 2 if kind != "helix" else draw(st.integers(-3, 8))
        joined = [halox.Connection(shift=(other, shift), pivot=p) for p in ("F", "T")]  # type: ignore[arg-type]
    else:
        pivots = list("FTUV" if periodic[other] else "FU") if kind != "strip" else ["F"]
        joined = [
            halox.Connection(flip=other, pivot=draw(st.sampled_from(pivots)))  # type: ignore[arg-type]
            for _ in "ab"
        ]
    position = None
    if not any(staggered) and draw(st.booleans()):
        places = [draw(st.sampled_from(PLACES)) for _ in range(ndim)]
        if not periodic[other]:
            places[other] = "center"
        position = tuple(places)
    ends = [(axis, "low"), (axis, "high")]
    if kind in ("strip", "helix"):
        connect: dict[Any, Any] = {axis: halox.Connection(joined[0].flip, joined[0].shift)}
    elif kind in ("folds", "poles"):
        connect = dict(zip(ends, joined, strict=True))
    else:
        connect = {draw(st.sampled_from(ends)): draw(st.sampled_from(joined))}
    before = draw(st.sampled_from([(), (3,), (2, 2)]))
    after = draw(st.sampled_from([(), (2,)])) if len(before) < 2 else ()
    sign: Any = draw(st.sampled_from([1, -1]))
    if before + after and draw(st.booleans()):
        key: Any = tuple(draw(st.integers(0, n - 1)) for n in before + after)
        sign = {(key[0] if len(key) == 1 else key): -1, (): sign}
    halo = tuple((draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in shape)
    fields = [
        Field(
            draw(st.sampled_from(dtypes)),
            halo,
            before,
            after,
            staggered,
            sign=sign,
            position=position,
            mine=draw(st.booleans()),
        )
        for _ in "ab"
    ]
    procs = [
        one
        for one in factorisations(ranks, ndim)
        if all(p <= n for p, n in zip(one, shape, strict=True))
    ]
    blocks = divide(shape, draw(st.sampled_from(procs)))
    return Case(blocks, tuple(periodic), fields, not draw(SELDOM), connect, draw(WAYS))
