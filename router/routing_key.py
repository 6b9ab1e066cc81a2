"""What a request is routed by: hashes of its state's beginnings, and which of them are shared.

Standard library only: this module travels by value with the request router, into processes that
have nothing of this project installed.

The *canonical state text* is the state as it enters a prompt: a string as it is, structured data as
JSON (`flide_engine.families.rendering.entry_text`). Its *chain* is the running blake2b hash at
every 256 bytes up to 16 KiB, at every 4 KiB beyond, at the end of the first message that is not the
system's if the state is a list of messages, and at the very end. An entry therefore names all of
the text before it, and two texts agree on an entry only if they agree up to there.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

SCHEME = 1
"""Changes with anything that changes a hash; keys of two schemes share nothing."""

FINE_BYTES, COARSE_BYTES, FINE_END = 256, 4096, 16384
FINE_ENTRIES = FINE_END // FINE_BYTES
SYSTEM_ROLES = ("system", "developer")

K = TypeVar("K")
V = TypeVar("V")


class RouteKey(NamedTuple):
    """What a router needs of a request; `tuple(key)` is its form between processes, builtins only.

    scheme: `SCHEME` of the writer. tenant: seeds every hash, so that no key tells one tenant
    what another asked. session: the caller's session id; if set, the chain is left out. chain: 8
    bytes an entry, ascending by position; the last entry is that of the whole text. head: which
    entry ends the first message that is not the system's, or -1. size: bytes of the state's text,
    roughly.
    """

    scheme: int
    tenant: str
    session: str
    chain: bytes
    head: int
    size: int

    def entries(self) -> tuple[int, ...]:
        """The chain as integers."""
        return struct.unpack(f"<{len(self.chain) // 8}Q", self.chain)


class Anchor(NamedTuple):
    """What alone is routed on. shared: bytes of text before it that many other states have, too."""

    entry: int
    shared: int


def route_key(request: object, tenant: str = "", session: str = "") -> RouteKey:
    """The key of a decision request: a DecisionRequest or the plain dict of one.

    Never raises: what the engine will refuse gets the key of an empty state.
    """
    found = request.get("state") if isinstance(request, Mapping) else None
    state = getattr(request, "state", found)
    if session:
        try:
            size = _rough_size(state)
        except RecursionError:
            size = 0
        return RouteKey(SCHEME, tenant, session, b"", -1, size)
    text, head_end = _canonical(state)
    chain, head = _chain(text, head_end, tenant)
    return RouteKey(SCHEME, tenant, "", chain, head, len(text))


def as_key(value: object) -> RouteKey | None:
    """The key in its form between processes, or None for what is none of this scheme."""
    if not isinstance(value, (tuple, list)) or len(value) != len(RouteKey._fields):
        return None
    key = RouteKey(*value)
    kinds = (int, str, str, bytes, int, int)
    if not all(isinstance(part, kind) for part, kind in zip(key, kinds, strict=True)):
        return None
    count = len(key.chain) // 8
    whole = len(key.chain) % 8 == 0 and (count > 0 or bool(key.session))
    return key if key.scheme == SCHEME and whole and -1 <= key.head < max(count, 1) else None


def state_text(state: object) -> str:
    """The canonical text of a state; empty for what is no state."""
    if isinstance(state, str):
        return state
    try:
        return json.dumps(state, ensure_ascii=False) if isinstance(state, (dict, list)) else ""
    except (TypeError, ValueError, RecursionError):
        return ""


def _canonical(state: object) -> tuple[bytes, int]:
    """The text in UTF-8, and where its first message that is not the system's ends (-1: none)."""
    if not isinstance(state, list) or not state or not all(_is_message(m) for m in state):
        return _utf8(state_text(state)), -1
    parts = [state_text(message) for message in state]
    if not all(parts):
        return _utf8(state_text(state)), -1
    # the text of a list is that of its items, so the end of one is known without a second pass
    first = next((i for i, m in enumerate(state) if m["role"] not in SYSTEM_ROLES), -1)
    until = _utf8("[" + ", ".join(parts[: first + 1]))
    rest = "".join(f", {part}" for part in parts[first + 1 :])
    if first < 0:
        return _utf8("[" + ", ".join(parts) + "]"), -1
    return until + _utf8(rest + "]"), len(until)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _rough_size(state: object) -> int:
    """Characters of a state without writing its text; 0 for what is no state."""
    if isinstance(state, str):
        return len(state)
    if isinstance(state, dict):
        return sum(map(_rough_size, state.values()))
    return sum(map(_rough_size, state)) if isinstance(state, list) else 0


def _chain(text: bytes, head_end: int, tenant: str) -> tuple[bytes, int]:
    """(chain, index of the head's entry or -1); one pass over the text, 0.17 ms for 120 kB."""
    ends = list(range(FINE_BYTES, min(len(text), FINE_END) + 1, FINE_BYTES))
    ends += range(FINE_END + COARSE_BYTES, len(text) + 1, COARSE_BYTES)
    if head_end >= 0:
        ends = sorted({*ends, head_end})
    if not ends or ends[-1] < len(text):
        ends.append(len(text))
    hashed = blake2b(digest_size=8, key=_seed(tenant))
    view, at = memoryview(text), 0
    digests = []
    for end in ends:
        hashed.update(view[at:end])
        digests.append(hashed.digest())
        at = end
    return b"".join(digests), ends.index(head_end) if head_end >= 0 else -1


def _seed(tenant: str) -> bytes:
    return blake2b(b"flide route %d " % SCHEME + _utf8(tenant), digest_size=32).digest()


def session_entry(tenant: str, session: str) -> int:
    """What a session id is routed on."""
    digest = blake2b(_utf8(session), digest_size=8, key=_seed(tenant), person=b"session").digest()
    return int.from_bytes(digest, "little")


def anchor_text(anchor: object, route: object = None) -> str:
    """An anchor as 16 hex digits, in which a state without a session id is named; "" for none.

    anchor: what a router routed on. route: the key, for a call that no router of ours has placed:
    its anchor is the one it has before any opening is learned.
    """
    if not isinstance(anchor, int) or not 0 <= anchor < 1 << 64:
        if (key := as_key(route)) is None:
            return ""
        session = session_entry(key.tenant, key.session) if key.session else 0
        anchor = session or key.entries()[max(key.head, 0)]
    return f"{anchor:016x}"


def anchor_key(text: str, tenant: str, size: int) -> RouteKey:
    """A key that is routed on the anchor of this text (`anchor_text`); size: bytes of the state.

    Raises ValueError for anything but 16 hex digits.
    """
    if len(text) != 16:
        raise ValueError(f"an anchor has 16 hex digits; got {text[:80]!r}")
    return RouteKey(SCHEME, tenant, "", struct.pack("<Q", int(text, 16)), -1, size)


class Recent(Generic[K, V]):
    """A mapping of the most recently used keys, at least `most` and at most twice as many.

    Two dicts that take turns: a look-up is a dict's, and nothing is ever dropped one by one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        """The value, which counts as a use; or None."""
        value = self._young.get(key)
        if value is None and (value := self._old.pop(key, None)) is not None:
            self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        """Keeps a value."""
        if len(self._young) >= self._most and key not in self._young:
            self._old, self._young = self._young, {}
        self._old.pop(key, None)
        self._young[key] = value


class Openings:
    """Prefixes that many different states begin with, learned from the keys that pass by.

    A prefix with `distinct` continuations within `window_s` is an opening, and stays one: that an
    opening is no longer shared does no harm, that an anchor changes costs a recompute. A long one
    needs more of them, `distinct_long`: a history that is tried in several ways is a prefix of
    each, and to spread it is the dearer the longer it is. States are routed on the first entry
    past the deepest opening of theirs, so that a common system prompt spreads over the fleet, and
    a growing history stays where it is. A router observes what it routes and hears what replicas
    learned; a replica observes what it gets, and tells.

    Only branchings are stored. A reference chain is kept for each entry where texts part; a new
    key is compared with it, and their common part is a prefix with one more continuation. Both
    tables are bounded: 4,096 references (6 MB at most), 1,024 branchings.
    """

    def __init__(
        self,
        distinct: int = 3,
        distinct_long: int = 8,
        window_s: float = 600.0,
        heard: int = 512,
        told: int = 32,
    ) -> None:
        """distinct, distinct_long: continuations of an opening of at most 16 KiB, and of a longer
        one. heard: most openings known at a time. told: most openings passed on.
        """
        self._distinct, self._distinct_long = distinct, distinct_long
        self._window, self._told, self._most = window_s, told, heard
        self._known: dict[int, float] = {}  # entry -> last used, seconds; the last used stand last
        self._references: Recent[int, RouteKey] = Recent(4096)
        self._branchings: Recent[int, dict[int, float]] = Recent(1024)

    def anchor(self, key: RouteKey, now: float) -> Anchor:
        """What the key is routed on, after what it teaches."""
        if key.session:
            return Anchor(session_entry(key.tenant, key.session), 0)
        entries = key.entries()
        deepest = self._deepest(entries, now)
        self._learn(key, entries, deepest, now)
        if key.head > deepest:
            return Anchor(entries[key.head], 0)
        # a state that ends with its opening has nothing past it
        return Anchor(entries[min(deepest + 1, len(entries) - 1)], _position(deepest))

    def hear(self, openings: Iterable[int], now: float) -> None:
        """Openings that others have learned."""
        for entry in openings:
            self._use(entry, now)

    def known(self, now: float) -> tuple[int, ...]:
        """Openings used within `window_s`, at most `told`, the last used first."""
        recent = (e for e in reversed(self._known) if now - self._known[e] <= self._window)
        return tuple(islice(recent, self._told))

    def _deepest(self, entries: Sequence[int], now: float) -> int:
        known = self._known
        if known:
            for i in range(len(entries) - 1, -1, -1):
                if entries[i] in known:
                    self._use(entries[i], now)
                    return i
        return -1

    def _learn(self, key: RouteKey, entries: Sequence[int], deepest: int, now: float) -> None:
        """Compares a key with the references on its way, and counts where it parts from one."""
        at = min(deepest + 1, len(entries) - 1)
        while (other := self._references.get(entries[at])) is not None:
            mine, theirs = key.chain, other.chain
            if mine[:-8] == theirs[:-8]:
                # a step of a long history changes no entry but the last, and is no continuation
                if mine == theirs or len(entries) - 1 > FINE_ENTRIES:
                    return
                if key.size > other.size:
                    break  # perhaps the same state, grown; one that is not longer is another
            elif theirs.startswith(mine[:-8]):
                return  # the same state, earlier
            elif mine.startswith(theirs[:-8]):
                break  # the same state, grown
            parted = _agreed(mine, theirs)
            if not at < parted < min(len(mine), len(theirs)) // 8:
                return  # a chain that is no text's
            least = self._distinct if parted <= FINE_ENTRIES else self._distinct_long
            for continuation in (other.entries()[parted], entries[parted]):
                self._count(entries[parted - 1], continuation, least, now)
            at = parted
        self._references.put(entries[at], key)

    def _count(self, prefix: int, continuation: int, least: int, now: float) -> None:
        found = self._branchings.get(prefix)
        if found is None:
            found = {}
            self._branchings.put(prefix, found)
        found[continuation] = now
        if len(found) >= least:
            for entry in [e for e, used in found.items() if now - used > self._window]:
                del found[entry]
            if len(found) >= least:
                found.clear()
                self._use(prefix, now)

    def _use(self, entry: int, now: float) -> None:
        self._known.pop(entry, None)
        self._known[entry] = now
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]


def _agreed(mine: bytes, theirs: bytes) -> int:
    """How many entries two chains begin with alike."""
    low, high = 0, min(len(mine), len(theirs)) // 8
    while low < high:  # an entry names all before it, so agreement ends once
        middle = (low + high) // 2
        here = slice(8 * middle, 8 * middle + 8)
        low, high = (middle + 1, high) if mine[here] == theirs[here] else (low, middle)
    return low


def _position(index: int) -> int:
    """Bytes of text up to an entry; a head's own entry may put it off by one grid step."""
    fine = min(index + 1, FINE_ENTRIES)
    return fine * FINE_BYTES + (index + 1 - fine) * COARSE_BYTES
