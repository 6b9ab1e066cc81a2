"""Where checkpoints are taken. Pure: positions in, positions out."""

from collections.abc import Sequence
from dataclasses import dataclass

from flide_engine.config import GRAIN


@dataclass(frozen=True)
class MarkPolicy:
    """Positions worth a recurrent state.

    last: the state's last grain, which the next step of a growing history resumes from. turns: how
    many of the last turn boundaries that the family reports, in a state that is computed from its
    beginning: one that has grown step by step has marks where its earlier steps ended. spacing: a
    mark at every position whose distance from the state's end doubles from this on, against tails
    that are rewritten; 0 takes none. divergence: where a prompt leaves what an earlier one had in
    common with it.
    """

    last: bool = True
    turns: int = 1
    spacing: int = 2048
    divergence: bool = True

    def positions(
        self, state: int, resumed: int, agreed: int = 0, turns: Sequence[int] = ()
    ) -> list[int]:
        """Multiples of the grain after `resumed` and not after `state`, ascending.

        state: tokens of the state. resumed: where the computation starts. agreed: tokens in common
        with an earlier prompt. turns: boundaries inside the state, in tokens, ascending.
        """
        wanted = set()
        if self.last:
            wanted.add(state // GRAIN * GRAIN)
        if self.divergence:
            wanted.add(agreed // GRAIN * GRAIN)
        if not resumed:
            wanted |= {t // GRAIN * GRAIN for t in turns[len(turns) - self.turns :]}
        distance = self.spacing
        while 0 < distance < state - resumed:
            # on a grid of its own, so that a history that grows marks the same places again
            wanted.add((state - distance) // self.spacing * self.spacing)
            distance *= 2
        return sorted(p for p in wanted if resumed < p <= state)
