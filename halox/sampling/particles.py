"""`Particles`: positions and attributes of particles, each on the rank that owns its cell.

Arrays have more rows than particles, so that migrations seldom allocate; users see views of the first rows. The class
agrees on errors and numbers with the other ranks; `migration` and `device_migration` move the rows, and `clouds` reads
and adds to fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from halox.domain.dimension_names import FACE
from halox.domain.domain import domain_of
from halox.errors import FieldError
from halox.reductions.grid_reductions import GridReductions
from halox.runtime.call_guard import Unique, short_errors, single_threaded
from halox.runtime.gpu.devices import allocate, as_device_array, to_host
from halox.sampling.clouds import add_clouds, read_clouds
from halox.sampling.locating import indices_of
from halox.sampling.migration import MIGRATION, Migration, rules_of
from halox.values import as_list, check_unmasked, shortened, shown

if TYPE_CHECKING:
    from halox.runtime.array_types import FieldLike

POSITION = "position"


class Particles(Unique):
    """Particles in the cells of a grid: a structure of arrays, on the ranks that own the cells.

    Parameters
    ----------
    grid : Grid
        The grid.
    position : array_like, or mapping of str to array_like
        Global indices of this rank's particles, shape (n, axes), with another ``n`` on each rank and anywhere in the
        grid: cell ``i`` is centred at ``i`` and reaches from ``i - 1/2`` to ``i + 1/2``. A mapping has positions by
        dimension, ``{"x": ..., "y": ...}``: in ``coords`` of the grid, or indices along axes without coordinates.
    walls : str, or one per axis, or (low, high) per axis
        What happens beyond the walls, at ``-1/2`` and ``cells - 1/2``. "reflect" mirrors the position at the wall,
        "absorb" removes the particle, and "keep", the default, is an error. Periodic axes wrap.
    flip : str or sequence of str
        Attributes of floats of shape (n, axes), such as velocities, whose component along an axis changes its sign when
        a wall of this axis reflects the particle.
    **attributes : array_like
        Attributes by name, of any fixed-size dtype and of shape (n, ...), or a number for all particles.

    Attributes
    ----------
    position : array
        The positions as global indices, shape (n, axes) and float64. It may be changed in place, or assigned.

    Raises
    ------
    FieldError
        If positions or attributes have another shape or dtype, or sides of the grid are joined by ``connect``. In the
        construction and in `migrate` also if a position is not finite, 2**53 or more in magnitude, or beyond a wall
        that keeps its particles; no particle has changed then.
    MismatchError
        If ranks give different options, or attributes of different names, dtypes or shapes.
    DeviceError, StateError, ClosedError, ExchangeTimeoutError, HaloxError
        The same as for `Grid`.

    Notes
    -----
    Collective: brings each particle to the rank that owns its cell, as `migrate` does. Arrays are NumPy or CuPy arrays,
    as the grid's fields; given arrays are copied. ``p["v"]`` is an attribute, a plain array. ``p["v"] = array`` assigns
    it, or adds an attribute, and ``del p["v"]`` removes one, on all ranks. `migrate` and `sort` may change the order of
    the particles, and may end earlier arrays: get them anew. ``len(p)`` is the number of this rank's particles.

    `Points` are few, and the same on all ranks. Particles belong to one rank each, and to the nearest cell, so that one
    halo cell is enough for clouds of order 1 and 2 in fields at the cells.

    ``grid.save(path, p=p)`` stores all particles, and ``halox.Particles(grid, **grid.load(path)["p"])`` makes them
    again, on any number of ranks. ``halox.Output(grid, path, p=p)`` stores them in time.

    Examples
    --------
    >>> import halox
    >>> with halox.Grid((8, 8), periodic=True, device="cpu") as grid:
    ...     p = halox.Particles(grid, [(0.25, 7.0)] if grid.rank == 0 else [], v=[1.5] if grid.rank == 0 else [])
    ...     p.position[:, 0] -= p["v"]
    ...     p.migrate()
    ...     p.position if len(p) else None
    array([[6.75, 7.  ]])
    """

    def __init__(
        self,
        grid: GridReductions,
        /,
        position: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        walls: str | Sequence[Any] = "keep",
        flip: str | Sequence[str] = (),
        **attributes: npt.ArrayLike,
    ) -> None:
        self.domain = domain_of(grid)
        self._world, self._grid = self.domain.world, grid
        self._described: object = None
        self._use({}, 0)

        def check() -> tuple[Any, dict[str, object]]:
            rules = rules_of(walls, self.domain.decomposition)
            self._flip = [flip] if isinstance(flip, str) else as_list(flip) or []
            found = self._positions(position)
            self._use({POSITION: found.copy()}, len(found))
            for name, values in attributes.items():
                self[name] = values
            return rules, {"walls": rules, "flip": self._flip}

        with self._world.guard:
            self._world.begin("making Particles")
            rules = self._world.attempt(check, "the making of particles", alike=True)
            self._migration: Any = Migration(self.domain, rules)
            if self.domain.device_id is not None:
                from halox.sampling.device_migration import DeviceMigration

                self._migration = DeviceMigration(self.domain, rules)
            self._migrate()

    def __len__(self) -> int:
        """Return the number of this rank's particles."""
        return self._n

    def __repr__(self) -> str:
        """Return the number of this rank's particles, the names of the arrays and the grid."""
        return f"<halox.Particles: {self._n} here, {', '.join(self)}, on {self._grid!r}>"

    # Arrays

    @property
    def position(self) -> Any:
        """Positions as global indices, shape (n, axes) and float64; may be changed in place, or assigned."""
        return self._views[POSITION]

    @position.setter
    def position(self, values: npt.ArrayLike) -> None:
        self[POSITION] = values

    def keys(self) -> list[str]:
        """Return the names of the arrays, "position" first."""
        return [*self._views]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the arrays."""
        return iter(self._views)

    def __getitem__(self, name: str) -> Any:
        """Return an array of this rank's particles."""
        return self._views[name]

    def __setitem__(self, name: str, values: npt.ArrayLike) -> None:
        """Assign an array, or add an attribute; local."""
        view = self._views.get(name)
        if view is None:
            given = self._array(name, values)
            if given.ndim == 0:
                given = self.domain.xp.full(self._n, given)
            if len(given) != self._n:
                raise FieldError(
                    f"{name}: expected a row for each of the {self._n} particles, got the shape {given.shape}"
                )
            self._use(
                {**self._buffers, name: self._buffer(given, len(self._buffers[POSITION]))}, self._n
            )
        elif values is not view:  # as it is after `p["v"] += 1`
            given = self._positions(values) if name == POSITION else self._array(name, values)
            try:
                view[...] = given.copy() if self.domain.xp.may_share_memory(given, view) else given
            except (TypeError, ValueError) as error:
                raise FieldError(f"{name}: {error}; it has the shape {view.shape}") from error

    def __delitem__(self, name: str) -> None:
        """Remove an attribute; local."""
        if name == POSITION:
            raise FieldError("position: particles need one; make other particles instead")
        self._use({k: v for k, v in self._buffers.items() if k != name}, self._n)

    def _use(self, buffers: dict[str, Any], n: int) -> None:
        """Set the arrays, with ``n`` particles in their first rows."""
        self._buffers: dict[str, Any] = buffers
        self._n = n
        self._views = {name: buffer[:n] for name, buffer in buffers.items()}

    def _array(self, name: str, values: Any) -> Any:
        """Return values as an array in the memory of the grid's fields; raises `FieldError`."""
        check_unmasked(values, name)
        try:
            array = (to_host if self.domain.device_id is None else as_device_array)(values)
        except Exception as error:  # libraries raise several types
            raise FieldError(
                f"{name}: expected an array, got {shown(values)} ({shortened(str(error))})"
            ) from error
        if array.dtype.hasobject:
            raise FieldError(f"{name}: expected a dtype of a fixed size, got {shown(values)}")
        return array

    def _positions(self, given: Any) -> Any:
        """Return positions as float64, shape (n, axes); raises `FieldError`."""
        labels, ndim = self.domain.labels, self.domain.plain.spec.ndim
        if isinstance(given, Mapping):
            if any(name + FACE in given for name in labels.dims):
                raise FieldError("position: give positions by cells, as x, not by faces, as x_face")
            given = indices_of(given, labels)
        found = self._array(POSITION, given)
        if found.ndim == 1 and (ndim == 1 or not len(found)):
            found = found.reshape(-1, ndim)
        if found.ndim != 2 or found.shape[1] != ndim or found.dtype.kind not in "iuf":
            raise FieldError(
                f"{POSITION}: expected numbers of shape (n, {ndim}), a row for each particle, got {found.dtype} of "
                f"shape {found.shape}"
            )
        return found.astype("f8", copy=False)

    def _buffer(self, rows: Any, capacity: int) -> Any:
        """Return a new array of ``capacity`` rows that begins with the given rows."""
        buffer = allocate((capacity, *rows.shape[1:]), rows.dtype, self.domain.device_id)
        buffer[: len(rows)] = rows
        return buffer

    # Ranks

    @single_threaded
    def count(self) -> int:
        """Return the number of the particles of all ranks; collective."""
        self._world.begin("count")
        return self._world.total(lambda: (None, [self._n]), "a count of particles")[1][0]

    @single_threaded
    def migrate(self) -> None:
        """Apply the rules of the walls, and move each particle to the rank that owns its cell, however far.

        Raises
        ------
        FieldError
            Also if an attribute of ``flip`` is missing, or is not of floats of shape (n, axes).

        Notes
        -----
        Collective; blocks on the host. Calls in each step, by which few particles leave their rank, are fastest.
        """
        self._world.begin("migrate")
        self._migrate()

    def _migrate(self) -> None:
        world, migration = self._world, self._migration
        if self._described is not self._buffers:
            # In one order on all ranks, which may have added attributes in another.
            self._names = sorted(self._buffers, key=lambda name: (name != POSITION, name))
            self._arrays = [self._buffers[name] for name in self._names]
            pairs = zip(self._names, self._arrays, strict=True)
            self._kinds = ", ".join(f"{name}: {a.dtype} {a.shape[1:]}" for name, a in pairs)
            self._described = self._buffers

        def find() -> tuple[Any, list[int]]:
            shape = self._arrays[0].shape
            for name in self._flip:
                array = self._buffers.get(name)
                if array is None or array.shape != shape or array.dtype.kind not in "fc":
                    expected = f"floats of shape ({self._n}, {shape[1]})"
                    raise FieldError(f"flip: {shown(name)} is not an attribute of {expected}")
            flips = [name in self._flip for name in self._names]
            found = migration.find(self._arrays, flips, self._n)
            return found, [found[1]]

        (counts, left), (all_left,) = world.total(
            find, MIGRATION, alike={"the attributes": self._kinds}
        )
        if not all_left:
            migration.keep()
            return
        mine = np.empty((world.size, 2), "i8")
        mine[:, 0], mine[:, 1] = counts, counts.cumsum() - counts
        incoming, places = world.ranks.swap_numbers(mine, MIGRATION).T
        after = self._n - left + int(incoming.sum())

        def prepare() -> tuple[dict[str, Any], object]:
            buffers, arrays, capacity = self._buffers, self._arrays, len(self._arrays[0])
            if after > capacity:
                capacity = max(after, capacity + capacity // 2)
                buffers = {k: self._buffer(view, capacity) for k, view in self._views.items()}
                arrays = [buffers[name] for name in self._names]
            return buffers, migration.pack(arrays, counts, incoming)

        buffers, records = world.gather(prepare, MIGRATION)
        migration.keep()
        migration.swap(records, places)
        self._use(buffers, after)

    def sort(self, order: int = 1) -> None:
        """Order this rank's particles by place, in C order, which makes `get` and `add` faster.

        Particles of one place are those whose clouds of an order have the same points in fields at cells: of order 0
        and 2 those of a cell. Their order stays. Local; call `migrate` before.
        """
        xp, key = self.domain.xp, 0
        for axis, cut in enumerate(self.domain.plain.owned):
            place = xp.floor(self.position[:, axis] + (0 if order == 1 else 0.5)) - cut.start + 1
            key = key * (cut.stop - cut.start + 2) + place
        rows = xp.argsort(key, kind="stable")
        for view in self._views.values():
            view[...] = view[rows]

    # Fields

    @short_errors
    def get(self, field: FieldLike, order: int = 1) -> Any:
        """Return the values of a field at the particles: shape (n,), or (n, components) with all component axes.

        Local. On a GPU it is one launch, ordered with the current stream.

        Parameters
        ----------
        field : array
            A float or complex field of the grid, of any layout except one parity; call `Grid.exchange` before. Point k
            of a field that is staggered along an axis is at ``k - 1/2``.
        order : {0, 1, 2}
            Shape of the clouds: 0 is the nearest point; 1 a cloud in cell, which interpolates linearly; 2 a
            triangular-shaped cloud. Orders 1 and 2 need a halo of 1, except 1 along staggered axes.

        Raises
        ------
        FieldError
            Also if the field lacks the halo for the order, or a particle is not in this rank's cells: call `migrate`
            after changes of positions. On a GPU the value of such a particle is NaN instead.
        """
        return read_clouds(self.domain, field, self.position, order)

    @short_errors
    def add(
        self, field: FieldLike, values: Any, order: int = 1, *, reproducible: bool = False
    ) -> None:
        """Add values of the particles to the points around them, the adjoint of `get`; then call `Grid.accumulate`.

        ``values`` are a number for all particles, one for each, or an array of the shape of `get`. Errors are those of
        `get`; on a GPU a particle that is not in this rank's cells makes a point of the field NaN.

        Local. On a GPU it is one launch of atomic additions, ordered with the current stream, fastest after `sort`.
        ``reproducible=True`` gives the same bits for any order of this rank's particles, and so in each run with the
        same division; on GPUs it takes some tens of times as long.
        """
        add_clouds(
            self.domain, field, self.position, values, order, reproducible=bool(reproducible)
        )
