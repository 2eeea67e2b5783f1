"""Checkpoints in S3, where objects cannot be renamed.

Each save has an ID, and writes its objects under this ID. The object ``zarr.json`` of the path itself is written last,
and names the ID of the last complete save::

    s3://bucket/run.zarr/zarr.json       a group that names the last complete save: halox_current=ID
    s3://bucket/run.zarr/ID/zarr.json    the Zarr group of one save, and its arrays

After it has written ``zarr.json``, a save removes the objects of the previous save.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import PurePosixPath
from uuid import uuid4

from halox.errors import CheckpointError
from halox.io.checkpoint.store import (
    FORMAT,
    FORMAT_KEY,
    PREFIX,
    Store,
    StoreError,
    check_version,
    group,
    is_checkpoint,
)

SCHEME = "s3://"

_CURRENT = f"{PREFIX}current"


class BucketPath(PurePosixPath):
    """A path in S3: the name of a bucket, and then the key of a group."""

    def __str__(self) -> str:
        return SCHEME + super().__str__()

    def store(self, limit_s: float) -> Store:
        """Return the store of the path.

        Credentials are found as by other programs for S3. The environment variable ``AWS_ENDPOINT_URL`` names another
        server than Amazon's, and ``AWS_REGION`` the region.
        """
        driver = {"driver": "s3", "bucket": self.parts[0]}
        for member, names in (
            ("endpoint", ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
            ("aws_region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
        ):
            values = [os.environ[name] for name in names if os.environ.get(name)]
            if values:
                driver[member] = values[0]
        return Store(driver, f"{'/'.join(self.parts[1:])}/", str(self), limit_s)


def current(root: Store) -> str | None:
    """Return the ID of the last complete save; raises `CheckpointError` and `StoreError`.

    It is None without a checkpoint, and empty for a checkpoint that was copied there from a file system.
    """
    try:
        metadata = root.read_json()
    except ValueError as error:
        raise CheckpointError(f"{root.name}/zarr.json is damaged: {error}") from error
    if metadata is None:
        return None
    if not is_checkpoint(metadata):
        raise CheckpointError(
            f"{root.name} exists and is not a checkpoint that grid.save has written; give another path, or remove it"
        )
    check_version(metadata["attributes"][FORMAT_KEY], root.name)
    return str(metadata["attributes"].get(_CURRENT, ""))


class BucketReplacement:
    """A new save under a new ID; `commit` makes it the checkpoint of the path. Local.

    Raises `CheckpointError` if the path has a group that is not a checkpoint, and `StoreError`.
    """

    def __init__(self, path: BucketPath, limit_s: float) -> None:
        self._root = path.store(limit_s)
        self._previous = current(self._root)
        self.partial = uuid4().hex
        self._is_open = True

    def commit(self) -> None:
        """Name the new save in the group of the path, and remove the previous save."""
        self._root.write_json(group({FORMAT_KEY: FORMAT, _CURRENT: self.partial}))
        self._is_open = False
        if self._previous:
            with suppress(StoreError):  # remains of the previous save do no harm
                self._root.below(self._previous).remove()

    def discard(self) -> None:
        """Remove the new save; has no effect after `commit`."""
        if self._is_open:
            with suppress(StoreError):
                self._root.below(self.partial).remove()
