"""Reports of plans."""

from __future__ import annotations

import halox
from halox.datatypes import contiguous
from halox.paths.messages import Message, Part
from halox.plans.report import Report, Row
from tests import support

SEND = Row(1, "send", 1024, 1, 128, 8, "peer", "ll", "because", 7, 4.56, why_not={"host": "GPU"})
RECEIVE = Row(1, "receive", 1024, 1, 128, 8, "peer", "ll", "because", 7, 4.56)
OWN = Row(0, "send", 8, 1, 1, 8, "local", "copy", "itself")
MESSAGE = Message(3, "receive", (Part(0, contiguous(4, "f8")),), tag=5)
REPORT = Report(0, "exchange", ("f8[4]",), (OWN, SEND, RECEIVE))


def test_measured_times_go_to_their_messages_and_leave_the_old_report_alone() -> None:
    report = REPORT.measured({("send", 1, 7): 5.25, ("receive", 1, 8): 99.0})
    assert [row.measured_us for row in report.rows] == [None, 5.25, None]
    assert all(row.measured_us is None for row in REPORT.rows)
    assert "5.2" in str(report) and "all messages that go one path together" in str(report)
    again = report.measured({("receive", 1, 7): 6.0})
    assert [row.measured_us for row in again.rows] == [None, 5.25, 6.0]


def test_a_report_shows_itself_as_its_table() -> None:
    assert repr(REPORT) == str(REPORT)


def test_what_objects_show_of_themselves() -> None:
    support.require("mpi")
    with halox.Grid((8, 6), halo=1, periodic=True, device="cpu") as grid:
        u = grid.zeros(components=3, staggered=1)
        shown = repr(grid.layout(u))
        assert "0:8, 0:6" in shown and "(3, 10, 9)" in shown
        plan = grid.plan(u)
        plan.start()
        assert repr(plan).endswith(", started>")
        plan.finish()
        plan.close()
        assert repr(plan).endswith(", closed>")
    assert "closed" in repr(grid)
