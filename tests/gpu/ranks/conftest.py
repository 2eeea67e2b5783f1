"""GPU tests on ranks, which may share a GPU: ``mpirun -n 2 python -m pytest -p halox.testing tests/gpu/ranks``."""

from tests.gpu.ranks.paths import way
from tests.mpi.conftest import comm, pytest_collection_modifyitems, pytest_configure

__all__ = ["comm", "pytest_collection_modifyitems", "pytest_configure", "way"]
