"""The prefix index against a list of everything that was ever inserted."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flide_engine.cache.index import Checkpoint, PrefixIndex, grain_keys
from flide_engine.layout.tree import Tokens

PROMPTS = st.lists(st.integers(0, 1), min_size=0, max_size=5)


def prompt_of(grains: list[int]) -> Tokens:
    """A prompt whose grains are all zeros or all ones, and a few tokens more."""
    return np.concatenate([np.full(64, g) for g in grains] + [np.full(9, 7)]).astype(np.int32)


class IndexMachine(RuleBasedStateMachine):
    """Insert, match, lock, evict, remove in any order, beside a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[tuple[str, tuple[int, ...]], Checkpoint] = {}
        self.pages: dict[int, int] = {}
        self.next = 0
        self.now = 0.0

    def number(self) -> int:
        """A page or slot number never used before."""
        self.next += 1
        return self.next

    @rule(tenant=st.sampled_from("ab"), grains=PROMPTS.filter(bool))
    def insert(self, tenant: str, grains: list[int]) -> None:
        """A checkpoint after all grains of a prompt."""
        self.now += 1
        tokens = prompt_of(grains)
        keys = grain_keys(tokens)
        pages = np.array([self.number() for _ in grains], np.int32)
        slot = self.number()
        made, taken, slot_taken = self.index.insert(tenant, tokens, keys, pages, slot, self.now)
        key = (tenant, tuple(grains))
        assert slot_taken == (key not in self.held)
        self.held.setdefault(key, made)
        assert self.held[key] is made
        for page in taken:
            self.pages[int(page)] = 1

    @rule(tenant=st.sampled_from("ab"), grains=PROMPTS, limit=st.integers(0, 400))
    def match(self, tenant: str, grains: list[int], limit: int) -> None:
        """The longest prefix that was inserted and is still there, within the limit."""
        tokens = prompt_of(grains)
        found = self.index.match(tenant, tokens, grain_keys(tokens), limit)
        fits = [
            c
            for (who, has), c in self.held.items()
            if who == tenant and list(has) == grains[: len(has)] and 64 * len(has) <= limit
        ]
        want = max(fits, key=lambda c: c.position, default=None)
        assert found.checkpoint is want
        assert len(found.pages) == (want.position // 64 if want else 0)
        common = [
            sum(1 for _ in iter_common(has, grains)) for (who, has) in self.held if who == tenant
        ]
        assert found.agreed == min(64 * max(common, default=0), limit // 64 * 64)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lock_or_unlock(self, data: st.DataObject) -> None:
        """Somebody begins or ends to use a checkpoint."""
        one = data.draw(st.sampled_from(list(self.held.values())))
        one.locks = 0 if one.locks else 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), hits=st.integers(0, 30))
    def use(self, data: st.DataObject, hits: int) -> None:
        """Somebody resumes from a checkpoint."""
        one = data.draw(st.sampled_from(list(self.held.values())))
        one.hits, one.used = hits, self.now

    def worth(self, tenant: str, has: tuple[int, ...], now: float) -> float:
        """What `PrefixIndex.worth` promises, from the list of all prompts."""
        one = self.held[tenant, has]
        others = [other for who, other in self.held if who == tenant and other != has]
        continued = any(other[: len(has)] == has for other in others)
        before = max((len(o) for o in others if o == has[: len(o)]), default=0)
        age = now - one.used + 1.0
        if continued:
            share = 0.001 + min(1.0, 0.05 * max(0, one.hits - 1))
            return share * one.position / (age * 25)
        return (one.position - 64 * before) / (age * (25 + len(has) - before))

    @rule(count=st.integers(1, 4), later=st.floats(0, 1e4))
    def give_up(self, count: int, later: float) -> None:
        """The least worthy of those that nobody uses go, each the least of those left then."""
        now = self.now + later
        victims = self.index.victims(now)
        for _ in range(count):
            free = [k for k, c in self.held.items() if not c.locks and not c.pinned]
            gone = next(victims, None)
            if gone is None:
                assert not free
                return
            worths = {key: self.worth(*key, now) for key in free}
            (key,) = (k for k, c in self.held.items() if c is gone)
            assert worths[key] == pytest.approx(min(worths.values()), rel=1e-12)
            del self.held[key]
            for page in self.index.remove(gone).pages:
                del self.pages[int(page)]

    @invariant()
    def every_page_is_needed_and_none_is_lost(self) -> None:
        """Held pages are exactly the distinct grains of the checkpoints' prefixes."""
        assert len(self.index) == len(self.held)
        needed = {(who, has[: i + 1]) for who, has in self.held for i in range(len(has))}
        assert len(self.pages) == self.index.grains == len(needed)
        for (_, has), checkpoint in self.held.items():
            pages = self.index.pages_of(checkpoint)
            assert set(pages.tolist()) <= set(self.pages)
            text = self.index.tokens_of(checkpoint).tolist()
            assert text == prompt_of(list(has))[: 64 * len(has)].tolist()
            own = self.index.own_pages(checkpoint)
            others = [o for who, o in self.held if who == checkpoint.tenant and o != has]
            assert own == len(has) - max((len(o) for o in others if o == has[: len(o)]), default=0)


def iter_common(a: tuple[int, ...], b: list[int]) -> list[int]:
    """Grains on which both begin alike."""
    found = []
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        found.append(x)
    return found


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_key_without_its_tokens_is_no_hit() -> None:
    """Two prompts whose keys collide are told apart by their tokens."""
    index = PrefixIndex()
    tokens, other = prompt_of([0]), prompt_of([1])
    index.insert("t", tokens, grain_keys(tokens), np.array([1], np.int32), 2, 0.0)
    assert index.match("t", other, grain_keys(tokens), 64).checkpoint is None


def test_a_locked_checkpoint_is_never_removed() -> None:
    """Removing it is a mistake of ours."""
    index = PrefixIndex()
    tokens = prompt_of([0])
    made, _, _ = index.insert("t", tokens, grain_keys(tokens), np.array([1], np.int32), 2, 0.0)
    made.locks = 1
    with pytest.raises(AssertionError, match="in use"):
        index.remove(made)


def test_tenants_share_nothing() -> None:
    """The same tokens under another tenant are unknown."""
    index = PrefixIndex()
    tokens = prompt_of([0, 1])
    index.insert("a", tokens, grain_keys(tokens), np.array([1, 2], np.int32), 3, 0.0)
    match = index.match("b", tokens, grain_keys(tokens), 128)
    assert (match.checkpoint, match.agreed) == (None, 0)


def test_what_has_been_given_up_alters_what_goes_next() -> None:
    """With the longer one gone the one it continued is worth its own again; with that gone what
    follows it saves more.
    """
    index = PrefixIndex()
    text = prompt_of([0, 1, 0, 1, 0, 1])
    keys = grain_keys(text)
    steps = {}
    for i, grains in enumerate((2, 5, 6)):
        pages = np.arange(grains, dtype=np.int32)
        steps[grains], _, _ = index.insert("t", text, keys, pages, i, 0.0)
    steps[2].hits = 40  # an opening
    order = []
    for victim in index.victims(100.0):
        order.append(victim.position // 64)
        index.remove(victim)
    assert order == [5, 2, 6]
    assert len(index) == 0
