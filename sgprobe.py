"""One process: raw copies of the driver beside a kernel that fills the GPU."""
import time
import numpy as np
from mpi4py import MPI
import cupy as cp
from halox.packing.copy_boxes import PreparedCopies, common_blocks
from halox_bench.common.rig import Rig
from halox_bench.common.neighbour import Neighbour
from halox_bench.ranks.busy import beside_work, Work
from halox_bench.ranks.clock import RanksClock, Stage, Timing

comm = MPI.COMM_SELF
stage = Stage(0)
rig = Rig(0, 3)
clock = RanksClock(comm, stage, Timing(7, 3e-3))
peer = rig.peer
n = 1 << 20
for where in [0] + ([peer] if peer is not None else []):
    with cp.cuda.Device(0):
        a = cp.zeros(4 * n, "u1")
    with cp.cuda.Device(where):
        b = cp.zeros(4 * n, "u1")
        cp.cuda.Device(where).synchronize()
    cp.cuda.Device(0).use()
    for what in ("rows", "irregular", "contiguous", "rows to contiguous"):
        k = np.arange(256)
        off = k * 8192 + (k % 3) * 512 * (what == "irregular")
        if what == "contiguous":
            off = k * 4096
        other = k * 4096 if what == "rows to contiguous" else off
        side = lambda p, o: (p + o.astype(np.int64), np.full(256, 4096), np.zeros(256, np.int64))
        made = PreparedCopies(common_blocks(side(a.data.ptr, off), side(b.data.ptr, other)), 0)
        f = beside_work(comm, stage, clock, lambda: made.launch(stage.stream.ptr))
        print(f"GPU 0 to {where}, {what}, {made.calls} calls: {f.call_us:.1f} alone {f.call_beside_us:.1f} beside, loss {f.loss:.4f}, covered {f.is_covered}", flush=True)
neighbour = Neighbour(rig)
with cp.cuda.Device(0):
    u, v = cp.zeros((256, 1024), "f8"), cp.zeros((256, 1024), "f8")
def kernel():
    with stage.stream:
        v[:, :512] = u[:, :512]
f = beside_work(comm, stage, clock, kernel)
print(f"CuPy's kernel: {f.call_us:.1f} alone {f.call_beside_us:.1f} beside, loss {f.loss:.4f}, covered {f.is_covered}")
