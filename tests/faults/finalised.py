"""All calls of halox, made after MPI.Finalize: ``python -m tests.faults.finalised RESULT`` on ranks.

Each rank writes the outcome of every call as JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

LOCAL = ("close", "a plan's close", "a transpose's close", "an exchange's close")
LOCAL += ("an allreduce's close", "interior", "indices", "layout", "owned", "explain", "repr")
"""Calls that need no other rank: these may succeed."""


def main(place: str) -> None:
    faulthandler.enable()
    import mpi4py

    mpi4py.rc.finalize = False
    from mpi4py import MPI

    import halox
    from halox import Recv, Send

    comm = MPI.COMM_WORLD
    rank = comm.rank
    m = SimpleNamespace()
    m.g = halox.Grid((4 * comm.size, 6), periodic=True, device="cpu")
    m.h = halox.Grid((4 * comm.size, 6), halo=0, device="cpu")
    m.dropped = halox.Grid((4 * comm.size, 6), device="cpu")
    m.u, m.v, m.w = m.g.ones(), m.h.ones(), np.ones(m.g.padded_shape)
    m.g.exchange(m.u)
    m.g.accumulate(m.u)
    m.g.sum(m.u)
    m.plan, m.started = m.g.plan(m.u), m.g.plan(m.u)
    m.plan()
    m.started.start()
    m.started.finish()
    right, left = (rank + 1) % comm.size, (rank - 1) % comm.size
    sends = [Send(np.zeros(4), "f8", right, count=4)]
    receives = [Recv(np.zeros(4), "f8", left, count=4)]
    m.exchange = halox.Exchange(sends, receives)
    m.exchange()
    m.reduce = halox.Allreduce(None, 4, "f8", device="cpu")
    m.reduce(np.ones(4))
    m.transpose = halox.Transpose(m.g, m.h)
    m.transpose.forward(m.u, m.v)
    calls: dict[str, Any] = {
        "Grid": lambda: halox.Grid((4, 6), device="cpu"),
        "Grid of COMM_SELF": lambda: halox.Grid((4, 6), comm=MPI.COMM_SELF, device="cpu"),
        "zeros": lambda: m.g.zeros(),
        "ones": lambda: m.g.ones(),
        "full": lambda: m.g.full(2.0),
        "empty": lambda: m.g.empty(),
        "exchange, cached": lambda: m.g.exchange(m.u),
        "exchange, first": lambda: m.g.exchange(m.w),
        "accumulate": lambda: m.g.accumulate(m.u),
        "accumulate, first": lambda: m.g.accumulate(m.w),
        "plan": lambda: m.g.plan(m.u),
        "plan()": lambda: m.plan(),
        "plan.start": lambda: m.started.start(),
        "plan.measure": lambda: m.plan.measure(2),
        "sum": lambda: m.g.sum(m.u),
        "min": lambda: m.g.min(m.u),
        "norm": lambda: m.g.norm(m.u),
        "dot": lambda: m.g.dot(m.u, m.u),
        "allreduce": lambda: m.g.allreduce(1.0),
        "gather": lambda: m.g.gather(m.u),
        "Exchange": lambda: halox.Exchange(sends, receives),
        "Exchange()": lambda: m.exchange(),
        "Exchange.start": lambda: m.exchange.start(),
        "Exchange.measure": lambda: m.exchange.measure(2),
        "Allreduce": lambda: halox.Allreduce(None, 4, "f8", device="cpu"),
        "Allreduce()": lambda: m.reduce(np.ones(4)),
        "Transpose": lambda: halox.Transpose(m.g, m.h),
        "forward": lambda: m.transpose.forward(m.u, m.v),
        "backward": lambda: m.transpose.backward(m.v, m.u),
        "explain": lambda: m.g.explain(m.u),
        "layout": lambda: m.g.layout(m.u),
        "interior": lambda: m.g.interior(m.u),
        "indices": lambda: m.g.indices(),
        "owned": lambda: m.g.owned,
        "repr": lambda: repr((m.g, m.plan, m.exchange, m.reduce, m.transpose)),
        "a plan's close": lambda: m.plan.close(),
        "a transpose's close": lambda: m.transpose.close(),
        "an exchange's close": lambda: m.exchange.close(),
        "an allreduce's close": lambda: m.reduce.close(),
        "close": lambda: m.g.close(),
    }
    MPI.Finalize()
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "returned"
        except halox.HaloxError as error:
            found[name] = f"HaloxError: {error}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    vars(m).clear()
    calls.clear()
    gc.collect()
    Path(f"{place}.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
