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
bench = Bench(comm, Options("gpu", (), ("pack + NCCL + unpack",), timing=Timing(batches=7, batch_s=3e-3)))

def host_us(call, stage):
    times = []
    for _ in range(15):
        stage.synchronize(); comm.Barrier()
        begin = time.perf_counter()
        for _ in range(20): call()
        times.append((time.perf_counter() - begin) / 20 * 1e6)
    stage.synchronize()
    return round(median(times), 2)

for n, faces in [(64, "faces"), (128, "faces"), (256, "faces"), (512, "faces"), (64, "z"), (256, "z"), (512, "z")]:
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
        nc = ch["NcclChannel"]; ptr = stage.stream.ptr
        parts = {"plan": sel, "grid": p.exchange, "run": nc.run, "group": lambda: nc._group(ptr)}
        for k, cs in enumerate(nc._calls):
            for j, (l, s, t) in enumerate(cs):
                parts[f"call {k}.{j}"] = lambda l=l, s=s, t=t: l(ptr, s, t)
        if "LocalDeviceChannel" in ch: parts["local"] = ch["LocalDeviceChannel"].start
        if hand:
            b = hand.call
            parts |= {"hand": b, "hand pack": b._pack, "hand unpack": b._unpack}
        say("  host us", {k: host_us(c, stage) for k, c in parts.items()})
        gpu = {k: c for k, c in parts.items()}
        tg = {}
        for k, c in gpu.items():
            with suppress(Exception): tg[k] = stage.captured(c, 20)
        tt = bench.clock.measure(tg)
        say("  graph us", {k: round(v / 20, 2) for k, v in tt.items()})
    bench.free()
