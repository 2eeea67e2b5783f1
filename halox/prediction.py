"""Prediction of a step's time on other numbers of ranks, for `Grid.predict` and ``halox predict``.

The messages are those of the plans that the ranks would make. Their times follow from the constants by which halox
chooses paths, and the times of reductions from the model that chooses their algorithm: docs/predict.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from halox.collectives import algorithms
from halox.decomposition import Decomposition, FieldLayout, FieldSpec, decompose
from halox.decomposition.procgrid import workable_proc_shapes
from halox.errors import FieldError, HaloxError
from halox.exchange.calibration import costs_of
from halox.exchange.costs import Costs, protocol_name
from halox.exchange.halo import halo_draft
from halox.paths import PATHS
from halox.paths.base import Candidate
from halox.paths.costs import RUN_BYTES, ProtocolCost
from halox.paths.host import DIRECT_BYTES
from halox.paths.messages import Message
from halox.runtime.arrays import Described, DType
from halox.values import as_int, as_list, shown

if TYPE_CHECKING:
    from halox.grid import Grid

HOST_COSTS = Costs(
    {
        "local/copy": ProtocolCost(9.0, 0.0, (0.6, 1.5, 3.0, 6.0)),
        "host/direct": ProtocolCost(16.0, 2.0, (0.5, 1.2, 2.5, 5.0)),
        "host/shared": ProtocolCost(18.0, 2.0, (0.4, 1.0, 2.0, 3.0)),
        "host/mpi": ProtocolCost(20.0, 2.0, (0.4, 1.0, 2.0, 3.0)),
    },
    "shipped constants of two CPU cores; halox predict -n 2 measures them",
)
"""Constants of NumPy arrays, whose paths follow fixed rules."""

Link: TypeAlias = tuple[float, float]
"""Latency in microseconds, and bandwidth in GB/s (1e9 bytes per second)."""


@dataclass(frozen=True)
class Model:
    """A grid, its fields, the constants of a machine, and the options of `halox.Grid.predict`."""

    decomposition: Decomposition
    specs: Sequence[tuple[DType, FieldSpec]]
    corners: bool
    on_gpu: bool
    costs: Costs
    stencil: float | Callable[[tuple[int, ...]], float] = 0.0
    overlap: bool = False
    reductions: int = 0
    weak: bool = False
    proc_shape: Sequence[int] | None = None
    node_ranks: int | None = None
    gpu_ranks: int = 1
    link: Link | None = None
    network: Link | None = None

    def __post_init__(self) -> None:
        """Raise a `HaloxError` for an invalid option."""
        for name, least in (("reductions", 0), ("node_ranks", 1), ("gpu_ranks", 1)):
            number = as_int(value := getattr(self, name))
            if (number is None or number < least) and (value, name) != (None, "node_ranks"):
                raise HaloxError(f"{name} must be an int >= {least}, got {shown(value)}")
        for name in ("link", "network"):
            numbers = as_list(value := getattr(self, name)) or []
            valid = len(numbers) == 2 and all(map(_is_time, numbers)) and numbers[1] > 0
            if value is not None and not valid:
                raise HaloxError(
                    f"{name} must be a latency in us, at least 0, and a bandwidth in GB/s, above 0, such as "
                    f"{name}=(5, 25), got {shown(value)}"
                )
        if not callable(self.stencil) and not _is_time(self.stencil):
            raise HaloxError(
                "stencil must be ns per cell, at least 0, or a function that returns the us of a block of a shape, "
                f"got {shown(self.stencil)}"
            )

    def fastest(self, ranks: int) -> dict[str, Any]:
        """Return the step on halox's process grid, for weak scaling on the fastest, and the fastest process grid."""
        old, block = self.decomposition, _block(self.decomposition)
        halo = [(0, 0)] * old.ndim
        for _, spec in self.specs:
            halo = [tuple(map(max, *pair)) for pair in zip(halo, spec.halo)]  # type: ignore
        node = self.node_ranks or ranks
        common: dict[str, Any] = {
            "halo": halo,
            "periodic": old.periodic,
            "nodes": [rank // node for rank in range(ranks)] if node < ranks else None,
            "checkerboard": any(spec.parity for _, spec in self.specs),
        }
        shape = tuple(cells * ranks for cells in block) if self.weak else old.grid_shape
        steps = []
        for procs in workable_proc_shapes(ranks, shape, halo, old.periodic, self.proc_shape):
            if self.weak:
                shape = tuple(cells * parts for cells, parts in zip(block, procs, strict=True))
            steps.append(self.step(decompose(shape, ranks, proc_shape=procs, **common)))
        best = min(steps, key=lambda step: (step["step_us"], step["exchange_us"]))
        proc_shape = best["proc_shape"]
        if not self.weak:
            proc_shape = decompose(shape, ranks, proc_shape=self.proc_shape, **common).proc_shape
        chosen = next(step for step in steps if step["proc_shape"] == proc_shape)
        return chosen | {"best_proc_shape": best["proc_shape"], "best_us": best["step_us"]}

    def step(self, divided: Decomposition) -> dict[str, Any]:
        """Predict a step of divided ranks."""
        node = self.node_ranks or divided.ranks
        exchange_us, busiest = 0.0, (0, 0)
        for members in _watched(divided, node):
            sent = {rank: self.messages(divided, rank) for rank in members}
            near = {r: [m for m in sent[r] if m.peer // node == r // node] for r in sent}
            far = {r: [m for m in sent[r] if m.peer // node != r // node] for r in sent}
            node_bytes = sum(message.nbytes for some in far.values() for message in some)
            for rank in members:
                us = self.near_us(rank, near[rank], bool(far[rank]))
                exchange_us = max(exchange_us, us + self.far_us(far[rank], node_bytes))
                others = [message.nbytes for message in sent[rank] if message.peer != rank]
                busiest = max(busiest, (sum(others), len(others)))
        block = _block(divided)
        cells = math.prod(block)
        stencil_us = (
            float(self.stencil(block))
            if callable(self.stencil)
            else self.stencil * 1e-3 * cells * self.gpu_ranks
        )
        widths = [sum(pair) for pair in self.specs[0][1].halo]
        inner = math.prod(max(n - width, 0) for n, width in zip(block, widths, strict=True))
        inner_us = stencil_us * inner / cells if self.overlap else 0.0
        reduction_us = self.reductions * self.reduction_us(divided.ranks, math.ceil(divided.ranks / node))
        return {
            "ranks": divided.ranks,
            "proc_shape": divided.proc_shape,
            "rank_shape": block,
            "messages": busiest[1],
            "bytes": busiest[0],
            "stencil_us": stencil_us,
            "exchange_us": exchange_us,
            "reduction_us": reduction_us,
            # With overlap the rims follow the exchange.
            "step_us": max(inner_us, exchange_us) + stencil_us - inner_us + reduction_us,
            "efficiency": None,
        }

    def messages(self, divided: Decomposition, rank: int) -> Sequence[Message]:
        """Return the messages that a rank's plan would send."""
        read = []
        for dtype, spec in self.specs:
            layout = FieldLayout(divided, rank, spec)
            strides = [dtype.itemsize]
            for extent in layout.padded_shape[:0:-1]:
                strides.insert(0, strides[0] * extent)
            place = layout.padded_shape, tuple(strides), dtype, 0 if self.on_gpu else None
            read.append((Described(0, *place, True), layout))
        arrays = (None,) * len(read)
        return halo_draft(arrays, read, operation="copy", corners=self.corners).sends

    def near_us(self, rank: int, messages: Sequence[Message], has_far: bool) -> float:
        """Return the time of a rank's messages to itself and to its node: one kernel on a GPU, in turn on the host."""
        own = self.costs.protocols["local/copy"]
        copied = [message for message in messages if message.peer == rank]
        used = [(m, self._near_cost(m)) for m in messages if m.peer != rank]
        us = self._bytes_us(own, copied) + sum(self._bytes_us(cost, [m]) for m, cost in used)
        us += sum(sorted(cost.message_us for _, cost in used)[1:])
        # Copies travel with messages to other ranks, if there are any.
        alone = own.latency_us if copied and not has_far else 0.0
        return us + max((cost.latency_us for _, cost in used), default=alone)

    def _near_cost(self, message: Message) -> ProtocolCost:
        """Return the constants of the protocol that a message takes on a node."""
        if self.link is not None:
            return ProtocolCost(self.link[0], 0.0, (self.link[1],) * len(RUN_BYTES))
        if not self.on_gpu:
            protocol = "direct" if message.block_bytes >= DIRECT_BYTES else "shared"
            return self.costs.protocols[f"host/{protocol}"]
        shared = self.gpu_ranks > 1
        path = PATHS["ipc" if shared else "peer"]
        offers = [Candidate(path.name, protocol.name, "") for protocol in path.protocols]
        best = self.costs.best(offers, message.nbytes, message.row_bytes, shared_gpu=shared)
        return self.costs.protocols[protocol_name(best.path, best.protocol, shared)]

    def far_us(self, messages: Sequence[Message], node_bytes: int) -> float:
        """Return the time of a rank's messages to other nodes: the slower of packing and of the node's network."""
        if not messages:
            return 0.0
        if self.network is None:
            raise HaloxError(
                f"ranks on several nodes of {self.node_ranks} need network=(latency_us, gb_per_s) of a node, such as "
                "network=(5, 25)"
            )
        cost = self.costs.protocols["nccl/packed" if self.on_gpu else "host/mpi"]
        wire_us = node_bytes / (self.network[1] * 1e3)
        us = self.network[0] + cost.latency_us + (len(messages) - 1) * cost.message_us
        return us + max(self._bytes_us(cost, messages), wire_us)

    def _bytes_us(self, cost: ProtocolCost, messages: Sequence[Message]) -> float:
        """Return the time of the messages' bytes, without latencies; each part has runs of its own length."""
        parts = [Message(m.peer, "send", (part,)) for m in messages for part in m.parts]
        runs = [
            (each.nbytes, each.row_bytes if self.on_gpu else each.block_bytes) for each in parts
        ]
        return sum(cost.us(nbytes, run) - cost.latency_us for nbytes, run in runs)

    def reduction_us(self, ranks: int, nodes: int) -> float:
        """Return the time of the sum of one number over the ranks."""
        if ranks == 1:
            return 0.0
        if not self.on_gpu:
            name = algorithms.choose_algorithm(None, 8, ranks, nodes)
            return algorithms.predict_us(name, 8, ranks, nodes)
        sharers, possible = self.gpu_ranks, algorithms.DEVICE_ALGORITHMS[:2]
        if nodes > 1 or sharers > 1:
            possible = algorithms.DEVICE_ALGORITHMS[2 if nodes == 1 else -2 :]
        how: Any = {"sharers": sharers, "by_nccl": sharers == 1}
        name = algorithms.rank_algorithms(possible, 8, ranks, nodes, **how)[0]
        return algorithms.predict_device_us(name, 8, ranks, nodes, **how)


def predict(
    grid: Grid[Any],
    ranks: object,
    fields: Sequence[Any],
    costs: Costs | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Predict steps of a grid's fields (or dtypes), by default with the grid's constants; see `halox.Grid.predict`."""
    domain, on_gpu = grid.domain, grid.device == "gpu"
    if costs is None:
        costs = domain.context.once(costs_of) if on_gpu else HOST_COSTS
    specs = [_spec(grid, field) for field in fields or ("f8",)]
    model = Model(domain.decomposition, specs, grid.corners, on_gpu, costs, **options)
    rows = [model.fastest(number) for number in _numbers(ranks)]
    for row in rows:
        if row["stencil_us"]:
            share = 1.0 if model.weak else rows[0]["ranks"] / row["ranks"]
            row["efficiency"] = rows[0]["step_us"] * share / row["step_us"]
    return rows


def _spec(grid: Grid[Any], field: Any) -> tuple[DType, FieldSpec]:
    """Return the dtype and layout of a field, or of a plain field of a dtype."""
    if hasattr(field, "shape"):
        return np.dtype(field.dtype), grid.layout(field).spec
    try:
        return np.dtype(field), grid.domain.plain.spec
    except TypeError as error:
        raise FieldError(
            f"field {shown(field)} is neither an array of the grid nor a dtype, such as 'f8'"
        ) from error


def _numbers(ranks: object) -> list[int]:
    """Return the numbers of ranks: as listed, or the powers of two up to one number, and that number."""
    whole = as_int(ranks)
    numbers = [as_int(each) or 0 for each in ([ranks] if whole else as_list(ranks) or [])]
    if not numbers or min(numbers) < 1:
        raise HaloxError(f"ranks must be an int >= 1, or a list of them, got {shown(ranks)}")
    return [*(1 << n for n in range((whole - 1).bit_length())), whole] if whole else numbers


def _watched(divided: Decomposition, node: int) -> list[list[int]]:
    """Return the ranks, node by node, among which the slowest is: on the first or second block of each axis.

    Even cuts put the largest blocks first, and the second block has neighbours on both sides. All ranks of their nodes
    are returned if there are several nodes.
    """
    corner = itertools.product(*(range(min(axis.parts, 2)) for axis in divided.axes))
    ranks = {
        divided.placement.rank_of[np.ravel_multi_index(at, divided.proc_shape)] for at in corner
    }
    if node >= divided.ranks:
        return [sorted(ranks)]
    nodes = sorted({rank // node for rank in ranks})
    return [list(range(n * node, min((n + 1) * node, divided.ranks))) for n in nodes]


def _block(decomposition: Decomposition) -> tuple[int, ...]:
    return tuple(max(axis.sizes) for axis in decomposition.axes)


def _is_time(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf  # type: ignore[operator]
