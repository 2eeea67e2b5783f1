"""The forms of arguments that users may pass, and the errors for other values."""

from __future__ import annotations

import numpy as np
import pytest

from halox.decomposition.boundaries import normalise_boundary
from halox.decomposition.normalise import (
    normalise_blocks,
    normalise_grid_shape,
    normalise_halo,
    normalise_periodic,
    normalise_proc_shape,
)
from halox.errors import DecompositionError, FieldError


@pytest.mark.parametrize(
    ("halo", "ndim", "expected"),
    [
        (1, 3, ((1, 1),) * 3),
        (0, 1, ((0, 0),)),
        (np.int32(2), 1, ((2, 2),)),
        (np.array(2), 2, ((2, 2), (2, 2))),
        ((1, 2), 2, ((1, 1), (2, 2))),
        ([1, 2, 3], 3, ((1, 1), (2, 2), (3, 3))),
        (((1, 2), (3, 4)), 2, ((1, 2), (3, 4))),
        (np.array([[1, 2], [3, 4]]), 2, ((1, 2), (3, 4))),
        (((1, 2),), 1, ((1, 2),)),
        ((1, (0, 2)), 2, ((1, 1), (0, 2))),
    ],
)
def test_halo(halo, ndim, expected) -> None:
    widths = normalise_halo(halo, ndim)
    assert widths == expected
    assert all(type(width) is int for sides in widths for width in sides)


def test_periodic() -> None:
    assert normalise_periodic(True, 3) == (True,) * 3
    assert normalise_periodic((True, False), 2) == (True, False)
    of_mpi = normalise_periodic((1, np.int32(0)), 2)
    assert of_mpi == (True, False) and all(type(flag) is bool for flag in of_mpi)
    assert normalise_periodic(1, 2) == (True, True)
    given = normalise_periodic(np.array([True, False]), 2)
    assert given == (True, False) and all(type(wraps) is bool for wraps in given)


def test_grid_shape() -> None:
    assert normalise_grid_shape((3, 4)) == (3, 4)
    assert normalise_grid_shape(5) == (5,)
    shape = normalise_grid_shape(np.array([2, 1, 3, 4]))
    assert shape == (2, 1, 3, 4) and all(type(cells) is int for cells in shape)


def test_proc_shape() -> None:
    assert normalise_proc_shape(None, 2) is None
    assert normalise_proc_shape((0, None), 2) is None
    assert normalise_proc_shape((None, 4), 2) == (0, 4)
    assert normalise_proc_shape(4, 1) == (4,)
    assert normalise_proc_shape(np.array([2, 3]), 2) == (2, 3)


def test_blocks() -> None:
    assert normalise_blocks(None, (3, 4)) == (None, None)
    blocks = normalise_blocks([None, np.array([1, 3])], (3, 4))
    assert blocks == (None, (1, 3)) and type(blocks[1][0]) is int


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: normalise_halo(-1, 2), "halo: "),
        (lambda: normalise_halo((1, (0, -2)), 2), "halo[1][1]: "),
        (lambda: normalise_halo(True, 2), "halo: "),
        (lambda: normalise_halo((1, 1, 1), 2), "halo: "),
        (lambda: normalise_halo((1, 2), 1), "halo: "),
        (lambda: normalise_halo(((1, 2, 3), 1), 2), "halo[0]: "),
        (lambda: normalise_periodic(2, 2), "periodic: "),
        (lambda: normalise_periodic((True, "no"), 2), "periodic[1]: "),
        (lambda: normalise_periodic((True,), 2), "periodic: "),
        (lambda: normalise_grid_shape((1,) * 5), "grid_shape: "),
        (lambda: normalise_grid_shape(()), "grid_shape: "),
        (lambda: normalise_grid_shape((4, 0)), "grid_shape[1]: "),
        (lambda: normalise_grid_shape((4, 2.5)), "grid_shape[1]: "),
        (lambda: normalise_proc_shape((2, 2), 3), "proc_shape: "),
        (lambda: normalise_proc_shape((2, -1), 2), "proc_shape[1]: "),
        (lambda: normalise_blocks((4, 6), (10,)), "blocks: "),
        (lambda: normalise_blocks((4, 6), (4, 6)), "blocks[0]: "),
        (lambda: normalise_blocks((None, (4, 5)), (4, 10)), "blocks[1]: "),
        (lambda: normalise_blocks(((10, 0),), (10,)), "blocks[0][1]: "),
        (lambda: normalise_blocks(((5.0, 5),), (10,)), "blocks[0][0]: "),
    ],
)
def test_errors_name_the_argument(call, argument: str) -> None:
    with pytest.raises(DecompositionError) as error:
        call()
    assert str(error.value).startswith(argument)


@pytest.mark.parametrize("kind", ["constant", "gradient", "antisymmetric", "antireflect"])
@pytest.mark.parametrize("value", [np.timedelta64(5, "ns"), np.datetime64(5, "ns")])
def test_a_boundary_has_no_unit(kind: str, value: object) -> None:
    with pytest.raises(FieldError, match="boundary"):
        normalise_boundary((kind, value), (False,))
