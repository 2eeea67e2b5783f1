"""Transfers of one message's windows, in rounds of as many as both ends have keys."""

from __future__ import annotations

from halox.paths.scatter_gather.engine import Direction, Key, RemoteKey, Transfer
from halox.paths.scatter_gather.keys import KeyList, Keys, Offer


class Rounds:
    """One end of a message whose peer has offered its keys: which windows are moved in which round, and how.

    The ``count`` of rounds, alike at both ends, is 1 unless an engine has fewer keys than the message has windows.
    """

    def __init__(
        self, keys: Keys, own: KeyList, peer: int, theirs: Offer, remote: tuple[RemoteKey, ...]
    ) -> None:
        self._keys, self._own, self._peer, self._remote = keys, own, peer, remote
        self.n_windows = len(own.windows)
        # More keys than these are there for windows of a later round, and are mapped when it is theirs.
        self.at_once = min(len(own.keys), theirs.at_once)
        self.count = -(-self.n_windows // self.at_once)
        self._made: dict[tuple[Direction, int], Transfer] = {}

    @property
    def keys(self) -> list[Key]:
        """Keys of this end."""
        return self._own.keys

    def enter(self, number: int) -> None:
        """Map the keys of this end to the windows of a round; local, when nothing uses them for another."""
        self._keys.map_round(self._own, number, self.at_once)

    def transfers(self, direction: Direction, number: int) -> list[Transfer]:
        """Return the transfers of a round's windows, made once."""
        windows = range(min(self.at_once, self.n_windows - number * self.at_once))
        return [self.transfer(direction, slot) for slot in windows]

    def transfer(self, direction: Direction, slot: int) -> Transfer:
        """Return the transfer of the window to which a key is mapped."""
        made = self._made.get((direction, slot))
        if made is None:
            made = self._made[direction, slot] = self._keys.engine.transfer(
                direction, self._own.keys[slot], self._remote[slot], self._peer
            )
        return made
