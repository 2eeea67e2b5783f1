"""Prediction of a step's time on other numbers of ranks, by the model of docs/predict.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from numbers import Real
from operator import mul
from typing import Any

import numpy as np

from halox.decomposition import Decomposition, FieldLayout, FieldSpec, Halo, block_cells, decompose
from halox.decomposition.normalise import normalise_proc_shape
from halox.errors import FieldError, HaloxError
from halox.paths import PATHS
from halox.paths.base import Candidate
from halox.paths.costs import RUN_BYTES, ProtocolCost
from halox.paths.host import DIRECT_BYTES
from halox.paths.messages import Message
from halox.plans.calibration import costs_of
from halox.plans.costs import Costs, protocol_name
from halox.plans.halo import halo_draft
from halox.reductions import algorithms
from halox.runtime.arrays import Described, DType
from halox.values import as_int, as_list, shown

HOST_COSTS = Costs(
    {
        "local/copy": ProtocolCost(1.2, 0.0, (3.1, 3.8, 7.5, 15.3)),
        "host/direct": ProtocolCost(2.1, 2.0, (1.1, 2.1, 2.9, 6.9)),
        "host/shared": ProtocolCost(2.3, 0.0, (0.9, 1.8, 2.3, 4.1)),
    },
    "shipped constants of CPU cores; halox predict -n 2 measures them",
)
CALL_US = 8.0  # of the host for a launch, an exchange or a reduction outside of a CUDA graph, beside an H100
_COLUMNS = "ranks proc_shape rank_shape messages bytes stencil_us exchange_us reduction_us step_us"


@dataclass(frozen=True)
class Model:
    """A grid, its fields, the constants of a machine, and the options of `halox.Grid.predict`."""

    decomposition: Decomposition
    halo: Halo
    specs: Sequence[tuple[DType, FieldSpec]]
    corners: bool
    on_gpu: bool
    costs: Costs
    stencil: float = 0.0
    overlap: bool = False
    reductions: int = 0
    graph: bool = False
    weak: bool = False
    proc_shape: Sequence[int] | None = None
    node_ranks: int | None = None
    gpu_ranks: int = 1
    link: tuple[float, float] | None = None
    network: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Raise a `HaloxError` for an invalid option."""
        options = ("reductions", 0), ("gpu_ranks", 1), ("node_ranks", 1)
        for name, least in options if self.node_ranks is not None else options[:2]:
            if (number := as_int(value := getattr(self, name))) is None or number < least:
                raise HaloxError(f"{name} must be an int >= {least}, got {shown(value)}")
        for name, link in (("link", self.link), ("network", self.network)):
            numbers = [0, 1] if link is None else as_list(link) or [-1]
            is_number = [isinstance(number, Real) for number in numbers]
            if is_number != [True, True] or not numbers[0] >= 0 < numbers[1] < math.inf:
                raise HaloxError(
                    f"{name} must be a latency in us and a bandwidth in GB/s, such as (5, 25), got {shown(link)}"
                )
        if not isinstance(self.stencil, Real) or not 0 <= self.stencil < math.inf:
            raise HaloxError(f"stencil must be ns per cell, at least 0, got {shown(self.stencil)}")

    def fastest(self, ranks: int) -> dict[str, Any]:
        """Return the step on halox's process grid, with the fastest one; on which the step is in weak scaling.

        On the ranks of the given grid this is its own process grid, with its own blocks.

        Raises `DecompositionError` if the grid cannot be divided among the ranks.
        """
        old, node = self.decomposition, self.node_ranks or ranks
        nodes = [rank // node for rank in range(ranks)] if node < ranks else None
        same: Any = {"halo": self.halo, "periodic": old.periodic, "nodes": nodes}
        # Blocks of any process grid have the whole shape in weak scaling.
        wide = tuple(n * (ranks if self.weak else 1) for n in old.grid_shape)
        cost = block_cells("gpu" if self.on_gpu else "cpu", nodes is not None)
        given = self.proc_shape
        chosen = decompose(wide, ranks, proc_shape=given, block_cells=cost, **same).proc_shape
        steps = {}
        for procs in self._proc_shapes(ranks):
            shape = tuple(map(mul, old.grid_shape, procs)) if self.weak else old.grid_shape
            steps[procs] = self.step(decompose(shape, ranks, proc_shape=procs, **same))
        if ranks == old.ranks and old.proc_shape in steps and not self.weak:
            chosen = old.proc_shape
            steps[chosen] = self.step(replace(old, joined=None))
        best = min(steps, key=lambda p: (steps[p]["step_us"], steps[p]["exchange_us"], p != chosen))
        row = steps[best if self.weak else chosen]
        return row | {"best_proc_shape": best, "best_us": steps[best]["step_us"]}

    def _proc_shapes(self, ranks: int) -> list[tuple[int, ...]]:
        """Return the process grids that agree with ``proc_shape`` and have a cell for each rank."""
        shape = self.decomposition.grid_shape
        given = normalise_proc_shape(self.proc_shape, len(shape)) or (0,) * len(shape)
        parts = [
            [n for n in range(1, limit + 1) if ranks % n == 0 and want in (0, n)]
            for limit, want in zip([ranks] * len(shape) if self.weak else shape, given, strict=True)
        ]
        return [procs for procs in product(*parts) if math.prod(procs) == ranks]

    def step(self, divided: Decomposition) -> dict[str, Any]:
        """Predict a step of divided ranks."""
        ranks, node = divided.ranks, self.node_ranks or divided.ranks
        exchange_us, busiest = 0.0, (0, 0)
        # Even cuts put the largest blocks first; the second block, or a later one if the halo is wider than blocks, has
        # all neighbours on both sides.
        inner_blocks = [
            min(axis.parts // 2, max(1, math.ceil(max(width) / min(axis.sizes))))
            for axis, width in zip(divided.axes, self.halo, strict=True)
        ]
        watched = {divided.rank_at(at) or 0 for at in ([0] * divided.ndim, inner_blocks)}
        if any(not -1 < axis.sizes[0] - size < 3 for axis in divided.axes for size in axis.sizes):
            watched = {*range(ranks)}  # blocks of ``blocks`` or ``weights``
        block = max(map(divided.rank_shape, sorted(watched)), key=math.prod)
        for number in {rank // node for rank in watched}:
            members = range(number * node, min(number * node + node, ranks))
            # Without a network, ranks do not depend on the others of their node.
            sent = {r: self._messages(divided, r) for r in (members if node < ranks else watched)}
            far = [m.nbytes for some in sent.values() for m in some if m.peer // node != number]
            for rank, messages in sent.items():
                exchange_us = max(exchange_us, self._exchange_us(rank, messages, node, sum(far)))
                others = [message.nbytes for message in messages if message.peer != rank]
                busiest = max(busiest, (sum(others), len(others)))
        sharers = min(self.gpu_ranks, ranks) if self.on_gpu else 1
        stencil_us = self.stencil * 1e-3 * math.prod(block) * sharers
        reduction_us = self.reductions * self._reduction_us(ranks, math.ceil(ranks / node))
        inner = [max(n - sum(width), 0) for n, width in zip(block, self.halo, strict=True)]
        inner_us = stencil_us * math.prod(inner) / math.prod(block) if self.overlap else 0.0
        # With overlap the rims follow the exchange.
        step_us = max(inner_us, exchange_us) + stencil_us - inner_us + reduction_us
        if self.on_gpu and not self.graph:
            step_us = max(
                step_us, CALL_US * (self.reductions + (stencil_us > 0) + (exchange_us > 0))
            )
        times = stencil_us, exchange_us, reduction_us, step_us
        row = ranks, divided.proc_shape, block, busiest[1], busiest[0], *map(float, times)
        return dict(zip(_COLUMNS.split(), row, strict=True))

    def _messages(self, divided: Decomposition, rank: int) -> Sequence[Message]:
        read = []
        for dtype, spec in self.specs:
            layout = FieldLayout(divided, rank, spec)
            shape = layout.padded_shape
            strides = tuple(accumulate(shape[:0:-1], mul, initial=dtype.itemsize))[::-1]
            place = 0 if self.on_gpu else None, True
            read.append((Described(0, shape, strides, dtype, *place), layout))
        return halo_draft((None,) * len(read), read, operation="copy", corners=self.corners).sends

    def _exchange_us(self, rank: int, sent: Sequence[Message], node: int, shared: int) -> float:
        """Return the time of a rank's messages to itself, its node and other nodes; ``shared`` bytes leave the node."""
        known, copy = self.costs.protocols, self.costs.protocols["local/copy"]
        own = [message for message in sent if message.peer == rank]
        far = [message for message in sent if message.peer // node != rank // node]
        others = [m for m in sent if m.peer != rank and m.peer // node == rank // node]
        near = [(message, self._near_cost(message)) for message in others]
        us = self._bytes_us(copy, own) + sum(self._bytes_us(cost, [m]) for m, cost in near)
        us += sum(sorted(cost.message_us for _, cost in near)[1:])
        # Copies travel with messages to other ranks, if there are any.
        alone = copy.latency_us if own and not far else 0.0
        us += max((cost.latency_us for _, cost in near), default=alone)
        if not far:
            return us
        if self.network is None:
            raise HaloxError(
                f"node_ranks={self.node_ranks} makes several nodes; give network=(us, GB/s), such as network=(5, 25)"
            )
        cost = known["nccl/packed" if self.on_gpu else "host/shared"]
        us += self.network[0] + cost.latency_us + (len(far) - 1) * cost.message_us
        # The slower of packing and of the network, which the ranks of a node share.
        return us + max(self._bytes_us(cost, far), shared / (self.network[1] * 1e3))

    def _near_cost(self, message: Message) -> ProtocolCost:
        """Return the constants of the protocol that a message takes on a node."""
        if self.link is not None:
            return ProtocolCost(float(self.link[0]), 0.0, (float(self.link[1]),) * len(RUN_BYTES))
        known, shared = self.costs.protocols, self.gpu_ranks > 1
        if not self.on_gpu:
            return known["host/direct" if message.block_bytes >= DIRECT_BYTES else "host/shared"]
        path = PATHS["ipc" if shared else "peer"]
        offers = [Candidate(path.name, protocol.name, "") for protocol in path.protocols]
        best = self.costs.best(offers, message.nbytes, message.row_bytes, shared_gpu=shared)
        return known[protocol_name(best.path, best.protocol, shared)]

    def _bytes_us(self, cost: ProtocolCost, messages: Sequence[Message]) -> float:
        """Return the time of the messages' bytes, without latencies, by the block length of each part."""
        parts = [Message(m.peer, "send", (part,)) for m in messages for part in m.parts]
        blocks = [(p.nbytes, p.row_bytes if self.on_gpu else p.block_bytes) for p in parts]
        return sum(cost.us(*block) - cost.latency_us for block in blocks)

    def _reduction_us(self, ranks: int, nodes: int) -> float:
        """Return the time of the sum of one number over the ranks."""
        names: Sequence[str] = algorithms.HOST_ALGORITHMS
        if not self.on_gpu:
            return min(algorithms.predict_us(name, 8, ranks, nodes) for name in names)
        names, sharers = algorithms.DEVICE_ALGORITHMS, self.gpu_ranks
        if nodes > 1:  # NCCL refuses ranks that share a GPU
            names = names[-1:] if sharers > 1 else names[-2:]
        else:
            names = ("shared_buffer", "binomial", "host") if sharers > 1 else names[:2]
        return min(
            algorithms.predict_device_us(name, 8, ranks, nodes, sharers=sharers) for name in names
        )


def constants(grid: Any) -> Costs:
    """Return the constants of a grid's ranks; collective on GPUs."""
    costs: Costs = grid.domain.context.once(costs_of) if grid.device == "gpu" else HOST_COSTS
    return costs


def predict(
    grid: Any, ranks: object, fields: Sequence[Any], costs: Costs, /, **options: Any
) -> list[dict[str, Any]]:
    """Predict steps of fields or dtypes with the constants of a machine; see `halox.Grid.predict`."""
    try:
        dtypes = [
            np.dtype(field if isinstance(field, type) else getattr(field, "dtype", field))
            for field in fields
        ]
    except TypeError as error:
        raise FieldError(f"a field is neither an array of the grid nor a dtype: {error}") from error
    # NumPy's dtypes and scalar types have a shape, too.
    are_arrays = [hasattr(f, "shape") and not isinstance(f, np.dtype | type) for f in fields]
    layouts = [
        grid.layout(field) if is_array else grid.domain.plain
        for field, is_array in zip(fields, are_arrays, strict=True)
    ]
    specs = [(dtype, layout.spec) for dtype, layout in zip(dtypes, layouts, strict=True)]
    setup = grid.domain.decomposition, grid.halo, specs, grid.corners, grid.device == "gpu", costs
    known = list(Model.__dataclass_fields__)[len(setup) :]
    if unknown := sorted(options.keys() - {*known}):
        raise HaloxError(f"unknown option(s) {unknown}; options are {', '.join(known)}")
    model = Model(*setup, **options)
    whole = as_int(ranks)
    numbers = [as_int(each) or 0 for each in ([ranks] if whole else as_list(ranks) or [])]
    if not numbers or min(numbers) < 1:
        raise HaloxError(f"ranks must be an int >= 1, or a list of them, got {shown(ranks)}")
    if whole:
        given = normalise_proc_shape(model.proc_shape, len(grid.grid_shape)) or ()
        least = math.prod(n for n in given if n)
        powers = (1 << n for n in range((whole - 1).bit_length()))
        numbers = [*(power for power in powers if power % least == 0), whole]
    # The largest number first: if it is too large, the error comes at once.
    steps = {number: model.fastest(number) for number in sorted({*numbers}, reverse=True)}
    rows = [steps[number] for number in numbers]
    for row in rows:
        whole_us = rows[0]["step_us"] * (1.0 if model.weak else rows[0]["ranks"] / row["ranks"])
        row["efficiency"] = whole_us / row["step_us"] if row["stencil_us"] else None
    return rows
