"""Which replica a state goes to. Pure: the time is an argument, and nothing here talks.

Standard library only: this module travels by value with the request router, into processes that
have nothing of this project installed. What it is told may be stale, malformed or missing; that
costs a recompute, never an error.

Times are seconds of any one clock, waits and costs milliseconds of engine time.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from router.ring import Ring, rehashed
from router.routing_key import Anchor, Openings, Recent, RouteKey

SHIPPED = ("router.ring", "router.routing_key", "router.policy", "router.fingerprint")
"""Modules that travel by value; none imports more than these and the standard library."""

_ALL = 1 << 62
_LEAST = 1e-3  # of what is divided by


class Load(NamedTuple):
    """What a replica says of its work, in its stats and beside every answer.

    wait_ms: predicted wait of a request that arrives now. mean_wait_ms: of those of the last few
    seconds. step_ms: mean engine time of a request. tokens_per_ms: how fast it computes states.
    """

    wait_ms: float
    mean_wait_ms: float
    step_ms: float
    tokens_per_ms: float


@dataclass(frozen=True)
class Stats:
    """`routing_stats` of one replica. openings: prefixes many states share, at most 32. foreign:
    anchors it holds without being their home, and bytes of state it was last sent for each, at most
    64. draining: takes nothing new.
    """

    load: Load
    openings: tuple[int, ...] = ()
    foreign: tuple[tuple[int, int], ...] = ()
    draining: bool = False

    def encode(self) -> dict[str, bytes]:
        """What `record_routing_stats` returns: at most 916 bytes."""
        openings, foreign = self.openings[:32], self.foreign[:64]
        head = struct.pack(_HEAD, 1, self.draining, len(openings), len(foreign), *self.load)
        entries = (*openings, *(anchor for anchor, _ in foreign))
        sizes = (min(size // _SIZE_UNIT, 0xFFFF) for _, size in foreign)
        packed = struct.pack(f"<{len(entries)}Q{len(foreign)}H", *entries, *sizes)
        return {"flide": head + packed}


_HEAD = "<BBBBffff"  # not a Struct, which does not pickle
_SIZE_UNIT = 256  # bytes; a state of more than 16 MB counts as one of 16 MB


def decode(stats: object) -> Stats | None:
    """The stats a replica sent, or None for anything else."""
    packed = stats.get("flide") if isinstance(stats, dict) else None
    if not isinstance(packed, bytes) or len(packed) < struct.calcsize(_HEAD):
        return None
    version, draining, openings, foreign, *load = struct.unpack_from(_HEAD, packed)
    body, at = f"<{openings + foreign}Q{foreign}H", struct.calcsize(_HEAD)
    if version != 1 or len(packed) < at + struct.calcsize(body):
        return None
    if (sane := as_load(load)) is None:
        return None
    values = struct.unpack_from(body, packed, at)
    anchors, sizes = values[openings : openings + foreign], values[openings + foreign :]
    held = tuple((a, s * _SIZE_UNIT) for a, s in zip(anchors, sizes, strict=True))
    return Stats(sane, values[:openings], held, bool(draining))


def as_load(value: object) -> Load | None:
    """A load in its form between processes, or None for what is none."""
    if not isinstance(value, (tuple, list)) or len(value) != len(Load._fields):
        return None
    if not all(isinstance(x, (int, float)) and 0 <= x < 1e9 for x in value):
        return None
    return Load(*map(float, value))


class Board:
    """Predicted waits of replicas, as one router sees them.

    What came back with the last response, less the time since then, as an engine works off a
    millisecond in a millisecond; at least what this router has sent, less the same; and the longer
    ago that was, the nearer to the mean wait the replica last told. Nothing is counted up that
    another call must count down, so a lost answer is forgotten by itself.
    """

    MEMORY_STEPS = 10
    """Mean engine times of a request after which a queue says no more than the mean."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, float]] = {}  # replica -> (wait ms, when)
        self._sent: dict[str, tuple[float, float]] = {}
        self._mean: dict[str, float] = {}
        self.load = Load(0.0, 0.0, 3.0, 380.0)
        """The last load heard from any replica; before it, that of 0.8B on an H200."""

    def answered(self, replica: str, load: object, now: float) -> None:
        """A response came; load: as the replica wrote it beside the answer, or anything."""
        if (sane := as_load(load)) is not None:
            self._told[replica] = sane.wait_ms, now
            self.heard(replica, sane)

    def heard(self, replica: str, load: Load) -> None:
        """Stats came, as old as they may be."""
        self._mean[replica] = load.mean_wait_ms
        if load.step_ms > _LEAST and load.tokens_per_ms > _LEAST:
            self.load = load

    def sent(self, replica: str, cost_ms: float, now: float) -> None:
        """A request goes to a replica, which will work on it for about that long."""
        self._sent[replica] = (self._left(self._sent.get(replica), now) + cost_ms, now)

    def wait(self, replica: str, now: float) -> float | None:
        """Predicted ms until a request sent now is begun; None if nothing is known."""
        told, sent, mean = (
            self._told.get(replica),
            self._sent.get(replica),
            self._mean.get(replica),
        )
        if told is None and sent is None and mean is None:
            return None
        known = max(self._left(told, now), self._left(sent, now))
        if mean is None or told is None:
            return max(known, mean or 0.0)
        age = 1000 * (now - told[1]) / (self.MEMORY_STEPS * self.load.step_ms)
        return max(known, mean * min(1.0, age))

    def mean_wait(self, replica: str) -> float:
        """Mean ms that requests waited, when last heard; 0 if nothing is known."""
        return self._mean.get(replica, 0.0)

    def drop(self, replica: str) -> None:
        """Forgets a replica."""
        for table in (self._told, self._sent, self._mean):
            table.pop(replica, None)

    @staticmethod
    def _left(work: tuple[float, float] | None, now: float) -> float:
        return max(0.0, work[0] - 1000 * (now - work[1])) if work else 0.0


REASONS = ("home", "foreign", "spilled", "no information", "no key")
"""Why a replica was chosen: it is the anchor's home and pays best; holds it, too, and waits less;
does not hold it and still pays; is the home, of whose load nothing is known; there was no key.
"""


class Choice(NamedTuple):
    """Where a request goes: replica, what was routed on, whether the replica is its home, one of
    `REASONS`, and the predicted ms of computing the state anew there.
    """

    replica: str
    anchor: int
    home: bool
    reason: str
    move_ms: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Constants of the choice; figures are of `python -m router.simulate sweep`.

    margin_steps: what leaving must save beyond the recompute, in mean engine times of a request.
    With 64 replicas 0.5 computes 6.8% more tokens than needed, 1: 6.5%, 2: 5.2%, 4: 4.5% and less
    even work. recompute_share: engine time that moves may cost of all a router dispatches. More
    feeds the load that causes them: at 70% busy, 0.02, 0.05, 0.1 and 0.2 compute 5.2, 6.8, 9.7 and
    17% more than needed, and without a bound (1.0) 108%, with every engine busy throughout. burst:
    requests whose share can be saved up. others: replicas that do not hold a state and are
    considered for it; holders: how many of those that do; neither matters in the sweep. hot:
    requests a minute, through this router, from which on a state's moves are weighed by mean waits
    and paid once for all of them: 8, 20 and 60 compute 5.2, 4.5 and 4.3% more than needed with 64
    replicas, the busiest hundredth at 1.15, 1.21 and 1.22 of the mean. bytes_per_token: 65,016
    bytes are 17,436 tokens in agent_trajectories.
    """

    margin_steps: float = 2.0
    recompute_share: float = 0.05
    burst: int = 2000
    others: int = 2
    holders: int = 8
    hot: float = 8.0
    bytes_per_token: float = 3.7


class Policy:
    """One router's choices among the live replicas of one deployment."""

    def __init__(self, board: Board | None = None, limits: Limits | None = None) -> None:
        """board: what responses are written to, shared by routers of one process."""
        self.board = board or Board()
        self._limits = limits or Limits()
        self._ring = Ring()
        self._live: dict[str, Any] = {}  # replica -> its stats as they came
        self._draining: set[str] = set()
        self._listed: dict[str, tuple[tuple[int, int], ...]] = {}
        self._holders: dict[int, dict[str, int]] = {}  # anchor -> who lists it: bytes held
        self._moved: Recent[int, dict[str, int]] = Recent(4096)  # same, of what was sent from here
        # anchor -> (requests, since when, size at the last)
        self._visits: Recent[int, tuple[float, float, int]] = Recent(4096)
        self._sizes: Recent[int, float] = Recent(4096)  # of session ids: bytes, inf for mixed ones
        self._openings = Openings()
        self._saved_ms = 0.0  # engine time that moves may cost now
        self._turn = 0

    def set_replicas(self, stats: dict[str, object], now: float) -> None:
        """The live replicas by unique id, each with its routing stats, whatever they are."""
        for replica in [r for r in self._live if r not in stats]:
            self.remove(replica)
        for replica, told in stats.items():
            self.add(replica)
            # Serve hands the same object over until there are new ones
            if told is not self._live[replica]:
                self.hear(replica, told, now)

    def add(self, replica: str) -> None:
        """A replica is live: it takes its share of the anchors."""
        if replica not in self._live:
            self._live[replica] = None
            self._ring.add(replica)

    def hear(self, replica: str, stats: object, now: float) -> None:
        """New routing stats of a live replica; anything malformed leaves what was known before."""
        if replica not in self._live:
            return
        self._live[replica] = stats
        if (told := decode(stats)) is None:
            return
        self.board.heard(replica, told.load)
        self._openings.hear(told.openings, now)
        self._list(replica, told.foreign)
        if told.draining and replica not in self._draining:
            self._draining.add(replica)
            self._ring.remove(replica)
        elif not told.draining and replica in self._draining:
            self._draining.remove(replica)
            self._ring.add(replica)

    def remove(self, replica: str) -> None:
        """A replica is dead or leaves: nothing goes there from now on."""
        if replica in self._live:
            del self._live[replica]
            self._ring.remove(replica)
            self._draining.discard(replica)
            self._list(replica, ())
            self.board.drop(replica)

    def choose(self, key: RouteKey | None, now: float) -> Choice | None:
        """Where a request goes, which counts as sent there; None if no replica takes any."""
        if not self._ring:
            return None
        load, limits = self.board.load, self._limits
        earned = limits.recompute_share * load.step_ms
        most = limits.burst * earned
        self._saved_ms = min(max(self._saved_ms, -most) + earned, most)
        if key is None:
            choice = self._any(now)
        else:
            anchor = self._openings.anchor(key, now)
            mixed = bool(key.session) and self._is_mixed(anchor.entry, key.size)
            choice = self._place(anchor, key.size, now, mixed)
        self._saved_ms -= choice.move_ms
        self.board.sent(choice.replica, load.step_ms + choice.move_ms, now)
        return choice

    def owner(self, key: RouteKey, now: float) -> Choice | None:
        """Where a state belongs, however long it waits there; None if no replica takes any."""
        if not self._ring:
            return None
        anchor = self._openings.anchor(key, now).entry
        return Choice(self._ring.home(anchor), anchor, True, "handed over")

    def fallbacks(self, choice: Choice, count: int) -> list[str]:
        """Where to try next, should the chosen replica refuse: at most `count` others."""
        if not self._ring:
            return []
        tried = {choice.replica: None}
        for turn in range(4 * count):
            if len(tried) <= count:
                tried[self._ring.home(rehashed(choice.anchor, turn))] = None
        return list(tried)[1:]

    def _place(self, where: Anchor, size: int, now: float, mixed: bool) -> Choice:
        """Where the state of `size` bytes is, unless another replica saves more than it costs.

        mixed: the anchor stands for several states, so what one replica holds says nothing.
        """
        anchor, wait = where.entry, self.board.wait
        home = self._ring.home(anchor)
        moved, home_wait = None if mixed else self._moved.get(anchor), wait(home, now)
        margin = self._limits.margin_steps * self.board.load.step_ms
        visits, before = (0.0, size) if mixed else self._visit(anchor, size, now)
        idle = home_wait is None or home_wait <= margin
        if moved is None and idle and visits < self._limits.hot:
            return Choice(home, anchor, True, "home" if home_wait is not None else "no information")
        held = {home: _ALL} if mixed else self._held(anchor, home, moved)
        best, least = Choice(home, anchor, True, "home"), float("inf")
        for replica in self._some(held):
            lacks = self._ms(size - held[replica]) if held[replica] < size else 0.0
            cost = (wait(replica, now) or 0.0) + lacks
            if cost < least:
                reason = "home" if replica == home else "foreign"
                best, least = Choice(replica, anchor, replica == home, reason, lacks), cost
        anew = self._ms(max(0, size - where.shared))
        if anew <= self._saved_ms and (other := self._other(anchor, held, now)) is not None:
            saves = least - margin - (wait(other, now) or 0.0)
            if visits >= self._limits.hot:
                mean = min(map(self.board.mean_wait, held)) - self.board.mean_wait(other)
                saves = max(saves, visits * (mean - margin / 8))
            if saves > anew:
                best = Choice(other, anchor, False, "spilled", anew)
        if not mixed and (moved is not None or best.replica != home):
            self._moved.put(anchor, {**(moved or {home: before}), best.replica: size})
        return best

    def _held(self, anchor: int, home: str, moved: dict[str, int] | None) -> dict[str, int]:
        """Bytes of a state by the live replicas that are thought to hold it, home among them."""
        listed = self._holders.get(anchor, {})
        known = {home: _ALL} if moved is None else {home: 0}
        for replica, size in (*listed.items(), *(moved or {}).items()):
            if replica in self._live and replica not in self._draining:
                known[replica] = max(size, known.get(replica, 0))
        return known

    def _other(self, anchor: int, held: dict[str, int], now: float) -> str | None:
        """The one that waits least of a few replicas that do not hold a state.

        Each holder more opens the next places, the same for all routers that know as many.
        """
        new: dict[str, float] = {}
        for turn in range(len(held), len(held) + 4 * self._limits.others):
            replica = self._ring.home(rehashed(anchor, turn))
            if replica not in held:
                new[replica] = self.board.wait(replica, now) or 0.0
            if len(new) == self._limits.others:
                break
        return min(new, key=new.__getitem__, default=None)

    def _is_mixed(self, anchor: int, size: int) -> bool:
        """Whether a session id has been used for states that shrink: for more than one, then."""
        largest = self._sizes.get(anchor) or 0.0
        mixed = size < 0.9 * largest
        self._sizes.put(anchor, math.inf if mixed else max(size, largest))
        return mixed

    def _visit(self, anchor: int, size: int, now: float) -> tuple[float, int]:
        """Requests for a state in a minute, and its size at the last, both through this router.

        Only each fourth request is told how many: mean waits change slowly, and looking for a
        better place takes twice as long as knowing the way home.
        """
        count, since, before = self._visits.get(anchor) or (0.0, now, size)
        if now - since > 60.0:
            count, since = count / 2, (now + since) / 2
        self._visits.put(anchor, (count + 1, since, size))
        return (60 * count / max(now - since, 10.0) if int(count) % 4 == 3 else 0.0), before

    def _ms(self, size: int) -> float:
        """Engine time of computing so many bytes of state."""
        return size / self._limits.bytes_per_token / self.board.load.tokens_per_ms

    def _some(self, held: dict[str, int]) -> list[str]:
        """At most `limits.holders` of them, others each time."""
        most, holders = self._limits.holders, list(held)
        if len(holders) <= most:
            return holders
        self._turn += 1
        start = rehashed(0, self._turn) % len(holders)
        return (holders[start:] + holders[:start])[:most]

    def _any(self, now: float) -> Choice:
        """The less loaded of two replicas."""
        self._turn += 1
        pair = [self._ring.home(rehashed(i, self._turn)) for i in range(2)]
        replica = min(pair, key=lambda r: self.board.wait(r, now) or 0.0)
        return Choice(replica, 0, True, "no key")

    def _list(self, replica: str, foreign: tuple[tuple[int, int], ...]) -> None:
        """Replaces what a replica says it holds."""
        for anchor, _ in self._listed.pop(replica, ()):
            if (holders := self._holders.get(anchor)) is not None:
                holders.pop(replica, None)
                if not holders:
                    del self._holders[anchor]
        if foreign:
            self._listed[replica] = foreign
            for anchor, size in foreign:
                self._holders.setdefault(anchor, {})[replica] = size
