"""What plans are made in: what they stand on, and the constants that paths are chosen by."""

from __future__ import annotations

from halox.exchange.calibration import agreed_costs, fingerprint_of
from halox.exchange.costs import Costs
from halox.paths.cuda_aware import find_out
from halox.runtime.context import Ground
from halox.runtime.topology import Topology
from halox.runtime.world import World


class Surroundings(Ground):
    """What all plans of a grid, or of an exchange, share.

    Parameters
    ----------
    world : World

    Attributes
    ----------
    costs : Costs
        The same on all ranks.
    no_cuda_aware : str or None
        Why MPI cannot be given device pointers; None if it can.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.costs = Costs.default()
        self.no_cuda_aware: str | None = "the ranks have no GPUs"
        self._is_priced = False

    def look_around(self) -> Topology:
        """Find out which GPUs the ranks use and what moving data costs, if not known yet; collective."""
        topology = self.find_gpus()
        if not self._is_priced:
            device = None if self.device_arena is None else self.device_arena.device
            verdict = find_out(self.world, device)
            self.no_cuda_aware = None if verdict.takes else verdict.reason
            self.costs = agreed_costs(self.world, fingerprint_of(self.world, topology, device))
            self._is_priced = True
        return topology
