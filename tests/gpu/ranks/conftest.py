"""GPU tests on ranks, which may share a GPU. To run: ``mpirun -n 2 python -m mpi4py -m pytest tests/gpu/ranks``."""

from tests.gpu.ranks.paths import way
from tests.mpi.conftest import (
    comm,
    pytest_collection_modifyitems,
    pytest_configure,
    ranks_end_together,
)

__all__ = ["comm", "pytest_collection_modifyitems", "pytest_configure", "ranks_end_together", "way"]
