import json, sys, time
from contextlib import suppress
from statistics import median
import cupy, numpy as np
from mpi4py import MPI
import halox
from halox.runtime.gpu.marks import MarkLaunch
from halox_bench.exchange.run import Bench, Prepared
from halox_bench.exchange.cases import ExchangeCase
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing

comm = MPI.COMM_WORLD
say = (lambda *a: print(*a, flush=True)) if comm.rank == 0 else (lambda *a: None)
bench = Bench(
    comm, Options("gpu", (), ("pack + NCCL + unpack",), timing=Timing(batches=7, batch_s=3e-3))
)


def host_us(call, stage):
    times = []
    for _ in range(15):
        stage.synchronize()
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - begin) / 20 * 1e6)
    stage.synchronize()
    return round(median(times), 2)


for n, faces in [(64, "faces"), (128, "faces"), (256, "faces"), (512, "faces"), (64, "z")]:
    with Prepared(bench, ExchangeCase((n,) * 3, faces)) as p:
        stage, calls = p.stage, {}
        for m in p.made:
            calls[m.name] = m.call
            plan = m.call if m.kind == "selected" else None
            if plan is not None:
                taken = m.details["path"]
                calls["grid"] = p.exchange
        p.exchange()
        us = bench.clock.measure(calls)
        graphs = {k: stage.captured(c, 20) for k, c in calls.items()}
        g = bench.clock.measure(graphs)
        say(n, faces, taken, {k: (round(us[k], 2), round(g[k] / 20, 2)) for k in calls})
        sel = next(m for m in p.made if m.kind == "selected").call
        hand = next((m for m in p.made if m.kind == "baseline"), None)
        ch = {type(c).__name__: c for c in sel._channels}
        nc = ch["NcclChannel"]
        ptr = stage.stream.ptr
        parts = {"plan": sel, "grid": p.exchange, "run": nc.run, "group": lambda: nc._group(ptr)}
        for k, cs in enumerate(nc._calls):
            for j, (l, s, t) in enumerate(cs):
                parts[f"call {k}.{j}"] = lambda l=l, s=s, t=t: l(ptr, s, t)
        if "LocalDeviceChannel" in ch:
            parts["local"] = ch["LocalDeviceChannel"].start
        if hand:
            b = hand.call
            parts |= {"hand": b, "hand pack": b._pack, "hand unpack": b._unpack}
        say("  host us", {k: host_us(c, stage) for k, c in parts.items()})
        gpu = {k: c for k, c in parts.items()}
        tg = {}
        for k, c in gpu.items():
            with suppress(Exception):
                tg[k] = stage.captured(c, 20)
        tt = bench.clock.measure(tg)
        say("  graph us", {k: round(v / 20, 2) for k, v in tt.items()})
    bench.free()

from halox import Exchange, Recv, Send, datatypes as dt
from halox.runtime.gpu.nccl import NcclOp

other = 1 - comm.rank
for nbytes in (1 << 13, 1 << 17, 1 << 20, 1 << 22, 1 << 24):
    a, b = cupy.zeros(nbytes, "u1"), cupy.zeros(nbytes, "u1")
    t, made = dt.contiguous(nbytes, "u1"), {}
    for path in ("nccl/packed", "nccl/parts"):
        made[path] = Exchange([Send(a, t, other)], [Recv(b, t, other)], comm=comm, path=path)
        made[path]()
    ranks = made["nccl/parts"]._plan._channels[0]._ranks
    stage = bench.stage
    ptr = lambda: cupy.cuda.get_current_stream().ptr
    group = ranks.prepared(
        [NcclOp(True, a.data.ptr, nbytes, other), NcclOp(False, b.data.ptr, nbytes, other)]
    )
    names = cupy.zeros(64, "u1")
    n = names.data.ptr
    named = ranks.prepared(
        [
            NcclOp(True, n, 16, other),
            NcclOp(True, a.data.ptr, nbytes, other),
            NcclOp(False, n + 16, 16, other),
            NcclOp(False, b.data.ptr, nbytes, other),
        ]
    )
    calls = {**made, "group": lambda: group(ptr()), "named": lambda: named(ptr())}
    us = bench.clock.measure(calls)
    with stage.current():
        graphs = {k: stage.captured(c, 20) for k, c in calls.items()}
    g = bench.clock.measure(graphs)
    say("run", nbytes, {k: (round(us[k], 2), round(g[k] / 20, 2)) for k in calls})
