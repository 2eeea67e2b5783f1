"""Reports of plans, and the HTML of objects in notebooks."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import numpy as np

import halox
from halox.datatypes import contiguous
from halox.paths.base import Route
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
    html = REPORT._repr_html_()
    assert html.count("<tr>") == 4 and "rank 0: exchange of f8[4]" in html
    odd = Report(0, "exchange", ("<script>",), (Row.of(MESSAGE, Route("a", "b", "1 < 2 & 3")),))
    html = odd._repr_html_()
    assert "&lt;script&gt;" in html and "1 &lt; 2 &amp; 3" in html and "<script>" not in html


def check_html(shown: Any, *words: str) -> None:
    """Check that an object's HTML is well formed and contains the words."""
    root = ElementTree.fromstring(shown._repr_html_())
    text = " ".join(root.itertext())
    assert root.tag == "table" and all(word in text for word in words), text


def test_what_objects_show_of_themselves() -> None:
    support.require("mpi")
    with halox.Grid((8, 6), halo=1, periodic=True, device="cpu") as grid:
        u = grid.zeros(components=3, staggered=1)
        shown = repr(grid.layout(u))
        assert "0:8, 0:6" in shown and "(3, 10, 9)" in shown
        plan = grid.plan(u)
        check_html(plan, "local/copy", "exchange of")
        plan.start()
        assert repr(plan).endswith(", started>")
        plan.finish()
        plan.close()
        assert repr(plan).endswith(", closed>")
        with halox.Transpose(grid, grid) as transpose:
            check_html(transpose, "grid_a", "grid_b", "(8, 6)")
    assert "closed" in repr(grid)
    with halox.Allreduce(None, 3, "f8", device="cpu") as reduce:
        check_html(reduce, "sum", "shape (3,) of float64", reduce.algorithm)
    x, y = np.zeros(4), np.zeros(4)
    with halox.Exchange([halox.Send(x, "f8", 0, 4)], [halox.Recv(y, "f8", 0, 4)]) as exchange:
        check_html(exchange, "local/copy")
    check_html(halox.packing_method(x, "f8", 4), "host", "in host memory")
