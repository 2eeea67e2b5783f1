"""The algorithms of allreduce by name, their predicted times, and the choice among them.

The constants need to be accurate enough only to order the algorithms. The constants for GPUs are for H200-class GPUs
joined by NVLink. Processes that share a GPU are time-sliced, a quarter of a millisecond each, and their kernels wait
that long at every step. Copies to and from the host need no time slice.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from halox.errors import FieldError
from halox.reductions.host.mpi_reduction import GATHERED_BYTES
from halox.reductions.host.shared_reduction import SMALL_BYTES
from halox.values import shown

HOST_ALGORITHMS = ("host", "hierarchical")
"""Algorithms for NumPy arrays."""

DEVICE_ALGORITHMS = (
    "oneshot",
    "reduce_scatter_allgather",
    "shared_buffer",
    "binomial",
    "hierarchical",
    "host",
)
"""Algorithms for arrays on GPUs."""

_B_PER_US = 1e3
_WIDE_PACKETS = 8 / 7  # bytes of LL128-like packets per byte of data


@dataclass(frozen=True)
class Link:
    """Cost of a step of a collective: its latency, and the bandwidth of each node."""

    step_us: float
    gb_per_s: float

    def us(self, ranks: int, nbytes: float) -> float:
        """Return the microseconds of a collective among some ranks in which each node receives ``nbytes``."""
        return self.step_us * math.ceil(math.log2(max(ranks, 1))) + nbytes / (
            self.gb_per_s * _B_PER_US
        )


WITHIN, BETWEEN = Link(1.0, 8.0), Link(5.0, 10.0)
"""MPI within a node, and over a network: orders of magnitude, which suffice for the choice below."""

SHARED = Link(2.0, 80.0)
"""Synchronisation of a node's ranks in shared memory, and the bytes that they read and write there; measured on two."""


NCCL = Link(10.0, 20.0)
"""NCCL between nodes; a step is a group of sends and receives."""


@dataclass(frozen=True)
class DeviceCosts:
    """Constants of the algorithms on GPUs, in microseconds and GB/s."""

    oneshot_us: float = 3.5  # of "oneshot" for a few bytes
    scattered_us: float = 8.0  # of "reduce_scatter_allgather" for a few bytes
    peer_gb_per_s: float = 320.0  # from a GPU into the memory of its peers
    tree_us: float = 15.0  # of a call of a tree; multiplied by the ranks per GPU, as are its steps
    step_us: float = 10.0  # of each step that the host orders
    copy_gb_per_s: float = 250.0  # between ranks
    host_us: float = 25.0  # of copies to the host and from it
    host_gb_per_s: float = 25.0  # between a GPU and the host, for all its ranks together


OWN_GPU = DeviceCosts()
"""Costs if each rank has a separate GPU."""

SHARED_GPU = DeviceCosts(
    tree_us=10.0,
    step_us=80.0,
    copy_gb_per_s=490.0,
    host_us=30.0,
    host_gb_per_s=90.0,
)
"""Costs if ranks share a GPU: their kernels are time-sliced, and their copies to and from the host share its link.
Measured on one H200 with 2, 4 and 8 ranks."""


def predict_us(name: str, nbytes: int, ranks: int, nodes: int) -> float:
    """Return the predicted microseconds of an algorithm for NumPy arrays.

    Examples
    --------
    >>> predict_us("host", 8, 64, 8) > predict_us("hierarchical", 8, 64, 8)
    True
    >>> predict_us("host", 1 << 20, 4, 1) < predict_us("hierarchical", 1 << 20, 4, 1)
    True
    """
    if name == "hierarchical":
        each = math.ceil(ranks / nodes)
        return _ordered_us(nbytes, each, 1) + _leaders_us(nbytes, ranks, nodes)
    return _ordered_us(nbytes, ranks, nodes)


def predict_device_us(name: str, nbytes: int, ranks: int, nodes: int, *, sharers: int = 1) -> float:
    """Return the predicted microseconds of an algorithm for arrays on GPUs.

    Examples
    --------
    >>> predict_device_us("oneshot", 8, 8, 1) < predict_device_us("reduce_scatter_allgather", 8, 8, 1)
    True
    >>> large = 1 << 26
    >>> predict_device_us("oneshot", large, 8, 1) > predict_device_us("reduce_scatter_allgather", large, 8, 1)
    True
    """
    costs = SHARED_GPU if sharers > 1 else OWN_GPU
    peer, copy = costs.peer_gb_per_s * _B_PER_US, costs.copy_gb_per_s * _B_PER_US
    others = ranks - 1
    if name == "oneshot":
        return costs.oneshot_us + _WIDE_PACKETS * others * nbytes / peer
    if name == "reduce_scatter_allgather":
        return costs.scattered_us + 2 * others / ranks * nbytes / peer
    if name == "shared_buffer":
        steps = costs.tree_us + 2 * costs.step_us
        return sharers * steps + 2 * others * nbytes / copy
    if name == "binomial":
        levels = math.ceil(math.log2(ranks))
        steps = costs.tree_us + (levels + 1) * costs.step_us
        return sharers * steps + (levels + others) * nbytes / copy
    if name == "host":
        through_host = costs.host_us + 2 * sharers * nbytes / (costs.host_gb_per_s * _B_PER_US)
        return through_host + _ordered_us(nbytes, ranks, nodes)
    each = math.ceil(ranks / nodes)
    kernels = ("oneshot", "reduce_scatter_allgather") if each > 1 else ()
    within = min((predict_device_us(kernel, nbytes, each, 1) for kernel in kernels), default=0.0)
    return within + NCCL.step_us + NCCL.us(1, (nodes - 1) * nbytes)


def _leaders_us(nbytes: int, ranks: int, nodes: int) -> float:
    """Return the cost of the reduction among the nodes' first ranks, and of their broadcasts."""
    return _ordered_us(nbytes, nodes, nodes) + WITHIN.us(math.ceil(ranks / nodes), nbytes)


def _ordered_us(nbytes: int, ranks: int, nodes: int) -> float:
    """Return the cost of a `SharedReduction` on one node, or of an `OrderedReduction` between nodes."""
    if nodes == 1:
        if nbytes <= SMALL_BYTES:
            return SHARED.us(ranks, ranks**2 * nbytes)
        # Each rank writes, combines and reads about as many bytes as its array has.
        return 2 * SHARED.us(ranks, 1.5 * ranks * nbytes)
    each = math.ceil(ranks / nodes)
    far = ranks - each
    if nbytes <= GATHERED_BYTES:
        return BETWEEN.us(ranks, each * far * nbytes)
    return 2 * BETWEEN.us(ranks, each * far / ranks * nbytes)


def choose_algorithm(name: str | None, nbytes: int, ranks: int, nodes: int) -> str:
    """Choose an algorithm for NumPy arrays: the requested or else the fastest by prediction.

    Examples
    --------
    >>> choose_algorithm(None, 8, 4, 1), choose_algorithm(None, 8, 64, 8), choose_algorithm(None, 8, 4, 4)
    ('host', 'hierarchical', 'host')
    """
    if name is None:
        return min(HOST_ALGORITHMS, key=lambda each: predict_us(each, nbytes, ranks, nodes))
    check_name(name, on_gpu=False)
    return name


def rank_algorithms(
    possible: Collection[str], nbytes: int, ranks: int, nodes: int, *, sharers: int
) -> list[str]:
    """Return algorithms for arrays on GPUs, in ascending order of predicted times.

    The parameters are the same as for :func:`predict_device_us`.

    Examples
    --------
    >>> rank_algorithms(DEVICE_ALGORITHMS, 8, 2, 1, sharers=1)[0]
    'oneshot'
    >>> rank_algorithms(DEVICE_ALGORITHMS[4:], 8, 4, 4, sharers=1)[0]
    'hierarchical'
    >>> shared = ("shared_buffer", "binomial", "host")
    >>> [rank_algorithms(shared, n << 10, 2, 1, sharers=2)[0] for n in (1, 512, 4096)]
    ['host', 'host', 'shared_buffer']
    """
    return sorted(
        (name for name in DEVICE_ALGORITHMS if name in possible),
        key=lambda name: predict_device_us(name, nbytes, ranks, nodes, sharers=sharers),
    )


def check_name(name: object, *, on_gpu: bool) -> None:
    """Raise `FieldError` unless ``name`` is an algorithm or None."""
    known = DEVICE_ALGORITHMS if on_gpu else HOST_ALGORITHMS
    if name is None or (isinstance(name, str) and name in known):
        return
    if isinstance(name, str) and name in DEVICE_ALGORITHMS:
        raise FieldError(
            f'algorithm {name!r} is not available: it is for arrays on GPUs (device="gpu"), and these are on the host'
        )
    raise FieldError(
        f"algorithm must be one of {', '.join(map(repr, known))}, or None for the fastest, got {shown(name)}"
    )
