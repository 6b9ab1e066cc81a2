"""Operations on a tenant's states, and what the replicas of a fleet say of them, put together.

A state goes by its *id*: the session id it was asked with, else the 16 hex digits of the anchor it
is routed on. Its *steps* are the positions, in tokens, at which something is remembered of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Operation = Literal["list", "inspect", "pin", "unpin", "snapshot", "rollback", "branch", "delete"]


@dataclass(frozen=True)
class StateCall:
    """One operation, the same for every replica.

    tenant: whose states. id: of which one; "" for `list`. tokens: the step that is meant, of
    `rollback` and `branch`. new: the branch's id; anchor: what that is routed on. after, limit: of
    `list`: only ids that sort after this one, and at most so many.
    """

    operation: Operation
    tenant: str
    id: str = ""
    tokens: int = 1 << 62
    new: str = ""
    anchor: str = ""
    after: str | None = None
    limit: int = 0


@dataclass
class Step:
    """A position of a state: how often it was resumed from, whether it is kept from eviction, bytes
    by tier that it adds to the step before it, and how many checkpoints there are, one a replica.
    """

    hits: int = 0
    pinned: bool = False
    bytes: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def add(self, other: "Step") -> None:
        """Counts another one's as well."""
        self.hits += other.hits
        self.pinned = self.pinned or other.pinned
        self.count += other.count
        for tier, size in other.bytes.items():
            self.bytes[tier] = self.bytes.get(tier, 0) + size


@dataclass
class State:
    """What is remembered of a state. steps: by tokens. replicas: ids of those that have it."""

    id: str
    anchor: str
    steps: dict[int, Step] = field(default_factory=dict)
    replicas: list[str] = field(default_factory=list)

    def whole(self) -> Step:
        """All its steps as one."""
        whole = Step()
        for step in self.steps.values():
            whole.add(step)
        return whole

    def summary(self) -> dict[str, Any]:
        """As it is listed."""
        whole = self.whole()
        return {
            "id": self.id,
            "anchor": self.anchor,
            "tokens": max(self.steps, default=0),
            "checkpoints": whole.count,
            "hits": whole.hits,
            "pinned": whole.pinned,
            "bytes": whole.bytes,
            "replicas": self.replicas,
        }

    def details(self) -> dict[str, Any]:
        """As it is inspected: steps one by one, first one first."""
        steps = [
            {"tokens": tokens, "hits": step.hits, "pinned": step.pinned, "bytes": step.bytes}
            for tokens, step in sorted(self.steps.items())
        ]
        return {**self.summary(), "steps": steps}


@dataclass(frozen=True)
class Told:
    """What one replica says to a call.

    states: for `inspect`, and for `list`, there with all steps of a state as its last one. found:
    copies of checkpoints that the state had there, in all tiers; changed: those it concerned;
    tokens: the step it ended at; left: copies that a deletion had to leave, as requests were using
    them.
    """

    replica: str
    states: tuple[State, ...] = ()
    found: int = 0
    changed: int = 0
    tokens: int = 0
    left: int = 0


class Copy(Protocol):
    """A copy of a checkpoint, as `Engine.states` tells it."""

    @property
    def name(self) -> str:
        """Session id, or ""."""
        ...

    @property
    def anchor(self) -> str:
        """What its state was routed on."""
        ...

    @property
    def tokens(self) -> int:
        """Where it stands."""
        ...

    @property
    def hits(self) -> int:
        """How often it was resumed from."""
        ...

    @property
    def pinned(self) -> bool:
        """Whether it is kept from eviction."""
        ...

    @property
    def tier(self) -> str:
        """Where it is."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes it adds there."""
        ...


def grouped(copies: Iterable[Copy], replica: str) -> list[State]:
    """The states of one replica by their checkpoints, by id.

    Copies of one checkpoint on several tiers count the same hits.
    """
    states: dict[str, State] = {}
    for copy in copies:
        name = copy.name or copy.anchor
        state = states.setdefault(name, State(name, copy.anchor, replicas=[replica]))
        step = state.steps.setdefault(copy.tokens, Step(count=1))
        step.hits = max(step.hits, copy.hits)
        step.pinned = step.pinned or copy.pinned
        step.bytes[copy.tier] = step.bytes.get(copy.tier, 0) + copy.bytes
    return sorted(states.values(), key=lambda state: state.id)


def merged(told: Iterable[Told]) -> list[State]:
    """The states of several replicas, by id; what several hold is one state with their sums."""
    states: dict[str, State] = {}
    for state in (state for answer in told for state in answer.states):
        whole = states.setdefault(state.id, State(state.id, state.anchor))
        whole.replicas += state.replicas
        for tokens, step in state.steps.items():
            whole.steps.setdefault(tokens, Step()).add(step)
    return sorted(states.values(), key=lambda state: state.id)
