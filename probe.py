"""Probe for one run."""
import os, sys, time
from statistics import median

import cupy
from mpi4py import MPI

from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox_bench.exchange import targets
from halox_bench.exchange.cases import ExchangeCase
from halox_bench.exchange.run import Bench, Prepared
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing

comm = MPI.COMM_WORLD
say = (lambda *a: print(*a, flush=True)) if comm.rank == 0 else (lambda *a: None)
bench = Bench(comm, Options("gpu", (), ("pack + NCCL + unpack",), timing=Timing(batches=9, batch_s=3e-3)))

def host_us(call, stage):
    times = []
    for _ in range(15):
        stage.synchronize(); comm.Barrier()
        begin = time.perf_counter()
        for _ in range(20): call()
        times.append((time.perf_counter() - begin) / 20 * 1e6)
    stage.synchronize()
    return round(median(times), 2)

if sys.argv[1] == "figures":
    made = targets.Targets(bench)
    for n in targets.SIX_FACES_US:
        for one in made.six_faces(n): say(one["name"], one["value"], one.get("us"), one["baseline"], one["target"], one["met"], one.get("others"))
    bench.options = Options("gpu", (), ("pack + NCCL + unpack",), timing=targets.TIMING)
    for one in made.z_faces(): say(one["name"], one["value"], one["baseline"], one["target"], one["met"], one.get("others"))
    for one in made.weak_scaling(): say(one["name"], one["value"], one["baseline"], one["target"], one["met"])
    sys.exit()
for n in (64, 128, 256):
    with Prepared(bench, ExchangeCase((n,) * 3, "faces")) as p:
        stage, calls = p.stage, {m.name: m.call for m in p.made}
        calls["grid"] = p.exchange
        p.exchange()
        us = bench.clock.measure(calls)
        say(n, {k: round(us[k], 2) for k in calls}, "host", {k: host_us(c, stage) for k, c in calls.items()})
    bench.free()
other = 1 - comm.rank
for nbytes in (1 << 17, 1 << 20, 1 << 22, 1 << 24):
    a, b = cupy.zeros(nbytes, "u1"), cupy.zeros(nbytes, "u1")
    t = dt.contiguous(nbytes, "u1")
    made = Exchange([Send(a, t, other)], [Recv(b, t, other)], comm=comm, path="nccl")
    made()
    us = bench.clock.measure({"x": made})
    with bench.stage.current(): g = bench.stage.captured(made, 20)
    say("run", nbytes, {r.protocol for r in made.explain().rows}, us, bench.clock.measure({"x": g})["x"] / 20)
