"""Linear operators of fields, for solvers of SciPy and CuPy on one rank, and of PETSc on any number; needs SciPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from halox.domain import Domain
from halox.errors import FieldError, StateError
from halox.runtime.gpu.devices import linalg_module, to_host
from halox.values import check_unmasked, shown

_CALL = "linear_operator"


class FieldOperator:
    """A function of fields as a matrix, made by `Grid.linear_operator`.

    Also a ``scipy.sparse.linalg.LinearOperator``, or on a GPU CuPy's. Vectors have the owned cells of this rank: one
    field after another, each in C order of ``grid.interior(field)``.

    Attributes
    ----------
    sizes : tuple
        ``((mine, all), (mine, all))``, entries of this rank and of all ranks, as ``PETSc.Mat`` takes them.

    Raises
    ------
    StateError
        On several ranks, by products such as ``operator @ x``: solvers of SciPy would form wrong dot products.
    """

    def __init__(self, domain: Domain, apply: Callable[..., object], fields: Sequence[Any]) -> None:
        find, make = domain.layouts.find, domain.allocation.new_like
        self._arguments = [make(field, None, "zeros") for field in [*fields, *fields]]
        self._apply, self._xp, self._ranks = apply, domain.xp, domain.world.size
        views = [array[find(array).interior] for array in self._arguments]
        self._inputs, self._outputs = views[: len(fields)], views[len(fields) :]
        mine = sum(view.size for view in self._inputs)
        _, (total,) = domain.world.total(lambda: (None, [mine]), _CALL)
        self.sizes = ((mine, total),) * 2
        # The other base of the class is `LinearOperator`.
        cast("Any", super()).__init__(self._inputs[0].dtype, (mine, mine))

    def _matvec(self, x: Any) -> Any:
        if self._ranks > 1:
            raise StateError(
                f"the dot products of SciPy's solvers would only count the cells of one of {self._ranks} ranks; use "
                'the recipe "Conjugate gradients" of the page "Solvers", or '
                "petsc4py.PETSc.Mat().createPython(operator.sizes, operator, grid.comm)"
            )
        return self._product(x)

    def mult(self, mat: object, x: Any, y: Any) -> None:
        """Form ``y = operator @ x`` with the attributes ``x.array_r`` and ``y.array_w`` of ``PETSc.Vec``; collective.

        petsc4py calls it for a matrix of type "python". On a GPU the vectors are copied from and to the host.
        """
        y.array_w = to_host(self._product(self._xp.asarray(x.array_r)))

    def _product(self, x: Any) -> Any:
        check_unmasked(x, "x")
        dtype, start, x = self._inputs[0].dtype, 0, x.reshape(-1)
        if not np.can_cast(x.dtype, dtype, "same_kind"):
            raise FieldError(
                f"x has the dtype {x.dtype}, and the fields of this operator are {dtype}; make it of fields of the "
                "dtype of x"
            )
        if x.size != self.sizes[0][0]:
            raise FieldError(
                f"x has {x.size} entries, and the fields have {self.sizes[0][0]} owned cells here"
            )
        for view in self._inputs:
            view[...] = x[start : start + view.size].reshape(view.shape)
            start += view.size
        self._apply(*self._arguments)
        return self._xp.concatenate([view.reshape(-1) for view in self._outputs])


def linear_operator(domain: Domain, apply: Callable[..., object], fields: Any) -> Any:
    """Implement `halox.Grid.linear_operator`."""
    world, given = domain.world, fields if isinstance(fields, list | tuple) else [fields]

    def build() -> tuple[Any, dict[str, object]]:
        if not callable(apply):
            raise FieldError(
                f"apply must be a function of fields, as in apply(u, out), got {shown(apply)}"
            )
        dtypes = sorted(
            {str(np.dtype(domain.layouts.read(field, halo=True)[0].dtype)) for field in given}
        )
        if len(dtypes) != 1 or dtypes[0].rstrip("0123456789") not in ("float", "complex"):
            raise FieldError(
                f"fields must be arrays of one real or complex dtype, got {dtypes}; convert them by astype"
            )
        return linalg_module(domain.device_id), {"number of fields": len(given)}

    with world.guard:
        world.begin(_CALL)
        linalg = world.attempt(build, _CALL, alike=True)
        return type("FieldOperator", (FieldOperator, linalg.LinearOperator), {})(
            domain, apply, given
        )
