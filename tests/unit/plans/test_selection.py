"""Selection of paths: both ends of a message choose the same protocol, for the documented reasons."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from halox.datatypes import StridedBlocks
from halox.errors import PathError
from halox.paths import PATHS
from halox.paths.base import EndpointInfo, MessageEnds, Route, SelectionContext
from halox.paths.costs import RUN_BYTES, ProtocolCost
from halox.paths.host import DIRECT_BYTES
from halox.paths.host.direct import SharedParts
from halox.paths.peer import PeerInfo
from halox.plans.costs import Costs
from halox.plans.selection import candidates, choose_route
from halox.runtime.segments import Place
from halox.runtime.topology import Topology


def shared_parts(block: int) -> SharedParts:
    return SharedParts((Place((0, 0)),), (StridedBlocks(0, (8,), (2 * block,), block),))


def end(
    node: int = 0, memory: str = "host", block: int = 4096, shared: bool = True
) -> EndpointInfo:
    paths: dict[str, Any] = {}
    if memory == "gpu":
        paths["peer"] = PeerInfo(1, None, None)
    elif shared:
        paths["host"] = shared_parts(block)
    return EndpointInfo(node, memory, block, (), paths=paths)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sender", "receiver", "path", "protocol"),
    [
        (end(), end(), "host", "direct"),
        (end(block=DIRECT_BYTES), end(block=DIRECT_BYTES), "host", "direct"),
        (end(block=DIRECT_BYTES - 8), end(block=DIRECT_BYTES - 8), "host", "shared"),
        (end(shared=False), end(), "host", "shared"),
        (end(), end(shared=False), "host", "shared"),
        (end(node=0), end(node=1), "host", "mpi"),
        (end(memory="gpu", shared=False), end(memory="gpu", shared=False), "staged", "shared"),
        (end(memory="gpu", shared=False), end(shared=False), "staged", "shared"),
        (end(0, "gpu", shared=False), end(1, "gpu", shared=False), "staged", "mpi"),
        (end(block=512), end(block=1024), "host", "shared"),  # the blocks of both ends differ
    ],
)
def test_routes(sender: EndpointInfo, receiver: EndpointInfo, path: str, protocol: str) -> None:
    route = choose_route(sender, receiver, to_self=False, selection=SelectionContext())
    assert (route.path, route.protocol) == (path, protocol) and route.reason


def test_to_self_is_local_and_accumulate_never_reads_in_place() -> None:
    assert choose_route(end(), end(), to_self=True, selection=SelectionContext()).path == "local"
    adding = SelectionContext("add")
    assert choose_route(end(), end(), to_self=False, selection=adding).protocol == "shared"


# Arrays on GPUs

FACE = StridedBlocks(0, (16, 16), (2048, 64), 8)


def on_gpu(rank: int, **said: Any) -> EndpointInfo:
    """Return an end in device memory that peers can map: 256 runs of 8 bytes."""
    place = Place((f"arena {rank}", 0))
    plain: dict[str, Any] = {
        "word_bytes": 8,
        "places": (place,),
        "layouts": (FACE,),
    }
    peer = plain | {name: value for name, value in said.items() if name in plain}
    paths: dict[str, Any] = {"peer": PeerInfo(**peer), "nccl": said.get("runs", (False,))}
    if said.get("is_contiguous"):
        paths["ipc"] = True
    nbytes, block = said.get("nbytes", 2048), said.get("block_bytes", 8)
    return EndpointInfo(said.get("node", 0), "gpu", block, (), rank, nbytes, paths)


def two_gpus(gpus: Any = (1, 2), nodes: Any = (0, 0), **said: Any) -> Topology:
    """Return a node of two ranks, each with its own GPU; each GPU can map the other's memory."""
    return Topology(np.array(gpus), np.array(nodes), **({"unmapped": {}} | said))


def named(found: Any) -> set[str]:
    return {f"{one.path}/{one.protocol}" for one in found}


PEER = {"peer/staging", "peer/ll", "peer/direct"}
STAGING = {"peer/staging", "ipc/staging", "staged/shared"}
LL = STAGING | {"peer/ll"}
ALL = PEER | STAGING
TWO_NODES: dict[str, Any] = {"topology": {"nodes": (0, 1)}, "receiver": {"node": 1}}
NCCL: dict[str, Any] = TWO_NODES | {"surveys": {"nccl": None}}


def between_nodes(runs: tuple[Any, Any], nbytes: int) -> dict[str, Any]:
    """Return two ends on nodes with NCCL; ``runs`` says which of their parts are contiguous."""
    sender, receiver = ({"runs": each, "nbytes": nbytes} for each in runs)
    return NCCL | {"sender": sender, "receiver": receiver | {"node": 1}}


# For each situation: endpoints, GPUs and operation; the possible protocols.
POSSIBLE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "all is well": ({}, ALL),
    "MPI takes device pointers": ({"surveys": {"cuda_aware": None}}, ALL | {"cuda_aware/mpi"}),
    "the sender has short words": ({"sender": {"word_bytes": 2}}, ALL - {"peer/ll"}),
    "the receiver has short words": ({"receiver": {"word_bytes": 1}}, ALL - {"peer/ll"}),
    "the receiver's array cannot be mapped": ({"receiver": {"places": None}}, LL),
    "the sender's array cannot be mapped": ({"sender": {"places": None}}, ALL),
    "the sender's type is irregular": ({"sender": {"layouts": None}}, LL),
    "the receiver's type is irregular": ({"receiver": {"layouts": None}}, LL),
    "what arrives is added": (
        {"operation": "add", "sender": {"is_contiguous": True}},
        LL,
    ),
    "the receiver is contiguous": ({"receiver": {"is_contiguous": True}}, ALL | {"ipc/put"}),
    "the sender is contiguous": ({"sender": {"is_contiguous": True}}, ALL | {"ipc/get"}),
    "both share a GPU": ({"topology": {"gpus": (1, 1)}}, STAGING - {"peer/staging"}),
    "another rank shares the receiver's GPU": (
        {"topology": {"gpus": (1, 2, 2), "nodes": (0, 0, 0)}},
        STAGING - {"peer/staging"},
    ),
    "the sender cannot map the receiver's memory": (
        {"topology": {"unmapped": {(0, 1): "no peer access"}}},
        {"staged/shared"},
    ),
    "the receiver cannot map the sender's memory": (
        {"topology": {"unmapped": {(1, 0): "another container"}}},
        {"staged/shared"},
    ),
    "streams cannot wait for events": (
        {"topology": {"no_events": {(1, 0): "no such events"}}},
        PEER | {"staged/shared"},
    ),
    "other nodes": (TWO_NODES, {"staged/mpi"}),
    "other nodes, and MPI takes device pointers": (
        TWO_NODES | {"surveys": {"cuda_aware": None}},
        {"staged/mpi", "cuda_aware/mpi"},
    ),
    "other nodes, and NCCL": (NCCL, {"staged/mpi", "nccl/packed"}),
    "other nodes, and another NCCL": (
        TWO_NODES | {"surveys": {"nccl": "rank 1 has another"}},
        {"staged/mpi"},
    ),
    "NCCL, contiguous at either end": (
        between_nodes(((True,), (False,)), 1 << 20),
        {"staged/mpi", "nccl/packed", "nccl/parts"},
    ),
    "NCCL, short parts": (
        between_nodes(((True, True), (False, True)), 2048),
        {"staged/mpi", "nccl/packed"},
    ),
    "NCCL, long parts": (
        between_nodes(((True, False), (False, True)), 1 << 21),
        {"staged/mpi", "nccl/packed", "nccl/parts"},
    ),
    "NCCL, parts that are strided at both ends": (
        between_nodes(((True, False), (True, False)), 1 << 21),
        {"staged/mpi", "nccl/packed"},
    ),
    "nobody knows the GPUs": ({"topology": None}, {"staged/shared"}),
}


def situation(name: str) -> tuple[EndpointInfo, EndpointInfo, SelectionContext]:
    """Return both ends of a message and the selection inputs."""
    said = POSSIBLE[name][0]
    topology = said.get("topology", {})
    selection = SelectionContext(
        topology=None if topology is None else two_gpus(**topology),
        **{k: v for k, v in said.items() if k in ("operation", "surveys")},
    )
    return on_gpu(0, **said.get("sender", {})), on_gpu(1, **said.get("receiver", {})), selection


@pytest.mark.parametrize("name", POSSIBLE)
def test_possible_protocols(name: str) -> None:
    """Every possible protocol and every impossible path has a reason."""
    wanted = POSSIBLE[name][1]
    possible, impossible = candidates(MessageEnds(*situation(name)))
    assert named(possible) == wanted and len(possible) == len(wanted)
    assert all(one.reason for one in possible) and all(impossible.values())
    between_ranks = {path for path, one in PATHS.items() if not one.to_self}
    assert {one.path for one in possible} | {*impossible} == between_ranks
    assert {one.path for one in possible}.isdisjoint(impossible)


def test_reasons_come_from_the_surveys() -> None:
    for name, path, reason in (
        ("the sender cannot map the receiver's memory", "peer", "no peer access"),
        ("the receiver cannot map the sender's memory", "ipc", "another container"),
        ("streams cannot wait for events", "ipc", "no such events"),
        ("other nodes, and another NCCL", "nccl", "rank 1 has another"),
        ("another rank shares the receiver's GPU", "peer", "rank 1 shares its GPU with rank 2"),
    ):
        assert reason in candidates(MessageEnds(*situation(name)))[1][path]


@pytest.mark.parametrize("name", POSSIBLE)
def test_both_ends_choose_alike(name: str) -> None:
    """Each end has its own description, and a pickled copy of the other's."""
    sender, receiver, selection = situation(name)
    copies = pickle.loads(pickle.dumps((sender, receiver, selection)))
    at_sender = choose_route(sender, copies[1], to_self=False, selection=selection)
    at_receiver = choose_route(copies[0], receiver, to_self=False, selection=copies[2])
    assert at_sender == at_receiver
    assert f"{at_sender.path}/{at_sender.protocol}" in POSSIBLE[name][1]


@pytest.mark.parametrize("name", POSSIBLE)
def test_wishes(name: str) -> None:
    """The requested path is chosen, or the error names the possible protocols."""
    ends, possible = situation(name), POSSIBLE[name][1]
    for requested in ("peer", *PEER, "ipc", "ipc/put", "ipc/get", "staged", "cuda_aware", "host"):
        fitting = {way for way in possible if requested in (way, way.partition("/")[0])}

        def choose(requested: str = requested) -> Route:
            return choose_route(*ends[:2], to_self=False, selection=ends[2], requested=requested)

        if fitting:
            assert f"{choose().path}/{choose().protocol}" in fitting
            continue
        with pytest.raises(PathError) as caught:
            choose()
        assert repr(requested) in str(caught.value)
        assert all(way in str(caught.value) for way in possible)


# Costs

NAMES = ("peer/ll", "peer/staging", "peer/direct", "ipc/staging", "staged/shared")


def costs_where(**latencies: float) -> Costs:
    """Return equal costs for all protocols in `NAMES`, except for the latencies."""
    speed = (100.0,) * len(RUN_BYTES)
    return Costs(
        {n: ProtocolCost(latencies.get(n.replace("/", "_"), 50.0), 0, speed) for n in NAMES}, ""
    )


@pytest.mark.parametrize("cheapest", NAMES)
def test_the_cheapest_is_taken(cheapest: str) -> None:
    costs = costs_where(**{cheapest.replace("/", "_"): 3.0})
    route = chosen("all is well", costs)
    assert f"{route.path}/{route.protocol}" == cheapest
    assert route.predicted_us == pytest.approx(3.0 + 2048 / 100e3)
    if not cheapest.startswith("peer"):
        assert chosen("all is well", costs, requested="peer").path == "peer"


def chosen(name: str, costs: Costs | None = None, **more: Any) -> Route:
    sender, receiver, selection = situation(name)
    return choose_route(sender, receiver, to_self=False, selection=selection, costs=costs, **more)


def test_size_and_runs_decide_between_the_ways_of_peer() -> None:
    """Small messages choose by latency, large ones by bandwidth, which depends on the length of runs."""
    low, high = (10.0, 10.0, 10.0, 10.0), (2.0, 5.0, 50.0, 400.0)
    costs = Costs(
        {
            "peer/ll": ProtocolCost(2.0, 0, low),
            "peer/staging": ProtocolCost(5.0, 0, (80.0, 90.0, 100.0, 100.0)),
            "peer/direct": ProtocolCost(6.0, 0, high),
        },
        "made up",
    )
    selection = SelectionContext(topology=two_gpus())

    def way(nbytes: int, runs: tuple[int, int]) -> str:
        ends = [on_gpu(r, nbytes=nbytes, block_bytes=runs[r]) for r in range(2)]
        return choose_route(
            *ends, to_self=False, selection=selection, costs=costs, requested="peer"
        ).protocol

    assert way(64, (8, 8)) == way(64, (4096, 4096)) == "ll"
    assert way(1 << 20, (8, 8)) == "staging"
    assert way(1 << 20, (4096, 4096)) == "direct"
    # The shorter runs of both ends decide.
    assert way(1 << 20, (8, 4096)) == way(1 << 20, (4096, 8)) == "staging"


def test_ranks_that_share_a_gpu_have_costs_of_their_own() -> None:
    speed = (100.0,) * len(RUN_BYTES)
    costs = Costs(
        {
            "ipc/staging": ProtocolCost(1.0, 0, speed),
            "staged/shared": ProtocolCost(2.0, 0, speed),
            "ipc/staging, shared GPU": ProtocolCost(20.0, 0, speed),
            "staged/shared, shared GPU": ProtocolCost(10.0, 0, speed),
        },
        "made up",
    )
    for name, path in (("both share a GPU", "staged"), ("all is well", "ipc")):
        assert chosen(name, costs).path == path


def test_the_shipped_constants_prefer_the_gpu() -> None:
    for name, path in (
        ("all is well", "peer"),
        ("both share a GPU", "ipc"),
        ("other nodes, and NCCL", "nccl"),
    ):
        for nbytes in (8, 1 << 12, 1 << 20, 1 << 26):
            *ends, selection = situation(name)
            ends = [replace(end, nbytes=nbytes) for end in ends]
            route = choose_route(*ends, to_self=False, selection=selection)
            assert route.path == path, (name, nbytes)


# Names
