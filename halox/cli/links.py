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
from halox.errors import ExchangeTimeoutError, HaloxError
from halox.plans.measuring import exchange_us
from halox.runtime import cross_memory
from halox.runtime.gpu.devices import array_module, choose_device
from halox.runtime.status import ranks_text
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

LIMIT_S = 6.0  # for measuring; the start of the ranks takes additional time
FAR_BELOW = 1 / 3  # of the expected rate
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 27
_EXCHANGE_US = 3000.0  # intended time of an exchange
_SHARED_BYTES = 64 << 20  # for each rank
_MEASURING = "the check of links"
_REMEDIES = {
    "TCP in place of RDMA": "no libibverbs is loaded; use the machine's MPI, or one with UCX or libfabric",
    "unused adapter": "unset OMPI_MCA_pml, OMPI_MCA_btl, UCX_TLS; UCX_NET_DEVICES, NCCL_IB_HCA name adapters",
    "staged copies": "another path is possible; unset HALOX_PATH, or run halox tune again",
    "slow network": "OMPI_MCA_btl_tcp_if_include and NCCL_SOCKET_IFNAME choose the interface",
    "slow NVLink": "`nvidia-smi nvlink -e` counts errors of links",
    "slow PCIe": "`nvidia-smi -q -d PERFORMANCE` shows throttling",
    "oversubscribed cores": "give each rank its own core (fewer ranks, or mpiexec --bind-to core)",
    "GPU behind another socket": "bind ranks near their GPUs (mpiexec --map-by numa, srun --gpu-bind=closest)",
    "small /dev/shm": "less than 64 MiB are free for each rank; docker run --shm-size=8g",
}
_BUSY = "other programs may use the cores or the GPU; repeat the check without them"

Pair = tuple[int, int]


class Link(NamedTuple):
    """Link between two ranks; rates are GB/s of each direction while both ranks send, 0 if unknown.

    ``why_not`` has reasons against other paths; ``error`` is the reason if no exchange works.
    """

    ranks: Pair
    rate: float = 0.0
    expected: float = 0.0
    path: str = ""
    why_not: Mapping[str, str] = {}
    error: str = ""
    kind: str = "shared memory"
    source: str = "two copies"

    @property
    def ratio(self) -> float:
        """Share of the expected rate; 1 if it is unknown, 0 after an error."""
        return 0.0 if self.error else self.rate / (self.expected or self.rate)


def show(comm: MPI.Intracomm, *, as_json: bool, root: Path = Path("/sys")) -> int:
    """Print kinds of links and findings on rank 0; return 1 if a link is slow, else 0; collective."""
    if comm.size < 2:
        raise HaloxError("halox info --check needs 2 or more ranks, got 1; add -n 2")
    begin, world = time.monotonic(), World(comm, "tune")
    device = world.attempt(lambda: choose_device("auto", world.turn), "the choice of GPUs")
    find = partial(info.machine, device, root, asks_nvlinks=world.machine_rank == 0)
    machines: list[info.Machine] = [*world.gather(lambda: (None, find()), _MEASURING)[1]]
    refused = cross_memory.survey(world).refused
    measured, cut_short = measure(world, [m.gpu for m in machines], device, begin + LIMIT_S)
    world.close()
    links = sorted(
        (judge(each, world.nodes, machines) for each in measured), key=lambda x: (x.ratio, x.rate)
    )
    figures: dict[str, Any] = {"ranks": comm.size, "cut_short": cut_short, "rows": table(links)}
    figures["findings"] = findings(links, machines, refused)
    figures["seconds"] = round(time.monotonic() - begin, 1)
    if comm.rank == 0:
        print(report.as_json(figures) if as_json else report.as_text(figures), flush=True)
    return int(any(link.ratio < FAR_BELOW for link in links))


def rounds(nodes: Sequence[int], gpus: Sequence[str]) -> list[list[Pair]]:
    """Return pairs of ranks to measure at the same time, at most one of each node.

    Pairs on a node are neighbours in the order of GPUs; other pairs are neighbours in the order of places on nodes.
    """
    ranks = range(len(nodes))
    places = [nodes[:rank].count(nodes[rank]) for rank in ranks]
    near = pairwise(sorted(ranks, key=lambda rank: (nodes[rank], gpus[rank])))
    far = pairwise(sorted(ranks, key=lambda rank: (places[rank], nodes[rank])))
    parts = (
        [(a, b) for a, b in near if nodes[a] == nodes[b]],
        [(a, b) for a, b in far if nodes[a] != nodes[b]],
    )
    # Disjoint pairs first, since time may run out.
    pairs = chain(*(part[start::2] for start in (0, 1) for part in parts))
    busy, found = Counter[int](), dict[int, list[Pair]]()
    for a, b in pairs:
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
        is_over = any(world.gather(lambda: (None, time.monotonic() > end), _MEASURING)[1].distinct)
        if is_over:
            break
        for pair in (pair for pair in pairs if world.rank in pair):
            both = world.comm.Create_group(world.comm.group.Incl(pair), number)
            links.append(_measured(both, pair, device))
            both.Free()
    own = [link for link in links if link.ranks[0] == world.rank]
    _, gathered = world.gather(lambda: (None, own), _MEASURING)
    return [*chain(*gathered)], is_over


def _measured(comm: MPI.Intracomm, ranks: Pair, device: int | None) -> Link:
    """Measure contiguous messages in both directions; collective over the two ranks."""
    xp, peer, world, nbytes = array_module(device), 1 - comm.rank, World(comm, "tune"), _FIRST_BYTES

    def rate(call: Callable[[], None]) -> float:
        return nbytes / exchange_us(world, call, 3, device, rows=3) / 1e3

    try:
        for _ in range(2):  # the first time finds the size for the second
            a, b = world.attempt(partial(xp.ones, (2, nbytes // 8)), _MEASURING)
            whole = datatypes.contiguous(nbytes // 8, "f8")
            sends, receives = [halox.Send(a, whole, peer)], [halox.Recv(b, whole, peer)]
            with halox.Exchange(sends, receives, comm=comm) as exchange:
                row, speed = exchange.explain().rows[0], rate(exchange)
            # Messages on one GPU, or of NumPy arrays on one node, are copied twice.
            expected = rate(partial(xp.copyto, b, a)) / 2
            nbytes = int(min(max(speed * 1e3 * _EXCHANGE_US, nbytes), _MOST_BYTES)) // 8 * 8
        return Link(ranks, speed, expected, f"{row.path}/{row.protocol}", row.why_not)
    except ExchangeTimeoutError:
        raise
    except HaloxError as error:
        return Link(ranks, error=str(error))
    finally:
        world.close()


def judge(link: Link, nodes: Sequence[int], machines: Sequence[info.Machine]) -> Link:
    """Return a link with its kind and the expected rate; the slower end counts."""
    a, b = (machines[rank] for rank in link.ranks)
    if nodes[link.ranks[0]] != nodes[link.ranks[1]]:
        expected, source = min(a.network, b.network)
        return link._replace(kind="network", expected=expected, source=source)
    if not (a.gpu and b.gpu):
        return link
    if a.gpu == b.gpu:
        return link._replace(kind="same GPU")
    nvlink = max(m.nvlink.get((a.gpu, b.gpu), 0) for m in machines if m.host == a.host)
    kind = "NVLink" if nvlink else "PCIe"
    return link._replace(kind=kind, source=kind, expected=nvlink or min(a.pcie, b.pcie))


def table(links: Sequence[Link]) -> list[dict[str, object]]:
    """Return a row for each kind of link; ``links`` are sorted by their share of the expected rate."""
    rows = []
    for kind in dict.fromkeys(link.kind for link in links):
        alike = [link for link in links if link.kind == kind]
        row: dict[str, object] = {"link": kind, "pairs": len(alike)}
        for name, link in ("slowest", alike[0]), ("fastest", alike[-1]):
            row |= {name: "{}-{}".format(*link.ranks), f"{name}_GB/s": link.rate}
        row |= {"median_GB/s": median(link.rate for link in alike)}
        expected = alike[0].expected or None
        row |= {"expected_GB/s": expected, "ratio": expected and alike[0].ratio}
        rows.append(row | {"by": alike[0].path})
    return rows


def findings(
    links: Sequence[Link], machines: Sequence[info.Machine], refused: str | None
) -> list[str]:
    """Return a line for each cause of slow links and of detours, with its slowest link or with its ranks."""
    found: dict[str, str] = {}
    for link in links:
        is_slow, is_far = link.ratio < FAR_BELOW, link.kind == "network"
        rdma = [machines[rank].rdma for rank in link.ranks]
        cause, why = f"slow {link.kind}" if is_slow else "", ""
        if link.error:
            cause, why = "failed exchange", link.error
        elif is_slow and is_far and None not in rdma:
            cause = "unused adapter" if all(rdma) else "TCP in place of RDMA"
        elif link.path.startswith("staged/") and link.kind != "shared memory":
            direct = {"network": ("nccl", "cuda_aware"), "same GPU": ("ipc",)}.get(
                link.kind, ("peer",)
            )
            why = "; ".join(link.why_not[path] for path in direct if path in link.why_not)
            cause = "missing peer access" if why and direct == ("peer",) else "staged copies"
        of = f", {link.ratio:.0%} of {link.expected:.3g} ({link.source})" if link.expected else ""
        rate = f"{link.rate:.3g} GB/s by {link.path}{of}: " if link.path else ""
        text = f"{cause}, {ranks_text(link.ranks)}: {rate}{why or _REMEDIES.get(cause, _BUSY)}"
        found.setdefault(cause, text)
    lines = [text for cause, text in found.items() if cause]
    sharers, hosts = Counter((m.host, m.cores) for m in machines), Counter(m.host for m in machines)
    conditions: dict[str, Callable[[info.Machine], bool]] = {
        "oversubscribed cores": lambda m: sharers[m.host, m.cores] > len(m.cores),
        "GPU behind another socket": lambda m: m.is_far,
        "small /dev/shm": lambda m: m.shared_bytes < hosts[m.host] * _SHARED_BYTES,
    }
    for cause, holds in conditions.items():
        ranks = [rank for rank, m in enumerate(machines) if holds(m)]
        lines += [f"{cause}, {ranks_text(ranks)}: {_REMEDIES[cause]}"] if ranks else []
    return lines if refused is None else [*lines, f"no cross-memory attach: {refused}"]
