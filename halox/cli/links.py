"""``halox info --check``: rates of links between ranks beside the rates of their kinds, and causes of slow links."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import halox
from halox import datatypes
from halox.cli import info, report
from halox.cli.info import Machine
from halox.errors import ExchangeTimeoutError, HaloxError
from halox.exchange.measuring import exchange_us
from halox.runtime import cross_memory
from halox.runtime.gpu.devices import array_module, choose_device
from halox.runtime.status import ranks_text
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

LIMIT_S = 6.0
"""Limit for measuring, in seconds; the start of the ranks takes additional time."""

FAR_BELOW = 0.5
"""Share of the expected rate below which a link is slow."""

_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 27
_EXCHANGE_US = 3000.0  # intended time of an exchange
_SHARED_BYTES = 64 << 20  # for each rank
_MEASURING = "the check of links"
_CORES = "fewer cores than ranks; bind each rank to its own core (mpiexec --bind-to core, srun --cpu-bind=cores)"
_SOCKET = "none of the rank's cores is near its GPU; bind by NUMA node (mpiexec --map-by numa, srun --gpu-bind=closest)"
_SHARED = "less than 64 MiB free for each rank; docker run --shm-size=8g"
_NOT_LOADED = (
    "the MPI library has not loaded libibverbs; take the machine's, or one with UCX or libfabric"
)
_NOT_USED = (
    "unset OMPI_MCA_pml, OMPI_MCA_btl and UCX_TLS; UCX_NET_DEVICES and NCCL_IB_HCA choose adapters"
)
_REMEDIES = {
    "network": "OMPI_MCA_btl_tcp_if_include and NCCL_SOCKET_IFNAME choose the interface",
    "NVLink": "`nvidia-smi nvlink -e` counts errors of links",
    "PCIe": "`nvidia-smi -q -d PERFORMANCE` shows throttling",
}
_BUSY = "other programs may use the cores or the GPU; repeat the check without them"

Pair = tuple[int, int]


class Link(NamedTuple):
    """Link between two ranks: GB/s of each direction while both send, and of a copy in memory while both copy.

    ``why_not`` has reasons against other paths; ``error`` is the reason if no exchange works. An unknown rate is 0.
    """

    ranks: Pair
    rate: float = 0.0
    copied: float = 0.0
    path: str = ""
    why_not: Mapping[str, str] = {}
    error: str = ""
    kind: str = ""
    expected: float = 0.0
    source: str = ""

    @property
    def ratio(self) -> float:
        """Share of the expected rate; 1 if it is unknown, 0 after an error."""
        return 0.0 if self.error else self.rate / (self.expected or self.rate)


def show(comm: MPI.Intracomm, *, as_json: bool, root: Path = Path("/sys")) -> int:
    """Print kinds of links and findings on rank 0; return 1 if a link is slow, else 0; collective."""
    if comm.size < 2:
        raise HaloxError("halox info --check needs 2 or more ranks, got 1; add -n 2")
    begin, world = time.monotonic(), World(comm, "tune")
    device = world.guarded(lambda: choose_device("auto", world.turn), "the choice of GPUs")
    find = partial(info.machine, device, root, asks_nvlinks=world.machine_rank == 0)
    machines: list[Machine] = world.gather_result(find, _MEASURING)
    refused = cross_memory.survey(world).refused
    measured, cut_short = measure(world, [m.gpu for m in machines], device, begin + LIMIT_S)
    world.close()
    links = sorted((judge(each, world.nodes, machines) for each in measured), key=lambda x: x.ratio)
    figures: dict[str, Any] = {"ranks": comm.size, "cut_short": cut_short, "rows": table(links)}
    figures["findings"] = findings(links, machines, refused)
    figures["seconds"] = round(time.monotonic() - begin, 1)
    if comm.rank == 0:
        print(report.as_json(figures) if as_json else report.as_text(figures), flush=True)
    return int(any(link.ratio < FAR_BELOW for link in links))


def rounds(nodes: Sequence[int], gpus: Sequence[str]) -> list[list[Pair]]:
    """Return pairs of ranks to measure at the same time, at most one of each node.

    The pairs are neighbours in the order of nodes and GPUs, and in the order of places on nodes. So each rank has a
    partner on its node, on another node, on its GPU and on another GPU, where there are such ranks.
    """
    ranks = range(len(nodes))
    places = [nodes[:rank].count(nodes[rank]) for rank in ranks]
    orders = (
        sorted(ranks, key=lambda rank: (nodes[rank], gpus[rank])),
        sorted(ranks, key=lambda rank: (places[rank], nodes[rank])),
    )
    # Disjoint pairs first, since time may run out.
    pairs = chain(*([*pairwise(order)][start::2] for start in (0, 1) for order in orders))
    busy, found = Counter[int](), dict[int, list[Pair]]()
    for a, b in dict.fromkeys((min(pair), max(pair)) for pair in pairs):
        turn = max(busy[nodes[a]], busy[nodes[b]])
        busy[nodes[a]] = busy[nodes[b]] = turn + 1
        found.setdefault(turn, []).append((a, b))
    return [found[turn] for turn in sorted(found)]


def measure(
    world: World, gpus: Sequence[str], device: int | None, end: float
) -> tuple[list[Link], bool]:
    """Return the measured links, and whether time ran out before all were measured; collective."""
    links, is_over = [], False
    for number, pairs in enumerate(rounds(world.nodes, gpus)):
        is_over = any(world.gather(time.monotonic() > end, _MEASURING))
        if is_over:
            break
        for pair in pairs:
            if world.rank in pair:
                both = world.comm.Create_group(world.comm.group.Incl(pair), number)
                link = _measured(both, pair, device)
                both.Free()
                links += [link] if world.rank == pair[0] else []
    return [*chain(*world.gather(links, _MEASURING))], is_over


def _measured(comm: MPI.Intracomm, ranks: Pair, device: int | None) -> Link:
    """Measure contiguous messages in both directions; collective over the two ranks."""
    xp, peer, world, nbytes = array_module(device), 1 - comm.rank, World(comm, "tune"), _FIRST_BYTES

    def rate(call: Callable[[], None]) -> float:
        return nbytes / exchange_us(world, call, 3, device, rows=3) / 1e3

    try:
        for _ in range(2):  # the first time finds the size for the second
            a, b = world.guarded(partial(xp.ones, (2, nbytes // 8)), _MEASURING)
            whole = datatypes.contiguous(nbytes // 8, "f8")
            sends, receives = [halox.Send(a, whole, peer)], [halox.Recv(b, whole, peer)]
            with halox.Exchange(sends, receives, comm=comm) as exchange:
                row, speed = exchange.explain().rows[0], rate(exchange)
            copied = rate(partial(xp.copyto, b, a))
            nbytes = int(min(max(speed * 1e3 * _EXCHANGE_US, nbytes), _MOST_BYTES)) // 8 * 8
        return Link(ranks, speed, copied, f"{row.path}/{row.protocol}", row.why_not)
    except ExchangeTimeoutError:
        raise
    except HaloxError as error:
        return Link(ranks, error=str(error))
    finally:
        world.close()


def judge(link: Link, nodes: Sequence[int], machines: Sequence[Machine]) -> Link:
    """Return a link with its kind and the expected rate, the rate of the slower end.

    Messages on one GPU, or of NumPy arrays on one node, are copied twice, so that half the rate of a copy is expected.
    """
    a, b = (machines[rank] for rank in link.ranks)
    kind, expected, source = "shared memory", link.copied / 2, "two copies"
    if nodes[link.ranks[0]] != nodes[link.ranks[1]]:
        kind, (expected, source) = "network", min(a.network, b.network)
    elif a.gpu and a.gpu == b.gpu:
        kind = "same GPU"
    elif a.gpu and b.gpu:
        nvlink = max(m.nvlink.get((a.gpu, b.gpu), 0) for m in machines if m.host == a.host)
        kind = source = "NVLink" if nvlink else "PCIe"
        expected = nvlink or min(a.pcie, b.pcie)
    return link._replace(kind=kind, expected=expected, source=source)


def table(links: Sequence[Link]) -> list[dict[str, object]]:
    """Return a row for each kind of link; ``links`` are sorted by their share of the expected rate."""
    rows = []
    for kind in dict.fromkeys(link.kind for link in links):
        alike = [link for link in links if link.kind == kind]
        row: dict[str, object] = {"link": kind, "pairs": len(alike)}
        for name, link in ("slowest", alike[0]), ("fastest", alike[-1]):
            row |= {name: "{}-{}".format(*link.ranks), f"{name}_GB/s": link.rate}
        row |= {"median_GB/s": median(link.rate for link in alike), "by": alike[0].path}
        rows.append(
            row
            | {
                "expected_GB/s": alike[0].expected or None,
                "ratio": alike[0].ratio if alike[0].expected else None,
            }
        )
    return rows


def findings(
    links: Sequence[Link], machines: Sequence[Machine], refused: Mapping[Pair, str]
) -> list[str]:
    """Return a line for each cause of slow links and of detours, with the ranks, or with its slowest link."""
    sharers, hosts = Counter((m.host, m.cores) for m in machines), Counter(m.host for m in machines)
    found: dict[str, list[str]] = {}
    for link in links:
        ends, is_far = [machines[rank] for rank in link.ranks], link.kind == "network"
        is_slow, is_staged = link.ratio < FAR_BELOW, link.path.startswith("staged/")
        if link.error:
            cause, why = "failed exchange", link.error
        elif is_slow and is_far and all(end.has_rdma for end in ends):
            is_loaded = all(end.loads_rdma for end in ends)
            cause, why = "TCP in place of RDMA", _NOT_USED if is_loaded else _NOT_LOADED
        elif is_staged:
            cause = "staged copies" if is_far else "missing peer access"
            why = link.why_not.get("nccl" if is_far else "peer", "")
        elif is_slow:
            cause, why = f"slow {link.kind}", _REMEDIES.get(link.kind, _BUSY)
        else:
            continue
        rates = f"{link.rate:.3g} GB/s by {link.path}, {link.ratio:.0%} of {link.expected:.3g} ({link.source})"
        found.setdefault(cause, []).append(f"{ranks_text(link.ranks)}: {rates}: {why}")
    lines = [
        f"{cause}, {texts[0]}" + (f" (and {len(texts) - 1} more pairs)" if texts[1:] else "")
        for cause, texts in found.items()
    ]
    conditions: list[tuple[str, Callable[[Machine], bool], str]] = [
        ("oversubscribed cores", lambda m: sharers[m.host, m.cores] > len(m.cores), _CORES),
        (
            "GPU behind another socket",
            lambda m: bool(m.numa) and -1 < m.gpu_numa not in m.numa,
            _SOCKET,
        ),
        ("small /dev/shm", lambda m: m.shared_bytes < hosts[m.host] * _SHARED_BYTES, _SHARED),
    ]
    for cause, holds, why in conditions:
        ranks = [rank for rank, m in enumerate(machines) if holds(m)]
        lines += [f"{cause}, {ranks_text(ranks)}: {why}"] if ranks else []
    return lines + [f"no cross-memory attach: {why}" for why in [*refused.values()][:1]]
