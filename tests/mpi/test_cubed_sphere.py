"""Cubed spheres: halos by geometry, vectors by differences, on any number of ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import DecompositionError, FieldError
from tests.limits import read_in_place
from tests.mpi.conftest import agree
from tests.oracle import is_adjoint

pytestmark = pytest.mark.geometry

UNTOUCHED = -77.0


def points(n: int, i: Any, j: Any) -> Any:
    """Return points of the six faces at some indices: unit vectors along axis 0, then faces."""
    x, y, z = np.eye(3)
    faces = [(x, y, z), (y, -x, z), (z, -x, -y), (-x, -z, -y), (-y, -z, x), (-z, y, x)]
    a, b = (np.tan((2 * k + 1 - n) * np.pi / 4 / n) for k in np.broadcast_arrays(i, j))
    p = np.array([[f[c] + e[c] * a + g[c] * b for f, e, g in faces] for c in range(3)])
    return p / np.sqrt((p**2).sum(axis=0))


@cache
def sources(n: int, halo: int) -> Any:
    """Return for each cell of six padded faces the number of its cell, -1 at the corners of the cube.

    A halo cell is the mirror image of a cell inside at the plane through the edge and the center of the sphere: the
    coordinates along the normal of the face and across the edge are swapped.
    """
    index = np.arange(n)
    p = points(n, index[:, None], index)
    known = {tuple(q.round(9) + 0.0): number for number, q in enumerate(p.reshape(3, -1).T)}
    assert len(known) == 6 * n * n
    result = np.full((6, n + 2 * halo, n + 2 * halo), -1)
    middle = points(n, (n - 1) / 2, (n - 1) / 2)
    for face in range(6):
        for i in range(-halo, n + halo):
            for j in range(-halo, n + halo):
                beyond = [axis for axis, k in enumerate((i, j)) if not 0 <= k < n]
                if len(beyond) > 1:
                    continue
                at = [-1 - k if k < 0 else 2 * n - 1 - k if k >= n else k for k in (i, j)]
                q = points(n, *at)[:, face].copy()
                if beyond:
                    normal = int(np.argmax(abs(middle[:, face])))
                    edge = [(n - 1) / 2] * 2
                    edge[beyond[0]] = -0.5 if (i, j)[beyond[0]] < 0 else n - 0.5
                    across = points(n, *edge)[:, face]
                    others = [c for c in range(3) if c != normal and abs(across[c]) > 0.5]
                    sign = np.sign(across[normal] * across[others[0]])
                    q[[normal, others[0]]] = sign * q[[others[0], normal]]
                result[face, i + halo, j + halo] = known[tuple(q.round(9) + 0.0)]
    return result


def block(grid: halox.Grid, u: Any, whole: Any) -> Any:
    """Return a rank's part of six padded faces."""
    faces, *cuts = grid.layout(u).stored
    low = grid.halo[1][0]
    return whole[(..., faces, *(slice(cut.start + low, cut.stop + low) for cut in cuts))]


@pytest.mark.parametrize(("n", "halo", "direct"), [(6, 2, False), (5, 2, True), (3, 3, False)])
def test_halos_by_geometry(
    n: int, halo: int, direct: bool, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if direct:
        read_in_place(monkeypatch)
    source = sources(n, halo)
    with halox.CubedSphere(n, halo, comm=comm, device="cpu") as sphere:
        u = sphere.full(UNTOUCHED)
        w = sphere.full(UNTOUCHED, "c16", components=(..., 2))
        plan = sphere.plan(u, w)
        for call in range(2):
            whole = np.random.default_rng(call).random((6, n, n))
            sphere.interior(u)[...] = whole[sphere.owned]
            sphere.interior(w)[...] = np.stack([whole, 1j * whole], axis=-1)[sphere.owned]
            if call:
                plan.start()
                plan.finish()
            else:
                sphere.exchange(u, w)
            expected = block(sphere, u, np.where(source < 0, UNTOUCHED, whole.ravel()[source]))
            assert agree(np.array_equal(u, expected), comm)
            is_corner = expected == UNTOUCHED
            assert agree(np.array_equal(w[..., 0], expected), comm)
            assert agree(
                np.array_equal(w[..., 1], np.where(is_corner, UNTOUCHED, 1j * expected)), comm
            )
        rows = plan.explain().rows
        peers = [row.peer for row in rows if row.direction == "receive"]
        assert agree(len(peers) == len(set(peers)), comm)  # one message per peer


def test_vectors_are_differences(comm: MPI.Intracomm) -> None:
    """Differences of a function along i and j are a vector; in the halo they are the differences of the halo."""
    n, halo, w = 6, 3, np.array([0.3, -0.5, 0.8])
    source = sources(n, halo)
    index = np.arange(n)
    f = np.tensordot(w, points(n, index[:, None], index), 1)
    inner = slice(1, -1)
    u, v = np.zeros((2, 6, n, n))
    u[:, inner], v[..., inner] = f[:, 2:] - f[:, :-2], f[..., 2:] - f[..., :-2]
    padded = np.where(source < 0, np.nan, f.ravel()[source])
    with halox.CubedSphere(n, halo, comm=comm, device="cpu") as sphere:
        uv = sphere.zeros(components=2, sign="vector")
        sphere.interior(uv)[...] = np.stack([u, v])[(slice(None), *sphere.owned)]
        sphere.exchange(uv)
        du, dv = np.full((2, *padded.shape), np.nan)
        du[:, inner], dv[..., inner] = (
            padded[:, 2:] - padded[:, :-2],
            padded[..., 2:] - padded[..., :-2],
        )
        checked = 0
        for got, expected in zip(uv, (block(sphere, uv[0], d) for d in (du, dv)), strict=True):
            # Differences of one face: neither next to an edge, nor at corners.
            some = np.isfinite(expected) & (got != 0)
            checked += int(some.sum())
            assert agree(np.array_equal(got[some], expected[some]), comm)
        assert comm.allreduce(checked) > 6 * 2 * 4 * n


@pytest.mark.parametrize("options", [{}, {"components": 2, "sign": "vector"}])
def test_accumulate_is_the_adjoint(options: Any, comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng(comm.rank)
    with halox.CubedSphere(5, 2, comm=comm, device="cpu") as sphere:
        fields = sphere.zeros(**options), sphere.zeros(**options)
        for u in fields:
            u[...] = rng.integers(-9, 10, u.shape)
        assert is_adjoint(sphere, fields[:1], fields[1:])


@pytest.mark.usually(3)
def test_points_and_sums(comm: MPI.Intracomm) -> None:
    with halox.CubedSphere(4, comm=comm, device="cpu") as sphere:
        index = np.arange(4)
        mine = points(4, index[:, None], index)[(slice(None), *sphere.owned)]
        assert agree(np.allclose(sphere.xyz(), mine, rtol=0, atol=1e-14), comm)
        assert sphere.sum(sphere.ones()) == 96
        whole = sphere.gather(sphere.ones())
        assert (whole is None) == (comm.rank > 0)


@pytest.mark.parametrize(
    ("options", "error", "argument"),
    [
        ({"staggered": 1}, FieldError, "staggered"),
        ({"halo": 1}, DecompositionError, "halo"),
        ({"components": 3, "sign": "vector"}, FieldError, "components"),
        ({"parity": "even"}, FieldError, "parity"),
    ],
)
@pytest.mark.usually(2)
def test_errors(options: Any, error: Any, argument: str, comm: MPI.Intracomm) -> None:
    with (
        halox.CubedSphere(4, comm=comm, device="cpu") as sphere,
        pytest.raises(error, match=argument),
    ):
        sphere.zeros(**options)


@pytest.mark.usually(2)
def test_a_communicator_with_periods_is_refused(comm: MPI.Intracomm) -> None:
    dims = (comm.size, 1, 1)
    for periods in ((False, True, True), (True, False, False)):
        cart = comm.Create_cart(dims, periods)
        with pytest.raises(DecompositionError, match="periodic"):
            halox.CubedSphere(6, comm=cart, device="cpu")
        cart.Free()
    cart = comm.Create_cart(dims)
    with halox.CubedSphere(6, comm=cart, device="cpu") as sphere:
        assert sphere.periodic == (False, False, False)
    cart.Free()
