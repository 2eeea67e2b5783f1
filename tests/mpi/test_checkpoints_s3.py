"""Checkpoints in S3: moto's server on the loopback, which speaks the protocol over HTTP."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import CheckpointError
from tests.mpi.test_checkpoints import check, fails, filled, grid, in_between, path

__all__ = ["path"]  # a fixture

pytestmark = pytest.mark.usually(3)

pytest.importorskip("tensorstore")

NAMES = ("gap", "rho", "u", "w")


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    """A bucket; rank 0 runs its server, and all ranks have its address in their environment."""
    from moto.server import ThreadedMotoServer

    comm, running, url = MPI.COMM_WORLD, None, ""
    if comm.rank == 0:
        running = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        running.start()
        host, port = running.get_host_and_port()
        url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", comm.bcast(url)),
            ("AWS_ACCESS_KEY_ID", "testing"),
            ("AWS_SECRET_ACCESS_KEY", "testing"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(name, value)
        in_between(lambda: client().create_bucket(Bucket="bucket"), comm)
        yield
        comm.Barrier()
    if running is not None:
        running.stop()


@pytest.fixture
def run(server: None, request: pytest.FixtureRequest) -> str:
    """The path of a checkpoint that does not exist."""
    return f"s3://bucket/{request.node.name}/run.zarr"


@cache
def client() -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def keys(run: str) -> list[str]:
    """The keys of the objects of a checkpoint."""
    prefix = run.removeprefix("s3://bucket/")
    found = client().list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    return [one["Key"] for one in found]


def read(key: str) -> bytes:
    found: bytes = client().get_object(Bucket="bucket", Key=key)["Body"].read()
    return found


def write(key: str, content: bytes) -> None:
    client().put_object(Bucket="bucket", Key=key, Body=content)


@pytest.mark.ranks(1, 2, 3, 4, 6)  # eight slabs would be thinner than the halo
def test_the_same_bits_in_other_divisions(run: str, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        g.save(run, filled(g, NAMES), attrs={"step": 3}, coords={"x": range(6)})
    with grid(comm, proc_shape=(1, 0)) as g:
        found = g.load(run)
        check(g, found, NAMES)
        assert found.attrs == {"step": 3}
        g.save("s3://bucket/other", found, compressors="zstd")
        check(g, g.load("s3://bucket/other"), NAMES)


def test_a_save_replaces_the_last_one_and_removes_its_objects(
    run: str, comm: MPI.Intracomm
) -> None:
    with grid(comm) as g:
        fails(lambda: g.load(run), comm)
        for value in (1.0, 2.0):
            g.save(run, u=g.full(value))
            assert g.sum(g.load(run)["u"]) == 72 * value
        comm.Barrier()
        assert len({key.split("/")[2] for key in keys(run)}) == 2  # zarr.json and one save


def test_a_failed_save_leaves_the_last_one(run: str, comm: MPI.Intracomm) -> None:
    def fail(done: int, total: int) -> None:
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError

    with grid(comm) as g:
        g.save(run, u=g.ones())
        comm.Barrier()
        before = keys(run)
        fails(lambda: g.save(run, u=g.full(2.0), progress=fail), comm)
        comm.Barrier()  # rank 0 has removed what was written
        assert keys(run) == before
        assert g.sum(g.load(run)["u"]) == 72


def test_a_checkpoint_that_was_copied_from_a_disk(
    run: str, comm: MPI.Intracomm, path: Path
) -> None:
    def copy() -> None:
        for file in (path / "a").rglob("*"):
            if file.is_file():
                name = file.relative_to(path / "a")
                write(f"{run.removeprefix('s3://bucket/')}/{name}", file.read_bytes())

    with grid(comm) as g:
        g.save(path / "a", filled(g, NAMES))
        in_between(copy, comm)
        check(g, g.load(run), NAMES)
        g.save(run, u=g.ones())
        assert list(g.load(run)) == ["u"]


def test_damage(run: str, comm: MPI.Intracomm) -> None:
    """A wrong bit is an error on all ranks; the group of a save that died is complete, but no object names it."""

    def flip() -> None:
        (key,) = [one for one in keys(run) if one.endswith("u/c/0/0")]
        content = bytearray(read(key))
        content[9] ^= 1
        write(key, bytes(content))

    def forget() -> None:
        client().delete_object(Bucket="bucket", Key=f"{run.removeprefix('s3://bucket/')}/zarr.json")

    with grid(comm) as g:
        for damage in (flip, forget):
            g.save(run, u=g.ones())
            in_between(damage, comm)
            fails(lambda: g.load(run), comm)
            g.save(run, u=g.full(2.0))
            assert g.sum(g.load(run)["u"]) == 144


def test_a_checkpoint_that_is_replaced_while_it_is_read(run: str, comm: MPI.Intracomm) -> None:
    with grid(comm) as g, halox.Grid((6, 12), comm=MPI.COMM_SELF, device="cpu") as alone:
        u = g.ones()
        g.save(run, u=u, v=u)
        comm.Barrier()
        replaced: list[int] = []

        def replace(done: int, total: int) -> None:
            if comm.rank == 0 and not replaced:
                replaced.append(1)
                alone.save(run, u=alone.full(2.0), v=alone.full(2.0))

        with pytest.raises(CheckpointError):
            g.load(run, progress=replace)
        found = g.load(run)
        assert g.sum(found["u"]) == g.sum(found["v"]) == 144


def test_nothing_else_is_replaced(run: str, comm: MPI.Intracomm) -> None:
    key = f"{run.removeprefix('s3://bucket/')}/zarr.json"
    with grid(comm) as g:
        u = g.ones()
        group = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
        in_between(lambda: write(key, group), comm)
        for call in (lambda: g.save(run, u=u), lambda: g.load(run)):
            fails(call, comm)
        assert keys(run) == [key]
        for call in (lambda: g.save("s3://missing/run", u=u), lambda: g.load("s3://missing/run")):
            assert "missing" in fails(call, comm)


def test_zarr_reads_the_last_save(run: str, comm: MPI.Intracomm) -> None:
    """From the objects, as a group of their own: `halox_current` names it."""
    zarr = pytest.importorskip("zarr")
    with grid(comm) as g:
        g.save(run, filled(g, ("rho",)))
        expected = g.gather(g.load(run)["rho"])
    if comm.rank == 0:
        prefix = run.removeprefix("s3://bucket/") + "/"
        objects = {
            key.removeprefix(prefix): zarr.core.buffer.cpu.Buffer.from_bytes(read(key))
            for key in keys(run)
        }
        whole = zarr.open_group(zarr.storage.MemoryStore(objects), mode="r")
        found = whole[whole.attrs["halox_current"]]["rho"][...]
        assert expected is not None and np.array_equal(found, expected, equal_nan=True)


def test_a_server_that_does_not_answer(server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("HALOX_TIMEOUT", "1")
        with grid(MPI.COMM_SELF) as g, pytest.raises(CheckpointError, match="HALOX_TIMEOUT"):
            g.load("s3://bucket/run.zarr")
