"""Network adapters of the mlx5 driver (ConnectX, BlueField), accessed by pyverbs, rdma-core's Python package.

The scatter_gather path uses these adapters to gather and scatter blocks of memory by indirect memory keys. pyverbs is
imported on first use. The rest of halox works without pyverbs and without an adapter; `survey` reports the ranks that
lack either.

The values of flags are copied from rdma-core's headers, where they never change; pyverbs moves them between its
modules.

References
----------
rdma-core's manual pages mlx5dv_open_device(3), mlx5dv_create_mkey(3), mlx5dv_create_qp(3), mlx5dv_wr_post(3),
ibv_reg_mr(3) and ibv_modify_qp(3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from halox.errors import MissingPackageError, PathError
from halox.runtime.world import World

PORT = 1
"""Port of an adapter; a device of the mlx5 driver has one port."""

ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE = 1, 2
ACCESS = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE
SEND_SIGNALED, SEND_INLINE = 2, 8
WC_SUCCESS = 0
SEND_DEPTH, RECEIVE_DEPTH = 128, 512
INLINE_BYTES = 512
"""Space in a work request for the entries of the memory key that it maps, 16 bytes per entry."""

_QPT_RC = 2
_HAS_PD, _HAS_SEND_OPS = 1 << 0, 1 << 6
_OPS = (1 << 0) | (1 << 1) | (1 << 7)
"""RDMA write, RDMA write with immediate, and local invalidation of a key."""
_DV_HAS_SEND_OPS = 1 << 2
_DV_OPS = (1 << 0) | (1 << 1)
"""Mapping of keys: interleaved layouts, and lists of buffers."""
_KEY_IS_INDIRECT = 1
_DEVX = 1
_PORT_ACTIVE = 4
_ETHERNET = 2
_ROCE_V2 = 1
_MIN_RNR_TIMER = 12
_RETRY_FOREVER = 7
_ACK_TIMEOUT = 14
"""4.096 us * 2**14: 67 ms before a packet is retransmitted."""

_SURVEYING = "the survey of network adapters"

_INSTALL = "install rdma-core's Python package, python3-pyverbs of your distribution or `pip install pyverbs`"


def verbs() -> Any:
    """Return the pyverbs classes that halox uses, in one namespace; raise `MissingPackageError` without pyverbs."""
    classes: dict[str, Any] = {}
    try:
        for module, names in {
            "addr": ("AHAttr", "GID", "GlobalRoute"),
            "cq": ("CQ",),
            "device": ("get_device_list",),
            "mr": ("MR", "DmaBufMR"),
            "pd": ("PD",),
            "pyverbs_error": ("PyverbsError",),
            "qp": ("QPAttr", "QPCap", "QPInitAttrEx"),
            "wr": ("RecvWR", "SGE"),
            "providers.mlx5.mlx5dv": (
                "Mlx5Context",
                "Mlx5DVContextAttr",
                "Mlx5DVQPInitAttr",
                "Mlx5QP",
            ),
            "providers.mlx5.mlx5dv_mkey": ("Mlx5Mkey", "Mlx5MrInterleaved"),
        }.items():
            loaded = import_module(f"pyverbs.{module}")
            classes |= {name: getattr(loaded, name) for name in names}
    except (ImportError, AttributeError) as error:
        raise MissingPackageError(f"pyverbs cannot be imported ({error}); {_INSTALL}") from error
    return SimpleNamespace(**classes)


class PortAddress(NamedTuple):
    """Address of a port: its local identifier (LID), and its global identifier (GID) if packets are routed by GID."""

    lid: int
    gid: str | None


class QueueAddress(NamedTuple):
    """Address of a queue pair, which its partner needs to connect."""

    port: PortAddress
    number: int


class QueuePair:
    """Reliable connection to one partner, with a separate completion queue."""

    def __init__(self, adapter: Adapter) -> None:
        v, self._adapter = adapter.verbs, adapter
        self.cq = v.CQ(adapter.context, SEND_DEPTH + RECEIVE_DEPTH)
        cap = v.QPCap(
            max_send_wr=SEND_DEPTH, max_recv_wr=RECEIVE_DEPTH, max_inline_data=INLINE_BYTES
        )
        attr = v.QPInitAttrEx(
            qp_type=_QPT_RC,
            scq=self.cq,
            rcq=self.cq,
            cap=cap,
            pd=adapter.pd,
            comp_mask=_HAS_PD | _HAS_SEND_OPS,
            send_ops_flags=_OPS,
        )
        extra = v.Mlx5DVQPInitAttr(comp_mask=_DV_HAS_SEND_OPS, send_ops_flags=_DV_OPS)
        self.qp = v.Mlx5QP(adapter.context, attr, extra)
        self.address = QueueAddress(adapter.address, self.qp.qp_num)
        # An immediate carries no bytes, but pyverbs requires a scatter entry.
        self._receive = v.RecvWR(num_sge=1, sg=[v.SGE(0, 0, 0)])

    def connect(self, partner: QueueAddress) -> None:
        """Connect to the partner and post receives; sends work once the partner has connected too."""
        v, adapter = self._adapter.verbs, self._adapter
        attr = v.QPAttr(port_num=PORT, path_mtu=adapter.mtu)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num = partner.number
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.rnr_retry = _MIN_RNR_TIMER, _RETRY_FOREVER
        attr.timeout, attr.retry_cnt = _ACK_TIMEOUT, 7
        if adapter.gid_index is None:
            attr.ah_attr = v.AHAttr(dlid=partner.port.lid, port_num=PORT)
        else:
            route = v.GlobalRoute(
                dgid=v.GID(partner.port.gid), sgid_index=adapter.gid_index, hop_limit=64
            )
            attr.ah_attr = v.AHAttr(is_global=1, port_num=PORT, gr=route)
        self.qp.to_rts(attr)
        for _ in range(RECEIVE_DEPTH):
            self.post_receive()

    def post_receive(self) -> None:
        self.qp.post_recv(self._receive)

    def close(self) -> None:
        self.qp.close()
        self.cq.close()


class Adapter:
    """An open adapter, its protection domain, and the address of its port."""

    def __init__(self, name: str) -> None:
        self.verbs, self.name = verbs(), name
        v = self.verbs
        self.context = v.Mlx5Context(v.Mlx5DVContextAttr(flags=_DEVX), name=name)
        device, port = self.context.query_device(), self.context.query_port(PORT)
        self.firmware = str(device.fw_version)
        if port.state != _PORT_ACTIVE:
            raise PathError(f"port {PORT} of {name} is not active")
        self.mtu, self.max_message_bytes = port.active_mtu, int(port.max_msg_sz)
        self.gid_index = self._routable_gid_index(port) if port.link_layer == _ETHERNET else None
        gid = None
        if self.gid_index is not None:
            gid = str(self.context.query_gid(PORT, self.gid_index))
        self.address = PortAddress(port.lid, gid)
        self.pd = v.PD(self.context)

    def _routable_gid_index(self, port: Any) -> int:
        """Return the index of a GID for RoCE v2, with an IPv4 address if there is one."""
        gids = []
        for index in range(port.gid_tbl_len):
            try:
                gid = str(self.context.query_gid(PORT, index))
                is_v2 = self.context.query_gid_type(PORT, index) == _ROCE_V2
            except self.verbs.PyverbsError:  # the table has gaps
                continue
            parts = gid.split(":")
            if is_v2 and any(part.strip("0") for part in parts):
                gids.append((parts[:6] != ["0000"] * 5 + ["ffff"], index))
        if not gids:
            raise PathError(f"port {PORT} of {self.name} has no address for RoCE v2")
        return min(gids)[1]

    def register(self, address: int, nbytes: int) -> Any:
        return self.verbs.MR(self.pd, length=nbytes, access=ACCESS, address=address)

    def register_dmabuf(self, descriptor: int, nbytes: int, offset: int) -> Any:
        """Register GPU memory from an offset in a dmabuf; addresses in keys count from the dmabuf's start."""
        return self.verbs.DmaBufMR(self.pd, nbytes, ACCESS, dmabuf=descriptor, offset=offset)

    def make_key(self, entries: int) -> Any:
        return self.verbs.Mlx5Mkey(self.pd, _KEY_IS_INDIRECT, entries)


def open_adapter(turn: int = 0) -> Adapter:
    """Open the first adapter, from index ``turn`` on, with an active port and support for indirect keys.

    Raises `MissingPackageError` if pyverbs is missing. Raises `PathError` if there is no RDMA device, or if no device
    is usable; the text gives the reason for each device.
    """
    v = verbs()
    try:
        names = [_text(device.name) for device in v.get_device_list()]
    except v.PyverbsError as error:
        raise PathError(
            f"RDMA devices cannot be listed: {error}; without the kernel module ib_uverbs there are none"
        ) from error
    if not names:
        raise PathError("this machine has no RDMA device (`ibv_devices` lists none)")
    names.sort()
    reasons = []
    first = turn % len(names)
    for name in names[first:] + names[:first]:
        try:
            adapter = Adapter(name)
            adapter.make_key(2).close()
            QueuePair(adapter).close()
        except (v.PyverbsError, PathError) as error:
            reasons.append(f"{name}: {error}")
        else:
            return adapter
    raise PathError(f"no RDMA device is a usable mlx5 adapter ({'; '.join(reasons)})")


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


@dataclass(frozen=True)
class Adapters:
    """Adapter of this rank, and for each rank the reason why it has no adapter (None if it has one).

    ``refused`` has the reasons of the ranks, or a single reason of all ranks.
    """

    own: Adapter | None
    refused: Sequence[str | None]

    def why_not(self, a: int, b: int) -> str | None:
        """Return why at least one of two ranks has no adapter, None if both have one."""
        for rank in (a, b):
            why = self.refused[rank if len(self.refused) > 1 else 0]
            if why is not None:
                return f"rank {rank} has no mlx5 adapter: {why}"
        return None


def survey(world: World) -> Adapters:
    """Open this rank's adapter, and agree on which ranks have an adapter; collective over the world."""
    own, why = None, None
    try:
        own = open_adapter(world.machine_rank)
    except (MissingPackageError, PathError) as error:
        why = str(error)
    return Adapters(own, world.gather(lambda: (None, why), _SURVEYING)[1].distinct)
