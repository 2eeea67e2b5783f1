"""Typed messages for users who have no grid: `Exchange`, a plan for lists of `Send` and `Recv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from halox.datatypes import as_datatype, from_mpi
from halox.errors import DatatypeError, FieldError, MismatchError
from halox.paths.messages import Direction, Message, Part, fuse
from halox.plans.draft import Draft
from halox.plans.making import make_plan
from halox.plans.plan import Plan
from halox.runtime.arrays import Described, check_no_gaps, describe
from halox.runtime.call_guard import Closing, short_errors
from halox.runtime.context import Context
from halox.runtime.world import World
from halox.values import as_int, as_list, shown

if TYPE_CHECKING:
    from mpi4py import MPI

    from halox.plans.report import Report


Item = TypeVar("Item")


@dataclass(frozen=True)
class Send:
    """``count`` items of ``datatype``, at the first element of ``array``, to rank ``dest``.

    Parameters
    ----------
    array : numpy.ndarray or array on a GPU
        Displacements of the datatype count bytes from element [0, ..., 0], so a view with memory between its elements
        (``A[:, 1]``) is refused: give ``A``, and describe the elements by `halox.datatypes.slab` or by a vector.
    datatype : Datatype, dtype or mpi4py.MPI.Datatype
        A datatype of mpi4py, predefined or derived, need not be committed, and may be freed when the exchange is made.
    dest : int
        Rank in the exchange's communicator; may be this rank. ``MPI.PROC_NULL`` is an empty message: it is ignored.
    count : int
        Consecutive items, 0 or more.
    tag : int
        Distinguishes messages between the same two ranks.
    """

    array: object
    datatype: object
    dest: int
    count: int = 1
    tag: int = 0


@dataclass(frozen=True)
class Recv:
    """``count`` items of ``datatype``, at the first element of ``array``, from rank ``source``.

    The type may differ from the sender's type if both have the same signature. The parameters are the same as for
    `Send`.
    """

    array: object
    datatype: object
    source: int
    count: int = 1
    tag: int = 0


class Exchange(Closing):
    """A persistent exchange of typed messages.

    Parameters
    ----------
    sends : sequence of Send
    receives : sequence of Recv
        Receives (and sends) with the same peer and tag travel as one message, matched in the order given.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks; ``MPI.COMM_WORLD`` by default.
    path : str, optional
        Data path of all messages to other ranks, as listed by ``halox info``; by default the value of HALOX_PATH, or
        else the fastest path.

    Raises
    ------
    MismatchError
        On all ranks, if a send has no receive or their signatures differ.
    DatatypeError, FieldError
        On all ranks, if a datatype accesses bytes outside its array, or if an array is unsuitable or a view with memory
        between its elements.
    PathError
        On all ranks, if the requested path cannot be taken; the text gives the reason.

    Notes
    -----
    The constructor and `close` are collective over ``comm``. Call the exchange, or `start` and `finish` it, on all
    ranks. Streams and CUDA graphs: see `Plan`. The arrays of one rank are all NumPy arrays or all on one GPU; different
    ranks may differ in this. As in MPI, no receive may write bytes of another receive or of a send.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from halox import Exchange, Recv, Send, datatypes
    >>> matrix, column = np.arange(6.0).reshape(2, 3), np.zeros(2)
    >>> with Exchange([Send(matrix, datatypes.vector(2, 1, 3, "f8"), 0)],
    ...               [Recv(column, datatypes.contiguous(2, "f8"), 0)], comm=MPI.COMM_SELF) as exchange:
    ...     exchange()
    >>> column
    array([0., 3.])
    """

    @short_errors
    def __init__(
        self,
        sends: Sequence[Send],
        receives: Sequence[Recv],
        *,
        comm: MPI.Intracomm | None = None,
        path: str | None = None,
    ) -> None:
        world = World(comm, "making an Exchange", "Exchange")
        self._context = Context(world)
        try:
            runner = make_plan(
                self._context,
                lambda: _draft(
                    _items("sends", sends, Send), _items("receives", receives, Recv), world
                ),
                path=path,
                call="exchange",
            )
        except BaseException as error:
            self._context.close_after(error)
            raise
        self._plan, self._run = Plan(runner), runner.run

    def __call__(self) -> None:
        """Run the exchange once; raises the errors of `Plan`."""
        self._run()

    def start(self) -> None:
        """Begin an exchange; see `Plan.start`."""
        self._plan.start()

    def finish(self) -> None:
        """End an exchange; see `Plan.finish`."""
        self._plan.finish()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends to other ranks in each exchange."""
        return self._plan.bytes_sent

    def explain(self) -> Report:
        """Return, for each message, its path and the reason for it."""
        return self._plan.explain()

    def measure(self, repeats: int = 20) -> Report:
        """Measure how long exchanges take, path by path; see `Plan.measure`."""
        return self._plan.measure(repeats)

    def close(self) -> None:
        """Free everything; collective, and harmless when repeated."""
        self._plan.close()
        self._context.close()

    def __repr__(self) -> str:
        """Return the arrays, message counts and state of the exchange."""
        return repr(self._plan).replace("halox.Plan", "halox.Exchange", 1)


def _items(name: str, given: object, kind: type[Item]) -> tuple[Item, ...]:
    """Return the listed messages as a tuple; raises `FieldError` unless all are of one kind."""
    items = as_list(given)
    if items is None:
        raise FieldError(f"{name} must be a sequence of halox.{kind.__name__}, got {shown(given)}")
    for number, item in enumerate(items):
        if not isinstance(item, kind):
            raise FieldError(f"{name}[{number}] must be a halox.{kind.__name__}, got {shown(item)}")
    return tuple(items)


def _draft(sends: tuple[Send, ...], receives: tuple[Recv, ...], world: World) -> Draft:
    mpi, size = world.mpi, world.size
    known: dict[int, tuple[int, object, Described]] = {}

    def part(item: Send | Recv, name: str) -> Part:
        array = item.array
        if id(array) not in known:
            known[id(array)] = len(known), array, describe(array, f"{name}.array")
        number, _, described = known[id(array)]
        count = as_int(item.count)
        if count is None or count < 0:
            raise FieldError(f"{name}.count must be an int >= 0, got {shown(item.count)}")
        given: Any = item.datatype
        try:
            datatype = from_mpi(given) if isinstance(given, mpi.Datatype) else as_datatype(given)
        except DatatypeError as error:
            raise DatatypeError(f"{name}.datatype: {error}") from error
        form = described.shape, described.strides, described.dtype.itemsize
        check_no_gaps(f"{name}.array", *form)
        return Part(number, datatype, count)

    def messages(items: Sequence[Send | Recv], direction: Direction) -> tuple[Message, ...]:
        parts = []
        role = "dest" if direction == "send" else "source"
        for number, item in enumerate(items):
            name, given = f"{direction}s[{number}]", getattr(item, role)
            peer, tag = as_int(given), as_int(item.tag)
            if peer == mpi.PROC_NULL:
                continue
            if peer is None or not 0 <= peer < size:
                raise MismatchError(
                    f"{name}.{role} must be a rank, 0 to {size - 1}, or MPI.PROC_NULL, got {shown(given)}"
                )
            if tag is None:
                raise MismatchError(f"{name}.tag must be an int, got {shown(item.tag)}")
            parts.append((peer, tag, part(item, name)))
        return fuse(direction, parts)

    outgoing, incoming = messages(sends, "send"), messages(receives, "receive")
    arrays = tuple(array for _, array, _ in known.values())
    described = tuple(one for *_, one in known.values())
    devices = {array.device for array in described} - {None}
    if len(devices) > 1:
        raise FieldError(
            f"this rank's arrays are on GPU {' and GPU '.join(sorted(map(str, devices)))}; "
            "a rank exchanges arrays of one GPU: move them, or use a rank a GPU"
        )
    return Draft(arrays, described, outgoing, incoming)
