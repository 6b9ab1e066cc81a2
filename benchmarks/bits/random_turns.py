"""Turns that numpy draws, for as many comparisons as are wanted: what hypothesis draws few of."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.bits.histories import Ask, Histories
from benchmarks.bits.questions import KINDS
from flide_engine.errors import RoundTooLarge

NAMES = ("a", "b", "c", "d", "e")
KIND_WEIGHTS = (0.15, 0.5, 0.1, 0.25)
OFTEN = 5.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Sizes:
    """Tokens that a state grows by at most, tokens of one in fifty, questions of a request at most,
    the shortest and longest piece that a request is cut to.
    """

    grow: int
    long: int
    questions: int
    pieces: tuple[int, int]


class RandomTurns:
    """What may become of some states, one thing after the other, each followed by questions."""

    def __init__(self, histories: Histories, sizes: Sizes, seed: int, marks: bool) -> None:
        """marks: whether more checkpoints are kept than the engine wants, at times."""
        self._histories, self._sizes, self._marks = histories, sizes, marks
        self._rng, self._akin = np.random.default_rng(seed), ""
        for name in NAMES:
            self._anew(name, sizes.grow)
        self._changes: dict[Callable[[str], None], float] = {
            self._nothing: 0.25,
            self._grows: 0.2,
            self._is_rewritten: 0.08,
            self._begins_like_another: 0.08,
            self._and_another_begin_anew: 0.05,
            lambda name: histories.to_host(): 0.08,
            lambda name: histories.to_disk(): 0.06,
            histories.hand_over: 0.05,
            self._is_rolled_back: 0.05,
            self._leaves_a_branch: 0.04,
            histories.forget: 0.03,
            self._is_long: 0.02,
            lambda name: self._anew(name, sizes.grow): 0.01,
        }

    def run(self, count: int, seconds: float) -> float:
        """Turns until the engine has been compared so often in all, or time is over: the seconds
        that it took.
        """
        watched, began, told = self._histories.watched, time.monotonic(), -OFTEN
        while True:
            spent = time.monotonic() - began
            done = watched.compared >= count or spent >= seconds
            if done or spent - told >= OFTEN:
                told = spent
                print(
                    f"{spent:.0f} s: {watched.compared:,} of {count:,} compared,"
                    f" {watched.resumed:,} resumed, {len(watched.differing):,} differ",
                    *watched.differing[:1],
                    flush=True,
                )
            if done:
                return spent
            self.turn()

    def turn(self) -> None:
        """One change and one round of questions about what has changed, and about others."""
        rng, histories = self._rng, self._histories
        change = rng.choice(len(self._changes), p=list(self._changes.values()))
        name, self._akin = str(rng.choice(NAMES)), ""
        list(self._changes)[change](name)
        others = [str(n) for n in rng.permutation(NAMES) if n not in (name, self._akin)]
        names = [name, *filter(None, [self._akin]), *others[: rng.integers(0, 3)]]
        asks = [self._ask(n) for n in names if len(histories.texts[n]) <= 4 * self._sizes.grow]
        if len(asks) < len(names):  # the long one, in company of a short one at most
            asks = [Ask(n, "some", 2, self._seed()) for n in names[:2]]
        limit = int(rng.integers(*self._sizes.pieces)) if rng.random() < 0.3 else None
        every = int(rng.integers(1, 5)) if self._marks and rng.random() < 0.3 else 0
        fault: Exception | None = None
        if (drawn := rng.random()) < 0.08:
            fault = RoundTooLarge(0, 0, 0, 0) if drawn < 0.05 else RuntimeError("a round fails")
        given_up = 0 if len(asks) > 1 and rng.random() < 0.05 else None
        histories.ask(asks, limit, every, fault, given_up)
        for n in NAMES:
            if len(histories.texts[n]) > 4 * self._sizes.grow:
                self._anew(n, self._sizes.grow)

    def _ask(self, name: str) -> Ask:
        kind = KINDS[self._rng.choice(len(KINDS), p=KIND_WEIGHTS)]
        return Ask(name, kind, int(self._rng.integers(1, self._sizes.questions + 1)), self._seed())

    def _seed(self) -> int:
        return int(self._rng.integers(1 << 31))

    def _up_to(self, most: int) -> int:
        return int(self._rng.integers(0, most + 1))

    def _anew(self, name: str, most: int) -> None:
        self._histories.forget(name)
        self._histories.rewrite(name, 0, 1 + self._up_to(most), self._seed())

    def _nothing(self, name: str) -> None:
        del name

    def _grows(self, name: str) -> None:
        self._histories.grow(name, 1 + self._up_to(self._sizes.grow // 2), self._seed())

    def _is_rewritten(self, name: str) -> None:
        keep = self._up_to(len(self._histories.texts[name]))
        self._histories.rewrite(name, keep, self._up_to(200), self._seed())

    def _begins_like_another(self, name: str) -> None:
        other = str(self._rng.choice(NAMES))
        keep = self._up_to(len(self._histories.texts[other]))
        self._histories.begin_like(name, other, keep, 1 + self._up_to(200), self._seed())
        self._akin = other if other != name else ""  # asked together, they share a trunk

    def _and_another_begin_anew(self, name: str) -> None:
        """With an opening in common that nothing is known of."""
        other = NAMES[(NAMES.index(name) + 1) % len(NAMES)]
        self._anew(name, self._sizes.grow)
        self._histories.begin_like(other, name, self._sizes.grow, self._up_to(200), self._seed())
        self._akin = other

    def _is_rolled_back(self, name: str) -> None:
        self._histories.roll_back(name, self._up_to(len(self._histories.texts[name])))

    def _leaves_a_branch(self, name: str) -> None:
        """To itself, by way of a name that is then forgotten."""
        tokens = self._up_to(len(self._histories.texts[name]))
        self._histories.branch(name, "branch", max(1, tokens))
        self._histories.branch("branch", name, max(1, tokens))

    def _is_long(self, name: str) -> None:
        self._histories.rewrite(name, 0, self._sizes.long, self._seed())
