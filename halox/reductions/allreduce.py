"""`Allreduce`, a persistent object for users who have no grid.

It checks the arguments with all ranks, and makes a `HostAllreduce` or a `DeviceAllreduce`, which does the work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from halox.errors import FieldError
from halox.reductions.algorithms import check_name, choose_algorithm
from halox.reductions.device.device_allreduce import DeviceAllreduce
from halox.reductions.host.host_allreduce import HostAllreduce
from halox.reductions.operations import find_operation
from halox.reductions.prepared import Launch, PreparedReductions
from halox.runtime.arrays import DType, check_extents, describe
from halox.runtime.call_guard import Closing, short_errors, single_threaded
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import choose_device
from halox.runtime.world import World
from halox.values import LARGEST, as_entries, as_int, check_bool, shortened, shown

if TYPE_CHECKING:
    from mpi4py import MPI

_MAKING = "the making of an allreduce"


class Allreduce(Closing):
    """Combines arrays of all ranks element by element, any number of times.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        The ranks; None is ``MPI.COMM_WORLD``. The object uses a private duplicate of the communicator.
    shape : int or sequence of int
        Shape of each rank's array; ``()`` for a single value.
    dtype : dtype
        bool, an integer, float32, float64, complex64 or complex128.
    op : str
        "sum", "prod" for numbers; "min", "max" for all dtypes except complex; "logical_and", "logical_or",
        "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor" for bool and integers.
    algorithm : str, optional
        For arrays on the host "host" or "hierarchical"; on GPUs "oneshot", "reduce_scatter_allgather",
        "shared_buffer", "binomial", "hierarchical" or "host" (docs/allreduce.md). By default the fastest available
        algorithm, by prediction.
    device : {"auto", "cpu", "gpu"}
        Device that combines the arrays; see `halox.Grid`. With "auto", arrays on the host are slow on a machine with a
        GPU, since they are copied there and back: the first such call warns.
    like : array, optional
        Array whose memory decides the device, in place of ``device``: the host for a NumPy array, else a GPU.
    reproducible : bool
        Whether a sum of floats is exact and rounded once, so that its bits do not depend on the order of the ranks'
        values (docs/allreduce.md). The algorithm is then "host". The operation is "sum", or one that is always
        reproducible.

    Attributes
    ----------
    shape : tuple of int
        Shape of the arrays.
    dtype : numpy.dtype
        Dtype of their elements.
    op : str
        Operation.
    reproducible : bool
        Whether sums of floats are exact and rounded once.
    algorithm : str
        Algorithm, requested or chosen.
    device : {"cpu", "gpu"}
        Memory of the arrays.
    device_id : int or None
        Number of this rank's GPU; None on the host.
    captures : bool
        Whether a call may be captured in a CUDA graph.
    reasons : dict of str to str
        For each algorithm that is not available here, the reason.

    Raises
    ------
    FieldError
        If the shape or dtype is invalid, the operation has no meaning for the dtype or cannot be reproducible, or the
        algorithm does not exist or is not available between these ranks; the text gives the reason. Also if ``like`` is
        not an array, or ``device`` is given, too. In calls: if an array has the wrong shape or dtype on some rank, or
        ``out`` is read-only or has elements that share memory.
    MismatchError
        If ranks give different arguments; names the argument, and the values of two ranks.
    DeviceError
        If ``device="gpu"`` and there is no GPU.
    StateError
        If the current stream is being captured; in calls, only if the algorithm does not support this (`captures`). If
        another thread is inside a call of this object.
    ClosedError
        If this object is closed.
    ExchangeTimeoutError
        If another rank does not call within ``HALOX_TIMEOUT`` seconds; on a GPU with "oneshot",
        "reduce_scatter_allgather" and "hierarchical", if another rank missed an earlier call. The results of
        that call and of all later calls are not valid.
    MissingPackageError
        If mpi4py or an MPI library is missing.

    Notes
    -----
    The constructor, calls and `close` are collective over ``comm``. All errors are raised on all ranks or on no rank,
    with one exception. On GPUs with "oneshot", "reduce_scatter_allgather" and "hierarchical" the hosts do not
    synchronize in a call, so that a call with an unsuitable array raises only on its rank. The remaining ranks wait for
    that rank until the time limit, and their next call raises `ExchangeTimeoutError`.

    The result has the same bits on every rank and in every run: the values are combined in the order of the ranks
    ("hierarchical": within each node, and then in the order of the nodes; "binomial", and small arrays of more than 64
    ranks of several nodes: in pairs, in pairs of pairs, ...). Integers wrap around. "min" and "max" are NaN if any rank
    has NaN. Logical operations give 1 or 0 in the dtype of the array.

    Examples
    --------
    >>> import numpy as np
    >>> import halox
    >>> with halox.Allreduce(None, 3, "f8", "max") as reduce:
    ...     reduce(np.array([1.0, 2.0, np.nan]))
    array([ 1.,  2., nan])
    """

    @short_errors
    def __init__(
        self,
        comm: MPI.Intracomm | None,
        shape: int | Sequence[int],
        dtype: npt.DTypeLike,
        op: str = "sum",
        algorithm: str | None = None,
        *,
        device: Literal["auto", "cpu", "gpu"] = "auto",
        like: Any = None,
        reproducible: bool = False,
    ) -> None:
        self._world = world = World(comm, "making an Allreduce", "Allreduce")
        self._context = Context(world)

        def check() -> tuple[tuple[int, ...], DType, str | None, int | None]:
            found_shape, found_dtype = _shape(shape), _dtype(dtype)
            is_exact = check_bool("reproducible", reproducible, FieldError)
            operation = find_operation(op, found_dtype, is_exact)
            check_extents(
                found_shape, found_dtype.itemsize, "shape", "reduce fewer elements at a time"
            )
            wanted: str = device
            if like is not None:
                if device != "auto":
                    raise FieldError(
                        "device, like: both say where the arrays are; give one of them"
                    )
                wanted = "cpu" if describe(like, "like").device is None else "gpu"
            gpu = choose_device(wanted, world.turn)
            if gpu is not None:
                check_name(algorithm, on_gpu=True)
                return found_shape, found_dtype, algorithm, gpu
            if operation.is_exact:
                check_name(algorithm, on_gpu=False)
                if algorithm == "hierarchical":
                    raise FieldError(
                        "algorithm 'hierarchical' rounds the sum of each node and cannot be reproducible; give 'host', "
                        "or None"
                    )
                return found_shape, found_dtype, "host", None
            nbytes = prod(found_shape) * found_dtype.itemsize
            chosen = choose_algorithm(algorithm, nbytes, world.size, world.node_count)
            return found_shape, found_dtype, chosen, None

        def compared() -> tuple[Any, dict[str, object]]:
            shape, dtype, requested, gpu = found = check()
            return found, {
                "shape": shape,
                "dtype": str(dtype),
                "op": op,
                "reproducible": bool(reproducible),
                "algorithm": requested,
                "device": "cpu" if gpu is None else "gpu",
            }

        remedies = {"device": 'say device="cpu" or device="gpu"'}
        try:
            found = world.attempt(compared, _MAKING, alike=True, remedies=remedies)
            self.shape, self.dtype, requested, self.device_id = found
            self.op, self.reproducible = op, bool(reproducible)
            self.device: Literal["cpu", "gpu"] = "cpu" if self.device_id is None else "gpu"
            what = self.shape, self.dtype, find_operation(op, self.dtype, self.reproducible)
            self._reduction: HostAllreduce | DeviceAllreduce
            self._bind: Callable[..., Launch | None] | None = None
            self._launch: Callable[..., Any] | None = None
            if self.device_id is None:
                assert requested is not None
                on_host = HostAllreduce(self._context, *what, requested)
                self._reduction, self._launch = on_host, on_host.launch
            else:
                on_gpu = DeviceAllreduce(self._context, self.device_id, *what, requested)
                self._reduction, self._bind = on_gpu, on_gpu.bind
        except BaseException as error:
            self._context.close_after(error)
            raise
        self._prepared: PreparedReductions[HostAllreduce | DeviceAllreduce] = PreparedReductions()
        self._prepared.add((), self._reduction)
        self._known = self._prepared.known
        self.algorithm, self.captures = self._reduction.algorithm, self._reduction.captures
        self.reasons = self._reduction.reasons
        self._has_warned = False
        self._tick = None if self.captures else world.ticker("allreduce", 0)

    def __call__(self, array: Any, out: Any = None) -> Any:
        """Combine the ranks' arrays.

        Parameters
        ----------
        array : numpy.ndarray, array on this rank's GPU, or scalar
            Array of this object's shape and dtype, with any strides. An array in other memory than `device` is copied
            to the device, and the result is copied back.
        out : array, optional
            Array for the result; may be ``array`` itself, or overlap it.

        Returns
        -------
        array
            ``out``, or a new array in the memory of ``array``, on a GPU of CuPy; a NumPy scalar for a scalar.

        Notes
        -----
        Collective. Blocks for arrays on the host. On a GPU the call is ordered with CuPy's current stream. "oneshot",
        "reduce_scatter_allgather" and "hierarchical" return at once. "shared_buffer" and "binomial" wait for the hosts
        of all ranks; "host" also waits for the stream. Calls on changing
        streams run in the order of the calls, except in captures.
        """
        if self._launch is not None:
            if not self._world.closed:
                result = self._launch(array, out)
                if result is not None:
                    return result
        elif self._bind is not None:
            arrays = (array,) if out is None else (array, out)
            launch = self._known.find("", arrays)
            if launch is not None:
                result = launch(arrays)
                return result if out is None else out
        return self._call(array, out)

    def _call(self, array: Any, out: Any) -> Any:
        guard = self._world.guard
        outer = guard.user
        if outer or self._world.closed:
            self._world.check_open()
            guard.check_thread()
        guard.user = 1
        try:
            if self._tick is not None:
                self._tick()
            result = self._reduction(array, out)
        except BaseException as error:
            guard.leave(error, outer)
            raise
        guard.user = outer
        if self._bind is not None:
            bind = self._bind
            self._prepared.prepare("", (array,), out, lambda: bind(array, out))
        on_gpu = self._bind is not None
        if type(array) is np.ndarray if on_gpu else is_device_array(array):
            self._warn_of_copies()
        return result

    def _warn_of_copies(self) -> None:
        """Warn once that arrays are in other memory than the device."""
        if not self._has_warned:
            self._has_warned = True
            here, there = ("on the host", "a GPU") if self._bind else ("on a GPU", "the host")
            warnings.warn(
                f"this Allreduce combines on {there}, and got an array {here}: each call copies it there and back; "
                "make the Allreduce with like=, an array in the memory of the calls",
                stacklevel=4,
            )

    @single_threaded
    def close(self) -> None:
        """Free memory and communicators; collective, and harmless when repeated."""
        if not self._world.closed:
            self._prepared.close()
            self._context.close()

    def __repr__(self) -> str:
        """Return the operation, arrays, ranks and algorithm."""
        return (
            f"<halox.Allreduce {self.op} of shape {self.shape} of {self.dtype} over {self._world.size} rank(s), "
            f"{self.algorithm} on {self.device}{', closed' if self._world.closed else ''}>"
        )


def _shape(shape: object) -> tuple[int, ...]:
    extents = [as_int(n) for n in as_entries(shape)]
    valid = tuple(n for n in extents if n is not None and 0 <= n <= LARGEST)
    if len(valid) < len(extents):
        raise FieldError(f"shape must be an int >= 0 or a sequence of such, got {shown(shape)}")
    return valid


def _dtype(dtype: npt.DTypeLike) -> DType:
    try:
        result: DType = np.dtype(dtype)
    except Exception as error:  # NumPy raises several types
        raise FieldError(
            f"dtype: {shown(dtype)} is not a dtype ({shortened(str(error))})"
        ) from error
    return result
