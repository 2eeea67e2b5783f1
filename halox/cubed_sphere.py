"""`CubedSphere`: the six faces of a cube as a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from halox.decomposition.connections import NONE, Along, Joined, Turn
from halox.errors import DecompositionError, FieldError
from halox.grid import Grid

if TYPE_CHECKING:
    from mpi4py import MPI

_EDGES = [  # of even and odd faces: axis and side of the edge, faces up to the other face, whether axes are swapped
    [(1, 1, 1, False), (2, 1, 2, True), (1, 0, -2, True), (2, 0, -1, False)],
    [(1, 1, 2, True), (2, 1, 1, False), (1, 0, -1, False), (2, 0, -2, True)],
]
_X, _Y, _Z = np.eye(3)
_FACES = np.array(  # directions of the normal, of i and of j
    [
        *[(_X, _Y, _Z), (_Y, -_X, _Z), (_Z, -_X, -_Y)],
        *[(-_X, -_Z, -_Y), (-_Y, -_Z, _X), (-_Z, _Y, _X)],
    ]
)


class _Cube(Joined):
    """The edges of a cube; the grid's axes are the face, and two axes along it."""

    walls = ((1, 0), (1, 1), (2, 0), (2, 1))

    def check(self, axes: Sequence[Along], is_vector: bool) -> None:
        """Raise `FieldError` for a staggered field, and `DecompositionError` if the halo is too wide."""
        if any(along.staggered or along.position != 1 for along in axes):
            raise FieldError(
                "staggered, position: fields on a cubed sphere have their points at centers"
            )
        faces, *along = axes
        if faces.partition.cells != 6:
            raise DecompositionError(
                f"grid_shape: a cubed sphere has 6 faces, got {faces.partition.cells}; coarsen it by factor=(1, 2, 2)"
            )
        if max(faces.halo) or any(max(one.halo) > one.partition.cells for one in along):
            raise DecompositionError(
                f"halo: expected 0 along the faces and at most {along[0].partition.cells} along axes 1 and 2, got "
                f"{tuple(one.halo for one in axes)}; give halo=(0, width, width)"
            )

    def images(self, axes: Sequence[Along]) -> Iterator[tuple[list[Any], Turn | None]]:
        """Yield the maps of the cells inside the faces, and beyond the four edges of even and of odd faces."""
        plain, n = [along.plain_map() for along in axes], axes[1].partition.cells
        yield plain, None
        for parity, edges in enumerate(_EDGES):
            for axis, side, ahead, swaps in edges:
                other, maps, turn = 3 - axis, plain.copy(), [(0, 1), (1, 1), (2, 1)]
                face = plain[0][0]
                maps[0] = (
                    face,
                    np.where((face >= 0) & (face % 2 == parity), (face + ahead) % 6, NONE),
                )
                index, along = plain[axis][0], plain[other][1]
                beyond = (index < 0, index >= n)[side]
                maps[axis] = index, np.where(beyond, index - n if side else index + n, NONE)
                if swaps:
                    # The edge is walked backwards; cells across it are counted from the same side as before.
                    maps[other] = plain[other][0], np.where(along < 0, NONE, n - 1 - along)
                    turn[axis], turn[other] = (other, 1), (axis, -1)
                yield maps, tuple(turn)


class CubedSphere(Grid[Any]):
    """A grid of six faces of n x n cells that cover a sphere.

    The axes are (face, i, j), and edges are joined as in this net, where i points to the right and j up::

                +---+---+
                | 4 | 5 |
            +---+---+---+
            | 2 | 3 |             The upper edge of 5 is the lower edge of 0. All other edges meet with a turn:
        +---+---+---+             the upper edge of 0, 2, 4 is the left edge of 2, 4, 0, backwards, and
        | 0 | 1 |                 the right edge of 1, 3, 5 is the lower edge of 3, 5, 1, backwards.
        +---+---+

    Parameters
    ----------
    n : int
        Cells along an edge of the cube.
    halo : int
        Width of the halo along axes 1 and 2, at most ``n``.
    comm, device, path
        The same as for `Grid`.

    Raises
    ------
    DecompositionError
        If ``n`` or ``halo`` is invalid, the halo is wider than ``n``, or the faces cannot be divided among the ranks.
        All other errors are those of `Grid`.

    Notes
    -----
    Collective. All methods of `Grid` work, with ``(6, n, n)`` as ``grid_shape``; `coarsen` takes the factor (1, 2, 2).
    Fields have the shape ``components + (faces, ni, nj)``, with the halo, and are not staggered. The number of ranks is
    a product of at most 6 parts of the faces and at most ``n`` parts along each of the other axes: 7 ranks need
    ``n >= 7``. Blocks are equal on 1, 2 or 3 ranks, and on multiples of 6 that divide the faces evenly. Exchanges do
    not change the halo at the 8 corners of the cube, where three faces meet: it stands for no cell. A field with
    ``components=2, sign="vector"`` has the components of a vector along i and j: where the axes are swapped, the
    components are swapped, too, with their signs.

    Examples
    --------
    >>> import halox
    >>> with halox.CubedSphere(4, device="cpu") as sphere:
    ...     h, uv = sphere.ones(), sphere.ones(components=2, sign="vector")
    ...     sphere.exchange(h, uv)
    ...     float(sphere.sum(h)), uv[:, 0, 1, -1]
    (96.0, array([-1.,  1.]))
    """

    def __init__(
        self,
        n: int,
        halo: int = 1,
        *,
        comm: MPI.Intracomm | None = None,
        device: Literal["auto", "cpu", "gpu"] = "auto",
        path: str | None = None,
    ) -> None:
        super().__init__(
            (6, n, n),
            halo=(0, halo, halo),
            connect=_Cube(1, (), False, "cubed sphere"),
            comm=comm,
            device=device,
            path=path,
        )

    def xyz(self) -> Any:
        """Return the centers of this rank's cells on the unit sphere, shape (3, faces, ni, nj) without halo; local.

        The angles between the lines of a face are equal (an equiangular gnomonic projection). The centers of faces 0 to
        5 are at +x, +y, +z, -x, -y and -z.
        """
        n, xp = self.grid_shape[1], self.xp
        _, i, j = self.indices()
        a, b = (xp.tan((2 * k + 1 - n) * (np.pi / 4 / n))[:, None] for k in (i, j))
        normal, along_i, along_j = xp.asarray(_FACES[self.owned[0]])[..., None, None].swapaxes(0, 1)
        xyz = normal + along_i * a + along_j * b
        return xp.moveaxis(xyz / xp.sqrt((xyz**2).sum(axis=1, keepdims=True)), 1, 0)
