"""States that grow, are rewritten, forked, moved between tiers and forgotten, each asked about in
between: the operations that tests and benchmarks draw at random.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.bits.first_difference import Tokens
from benchmarks.bits.questions import PATHS, Kind, questions
from benchmarks.bits.watch import Told, Watched
from flide_engine import Engine
from flide_engine.cache.marks import MarkPolicy
from flide_engine.config import GRAIN
from flide_engine.errors import PoolExhausted, TooManyBranches, TooMuchPinned

GARBAGE = 2992.0
"""What unwritten memory holds, finite so that its use shows as a difference, with a layer."""


@dataclass(frozen=True)
class Ask:
    """Questions about a state: of a kind, `count` of them at most, from `seed`."""

    name: str
    kind: Kind
    count: int
    seed: int


@dataclass(frozen=True)
class MarksAt:
    """The engine's mark policy, and further marks at the multiples of `every` grains."""

    policy: MarkPolicy
    every: int

    def positions(
        self, state: int, resumed: int, agreed: int = 0, turns: Sequence[int] = ()
    ) -> list[int]:
        """See MarkPolicy."""
        step = self.every * GRAIN
        wanted = {*self.policy.positions(state, resumed, agreed, turns), *range(0, state + 1, step)}
        return sorted(p for p in wanted if resumed < p <= state)


class Histories:
    """The states of one engine by name, and what may become of them.

    Every number is a size or the seed of random tokens: a shorter description is a smaller case.
    """

    def __init__(self, made: Callable[[], Engine], labels: Tokens, tokens: int, most: int) -> None:
        """made: a new engine over the same weights and the same files. tokens: ids are below it.
        most: tokens of the longest question.
        """
        self._made, self._vocabulary, self._most = made, tokens, most
        self.watched = Watched(made(), labels)
        self.texts: dict[str, Tokens] = {}
        self._been: dict[str, set[str]] = {}

    @property
    def engine(self) -> Engine:
        """The present one."""
        return self.watched.engine

    def random(self, seed: int, count: int) -> Tokens:
        """Random tokens."""
        return np.random.default_rng(seed).integers(0, self._vocabulary, count).astype(np.int32)

    def grow(self, name: str, count: int, seed: int) -> None:
        """A state goes on, or begins."""
        before = self.texts.get(name, self.random(0, 0))
        self.texts[name] = np.concatenate([before, self.random(seed, count)])

    def rewrite(self, name: str, keep: int, count: int, seed: int) -> None:
        """What a state says from token `keep` on is replaced by so many tokens."""
        kept = self.texts.get(name, self.random(0, 0))[:keep]
        self.texts[name] = np.concatenate([kept, self.random(seed, count)])

    def begin_like(self, name: str, other: str, keep: int, count: int, seed: int) -> None:
        """A state that begins with the first `keep` tokens of another."""
        self.texts[name] = np.concatenate([self.texts[other][:keep], self.random(seed, count)])

    def ask(
        self,
        asks: Sequence[Ask],
        limit: int | None = None,
        every: int = 0,
        fault: Exception | None = None,
        cancelled: int | None = None,
    ) -> None:
        """Asks together and compares; see `Watched.ask`.

        every: checkpoints at the multiples of so many grains, too; 0: where the engine wants them.
        """
        told = []
        for i, ask in enumerate(asks):
            paths = {PATHS[ask.kind], *self._been.pop(ask.name, set())}
            if cancelled not in (None, i):
                paths.add("beside one given up")
            request = questions(
                self.texts[ask.name], ask.kind, ask.count, ask.seed, self._vocabulary, self._most
            )
            told.append(Told(request, ask.name, tuple(paths)))
        checkpoints = self.engine._checkpoints
        if every:
            checkpoints._policy = MarksAt(MarkPolicy(), every)  # type: ignore[assignment]
        self.watched.ask(told, limit, fault, cancelled)
        checkpoints._policy = MarkPolicy()

    def to_host(self) -> None:
        """Everything is copied to the host, and taken off the device."""
        self._settle()

        def drop() -> None:
            kept = self.engine._checkpoints
            for checkpoint in list(kept.index):
                if not checkpoint.locks:
                    kept.free(kept.index.remove(checkpoint))

        self.engine._loop.call(drop)

    def evict(self, tenths: int) -> None:
        """So many tenths of what is held are given up, as for a round that needs the room: what is
        worth least first, copied to the host on its way.
        """
        kept, pool = self.engine._checkpoints, self.engine._loop._runner._pool

        def give_up() -> None:
            needed = pool.free + tenths * (pool.units - pool.free) // 10
            more = True  # one by one: all of it may be more than can be given up
            while pool.free < needed and more:
                more = kept.make_room(PoolExhausted("units", pool.free + 1, pool.free, pool.units))

        self.engine._loop.call(give_up)

    def to_disk(self) -> None:
        """Everything is written to files, where there are any, and taken off device and host."""
        self._settle()
        self.engine.drop_checkpoints()

    def hand_over(self, name: str) -> None:
        """A state is exported, forgotten on every tier, and imported again."""
        parcels = self.engine.export_state(name)
        self.engine.forget(name)
        self.engine.drop_checkpoints()
        for parcel in parcels:
            self.engine.import_state(parcel)
        self._note(name, "handed over")

    def roll_back(self, name: str, tokens: int) -> None:
        """What a state was after `tokens` is forgotten, once its end has been pinned and let go."""
        try:
            self.engine.snapshot(name)
            self.engine.pin(name, pinned=False)
        except TooMuchPinned:
            pass  # that is a limit of its own, with tests of its own
        self.engine.rollback(name, tokens)
        self._note(name, "rolled back or branched")

    def branch(self, name: str, new: str, tokens: int) -> None:
        """A second trajectory from a state as it was after at most `tokens`; the first is forgotten
        where that leaves something.
        """
        try:
            kept = self.engine.branch(name, new, tokens)
        except TooManyBranches:
            return
        self.texts[new] = self.texts[name][: max(kept, tokens)]
        if kept:
            self.engine.forget(name)
            self._note(new, "rolled back or branched")

    def forget(self, name: str) -> None:
        """A state is dropped on every tier; the next request computes it again."""
        self.engine.forget(name)

    def restart(self) -> None:
        """The engine ends, and another takes over its files."""
        self._settle()
        self.engine.close()
        self.watched.attach(self._made())
        gc.collect()  # the first one's memory
        for name in self.texts:
            self._note(name, "after a restart")

    def reset(self) -> None:
        """Forgets everything, and fills the memory with garbage."""
        self._settle()
        self.engine.forget("")
        self.engine.drop_checkpoints()
        for name in {state.name for state in self.engine.states()}:
            self.engine.forget(name)
        held = self.engine.accounting()
        assert held.page_bytes_held == held.slot_bytes_held == 0, held
        pool: Any = self.engine._loop._runner._pool
        self.engine._loop.call(lambda: pool.rows.view(torch.float32).fill_(GARBAGE))
        self.texts.clear()
        self._been.clear()

    def close(self) -> None:
        """Ends the engine."""
        self.engine.close()

    def _note(self, name: str, path: str) -> None:
        self._been.setdefault(name, set()).add(path)

    def _settle(self) -> None:
        """Waits until copies and files are made."""
        engine = self.engine
        engine._loop.call(lambda: engine._checkpoints.copy_some(1 << 50))
        engine._loop.call(lambda: engine._tiers and engine._tiers.settle(copies=True, writes=True))
