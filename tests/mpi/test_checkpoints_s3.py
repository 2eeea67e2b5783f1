"""Checkpoints in S3: moto's server on the loopback, which speaks the protocol over HTTP."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.checkpoint.bucket import BucketPath
from halox.errors import CheckpointError
from tests.limits import cut_shards
from tests.mpi.test_checkpoints import check, filled, grid, path

__all__ = ["path"]  # a fixture

pytestmark = pytest.mark.usually(3)

pytest.importorskip("tensorstore")

RUN = "s3://bucket/runs/run.zarr"
NAMES = ("gap", "rho", "u", "w")


@pytest.fixture
def server(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket; rank 0 runs its server, and all ranks have its address in their environment."""
    from moto.server import ThreadedMotoServer

    running, url = None, ""
    if comm.rank == 0:
        running = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        running.start()
        host, port = running.get_host_and_port()
        url = f"http://{host}:{port}"
        urlopen(
            f"{url}/moto-api/reset", data=b""
        ).close()  # all servers of a process have the same buckets
    url = comm.bcast(url)
    for name, value in (
        ("AWS_ENDPOINT_URL", url),
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)
    if comm.rank == 0:
        client().create_bucket(Bucket="bucket")
    comm.Barrier()
    yield url
    comm.Barrier()
    if running is not None:
        running.stop()


def client() -> Any:

    import boto3

    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def keys() -> list[str]:
    """The keys of all objects."""
    found = client().list_objects_v2(Bucket="bucket").get("Contents", [])
    return [one["Key"] for one in found]


@pytest.mark.ranks(1, 2, 3, 4, 6)  # eight slabs would be thinner than the halo
@pytest.mark.full
def test_the_same_bits_in_other_divisions(
    server: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_shards(monkeypatch, 300, 100)
    with grid(comm) as g:
        g.save(RUN, filled(g, NAMES), attrs={"step": 3}, coords={"x": range(6)})
    with grid(comm, proc_shape=(1, 0)) as g:
        found = g.load(RUN)
        check(g, found, NAMES)
        assert found.attrs == {"step": 3}
        g.save(BucketPath("bucket/other"), found, compressors="zstd")
        check(g, g.load("s3://bucket/other"), NAMES)


def test_a_save_replaces_the_last_one_and_removes_its_objects(
    server: str, comm: MPI.Intracomm
) -> None:
    with grid(comm) as g:
        with pytest.raises(CheckpointError):
            g.load(RUN)
        for value in (1.0, 2.0):
            g.save(RUN, u=g.full(value))
            assert g.sum(g.load(RUN)["u"]) == 72 * value
        comm.Barrier()
        assert len({key.split("/")[2] for key in keys()}) == 2  # zarr.json and one save


def test_a_failed_save_leaves_the_last_one(server: str, comm: MPI.Intracomm) -> None:
    def fail(done: int, total: int) -> None:
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError

    with grid(comm) as g:
        g.save(RUN, u=g.ones())
        comm.Barrier()
        before = keys()
        with pytest.raises(CheckpointError):
            g.save(RUN, u=g.full(2.0), progress=fail)
        comm.Barrier()  # rank 0 has removed what was written
        assert keys() == before
        assert g.sum(g.load(RUN)["u"]) == 72


def test_a_checkpoint_that_was_copied_from_a_disk(
    server: str, comm: MPI.Intracomm, path: Path
) -> None:
    with grid(comm) as g:
        g.save(path / "a", filled(g, NAMES))
        comm.Barrier()
        if comm.rank == 0:
            for file in (path / "a").rglob("*"):
                if file.is_file():
                    key = f"runs/run.zarr/{file.relative_to(path / 'a')}"
                    client().put_object(Bucket="bucket", Key=key, Body=file.read_bytes())
        comm.Barrier()
        check(g, g.load(RUN), NAMES)
        g.save(RUN, u=g.ones())
        assert list(g.load(RUN)) == ["u"]


def test_a_save_that_died_is_absent(server: str, comm: MPI.Intracomm) -> None:
    """Its group is complete, but no object names it."""
    with grid(comm) as g:
        g.save(RUN, u=g.ones())
        comm.Barrier()
        if comm.rank == 0:
            client().delete_object(Bucket="bucket", Key="runs/run.zarr/zarr.json")
        comm.Barrier()
        with pytest.raises(CheckpointError):
            g.load(RUN)
        g.save(RUN, u=g.full(2.0))
        assert g.sum(g.load(RUN)["u"]) == 144


def test_damage_is_one_error(server: str, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        g.save(RUN, u=g.ones())
        comm.Barrier()
        if comm.rank == 0:
            (key,) = [one for one in keys() if one.endswith("u/c/0/0")]
            found = bytearray(client().get_object(Bucket="bucket", Key=key)["Body"].read())
            found[9] ^= 1
            client().put_object(Bucket="bucket", Key=key, Body=bytes(found))
        comm.Barrier()
        with pytest.raises(CheckpointError) as caught:
            g.load(RUN)
        assert len(set(comm.allgather(str(caught.value)))) == 1


def test_a_checkpoint_that_is_replaced_while_it_is_read(server: str, comm: MPI.Intracomm) -> None:
    with grid(comm) as g, halox.Grid((6, 12), comm=MPI.COMM_SELF, device="cpu") as alone:
        u = g.ones()
        g.save(RUN, u=u, v=u)
        comm.Barrier()
        replaced: list[int] = []

        def replace(done: int, total: int) -> None:
            if comm.rank == 0 and not replaced:
                replaced.append(1)
                alone.save(RUN, u=alone.full(2.0), v=alone.full(2.0))

        with pytest.raises(CheckpointError):
            g.load(RUN, progress=replace)
        found = g.load(RUN)
        assert g.sum(found["u"]) == g.sum(found["v"]) == 144


def test_nothing_else_is_replaced(server: str, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        if comm.rank == 0:
            group = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
            client().put_object(Bucket="bucket", Key="runs/run.zarr/zarr.json", Body=group)
        comm.Barrier()
        for call in (lambda: g.save(RUN, u=g.ones()), lambda: g.load(RUN)):
            with pytest.raises(CheckpointError):
                call()
        assert keys() == ["runs/run.zarr/zarr.json"]


def test_a_bucket_that_is_missing(server: str, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        with pytest.raises(CheckpointError, match="NoSuchBucket") as caught:
            g.save("s3://missing/run.zarr", u=g.ones())
        assert len(set(comm.allgather(str(caught.value)))) == 1
        with pytest.raises(CheckpointError):
            g.load("s3://missing/run.zarr")


def test_zarr_reads_the_last_save(server: str, comm: MPI.Intracomm) -> None:
    """From the objects, as a group of their own: `halox_current` names it."""
    zarr = pytest.importorskip("zarr")
    with grid(comm) as g:
        g.save(RUN, filled(g, ("rho",)))
        expected = g.gather(g.load(RUN)["rho"])
    if comm.rank == 0:
        objects = {
            key.removeprefix("runs/run.zarr/"): zarr.core.buffer.cpu.Buffer.from_bytes(
                client().get_object(Bucket="bucket", Key=key)["Body"].read()
            )
            for key in keys()
        }
        whole = zarr.open_group(zarr.storage.MemoryStore(objects), mode="r")
        found = whole[whole.attrs["halox_current"]]["rho"][...]
        assert expected is not None and np.array_equal(found, expected, equal_nan=True)


@pytest.mark.ranks(1)
@pytest.mark.usually(1)
def test_a_server_that_does_not_answer(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("HALOX_TIMEOUT", "1")
        with grid(MPI.COMM_SELF) as g:
            u = g.ones()
            text = rf"{RUN} did not answer within 1 s \(HALOX_TIMEOUT\)"
            for call in (lambda: g.save(RUN, u=u), lambda: g.load(RUN)):
                with pytest.raises(CheckpointError, match=text):
                    call()
