"""What may happen to the states of an engine, as hypothesis draws and shrinks it.

Three states at most. After each step every answer so far has had the bits of its prompt alone.
"""

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from benchmarks.bits.histories import Ask, Histories
from benchmarks.bits.questions import KINDS
from flide_engine.errors import RoundTooLarge

NAMES = st.sampled_from(("a", "b", "c"))
SEEDS = st.integers(0, 99)
ASK = st.builds(Ask, NAMES, st.sampled_from(KINDS), st.integers(1, 4), SEEDS)
ASKS = st.lists(ASK, min_size=1, max_size=3, unique_by=lambda ask: ask.name)
FAULTS = {
    "none": None,
    "of one request": RuntimeError("a round fails"),
    "too large": RoundTooLarge(0, 0, 0, 0),
}


class Machine(RuleBasedStateMachine):
    """One engine, kept from example to example, with its memory full of garbage at each start.

    histories: whose. first: tokens of each state at the start. longest: most that one grows by.
    most: of one in all. restarts: whether a new engine is cheap. limits: longest pieces of a
    request.
    """

    histories: ClassVar[Histories]
    first: ClassVar[int] = 0
    longest: ClassVar[int] = 300
    most: ClassVar[int] = 1500
    restarts: ClassVar[bool] = True
    limits: ClassVar[tuple[int | None, ...]] = (None, 128, 256)

    def __init__(self) -> None:
        super().__init__()
        self.histories.reset()
        self.histories.watched.differing.clear()
        for seed, name in enumerate(("a", "b", "c")):
            self.histories.grow(name, self.first, seed)

    @rule(data=st.data(), name=NAMES, seed=SEEDS)
    def grow(self, data: st.DataObject, name: str, seed: int) -> None:
        """A state goes on."""
        count = data.draw(st.integers(1, self.longest), "tokens")
        if len(self.histories.texts[name]) + count <= self.most:
            self.histories.grow(name, count, seed)

    @rule(name=NAMES, keep=st.integers(0, 400), count=st.integers(0, 99), seed=SEEDS)
    def rewrite_the_tail(self, name: str, keep: int, count: int, seed: int) -> None:
        """A state ends otherwise."""
        self.histories.rewrite(name, keep, count, seed)

    @rule(name=NAMES, other=NAMES, keep=st.integers(0, 400), count=st.integers(0, 99), seed=SEEDS)
    def begin_like(self, name: str, other: str, keep: int, count: int, seed: int) -> None:
        """Two states with an opening in common."""
        self.histories.begin_like(name, other, keep, count, seed)

    @rule(ask=ASK)
    def ask(self, ask: Ask) -> None:
        """One request."""
        self._ask([ask])

    @rule(data=st.data(), asks=ASKS, every=st.integers(0, 2), fault=st.sampled_from([*FAULTS]))
    def ask_in_company(self, data: st.DataObject, asks: list[Ask], every: int, fault: str) -> None:
        """Requests that wait together: cut, marked, one given up, their round failing."""
        limit = data.draw(st.sampled_from(self.limits), "longest piece")
        given_up = data.draw(st.sampled_from([None, *range(len(asks) - 1)]), "given up")
        self._ask(asks, limit, every, fault, given_up)

    @rule(ask=ASK)
    def from_the_host(self, ask: Ask) -> None:
        """States leave the device, and one comes back."""
        self.histories.to_host()
        self._ask([ask])

    @rule(ask=ASK)
    def from_disk(self, ask: Ask) -> None:
        """States leave the memory, and one comes back."""
        self.histories.to_disk()
        self._ask([ask])

    @rule(ask=ASK)
    def handed_over(self, ask: Ask) -> None:
        """A state is exported and imported."""
        self.histories.hand_over(ask.name)
        self._ask([ask])

    @rule(ask=ASK, tokens=st.integers(0, 400))
    def rolled_back(self, ask: Ask, tokens: int) -> None:
        """A state's end is forgotten."""
        self.histories.roll_back(ask.name, tokens)
        self._ask([ask])

    @rule(name=NAMES, ask=ASK, tokens=st.integers(0, 400))
    def branched(self, name: str, ask: Ask, tokens: int) -> None:
        """A second trajectory, and what it left is forgotten."""
        if name != ask.name:
            self.histories.branch(name, ask.name, tokens)
        self._ask([ask])

    @rule(ask=ASK)
    def forgotten(self, ask: Ask) -> None:
        """A state is forgotten, and computed again."""
        self.histories.forget(ask.name)
        self._ask([ask])

    @precondition(lambda self: self.restarts)
    @rule(ask=ASK)
    def restarted(self, ask: Ask) -> None:
        """Another engine goes on from the files."""
        self.histories.restart()
        self._ask([ask])

    def _ask(
        self, asks: list[Ask], limit: int | None = None, every: int = 0, fault: str = "none",
        given_up: int | None = None,
    ) -> None:  # fmt: skip
        self.histories.ask(asks, limit, every, FAULTS[fault], given_up)
        differing = self.histories.watched.differing
        assert not differing, "\n".join(map(str, differing))
