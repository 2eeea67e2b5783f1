"""Remedies in error texts: a remedy that is code must run and work."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import datatypes as dt
from halox.errors import HaloxError

pytestmark = pytest.mark.ranks(1, 2)

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (6, 8)


class Case(NamedTuple):
    """A mistake as code, a pattern of the remedy in its error, and code that applies the remedy."""

    mistake: str
    remedy: str  # its groups replace each "{}" in the code below
    code: str = "{}"
    holds: str = "True"  # condition after the code; `result` is the value of its last statement
    before: str = ""
    ranks: int = 1


CALL = r"(grid\.\w+\(.*?\))(?=, or grid|, or allocate| if |$|\n)"

CASES: dict[str, Case] = {
    "a whole array that can be read in two ways": Case(
        "grid.scatter(whole)",
        CALL,
        holds="grid.sum(result) == 48**2",
        before="whole = np.ones((6, 8, 6, 8))",
    ),
    "a staggered whole array": Case(
        "grid.scatter(np.ones((7, 8)))",
        r"as with grid.scatter\(whole, (.*)\)$",
        "grid.scatter(np.ones((7, 8)), {})",
        "grid.layout(result).spec.staggered == (True, False)",
    ),
    "a staggered whole array with components": Case(
        "grid.scatter(whole)",
        CALL,
        holds="grid.sum(result) == 2 * 56",
        before="whole = np.ones((2, 7, 8))",
    ),
    "a file that can be read in two ways": Case(
        "grid.load(path)",
        CALL,
        holds="grid.sum(result['u']) == 48**2",
        before="save(path, np.ones((6, 8, 6, 8)))",
    ),
    "a file of a staggered field": Case(
        "grid.load(path)",
        r"as with (grid.load.*)$",
        holds="grid.sum(result['u']) == 56",
        before="save(path, np.ones((7, 8)))",
    ),
    "a file of a staggered field with components": Case(
        "grid.load(path)",
        r"as with (grid.load.*)$",
        holds="grid.sum(result['u']).tolist() == 6 * 9 * 2 and result['u'].shape[-1] == 2",
        before="save(path, np.ones((6, 9, 2)))",
    ),
    "an option of a layout given to load": Case(
        "grid.load(path, components=2)",
        r"as in (u=.*)$",
        "grid.load(path, {})",
        "grid.sum(result['u']) == 96",
        before="save(path, np.ones((2, 6, 8)))",
    ),
    "a file in Fortran order": Case(
        "grid.load(path)",
        r"write it by (np.save.*)$",
        "grid.comm.rank or {}; grid.comm.Barrier(); grid.load(path)",
        "grid.sum(result['file']) == 48",
        before="array = np.ones((6, 8), order='F'); save(path, array)",
    ),
    "a file of Python objects": Case(
        "grid.load(path)",
        r"as in u(\.astype\(.*\))$",
        "save(path, array{}); grid.load(path)",
        "grid.sum(result['file']) == 48",
        before="array = np.ones((6, 8), object); save(path, array)",
    ),
    "a scatter into another dtype": Case(
        "grid.scatter(whole, out=u)",
        r"as by (whole.astype.*)$",
        "grid.scatter({}, out=u)",
        "grid.sum(u) == 48",
        before="whole, u = np.ones((6, 8), 'f4'), grid.zeros()",
    ),
    "a scatter of a block": Case(
        "grid.scatter(np.ones((2, 2)), components=2)",
        r"as (grid.gather) returns them",
        "grid.scatter({}(grid.ones(components=2)), components=2)",
        "grid.sum(result) == 96",
    ),
    "an array that can be read in two ways": Case(
        "grid.sum(array)",
        CALL,
        "{}; grid.sum(array)",
        "result == 48 * grid.padded_shape[0] * grid.padded_shape[1]",
        before="array = np.ones(2 * grid.padded_shape)",
    ),
    "an array of several layouts": Case(
        "grid.sum(array)",
        CALL,
        "{}; grid.sum(array)",
        "result == 96",
        before="u, v = (grid.ones(halo=(h, 1)) for h in ((2, 1), (1, 2))); array = 2 * u; array[...] = 2",
    ),
    "a prediction of several nodes without a network": Case(
        "grid.predict([2], node_ranks=1)",
        r"such as (network=.*)$",
        "grid.predict([2], node_ranks=1, {})",
        "result[0]['exchange_us'] > 5",
    ),
    "cells without halo": Case(
        "grid.sum(array)",
        r"tell with (grid\.declare\(.*?\)) if it has none",
        "{}; grid.sum(array)",
        "result == 144",
        before="array = grid.interior(grid.ones(components=3)).copy()",
    ),
    "a field of either parity": Case(
        "grid.sum(array)",
        CALL,
        "{}; grid.sum(array)",
        "result == 24",
        before="u = grid.ones(parity='even'); array = 1 * u",
    ),
    "a field declared of the other parity": Case(
        "grid.declare(u, parity='odd')",
        r"allocate another with (parity=.*)$",
        "grid.ones({})",
        "grid.sum(result) == 24",
        before="u = grid.ones(parity='even')",
    ),
    "an array one cell too long": Case(
        "grid.sum(np.ones((9, 3)))",
        r"tell with grid.declare\(array, components=..., (staggered)=..., (halo)=...\)",
        "u = grid.ones(); grid.sum(grid.declare(1 * u, {}=(), {}=1))",
        "result == 48",
    ),
    "a declaration of another shape": Case(
        "grid.declare(np.ones((2, 2)))",
        r"allocate with (grid.zeros) to",
        "grid.declare({}())",
    ),
    "a list of fields": Case(
        "grid.exchange([u, u + 1])",
        r"a list of them with a star \((\*fields)\)",
        "fields = [u, u + 1]; grid.exchange({})",
        before="u = grid.ones()",
    ),
    "no field": Case("grid.save(path)", r"write (.*)$", before="u = grid.ones()"),
    "an array in place of a mapping": Case(
        "grid.save(path, u)", r"write (u=u) for", "grid.save(path, {})", before="u = grid.ones()"
    ),
    "a field called like a dimension": Case(
        "grid.save(zarr, x=u, dims=('x', 'y'))",
        r"or give (dims=)$",
        "grid.save(zarr, x=u, {}('i', 'j'))",
        before="u = grid.ones()",
    ),
    "an output that exists": Case(
        "halox.Output(grid, path, u=u)",
        r"give (mode=\"a\") to continue it, or (mode=\"w\")",
        "halox.Output(grid, path, u=u, {}).close(); out = halox.Output(grid, path, u=u, {})",
        "out.records == 0",
        "u, path = grid.ones(), zarr.with_name('a.zarr'); halox.Output(grid, path, u=u, mode='w').close()",
    ),
    "an output without a field": Case(
        "halox.Output(grid, path)",
        r"write (halox.Output\(grid, path, u=u\))$",
        "out = {}",
        "out.records == 0",
        "u, path = grid.ones(), zarr.with_name('c.zarr')",
    ),
    "a checkpoint in place of an output": Case(
        "halox.Output(grid, path, u=u, mode='a')",
        r"give another path, or (mode=\"w\")$",
        "out = halox.Output(grid, path, u=u, {})",
        "out.records == 0",
        "u, path = grid.ones(), zarr.with_name('d.zarr'); grid.save(path, u=u)",
    ),
    "an output of other fields": Case(
        "halox.Output(grid, path, v=u, mode='a')",
        r"or (mode=\"w\") to replace it$",
        "out = halox.Output(grid, path, v=u, {})",
        "out.records == 0",
        "u, path = grid.ones(), zarr.with_name('e.zarr'); halox.Output(grid, path, u=u, mode='w').close()",
    ),
    "a load of an output": Case(
        "grid.load(path)",
        r"open it with (xarray.open_zarr),",
        "{}(path, chunks=None).u.shape",
        "result == (0, 6, 8)",
        "import xarray; u, path = grid.ones(), zarr.with_name('f.zarr'); "
        "halox.Output(grid, path, u=u, mode='w').close()",
    ),
    "a closed output": Case(
        "out.append(time=0)",
        r"with (mode=\"a\") to continue it$",
        "out = halox.Output(grid, path, u=u, {}); out.append(time=0); out.wait()",
        "out.records == 1",
        "u, path = grid.ones(), zarr.with_name('g.zarr'); out = halox.Output(grid, path, u=u, mode='w'); "
        "out.close()",
    ),
    "a record of another dtype": Case(
        "out.append(time=0, u=u.astype('f4'))",
        r"as (grid.zeros_like) makes it$",
        "out.append(time=0, u={}(u)); out.wait()",
        "out.records == 1",
        "u, path = grid.ones(), zarr.with_name('h.zarr'); out = halox.Output(grid, path, u=u, mode='w')",
    ),
    "an output with two dimensions of one name": Case(
        "halox.Output(grid, path, a=u, b=u, region={'a': (slice(2), slice(None))}, dims=('x', 'x_a'))",
        r"rename a field, or give (dims=)$",
        "out = halox.Output(grid, path, a=u, b=u, region={'a': (slice(2), slice(None))}, {}('x', 'y'))",
        "out.records == 0",
        "u, path = grid.ones(), zarr.with_name('i.zarr')",
    ),
    "a limit in place of a grid": Case(
        "halox.stopping(3600)",
        r"as in (limit_s=3600)$",
        "halox.stopping({})",
        "result in (True, False)",
    ),
    "a limit that is no multiple of a round": Case(
        "grid.loop(print, stop, most=100, every=30)",
        r"give (most=\d+)$",
        "stop[...] = True; grid.loop(int, stop, {}, every=30)()",
        "result == 30",
        "stop = np.zeros((), bool)",
    ),
    "a flag that is a float": Case(
        "grid.loop(print, np.zeros(()))",
        r"as (grid.xp.zeros\(\(\), bool\)), which a step sets by (grid.xp.less)\(..., (out=)until\)$",
        "stop = {}; grid.loop(lambda: {}(1, 2, {}stop), stop)()",
        "result == 1",
    ),
    "a record of an earlier time": Case(
        "out.append(time=1)",
        r"as in halox.Output\(..., (mode=\"a\", time=)...\)$",
        "out.close(); out = halox.Output(grid, path, u=u, {}0.5); out.append(time=1); out.wait()",
        "out.records == 1",
        "u, path = grid.ones(), zarr.with_name('b.zarr'); out = halox.Output(grid, path, u=u, mode='w'); "
        "out.append(time=2)",
    ),
    "a damaged checkpoint": Case(
        "grid.load(zarr)",
        r"that (grid.save) has written$",
        "zarr = zarr.with_name('other.zarr'); {}(zarr, u=grid.ones()); grid.load(zarr)",
        "grid.sum(result['u']) == 48",
        before="zarr.mkdir(exist_ok=True); (zarr / 'zarr.json').write_text('[')",
    ),
    "a dtype with axes": Case(
        "grid.zeros(('f8', (3,)))",
        r"give (dtype=.*)$",
        "grid.zeros({})",
        "result.shape[2:] == (3,)",
    ),
    "a shape in place of a dtype": Case(
        "grid.zeros((6, 8))", r"as in (grid\.zeros\('f8'\))", holds="result.dtype == 'f8'"
    ),
    "a value with an imaginary part": Case(
        "grid.full(1 + 2j)", r"or (dtype=.*)$", "grid.full(1 + 2j, {})", "np.all(result == 1 + 2j)"
    ),
    "such a value in a field like another": Case(
        "grid.full_like(u, 1j)",
        r"or (dtype=.*)$",
        "grid.full_like(u, 1j, {})",
        "np.all(result == 1j)",
        before="u = grid.ones('f4')",
    ),
    "a value out of range": Case(
        "grid.full(300, 'u1')", r"or (dtype=.*)$", "grid.full(300, {})", "np.all(result == 300)"
    ),
    "a masked value": Case(
        "grid.full(value)",
        r"its (\.filled)\(number\)",
        "grid.full(value{}(3))",
        "np.all(result == 3)",
        before="value = np.ma.masked",
    ),
    "numbers of components": Case(
        "grid.full(value, components=2)",
        r"a component (numpy.reshape.*)$",
        "import numpy; grid.full({}, components=2)",
        "np.all(result[1] == 2)",
        before="value = [1, 2]",
    ),
    "a masked array": Case(
        "grid.exchange(array)",
        r"give its (\.data)",
        "grid.exchange(array{})",
        before="array = np.ma.array(grid.ones())",
    ),
    "elements that share memory": Case(
        "grid.exchange(array)",
        r"give a (copy)$",
        "grid.exchange(array.{}())",
        before="array = np.broadcast_to(np.ones(grid.padded_shape[1]), grid.padded_shape).view();"
        "array.flags.writeable = True",
    ),
    "a datatype of mpi4py": Case(
        "halox.pack(np.ones(3), MPI.DOUBLE)",
        r"convert it by (halox.datatypes.from_mpi)\)",
        "halox.pack(np.ones(3), {}(MPI.DOUBLE), count=3)",
        "result.size == 24",
    ),
    "a Cartesian communicator of another division": Case(
        "halox.Grid((6, 4), comm=comm, periodic=True, device='cpu')",
        r"or give comm=mpi4py\.(MPI\.Intracomm\(comm\)) to ignore",
        "halox.Grid((6, 4), comm={}, periodic=True, device='cpu')",
        "result.periodic == (True, True)",
        before="comm = MPI.COMM_WORLD.Create_cart((MPI.COMM_WORLD.size, 1))",
    ),
    "elements of a view": Case(
        "halox.Exchange([halox.Send(a, 'f8', me, count=4)], [halox.Recv(b, 'f8', me, count=4)])",
        r"Describe its elements by (halox.datatypes.slab\(.*?a.dtype\))",
        "d = {}; halox.Exchange([halox.Send(a, d, me)], [halox.Recv(b, 'f8', me, count=4)])()",
        "np.array_equal(b, [1, 7, 13, 19])",
        before="a, b, me = np.arange(24.0).reshape(4, 6)[:, 1], np.zeros(4), MPI.COMM_WORLD.rank",
    ),
    "a halo too wide": Case(
        "halox.Grid((8, 6), halo=((1, 1), (0, 7)), device='cpu', periodic=True)",
        r"expected widths of (\d+) or less along axis 1",
        "halox.Grid((8, 6), halo=((1, 1), (0, {})), device='cpu', periodic=True)",
    ),
    "a process grid that does not multiply up": Case(
        "halox.Grid((6, 8), proc_shape=(5, 1), device='cpu')",
        r"workable for \d+ ranks?: (\(.*?\))",
        "halox.Grid((6, 8), proc_shape={}, device='cpu')",
    ),
    "an odd extent of a checkerboard": Case(
        "halox.Grid((6, 7), checkerboard=True, device='cpu')",
        r"make it (\d+) or (\d+)$",
        "[halox.Grid((6, n), checkerboard=True, device='cpu') for n in ({}, {})]",
    ),
    "blocks at odd cells": Case(
        "g = halox.Grid((4, 4 * size), blocks=(None, blocks), device='cpu'); g.ones(parity='odd')",
        r"make the grid with (checkerboard=True)",
        "halox.Grid((4, 4 * size), {}, device='cpu').ones(parity='odd')",
        before="size = MPI.COMM_WORLD.size; blocks = (3, *[4] * (size - 2), 5)",
        ranks=2,
    ),
    "a number to count bools": Case(
        "grid.allreduce(array, 'sum')",
        r"count with (array.astype\('i8'\)), or use ('logical_or')",
        "grid.allreduce({}), grid.allreduce(array, {})",
        before="array = np.ones(3, '?')",
    ),
    "truth of floats": Case(
        "grid.allreduce(array, 'logical_or')",
        r"as in (array != 0)",
        "grid.allreduce({}, 'logical_or')",
        before="array = np.ones(3)",
    ),
    "the minimum of complex numbers": Case(
        "grid.allreduce(array, 'min')",
        r"reduce (abs\(array\))",
        "grid.allreduce({}, 'min')",
        before="array = np.ones(3, 'c16')",
    ),
    "a reproducible product": Case(
        "grid.allreduce(2.0, 'prod', reproducible=True)",
        r"give (reproducible=False)$",
        "grid.allreduce(2.0, 'prod', {})",
        "result == 2.0**grid.size",
    ),
    "a reproducible sum over an axis": Case(
        "grid.sum(grid.ones(), axis=0, reproducible=True)",
        r"give (reproducible=False)$",
        "grid.sum(grid.ones(), axis=0, {})",
        "result.tolist() == [6.0] * 8",
    ),
    "a reproducible sum of each node": Case(
        "halox.Allreduce(None, 3, 'f8', 'sum', 'hierarchical', device='cpu', reproducible=True)",
        r"give ('host'), or (None)$",
        "[halox.Allreduce(None, 3, 'f8', 'sum', a, device='cpu', reproducible=True) for a in ({}, {})]",
    ),
    "a name of an expression that is not given": Case(
        "grid.sum('u + w', u=grid.ones())",
        r"as a keyword, (w=)\.\.\.;",
        "grid.sum('u + w', u=grid.ones(), {}1)",
        "result == 96",
    ),
    "an expression without a field": Case(
        "grid.sum('2')",
        r"as in (u=u)$",
        "u = grid.ones(); grid.sum('2 * u', {})",
        "result == 96",
    ),
    "a reproducible product of complex numbers": Case(
        "grid.sum('w * w', w=grid.ones('c16'), reproducible=True)",
        r"give (reproducible=False)$",
        "grid.sum('w * w', w=grid.ones('c16'), {})",
        "result == 48",
    ),
    "a reduction of another byte order": Case(
        "grid.allreduce(array)",
        r"convert with (array.astype)$",
        "grid.allreduce({}('f8'))",
        before="array = np.ones(3, '>f8')",
    ),
    "an FFT of integers": Case(
        "fft.forward(u)",
        r"convert it by (u.astype)$",
        "fft.forward({}('c16'))",
        before="fft = halox.FFT(grid); u = fft.physical.ones('i8')",
    ),
    "an FFT of a spectrum": Case(
        "fft.forward(s)",
        r"make one with (fft.physical.zeros)$",
        "fft.forward({}('c16'))",
        before="fft = halox.FFT(grid); s = fft.grid.zeros('c16', halo=0)",
    ),
    "a real FFT of complex numbers": Case(
        "fft.forward(fft.physical.zeros('c16'))",
        r"make the FFT with (real=False)",
        "fft = halox.FFT(grid, {}); fft.forward(fft.physical.zeros('c16'))",
        before="fft = halox.FFT(grid, real=True)",
    ),
    "a complex FFT of real numbers": Case(
        "fft.forward(fft.physical.zeros())",
        r"make the FFT with (real=True)",
        "fft = halox.FFT(grid, {}); fft.forward(fft.physical.zeros())",
        before="fft = halox.FFT(grid)",
    ),
    "a transpose to turned axes": Case(
        "halox.Transpose(grid, turned)",
        r"or say with (axes=) which",
        "halox.Transpose(grid, turned, {}(1, 0))",
        before="turned = halox.Grid((8, 6), device='cpu')",
    ),
    "a dataset on axes of other names": Case(
        "ds.halox.exchange(grid)",
        r"name the grid axes by (dims=)$",
        "ds.halox.exchange(grid, {}('lon', 'lat'))",
        before="import xarray; u = grid.ones();"
        "ds = xarray.Dataset({'u': grid.dataarray(u, halo=True, dims=('lon', 'lat'))})",
    ),
    "a variable on axes of other names": Case(
        "dataset.halox.exchange(grid)",
        r"as in (dataset\[.*\])$",
        "{}.halox.exchange(grid)",
        before="import xarray; u = grid.dataarray(grid.ones(), halo=True);"
        "dataset = xarray.Dataset({'u': u, 'v': u.rename(x='lon', y='lat')})",
    ),
    "a variable without halo": Case(
        "xarray.Dataset({'u': grid.dataarray(u)}).halox.exchange(grid)",
        r"as (grid.dataarray\(u, halo=True\)) is",
        "xarray.Dataset({'u': {}}).halox.exchange(grid)",
        before="import xarray, halox.xarray; u = grid.ones()",
    ),
    "a variable that is named, on axes of other names": Case(
        "ds.halox.exchange(grid, 'u')",
        r"name the grid axes by (dims=)$",
        "ds.halox.exchange(grid, 'u', {}('lon', 'lat'))",
        before="import xarray; u = grid.ones();"
        "ds = xarray.Dataset({'u': grid.dataarray(u, halo=True, dims=('lon', 'lat'))})",
    ),
    "a labelled array in an exchange": Case(
        "grid.exchange(array)",
        r"give (array\.data) of a labelled array",
        "grid.exchange({})",
        before="import xarray; array = grid.dataarray(grid.ones(), halo=True)",
    ),
    "a dataset in an exchange": Case(
        "grid.exchange(dataset)",
        r"or call (dataset.halox.exchange\(grid\))$",
        before="import xarray; dataset = grid.dataarray(grid.ones(), halo=True).to_dataset(name='u')",
    ),
    "coordinates that are texts": Case(
        "halox.Grid(SHAPE, coords={'y': list('abcdefgh')}, device='cpu')",
        r"give other coordinates to (grid.dataarray)$",
        "{}(grid.ones(), coords={'y': list('abcdefgh')})",
        "set(result.y.values) <= set('abcdefgh')",
        before="import xarray; SHAPE = (6, 8)",
    ),
    "a call of a package": Case(
        "halox.exchange(u)",
        r"as in grid = halox.Grid\(shape\); (grid.exchange\(u\))$",
        before="u = grid.ones()",
    ),
    "a labelled array on axes of other names": Case(
        "grid.from_dataarray(a)",
        r"name the grid axes by (dims=)$",
        "grid.from_dataarray(a, {}('lon', 'lat'))",
        before="import xarray; a = xarray.DataArray(np.ones((6, 8)), dims=('lon', 'lat'))",
    ),
    "a periodic boundary of a field, and a grid with walls": Case(
        "grid.zeros(boundary='periodic')",
        r"make the grid with (periodic=True)",
        "halox.Grid((6, 8), {}, comm=grid.comm, device='cpu').zeros(boundary='periodic')",
    ),
    "a boundary of a field of one parity": Case(
        "grid.zeros(parity='even', boundary='edge')",
        r"give (boundary=None)",
        "grid.zeros(parity='even', {})",
    ),
    "a sign on a grid without connections": Case(
        "grid.zeros(sign=-1)",
        r"make the grid with (connect=)",
        "halox.Grid((6, 8), {}fold, comm=grid.comm, device='cpu').zeros(sign=-1)",
        before="fold = {(0, 'high'): halox.Connection(flip=1)}",
    ),
    "several steps for one exchange, and connections": Case(
        "folded.plan(folded.zeros(halo=2), every=2)",
        r"use (every=1)",
        "folded.plan(folded.zeros(halo=2), {})",
        before="folded = halox.Grid((6, 8), connect={(0, 'high'): halox.Connection(flip=1)},"
        "comm=grid.comm, device='cpu')",
    ),
    "a cubed sphere of fewer faces": Case(
        "sphere.coarsen(3)",
        r"coarsen it by (factor=.*)$",
        "sphere.coarsen({}).zeros()",
        before="sphere = halox.CubedSphere(6, comm=grid.comm, device='cpu')",
    ),
    "a halo along the faces of a cubed sphere": Case(
        "sphere.zeros(halo=2)",
        r"give (halo=\(0, width, width\))",
        "sphere.zeros({})",
        before="width = 2; sphere = halox.CubedSphere(4, comm=grid.comm, device='cpu')",
    ),
    "boundaries of components, of a grid": Case(
        "halox.Grid((6, 8), boundary={0: 'edge'}, comm=grid.comm, device='cpu')",
        r"\((grid.zeros), grid.declare\)",
        "{}(components=2, boundary={0: 'edge'})",
    ),
    "a plan called with an array of another layout": Case(
        "plan(grid.zeros(halo=2))",
        r"make another plan by (grid.plan)",
        "{}(grid.zeros(halo=2))()",
        before="plan = grid.plan(grid.zeros())",
    ),
    "a kernel's argument of a plan that is no exchange of halos": Case(
        "halox.Transpose(grid, other).plan(grid.zeros(), other.zeros()).device",
        r"use a plan of (grid.plan)$",
        "{}(grid.zeros())()",
        before="other = halox.Grid((6, 8), comm=grid.comm, device='cpu')",
    ),
    "a kernel's argument of NumPy arrays": Case(
        "plan.device",
        r"(call plan\(\))",
        "plan()",
        before="plan = grid.plan(grid.zeros())",
    ),
    "a fractional point, and a field without halo": Case(
        "halox.Points(grid, [(1.5, 1)]).get(grid.ones(halo=0))",
        r"make it with (halo=1)",
        "halox.Points(grid, [(1.5, 1)]).get(grid.ones({}))",
        "result == 1",
    ),
    "sums over axes into an array": Case(
        "grid.sum(u, out, axis=0)",
        r"leave out one of out and (axis)$",
        "grid.sum(u, {}=0)",
        "result.tolist() == [6] * 8",
        before="u, out = grid.ones(), np.zeros(8)",
    ),
    "an odd extent to coarsen": Case(
        "grid.coarsen(2)",
        r"give (even=False)",
        "grid.coarsen(2, {})",
        "result.grid_shape == (3, 4)",
        before="grid = halox.Grid((6, 7), proc_shape=(0, 1), comm=grid.comm, device='cpu')",
    ),
    "odd blocks to coarsen": Case(
        "grid.coarsen(2)",
        r"make the grid with blocks\[0\] = (\(.*?\)), or .*(even=False)",
        "halox.Grid(12, blocks=[{}], comm=grid.comm, device='cpu').coarsen(2); grid.coarsen(2, {})",
        "result.grid_shape == (6,)",
        before="grid = halox.Grid(12, blocks=[(5, 7)], comm=grid.comm, device='cpu')",
        ranks=2,
    ),
    "several steps for one exchange without corners": Case(
        "grid.plan(grid.zeros(halo=2), every=2, corners=False)",
        r"use (corners=True) and .* or (every=1)",
        "grid.plan(grid.zeros(halo=2), every=2, {});"
        "grid.plan(grid.zeros(halo=2), corners=False, {})",
    ),
}


def run(code: str, names: dict[str, Any]) -> Any:
    """Run statements, and return the value of the last one, an expression."""
    *others, last = ast.parse(code).body
    exec(compile(ast.Module(others, []), "remedy", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "remedy", "eval"), names)
    return exec(compile(ast.Module([last], []), "remedy", "exec"), names)


def mistaken(case: Case, comm: MPI.Intracomm, folder: Path) -> tuple[str, dict[str, Any]]:
    """Make a mistake; return the text of its error, and the names that the remedy's code can use."""
    grid = halox.Grid(SHAPE, comm=comm, device="cpu", checkerboard=True)

    def save(path: Path, array: Any) -> None:
        if comm.rank == 0:
            np.save(path, array)
        comm.Barrier()

    paths = {"path": folder / "file.npy", "zarr": folder / "file.zarr"}
    names = {"np": np, "halox": halox, "dt": dt, "MPI": MPI, "grid": grid, "save": save, **paths}
    for package in ("xarray", "zarr"):
        if package in case.before + case.mistake:
            pytest.importorskip(package)
    run(case.before or "None", names)
    with pytest.raises(HaloxError) as caught:
        run(case.mistake, names)
    return str(caught.value), names


@pytest.mark.parametrize("name", CASES)
def test_remedies_that_are_code_work(name: str, comm: MPI.Intracomm, tmp_path: Path) -> None:
    case, folder = CASES[name], comm.bcast(tmp_path)
    if comm.size < case.ranks:
        return
    text, names = mistaken(case, comm, folder)
    text = next((one for one in text.split("\n") if one.startswith(f"[rank {comm.rank}]")), text)
    found = [match.groups() for match in re.finditer(case.remedy, text)]
    assert found, text
    for number, groups in enumerate(found):
        if number:
            _, names = mistaken(case, comm, folder)
        code = case.code
        for group in groups:
            code = code.replace("{}", group, 1)
        names["result"] = run(code, names)
        assert run(case.holds, names), f"{code}: {text}"
        names["grid"].close()


# Remedies that the table omits: words of the remedy, and the reason or the test that has it.
ELSEWHERE = {
    "pip install": "tests/unit/test_recommendations.py",
    'say device="cpu"': "needs a machine with a GPU, or without",
    "cupy.cuda.Device": "needs a GPU",
    'make the grid with device="cpu"': "needs a GPU",
    'another device="cpu"': "needs a GPU",
    "array.reshape(-1).view('u1')": "needs a GPU",
    "in front of it": "of the command; tests/unit/test_cli.py",
    "being captured": "needs a GPU",
    "HALOX_PATH=peer": "needs a GPU",
    "read-only and would be written to": "needs JAX",
    "page-locked": "needs a GPU",
    "plan.device: field": "needs a GPU",
    "give path= and HALOX_PATH alike": "needs ranks that differ",
    "leave the choice to halox": "tests/mpi/test_path_errors.py",
    "same comm=": "needs ranks that differ",
    "same device=": "needs a GPU",
    "made without a timer": "no public call makes such a plan",
    "petsc4py": "an optional package; tests/mpi/test_solvers.py has what it calls",
    "give out=": "needs a machine without memory",
    "close the output, and make another": "tests/mpi/test_output.py",
}
CODE = re.compile(r"\w\.\w+\(|\b(?:grid|fft|np|halox|cupy)\.[a-z]\w+|\b[a-z_]+=(?![=0])")


def recommended() -> Iterator[tuple[str, str]]:
    """Yield each place in the library where the remedy of an error is code, and the error's text with gaps."""
    for path in sorted((ROOT / "halox").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            for text in node.exc.args:
                if isinstance(text, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in text.values]
                elif isinstance(text, ast.Constant) and isinstance(text.value, str):
                    parts = [text.value]
                else:
                    continue
                said = "".join(map(str, parts))
                if CODE.search(said.partition(";")[2].replace("\0", "x")):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", said


@pytest.mark.ranks(2)
def test_every_remedy_that_is_code_is_run(comm: MPI.Intracomm, tmp_path: Path) -> None:
    folder = comm.bcast(tmp_path)
    texts = [mistaken(case, comm, folder)[0] for case in CASES.values()]
    left = [
        f"{place}: {said!r}"
        for place, said in recommended()
        if not any(words in said for words in ELSEWHERE)
        and not any(
            re.search(".*?".join(map(re.escape, said.split("\0"))), text, re.DOTALL)
            for text in texts
        )
    ]
    assert not left, "\n".join(left)
