"""Which prefixes are in the pool: a trie of grains, one root a tenant, checkpoints at its nodes.

Pure: it deals in token ids and in numbers of pages and slots, and says which of them it takes and
gives up; the pool's counts are the caller's. A node stands where prefixes part or one ends; a run
of grains with the pages of their keys and values leads to it (`cache/trie.py`), so that a prompt
costs what there is on its way and not what it is long. A *checkpoint* at a node names the slot of
the state after it. Nodes exist only on the way to checkpoints, so every page the index holds is
needed to resume from one.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from flide_engine.cache.beside import Event
from flide_engine.cache.names import Named
from flide_engine.cache.trie import Node, Run
from flide_engine.config import GRAIN
from flide_engine.layout.plan import Ints

Tokens = NDArray[np.int32]

_NO_PAGES = np.zeros(0, np.int32)

SLOT_PAGES = 25
"""What a slot weighs in pages unless told otherwise (0.8B: 25 pages of 0.79 MB)."""


def grain_keys(tokens: Tokens, known: Sequence[bytes] = ()) -> list[bytes]:
    """One 16-byte key a whole grain, each covering everything before it as well.

    known: those of its first grains, which are not computed again.
    """
    keys = list(known)
    parent = keys[-1] if keys else b""
    data = _bytes(tokens[GRAIN * len(keys) :])
    for at in range(0, len(data) // (GRAIN * 4) * GRAIN * 4, GRAIN * 4):
        parent = hashlib.blake2b(parent + data[at : at + GRAIN * 4], digest_size=16).digest()
        keys.append(parent)
    return keys


def _bytes(tokens: Tokens) -> bytes:
    return np.ascontiguousarray(tokens, np.int32).tobytes()


@dataclass(eq=False)
class Checkpoint(Named):
    """A prefix one can resume from.

    tenant: whose it is. position: tokens before it. slot: of its recurrent state. used: when it was
    last taken or resumed from. hits: how often it was resumed from. locks: by how many it is in
    use. coming: when its contents, or those of pages before it, are on the device; None if they
    are. A round that resumes from it joins that first. trusted: values were read after it, and were
    finite; it may leave the device. others: of its pages, those that others must answer for first.
    """

    tenant: str
    position: int
    slot: int
    used: float
    hits: int = 0
    locks: int = 0
    coming: Event | None = None
    _node: "Node[Checkpoint] | None" = None
    _pages: Ints = field(default_factory=lambda: _NO_PAGES)
    trusted: bool = True
    others: Ints = field(default_factory=lambda: _NO_PAGES)
    _before: "Checkpoint | None" = None
    _after: "set[Checkpoint]" = field(default_factory=set)
    _continued: bool = False
    _saved: int = 0


@dataclass(frozen=True)
class Match:
    """What the index knows of a prompt: its longest checkpoint, and how many tokens of it were
    seen.

    pages [position / 64]: of the checkpoint's prefix, empty without one, and not to be changed.
    agreed: tokens, a multiple of 64, that some earlier prompt had in common with this one.
    """

    checkpoint: Checkpoint | None
    pages: Ints
    agreed: int


@dataclass(frozen=True)
class Freed:
    """Pages and slots that the index gave up: each was held once by it."""

    pages: Ints
    slots: Ints


class PrefixIndex:
    """Checkpoints by tenant and tokens. One thread uses it; nothing here locks.

    grains: distinct ones that its checkpoints consist of.
    """

    def __init__(self, slot_pages: int = SLOT_PAGES) -> None:
        """slot_pages: memory of a slot over that of a page, for what a checkpoint is worth."""
        self._slot_pages = slot_pages
        self._roots: dict[str, Node[Checkpoint]] = {}
        self._checkpoints: dict[int, Checkpoint] = {}  # by slot, oldest first
        self.grains = 0

    def __len__(self) -> int:
        return len(self._checkpoints)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return self._checkpoints.get(checkpoint.slot) is checkpoint

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._checkpoints.values())

    def match(self, tenant: str, tokens: Tokens, keys: Sequence[bytes], limit: int) -> Match:
        """The longest checkpoint of a prompt at no more than `limit` tokens.

        keys: `grain_keys(tokens)`. Tokens are compared on every hit: a key alone proves nothing.
        """
        found, agreed = None, 0
        for node, run, count in self._walk(tenant, tokens, min(limit // GRAIN, len(keys))):
            agreed += count
            if count == len(run.keys):
                found = node.end or found
        return Match(found, found._pages if found else _NO_PAGES, GRAIN * agreed)

    def keys(self, tenant: str, tokens: Tokens) -> list[bytes]:
        """`grain_keys` of a prompt; those of what is known of it are not computed again. Any thread
        may ask.
        """
        known: list[bytes] = []
        for _, run, count in self._walk(tenant, tokens, len(tokens) // GRAIN):
            known += run.keys[:count]
        return grain_keys(tokens, known)

    def _walk(
        self, tenant: str, tokens: Tokens, grains: int
    ) -> "Iterator[tuple[Node[Checkpoint], Run, int]]":
        """See `Node.walk`."""
        root = self._roots.get(tenant)
        return iter(()) if root is None else root.walk(_bytes(tokens[: GRAIN * grains]))

    def insert(
        self,
        tenant: str,
        tokens: Tokens,
        keys: Sequence[bytes],
        pages: Ints,
        slot: int,
        now: float,
        name: str = "",
        anchor: str = "",
    ) -> tuple[Checkpoint, Ints, bool]:
        """A checkpoint after `len(pages)` grains of a prompt: (it, pages taken, whether `slot`
        was).

        Pages of grains that are known already are not taken, nor is the slot where a checkpoint
        stands: what is there holds the same.
        """
        at, known, before = self._roots.setdefault(tenant, Node()), 0, None
        for node, run, count in self._walk(tenant, tokens, len(pages)):
            before = at.end or before
            known += count
            at = node if count == len(run.keys) else node.part(count)
        taken = np.array(pages[known:], np.int32)
        if len(taken):
            before = at.end or before
            more = _bytes(tokens[GRAIN * known : GRAIN * len(pages)])
            at = at.attach(Run(known, more, tuple(keys[known : len(pages)]), taken))
        self.grains += len(taken)
        if at.end is not None:
            at.end.used = now
            at.end.keep_for(name, anchor)
            return at.end, taken, False
        position = GRAIN * len(pages)
        made = Checkpoint(tenant, position, slot, now, name=name, anchor=anchor, _node=at)
        made._pages = np.concatenate([_NO_PAGES, *(run.pages for run in at.runs())])
        at.end = self._checkpoints[slot] = made
        _link(made, before, set(at.ends_after()))
        return made, taken, True

    def pages_of(self, checkpoint: Checkpoint) -> Ints:
        """Pages of a checkpoint's prefix, in order; not to be changed."""
        return checkpoint._pages

    def tokens_of(self, checkpoint: Checkpoint) -> Tokens:
        """Tokens of a checkpoint's prefix."""
        return np.frombuffer(b"".join(run.tokens for run in _runs(checkpoint)), np.int32)

    def own_pages(self, checkpoint: Checkpoint) -> int:
        """Pages between a checkpoint and the one before it on its way."""
        before = checkpoint._before
        return (checkpoint.position - (before.position if before else 0)) // GRAIN

    def is_continued(self, checkpoint: Checkpoint) -> bool:
        """Whether a longer checkpoint that is trusted goes on from it."""
        ahead = list(checkpoint._after)
        while ahead:
            longer = ahead.pop()
            if longer.trusted:
                return True
            ahead += longer._after
        return False

    def untrusted(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """A checkpoint and those before it on its way, back to the first that is trusted."""
        found: list[Checkpoint] = []
        at: Checkpoint | None = checkpoint
        while at is not None and not at.trusted:
            found.append(at)
            at = at._before
        return found

    def keys_of(self, checkpoint: Checkpoint) -> list[bytes]:
        """`grain_keys` of a checkpoint's prefix."""
        return [key for run in _runs(checkpoint) for key in run.keys]

    def remove(self, checkpoint: Checkpoint) -> Freed:
        """Takes a checkpoint out, and the pages that only it needed. It must not be locked."""
        assert checkpoint.locks == 0, "a checkpoint in use was removed"
        return self.detach(checkpoint)

    def detach(self, checkpoint: Checkpoint) -> Freed:
        """As `remove`, also of one in use: what is freed is in use until its locks are gone."""
        at = checkpoint._node
        assert at is not None
        del self._checkpoints[checkpoint.slot]
        at.end = None
        _unlink(checkpoint)
        pages = at.prune()
        self.grains -= len(pages)
        if not self._roots[checkpoint.tenant].children:
            del self._roots[checkpoint.tenant]
        return Freed(pages, np.array([checkpoint.slot], np.int32))

    def worth(self, checkpoint: Checkpoint, now: float) -> float:
        """Tokens saved a second of disuse and a page of memory: the lowest is evicted first.

        A checkpoint saves the tokens since the next one before it: those would be computed again if
        it went. One that a longer one continues serves only those who turn back, so it is worth a
        fraction, and frees its slot but no page.
        """
        continued, saved = checkpoint._continued, checkpoint._saved
        age = max(now - checkpoint.used, 0.0) + 1.0
        pages = self._slot_pages if continued else self._slot_pages + saved // GRAIN
        share = 1.0
        if continued:  # the first hit is the one that continued it, further ones show an opening
            share = TURNING_BACK + min(1.0, SHARED * max(0, checkpoint.hits - 1))
        return share * saved / (age * pages)

    def victims(self, now: float) -> Iterator[Checkpoint]:
        """Checkpoints that are neither locked nor pinned, each the least worthy of those that are
        left, the oldest of equals; the caller removes it before it asks for the next.

        All are looked at once: nothing may be inserted meanwhile, and what is unlocked meanwhile is
        not told.
        """
        known = list(self._checkpoints.values())
        worths = self._worths(known, now)
        while known:
            at = int(worths.argmin())
            victim = known[at]
            if worths[at] == np.inf:
                return
            worths[at] = np.inf
            if victim.locks or victim.pinned or victim not in self:
                continue
            near = [victim._before, *victim._after]
            yield victim
            for c in near:
                if c is not None and worths[i := known.index(c)] < np.inf:
                    worths[i] = self.worth(c, now)

    def _worths(self, known: Sequence[Checkpoint], now: float) -> NDArray[np.float64]:
        """`worth` of each, to the bit; infinite if it is locked or pinned."""

        def every(name: str) -> NDArray[np.float64]:
            return np.fromiter(map(attrgetter(name), known), np.float64, len(known))

        hits, saved, continued = every("hits"), every("_saved"), every("_continued") > 0
        age = np.maximum(now - every("used"), 0.0) + 1.0
        pages = self._slot_pages + np.where(continued, 0, saved // GRAIN)
        turned = TURNING_BACK + np.minimum(1.0, SHARED * np.maximum(0, hits - 1))
        worths: NDArray[np.float64] = np.where(continued, turned, 1.0) * saved / (age * pages)
        worths[(every("locks") > 0) | (every("pinned") > 0)] = np.inf
        return worths


TURNING_BACK = 0.001
"""Worth of a checkpoint that a longer one continues, against one that none does."""

SHARED = 0.05
"""Worth of each further time such a checkpoint was resumed from: many prompts begin with it."""


def _runs(checkpoint: Checkpoint) -> list[Run]:
    """Runs of a checkpoint's prefix, first one first."""
    assert checkpoint._node is not None
    return checkpoint._node.runs()


def _link(made: Checkpoint, before: Checkpoint | None, after: set[Checkpoint]) -> None:
    """Puts a checkpoint between the last one before it and the first ones after it."""
    made._before, made._after = before, after
    for c in after:
        c._before = made
    if before is not None:
        before._after -= after
        before._after.add(made)
    _weigh(made, before, *after)


def _unlink(gone: Checkpoint) -> None:
    """Takes a checkpoint out from between them."""
    before, after = gone._before, gone._after
    for c in after:
        c._before = before
    if before is not None:
        before._after.discard(gone)
        before._after |= after
    gone._before, gone._after = None, set()
    _weigh(before, *after)


def _weigh(*changed: Checkpoint | None) -> None:
    """What some checkpoints save now: see `PrefixIndex.worth`."""
    for c in changed:
        if c is not None:
            c._continued = bool(c._after)
            before = None if c._continued else c._before
            c._saved = c.position - (before.position if before else 0)
