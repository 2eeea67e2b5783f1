"""Both ends of a message choose alike, and for the reasons that the documentation gives."""

from __future__ import annotations

import itertools

import pytest

from halox.datatypes import StridedBlocks
from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.exchange.report import Report, Row
from halox.exchange.selection import DIRECT_BYTES, End, choose_route, reads_in_place
from halox.messages import Message, Part
from halox.transports.arena import Place
from halox.transports.direct import Window


def window(block: int) -> Window:
    return Window((Place(0, 0),), (StridedBlocks(0, (8,), (2 * block,), block),))


def end(node: int = 0, memory: str = "host", block: int = 4096, shared: bool = True) -> End:
    return End(node, memory, block, (), window(block) if shared else None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sender", "receiver", "path", "way"),
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
        (end(block=512), end(block=1024), "host", "shared"),  # not block by block the same
    ],
)
def test_routes(sender: End, receiver: End, path: str, way: str) -> None:
    route = choose_route(sender, receiver, to_self=False, may_read=True)
    assert (route.path, route.way) == (path, way) and route.reason


def test_to_self_is_local_and_accumulate_never_reads_in_place() -> None:
    assert choose_route(end(), end(), to_self=True, may_read=True).path == "local"
    assert choose_route(end(), end(), to_self=False, may_read=False).way == "shared"


@pytest.mark.parametrize(
    ("shape", "procs", "shared"),
    [
        ((256, 256, 256), (2, 1, 1), True),
        ((256, 256, 256), (1, 2, 1), True),
        ((256, 256, 256), (1, 1, 2), False),
        ((64, 64, 64), (1, 1, 2), True),  # too small for huge pages
    ],
)
def test_where_fields_lie(shape: tuple[int, ...], procs: tuple[int, ...], shared: bool) -> None:
    domain = decompose(shape, 2, halo=1, proc_shape=procs)
    spec = FieldSpec(((1, 1),) * 3)
    found = {reads_in_place(FieldLayout(domain, rank, spec), 8) for rank in (0, 1)}
    assert found == {shared}, "decided alike on all ranks"


def test_messages_keep_parts_apart_and_aligned() -> None:
    from halox.datatypes import contiguous, vector

    parts = (
        Part(0, contiguous(3, "u1")),
        Part(1, vector(4, 1, 2, "f8")),
        Part(0, contiguous(2, "f4")),
    )
    message = Message(1, "send", parts)
    assert message.nbytes == 3 + 32 + 8
    assert message.offsets == (0, 16, 48) and message.packed_bytes == 64
    for (a, first), (b, _) in itertools.pairwise(zip(message.offsets, parts, strict=True)):
        assert a + first.nbytes <= b
    assert message.block_count == 1 + 4 + 1 and message.block_bytes == 43 // 6


def test_report_is_a_table_and_plain_values() -> None:
    rows = (Row(1, "send", 1024, 1, 128, 8, "host", "shared", "because"),)
    report = Report(0, "exchange", ("f8[4]",), rows)
    assert "1,024" in str(report) and "host/shared" in str(report) and "because" in str(report)
    assert report.as_dict()["rows"][0]["nbytes"] == 1024
    assert "no neighbour" in str(Report(0, "exchange", (), ()))
