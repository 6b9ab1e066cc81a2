"""A round while the scheduler puts it together."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic

from flide_engine.fairness import Entry, W


class Verdict(Enum):
    """What becomes of work whose turn has come."""

    TAKE = 0
    GONE = 1
    HOPELESS = 2  # it would be late
    NO_ROOM = 3
    BLOCKED = 4  # long, while another long one has begun


@dataclass
class Packing(Generic[W]):
    """A round being put together. start: when it can begin, if all goes fast. waits: whether it may
    wait for states on their way to the device; passed: whether work was passed over for that.
    """

    room: int
    now: float
    start: float
    plan: Callable[[W], None]
    taken: list[Entry[W]] = field(default_factory=list)
    gone: list[Entry[W]] = field(default_factory=list)
    hopeless: list[Entry[W]] = field(default_factory=list)
    tokens: int = 0
    misses: int = 0
    waits: bool = False
    passed: bool = False
