"""A stand-in for pyverbs: adapters that execute keys and work requests on ordinary memory.

It has the names, arguments and flags of pyverbs that halox uses. It refuses whatever an adapter refuses: keys with
too many entries, strided patterns beyond 16 bits, requests that do not fit, keys that are not mapped, mapped twice or
in use, unregistered memory, access without permission, full queues. Errors appear as late as on hardware: as a failed
completion, after which the queue pair stops working.

Adapters of the same process reach one another directly. Adapters of other processes are reached through sockets in a
folder, which a thread serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import socket
import sys
import threading
from collections import deque
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from types import ModuleType
from typing import Any, ClassVar

LOCAL_WRITE, REMOTE_WRITE = 1, 2
SIGNALED, INLINE = 2, 8
OK, LENGTH_ERROR, LOCAL_ERROR, FLUSHED, REMOTE_ERROR = 0, 1, 4, 5, 10
RESET, READY = 0, 3


class PyverbsError(Exception):
    pass


class PyverbsRDMAError(PyverbsError):
    def __init__(self, text: str, error_code: int = -1) -> None:
        super().__init__(f"{text}. Errno: {error_code}, {os.strerror(abs(error_code))}")
        self.error_code = error_code


class Device:
    def __init__(self, name: str, lid: int) -> None:
        self.name, self.lid = name, lid


class Hardware:
    """Keys and queue pairs of an adapter, by number, shared by all contexts that opened it."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.pairs: dict[int, Mlx5QP] = {}
        self.numbers = iter(range(17, 1 << 24))


class Wire:
    """Connects the adapters of this process, and through ``folder`` the adapters of other processes."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.adapters: dict[int, Hardware] = {}
        self.lines: dict[int, SimpleQueue[Any]] = {}
        self.lock = threading.RLock()
        self.is_held = False
        self.held: list[tuple[int, Any]] = []
        self.is_open = True
        self.listeners: list[Listener] = []
        self.most_bytes = 1 << 30
        self.most_keys = 1 << 16

    def path(self, lid: int) -> str:
        return os.path.join(str(self.folder), f"port{lid}")

    def listen(self, lid: int) -> None:
        listener = Listener(self.path(lid), "AF_UNIX", backlog=16)
        self.listeners.append(listener)

        def serve(line: Connection) -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self.arrive(lid, line.recv())

        def accept() -> None:
            with contextlib.suppress(OSError):
                while self.is_open:
                    line = listener.accept()
                    threading.Thread(target=serve, args=(line,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def close(self) -> None:
        self.is_open = False
        for listener in self.listeners:
            listener.close()

    def send(self, lid: int, packet: Any) -> None:
        if self.is_held:
            self.held.append((lid, packet))
        elif lid in self.adapters:
            self.arrive(lid, packet)
        else:
            if lid not in self.lines:
                self.lines[lid] = self.line(lid)
            self.lines[lid].put(packet)

    def line(self, lid: int) -> SimpleQueue[Any]:
        """Connect to another process; a thread sends, since the lock is held here and a socket may be full."""
        line, packets = Client(self.path(lid), "AF_UNIX"), SimpleQueue[Any]()

        def transmit() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line.send(packets.get())

        threading.Thread(target=transmit, daemon=True).start()
        return packets

    def release(self) -> None:
        self.is_held = False
        held, self.held = self.held, []
        for lid, packet in held:
            self.send(lid, packet)

    def arrive(self, lid: int, packet: Any) -> None:
        with self.lock:
            kind, number, *rest = packet
            pair = self.adapters[lid].pairs.get(number)
            if pair is not None:
                getattr(pair, f"_{kind}")(*rest)


WIRE = Wire()
DEVICES: list[Device] = []


def get_device_list() -> list[Device]:
    return DEVICES


class Mlx5DVContextAttr:
    def __init__(self, flags: int = 0, comp_mask: int = 0) -> None:
        self.flags = flags


class _Attributes:
    fw_version = "00.00.0000"


class _Port:
    state, link_layer, active_mtu, gid_tbl_len = 4, 1, 5, 0

    def __init__(self, lid: int) -> None:
        self.lid, self.max_msg_sz = lid, WIRE.most_bytes


class Mlx5Context:
    def __init__(self, attr: Mlx5DVContextAttr, name: str = "") -> None:
        assert attr.flags == 1, "indirect keys need DEVX"
        self.lid = next(one.lid for one in DEVICES if one.name == name)
        with WIRE.lock:
            if self.lid not in WIRE.adapters:
                WIRE.adapters[self.lid] = Hardware()
                if WIRE.folder is not None:
                    WIRE.listen(self.lid)
        hardware = WIRE.adapters[self.lid]
        self.memory, self.pairs, self.numbers = hardware.memory, hardware.pairs, hardware.numbers

    def query_device(self) -> _Attributes:
        return _Attributes()

    def query_port(self, port: int) -> _Port:
        assert port == 1
        return _Port(self.lid)


class PD:
    def __init__(self, creator: Mlx5Context) -> None:
        self.context = creator


class MR:
    """Registered memory; ``shift`` is the origin of the addresses in requests."""

    shift = 0

    def __init__(self, pd: PD, length: int = 0, access: int = 0, address: int = 0) -> None:
        assert length > 0 and address > 0
        self.context, self.buf, self.length, self.access = pd.context, address, length, access
        self.lkey = self.rkey = next(self.context.numbers) << 8
        self.context.memory[self.lkey] = self

    def blocks(self, offset: int, nbytes: int) -> list[tuple[int, int]] | None:
        start = offset + self.shift
        inside = self.buf <= start and start + nbytes <= self.buf + self.length
        return [(start, nbytes)] if inside else None

    def close(self) -> None:
        self.context.memory.pop(self.lkey, None)


class DmaBufMR(MR):
    """Memory of a dmabuf descriptor, mapped a second time; addresses in requests count from the dmabuf's start.

    A file takes the place of device memory; `DMABUFS` holds the start and the bytes of a descriptor's range in it.
    """

    def __init__(self, pd: PD, length: int, access: int, dmabuf: int = 0, offset: int = 0) -> None:
        start, nbytes = DMABUFS.pop(dmabuf)
        if REFUSED or not 0 <= offset <= offset + length <= nbytes:
            raise PyverbsRDMAError("Failed to register a dmabuf MR", errno.EOPNOTSUPP)
        there = min(nbytes, os.fstat(dmabuf).st_size - start)
        self.memory = mmap.mmap(dmabuf, there, offset=start)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        super().__init__(pd, length, access, at + offset)
        self.shift = at


DMABUFS: dict[int, tuple[int, int]] = {}
REFUSED: list[str] = []
"""Adapters refuse dmabufs while this list has entries."""


class SGE:
    def __init__(self, addr: int, length: int, lkey: int) -> None:
        assert 0 <= length < 1 << 32
        self.addr, self.length, self.lkey = addr, length, lkey


class RecvWR:
    def __init__(self, wr_id: int = 0, num_sge: int = 0, sg: list[SGE] | None = None) -> None:
        if num_sge < 1 or sg is None:
            raise PyverbsError("A WR needs at least one SGE")
        assert wr_id == 0 and not any(one.length for one in sg)


class Mlx5MrInterleaved:
    def __init__(self, addr: int, bytes_count: int, bytes_skip: int, lkey: int) -> None:
        assert 0 <= bytes_count + bytes_skip < 1 << 16, "the adapter would cut it off"
        assert 0 < bytes_count < 1 << 16 and bytes_skip >= 0
        self.addr, self.bytes_count, self.bytes_skip = addr, bytes_count, bytes_skip
        self.lkey = lkey


class Mlx5Mkey:
    made: ClassVar[int] = 0

    def __init__(self, pd: PD, create_flags: int, max_entries: int) -> None:
        assert create_flags == 1
        self.context, self.max_entries = pd.context, max_entries
        if sum(isinstance(one, Mlx5Mkey) for one in self.context.memory.values()) >= WIRE.most_keys:
            raise PyverbsRDMAError("Failed to create mkey", errno.ENOMEM)
        Mlx5Mkey.made += 1
        self.entries: list[tuple[int, int, int]] | None = None
        self.access = self.users = 0
        self.lkey = self.rkey = next(self.context.numbers) << 8
        self.context.memory[self.lkey] = self

    def blocks(self, offset: int, nbytes: int) -> list[tuple[int, int]] | None:
        if self.entries is None:
            return None
        found, at = [], 0
        for address, length, lkey in self.entries:
            low, high = max(offset, at), min(offset + nbytes, at + length)
            if low < high:
                region = self.context.memory.get(lkey)
                inner = region and region.blocks(address + low - at, high - low)
                if not inner or region.access & self.access != self.access:
                    return None
                found += inner
            at += length
        return found if offset + nbytes <= at else None

    def map(self, access: int, entries: list[tuple[int, int, int]]) -> int:
        assert not self.users, "a key that is in use is mapped"
        if self.entries is not None:
            return LOCAL_ERROR
        self.access, self.entries = access, entries
        return OK

    def close(self) -> None:
        assert not self.users, "a key that is in use is destroyed"
        self.context.memory.pop(self.lkey, None)


class WC:
    def __init__(self, wr_id: int, status: int, imm: int = 0) -> None:
        self.wr_id, self.status, self.vendor_err = wr_id, status, 0x51 if status else 0
        self.imm_data = socket.htonl(imm)


class CQ:
    def __init__(self, context: Mlx5Context, cqe: int) -> None:
        self.cqe, self.waiting = cqe, deque[WC]()

    def add(self, one: WC) -> None:
        assert len(self.waiting) < self.cqe, "the completion queue overruns"
        self.waiting.append(one)

    def poll(self, num_entries: int = 1) -> tuple[int, list[WC]]:
        with WIRE.lock:
            n = min(num_entries, len(self.waiting))
            return n, [self.waiting.popleft() for _ in range(n)]

    def close(self) -> None:
        pass


class _Plain:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class QPCap(_Plain):
    pass


class QPInitAttrEx(_Plain):
    pass


class Mlx5DVQPInitAttr(_Plain):
    pass


class QPAttr(_Plain):
    pass


class AHAttr(_Plain):
    pass


class GID(_Plain):
    pass


class GlobalRoute(_Plain):
    pass


class Mlx5QP:
    """A reliable connection; the calls between ``wr_start`` and ``wr_complete`` build requests."""

    def __init__(self, context: Mlx5Context, attr: QPInitAttrEx, extra: Mlx5DVQPInitAttr) -> None:
        assert attr.qp_type == 2 and attr.comp_mask == 1 | 1 << 6 and extra.comp_mask == 1 << 2
        self.context, self.attr, self.extra = context, attr, extra
        self.cap, self.cq = attr.cap, attr.scq
        if 128 + self.cap.max_inline_data > 1024:
            raise PyverbsRDMAError("Failed to create MLX5 QP", errno.EINVAL)
        self.state, self.error = RESET, OK
        self.receives = 0
        self.qp_num = next(context.numbers)
        context.pairs[self.qp_num] = self
        self.building: list[Any] | None = None
        self.posted = deque[list[Any]]()  # requests in order: [wr_id, flags, key, status or None]
        self.arriving = deque[Any]()
        self.wr_id = self.wr_flags = 0
        self.code = 0

    def to_rts(self, attr: QPAttr) -> None:
        assert attr.qp_access_flags & REMOTE_WRITE and attr.rnr_retry == 7 and attr.port_num == 1
        self.there = attr.ah_attr.dlid, attr.dest_qp_num
        self.state = READY

    def close(self) -> None:
        self.context.pairs.pop(self.qp_num, None)

    def post_recv(self, wr: RecvWR) -> None:
        with WIRE.lock:
            assert self.state == READY
            if self.receives >= self.cap.max_recv_wr:
                raise PyverbsRDMAError("Failed to post recv", errno.ENOMEM)
            self.receives += 1
            self._advance()

    # Requests

    def wr_start(self) -> None:
        assert self.building is None and self.state == READY
        self.building, self.code = [], 0

    def _room(self, n: int, head: int, key: Mlx5Mkey) -> None:
        assert self.wr_flags & INLINE, "entries travel in the request"
        if n + head > min((self.cap.max_inline_data + 4) // 16, key.max_entries) or n < 1:
            self.code = errno.ENOMEM

    def _new(self, kind: str, *rest: Any) -> None:
        assert self.building is not None
        self.building.append([self.wr_id, self.wr_flags, kind, *rest])

    def wr_mr_list(self, mkey: Mlx5Mkey, access_flags: int, sge_list: list[SGE]) -> None:
        assert self.extra.send_ops_flags & 2
        self._room(len(sge_list), 0, mkey)
        assert sum(one.length for one in sge_list) < 1 << 31, "the length of a list has 31 bits"
        entries = [(one.addr, one.length, one.lkey) for one in sge_list]
        self._new("map", mkey, access_flags, entries)

    def wr_mr_interleaved(
        self,
        mkey: Mlx5Mkey,
        access_flags: int,
        repeat_count: int,
        mr_interleaved_lst: list[Mlx5MrInterleaved],
    ) -> None:
        assert self.extra.send_ops_flags & 1 and 0 < repeat_count < 1 << 32
        self._room(len(mr_interleaved_lst), 1, mkey)
        entries = [
            (one.addr + r * (one.bytes_count + one.bytes_skip), one.bytes_count, one.lkey)
            for r in range(repeat_count)
            for one in mr_interleaved_lst
        ]
        self._new("map", mkey, access_flags, entries)

    def wr_local_inv(self, invalidate_rkey: int) -> None:
        assert self.attr.send_ops_flags & 1 << 7
        self._new("unmap", self.context.memory[invalidate_rkey])

    def wr_rdma_write(self, rkey: int, remote_addr: int) -> None:
        assert self.attr.send_ops_flags & 1
        self._new("write", rkey, remote_addr, None, [])

    def wr_rdma_write_imm(self, rkey: int, remote_addr: int, data: int) -> None:
        assert self.attr.send_ops_flags & 2 and 0 <= data < 1 << 32
        self._new("write", rkey, remote_addr, data, [])

    def wr_set_sge(self, sge: SGE) -> None:
        self.wr_set_sge_list(1, [sge])

    def wr_set_sge_list(self, num_sge: int, sg_list: list[SGE]) -> None:
        assert self.building is not None and len(sg_list) == num_sge
        self.building[-1][-1] = list(sg_list)
        self.building[-1].append("finished")

    def wr_complete(self) -> None:
        requests, self.building = self.building, None
        assert requests
        if len(self.posted) + len(requests) > self.cap.max_send_wr:
            self.code = errno.ENOMEM
        if self.code:
            raise PyverbsRDMAError("ibv_wr_complete failed", self.code)
        with WIRE.lock:
            for wr_id, flags, kind, *rest in requests:
                assert flags & SIGNALED
                self.posted.append([wr_id, None, None])
                if self.error:
                    self._finish(wr_id, FLUSHED)
                elif kind == "map":
                    key, access, entries = rest
                    self._finish(wr_id, key.map(access, entries))
                elif kind == "unmap":
                    assert not rest[0].users, "a key that is in use is unmapped"
                    rest[0].entries = None
                    self._finish(wr_id, OK)
                else:
                    self._write(wr_id, *rest)

    def _write(
        self, wr_id: int, rkey: int, address: int, imm: int | None, sges: list[SGE], mark: str = ""
    ) -> None:
        assert mark == "finished", "a write without a setter is never executed"
        raw = b""
        for sge in sges:
            if not sge.length:
                continue
            key = self.context.memory.get(sge.lkey)
            blocks = key.blocks(sge.addr, sge.length) if key else None
            if blocks is None:
                return self._finish(wr_id, LOCAL_ERROR)
            raw += b"".join(ctypes.string_at(at, n) for at, n in blocks)
            if isinstance(key, Mlx5Mkey):
                key.users += 1
                self.posted[-1][2] = key
        if len(raw) > WIRE.most_bytes:
            return self._finish(wr_id, LENGTH_ERROR)
        lid, number = self.there
        here = self.context.lid, self.qp_num, wr_id
        WIRE.send(lid, ("deliver", number, here, rkey, address, raw, imm))
        return None

    def _finish(self, wr_id: int, status: int) -> None:
        """Record the status of a request, then complete the finished requests in posting order."""
        next(one for one in self.posted if one[0] == wr_id)[1] = status
        while self.posted and self.posted[0][1] is not None:
            wr_id, status, key = self.posted.popleft()
            self.error = self.error or status
            if key is not None:
                key.users -= 1
            self.cq.add(WC(wr_id, status))

    # Receiving side

    def _deliver(self, *packet: Any) -> None:
        self.arriving.append(packet)
        self._advance()

    def _advance(self) -> None:
        while self.arriving:
            (lid, number, wr_id), rkey, address, raw, imm = self.arriving[0]
            if imm is not None and not self.receives:
                return  # no receive is posted: the sender keeps retrying
            self.arriving.popleft()
            key = self.context.memory.get(rkey)
            is_granted = key is not None and key.access & REMOTE_WRITE
            blocks = key.blocks(address, len(raw)) if raw and is_granted else None
            status = REMOTE_ERROR if raw and blocks is None else OK
            at = 0
            for start, n in blocks or ():
                ctypes.memmove(start, raw[at : at + n], n)
                at += n
            if status == OK and imm is not None:
                self.receives -= 1
                self.cq.add(WC(0, OK, imm))
            WIRE.send(lid, ("finish", number, wr_id, status))


_MODULES = {
    "addr": (AHAttr, GID, GlobalRoute),
    "cq": (CQ,),
    "device": (get_device_list,),
    "mr": (MR, DmaBufMR),
    "pd": (PD,),
    "pyverbs_error": (PyverbsError, PyverbsRDMAError),
    "qp": (QPAttr, QPCap, QPInitAttrEx),
    "wr": (RecvWR, SGE),
    "providers.mlx5.mlx5dv": (Mlx5Context, Mlx5DVContextAttr, Mlx5DVQPInitAttr, Mlx5QP),
    "providers.mlx5.mlx5dv_mkey": (Mlx5Mkey, Mlx5MrInterleaved),
}


def install(monkeypatch: Any, lids: tuple[int, ...] = (1,), folder: str | None = None) -> Wire:
    """Make ``import pyverbs`` find this stand-in, with one adapter per LID."""
    global WIRE
    WIRE = Wire(folder)
    DEVICES[:] = [Device(f"mlx5_{n}", lid) for n, lid in enumerate(lids)]
    for name in ("", ".providers", ".providers.mlx5"):
        package = ModuleType(f"pyverbs{name}")
        package.__path__ = []
        monkeypatch.setitem(sys.modules, f"pyverbs{name}", package)
    for name, contents in _MODULES.items():
        module = ModuleType(f"pyverbs.{name}")
        for one in contents:
            setattr(module, one.__name__, one)
        monkeypatch.setitem(sys.modules, f"pyverbs.{name}", module)
    return WIRE
