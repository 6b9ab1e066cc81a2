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
    by tier that it adds to the step before it.
    """

    hits: int = 0
    pinned: bool = False
    bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class State:
    """What is remembered of a state. steps: by tokens. replicas: ids of those that have it."""

    id: str
    anchor: str
    steps: dict[int, Step] = field(default_factory=dict)
    replicas: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """As it is listed."""
        size: dict[str, int] = {}
        for step in self.steps.values():
            for tier, count in step.bytes.items():
                size[tier] = size.get(tier, 0) + count
        return {
            "id": self.id,
            "anchor": self.anchor,
            "tokens": max(self.steps, default=0),
            "checkpoints": len(self.steps),
            "hits": sum(step.hits for step in self.steps.values()),
            "pinned": any(step.pinned for step in self.steps.values()),
            "bytes": size,
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

    states: for `list` and `inspect`. found: copies of checkpoints that the state had there, in all
    tiers; changed: those it concerned; tokens: the step it ended at; left: copies that a deletion
    had to leave, as requests were using them.
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
        step = state.steps.setdefault(copy.tokens, Step())
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
            at = whole.steps.setdefault(tokens, Step())
            at.hits += step.hits
            at.pinned = at.pinned or step.pinned
            for tier, count in step.bytes.items():
                at.bytes[tier] = at.bytes.get(tier, 0) + count
    return sorted(states.values(), key=lambda state: state.id)
