"""Collective division of a grid among ranks, and its description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from halox.decomposition import (
    Decomposition,
    FieldLayout,
    FieldSpec,
    Placement,
    block_cells,
    boundary_text,
    check_widths,
    decompose,
    normalise_boundary,
    normalise_grid_shape,
    normalise_halo,
    normalise_periodic,
    with_periodic_boundary,
)
from halox.domain.options import GridOptions
from halox.errors import DecompositionError, FieldError
from halox.paths import requested_path
from halox.runtime.gpu.devices import choose_device
from halox.runtime.world import World
from halox.values import check_bool

if TYPE_CHECKING:
    from halox.decomposition.balance import Balance
    from halox.domain.cartesian import Cartesian
    from halox.domain.dimension_names import Labels

_MAKING = "the making of a grid"


@dataclass(frozen=True)
class Division:
    """A rank's part of a grid: layout of a plain field, GPU, options of exchanges, and labels if they were given."""

    decomposition: Decomposition
    layout: FieldLayout
    device_id: int | None
    corners: bool
    path: str | None
    leave_sms: bool
    labels: Labels | None
    reproducible: bool
    balance: Balance | None = None

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        return "cpu" if self.device_id is None else "gpu"

    def text(self, rank: int, nodes: int) -> str:
        """Return a description of the whole grid and a rank's part."""
        decomposition, layout = self.decomposition, self.layout
        sizes = [sorted(set(axis.sizes)) for axis in decomposition.axes]
        blocks = " x ".join("/".join(map(str, s)) for s in sizes)
        boundaries = layout.spec.boundary
        boundary = f"boundary {boundary_text(boundaries)}, " if boundaries else ""
        if decomposition.joined is not None:
            boundary += f"connect {decomposition.joined}, "
        work = ""
        if self.balance is not None:
            _, imbalance, even = self.balance
            work = f"weights: the largest block has {imbalance:.2f} of the mean work, {even:.2f} in even blocks\n"
        return "\n".join(
            [
                f"grid {decomposition.grid_shape}, halo {layout.spec.halo}, periodic {decomposition.periodic}, "
                f"{boundary}device {self.device}",
                f"process grid {decomposition.proc_shape} on {nodes} node(s), blocks of {blocks} cells",
                f"{work}{decomposition.placement.summary()}",
                f"rank {rank}: proc_coords {decomposition.coords_of(rank)}, owns {decomposition.rank_shape(rank)}, "
                f"stores {layout.padded_shape}, {len(decomposition.neighbours(rank, self.corners))} neighbours",
            ]
        )


def divide(
    world: World,
    grid_shape: int | Sequence[int],
    given: GridOptions,
    cartesian: Cartesian | None = None,
) -> Division:
    """Divide a grid among the ranks of a world, with the errors of `halox.Grid`; collective.

    ``cartesian`` is the topology of a Cartesian communicator.
    """

    def build() -> tuple[tuple[Division, object], dict[str, object]]:
        options = given if cartesian is None else cartesian.with_options(given, grid_shape)
        corners = check_bool("corners", options["corners"], DecompositionError)
        placed = options["placement"] if isinstance(options["placement"], Placement) else None
        by_node = placed is None and check_bool(
            "placement", options["placement"], DecompositionError
        )
        several = world.node_count > 1
        gpu = choose_device(options["device"], world.turn)
        ndim = len(normalise_grid_shape(grid_shape))
        weights = weights_text = None
        if options["weights"] is not None:
            from halox.domain.weights import read_weights

            weights, weights_text = read_weights(options, normalise_grid_shape(grid_shape))
        periodic = normalise_periodic(
            False if options["periodic"] is None else options["periodic"], ndim
        )
        if isinstance(options["boundary"], Mapping):
            raise FieldError(
                "boundary: a grid takes boundaries for all components; give those of single components to the field "
                "(grid.zeros, grid.declare)"
            )
        periodic = with_periodic_boundary(options["boundary"], periodic)
        if cartesian is not None:
            cartesian.check_periodic("boundary", periodic)
        decomposition = decompose(
            grid_shape,
            world.size,
            halo=options["halo"],
            periodic=periodic,
            proc_shape=options["proc_shape"],
            blocks=options["blocks"],
            nodes=world.ranks.node_of if by_node and cartesian is None and several else None,
            placement=placed,
            checkerboard=check_bool("checkerboard", options["checkerboard"], DecompositionError),
            block_cells=block_cells("cpu" if gpu is None else "gpu", several),
        )
        if options["connect"] is not None:
            from halox.decomposition.connections import normalise_connect

            joined = normalise_connect(options["connect"], decomposition.grid_shape, periodic)
            decomposition = replace(decomposition, joined=joined)
        spec = FieldSpec(
            normalise_halo(options["halo"], ndim),
            boundary=normalise_boundary(options["boundary"], periodic, decomposition.joined_sides),
        )
        layout = FieldLayout(decomposition, world.rank, spec)
        check_widths(layout)
        requested_path(options["path"])
        leave_sms = check_bool("leave_sms", options["leave_sms"], DecompositionError)
        labels = None
        if options["dims"] is not None or options["coords"] is not None:
            from halox.domain.dimension_names import AXES, Labels

            labels = Labels(decomposition, AXES[:ndim]).updated(options["dims"], options["coords"])
        reproducible = check_bool("reproducible", options["reproducible"], DecompositionError)
        division = Division(
            *(decomposition, layout, gpu, corners, options["path"], leave_sms), labels, reproducible
        )
        arguments = {
            "device": division.device,
            "grid_shape": decomposition.grid_shape,
            "halo": layout.spec.halo,
            "periodic": decomposition.periodic,
            "boundary": boundary_text(spec.boundary),
            "connect": str(decomposition.joined),
            "proc_shape": decomposition.proc_shape,
            "blocks": tuple(axis.bounds for axis in decomposition.axes),
            "corners": corners,
            "placement": decomposition.placement.shown,
            "path": options["path"],
            "leave_sms": leave_sms,
            "coords": (labels and labels.text()) or None,
            "dims": labels and labels.dims,
            "reproducible": reproducible,
            "weights": weights_text,
        }
        return (division, weights), arguments

    remedies = {
        "device": 'say device="cpu" or device="gpu"',
        "weights": "give it on rank 0 alone, or the same on all ranks",
    }
    (division, weights), records = world.gather(build, _MAKING)
    first = records[0]["weights"]
    alike = [{**record, "weights": record["weights"] or first} for record in records.distinct]
    world.check_alike(alike, remedies=remedies)
    if first is None:
        return division
    from halox.domain.weights import balanced_by_weights

    balance = world.from_first(
        lambda: balanced_by_weights(
            weights,
            division.layout,
            given["proc_shape"] if cartesian is None else cartesian.dims,
            2 if given["checkerboard"] else 1,
            block_cells(division.device, world.node_count > 1),
        ),
        _MAKING,
    )
    options: GridOptions = {**given, "weights": None, "blocks": balance.blocks}
    return replace(divide(world, grid_shape, options, cartesian), balance=balance)
