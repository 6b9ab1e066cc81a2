"""The index's trie: runs are parted and joined, and who reads meanwhile is told nothing wrong."""

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flide_engine.cache.index import Checkpoint, PrefixIndex, grain_keys
from flide_engine.cache.trie import Node
from flide_engine.layout.tree import Tokens

WAYS = st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(0, 12))


def text_of(way: tuple[int, int, int]) -> Tokens:
    """A prompt that leaves the others after some grains: (which way, grains, where it leaves)."""
    which, grains, leaves = way
    tokens = np.repeat(np.arange(grains) // 3, 64).astype(np.int32)  # grains repeat themselves
    tokens[64 * leaves + 63 :] += which  # the last token of a grain is where it differs
    return tokens


def insert(index: PrefixIndex, tokens: Tokens, slot: int, first: int = 0) -> Checkpoint:
    """A checkpoint at a prompt's end; its pages are first, first + 1, ..."""
    pages = np.arange(first, first + len(tokens) // 64, dtype=np.int32)
    return index.insert("t", tokens, grain_keys(tokens), pages, slot, 0.0)[0]


class TrieMachine(RuleBasedStateMachine):
    """Long prompts that part inside runs, beside a page for every distinct prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[bytes, Checkpoint] = {}
        self.page_of: dict[bytes, int] = {}
        self.next = 0

    @rule(way=WAYS)
    def insert(self, way: tuple[int, int, int]) -> None:
        """Pages are taken for the grains that nobody had, and for no other."""
        text = text_of(way)
        prefixes = [text[: 64 * (i + 1)].tobytes() for i in range(len(text) // 64)]
        pages = np.arange(self.next, self.next + len(prefixes), dtype=np.int32)
        slot, self.next = self.next + len(prefixes), self.next + len(prefixes) + 1
        made, taken, new = self.index.insert("t", text, grain_keys(text), pages, slot, 0.0)
        assert new == (prefixes[-1] not in self.held)
        fresh = [(p, int(n)) for p, n in zip(prefixes, pages, strict=True) if p not in self.page_of]
        assert taken.tolist() == [page for _, page in fresh]
        self.page_of.update(fresh)
        self.held.setdefault(prefixes[-1], made)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        """What only it needed goes, the last page first."""
        text = data.draw(st.sampled_from(sorted(self.held)))
        freed = self.index.detach(self.held.pop(text))
        kept = {other[:end] for other in self.held for end in range(256, len(other) + 1, 256)}
        gone = [text[:end] for end in range(len(text), 0, -256) if text[:end] not in kept]
        assert freed.pages.tolist() == [self.page_of.pop(prefix) for prefix in gone]

    @rule(way=WAYS, limit=st.integers(0, 13 * 64))
    def match(self, way: tuple[int, int, int], limit: int) -> None:
        """The longest that begins the prompt; keys of what is known are those of the prompt."""
        text = text_of(way)
        keys = grain_keys(text)
        assert self.index.keys("t", text) == keys
        found = self.index.match("t", text, keys, limit)
        data = text.tobytes()
        fits = [t for t in self.held if data.startswith(t) and len(t) <= 4 * limit]
        assert found.checkpoint is (self.held[max(fits, key=len)] if fits else None)
        whole = [n for n in range(1, limit // 64 + 1) if data[: 256 * n] in self.page_of]
        assert found.agreed == 64 * max((n for n in whole if 64 * n <= len(text)), default=0)

    @invariant()
    def every_checkpoint_has_its_own(self) -> None:
        """Its pages, tokens and keys; whatever was parted and joined since."""
        assert self.index.grains == len(self.page_of)
        for text, checkpoint in self.held.items():
            ends = range(256, len(text) + 1, 256)
            assert self.index.pages_of(checkpoint).tolist() == [
                self.page_of[text[:e]] for e in ends
            ]
            assert self.index.tokens_of(checkpoint).tobytes() == text
            assert self.index.keys_of(checkpoint) == grain_keys(np.frombuffer(text, np.int32))

    @invariant()
    def a_node_stands_where_it_must(self) -> None:
        """Where a checkpoint is or prefixes part, and nowhere else; runs know their place."""
        ways: list[tuple[Node[Any], int]] = [(r, 0) for r in self.index._roots.values()]
        assert len(ways) == bool(self.held)
        while ways:
            at, first = ways.pop()
            assert at.parent is None or at.end is not None or len(at.children) > 1
            for head, child in at.children.items():
                run = child.run
                assert child.parent is at
                assert (run.first, run.tokens[:256]) == (first, head)
                assert len(run.tokens) // 256 == len(run.keys) == len(run.pages) > 0
                ways.append((child, first + len(run.keys)))


TestTrie = TrieMachine.TestCase
TestTrie.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_prompt_that_goes_on_is_hashed_from_there_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it leaves inside a run; another tenant's are no help."""
    index = PrefixIndex()
    text = text_of((0, 9, 0))
    insert(index, text, 0)
    longer = np.concatenate([text, text])
    other = longer.copy()
    other[64 * 5 + 1] += 1
    hashed = list[int]()
    real = hashlib.blake2b

    def counted(data: bytes, digest_size: int) -> Any:
        hashed.append(len(data))
        return real(data, digest_size=digest_size)

    want = [grain_keys(t) for t in (longer, other, longer)]
    monkeypatch.setattr("flide_engine.cache.index.hashlib.blake2b", counted)
    asked = zip("ttu", (longer, other, longer), want, (9, 13, 18), strict=True)
    for tenant, prompt, keys, computed in asked:
        hashed.clear()
        assert index.keys(tenant, prompt) == keys
        assert len(hashed) == computed


@pytest.mark.parametrize("joined", [True, False])
def test_a_reader_that_is_overtaken_believes_nothing_wrong(joined: bool) -> None:
    """A node whose run was joined or parted since the reader stood before it is not compared: the
    text repeats itself, and would agree in the wrong place.
    """
    index = PrefixIndex()
    text = np.zeros(64 * 8, np.int32)
    short = insert(index, text[: 64 * 2], 0)
    insert(index, text[: 64 * 6], 1, 100)
    walk = index._roots["t"].walk(text.tobytes())
    _, run, count = next(walk)
    assert (count, run.pages.tolist()) == (2, [0, 1])
    if joined:
        index.detach(short)
    else:
        index._roots["t"].children[run.tokens[:256]].children[run.tokens[:256]].part(1)
    rest = list(walk)
    if joined:
        assert rest == []
    else:
        assert [(run.first, count) for _, run, count in rest] == [(2, 1), (3, 3)]
    # and who asks anew is told all there is
    assert index.match("t", text, grain_keys(text), 64 * 8).agreed == 64 * 6


def test_a_part_keeps_no_more_in_memory_than_it_is() -> None:
    """Pages of a run that was parted are arrays of their own."""
    index = PrefixIndex()
    text = np.zeros(64 * 8, np.int32)
    insert(index, text, 0)
    half = insert(index, text[: 64 * 4], 1)
    assert all(run.pages.base is None for run in half._node.runs())  # type: ignore[union-attr]
