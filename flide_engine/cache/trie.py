"""Prefixes of one tenant as a trie of runs: nodes stand where prefixes part and where one ends.

A node's way from the beginning and where it ends never change; what is parted or joined is how much
of that way is the node's own. So another thread may follow a way while the owner changes the trie:
it is told less than there is, and nothing that is not so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.plan import Ints

E = TypeVar("E")

_BYTES = 4 * GRAIN


class Run(NamedTuple):
    """Whole grains in a row; never changed.

    first: grains before it. tokens: [64 * n] int32, as bytes. keys: one a grain. pages [n].
    """

    first: int
    tokens: bytes
    keys: tuple[bytes, ...]
    pages: Ints

    def part(self, start: int, stop: int) -> "Run":
        """Its grains start .. stop - 1."""
        return Run(
            self.first + start,
            self.tokens[_BYTES * start : _BYTES * stop],
            self.keys[start:stop],
            self.pages[start:stop].copy(),  # a view would keep all of them in memory
        )


_NOTHING = Run(0, b"", (), np.zeros(0, np.int32))


@dataclass(eq=False, slots=True)
class Node(Generic[E]):
    """What ends at a place: a run that leads there from its parent, and `end`, which has to stand
    at a node without children.
    """

    parent: "Node[E] | None" = None
    run: Run = _NOTHING
    children: "dict[bytes, Node[E]]" = field(default_factory=dict)
    end: E | None = None

    def runs(self) -> list[Run]:
        """Those that lead here from the beginning, in order."""
        found, at = list[Run](), self
        while at.parent is not None:
            found.append(at.run)
            at = at.parent
        return found[::-1]

    def attach(self, run: Run) -> "Node[E]":
        """A node at the end of a run that goes on from here like no other."""
        made = Node(self, run)
        self.children[_head(run)] = made
        return made

    def part(self, count: int) -> "Node[E]":
        """A node after `count` grains of this one's run, which has more."""
        assert self.parent is not None
        run, parent = self.run, self.parent
        upper = Node(parent, run.part(0, count))
        self.run, self.parent = run.part(count, len(run.keys)), upper
        upper.children[_head(self.run)] = self
        parent.children[_head(run)] = upper
        return upper

    def prune(self) -> Ints:
        """Takes out what leads nowhere from here on upwards, and joins what no longer parts: pages
        that are given up, the last one first.
        """
        at, gone = self, [_NOTHING.pages]
        while at.parent is not None and at.end is None and not at.children:
            gone.append(at.run.pages[::-1])
            del at.parent.children[_head(at.run)]
            at = at.parent
        if at.parent is not None and at.end is None and len(at.children) == 1:
            (below,) = at.children.values()
            upper, lower = at.run, below.run
            pages = np.concatenate([upper.pages, lower.pages])
            keys = upper.keys + lower.keys
            below.run = Run(upper.first, upper.tokens + lower.tokens, keys, pages)
            below.parent = at.parent
            at.parent.children[_head(upper)] = below
        return np.concatenate(gone)

    def ends_after(self) -> list[E]:
        """The first ends on every way on from here."""
        found, ways = list[E](), list(self.children.values())
        while ways:
            at = ways.pop()
            if at.end is None:
                ways += at.children.values()
            else:
                found.append(at.end)
        return found

    def walk(self, tokens: bytes) -> "Iterator[tuple[Node[E], Run, int]]":
        """From the root, nodes on the way of some tokens: each with its run and how many grains of
        that agree, all of them but for the last node's.
        """
        children, known, at = self.children, 0, 0
        while at < len(tokens):
            node = children.get(tokens[at : at + _BYTES])
            if node is None:
                return
            run = node.run
            first, text, keys, _ = run
            if first != known:
                return  # it was joined or parted meanwhile
            stop = at + len(text)
            if not tokens.startswith(text, at):
                yield node, run, _common(text, tokens[at:stop])
                return
            yield node, run, len(keys)
            children, known, at = node.children, known + len(keys), stop


def _head(run: Run) -> bytes:
    """What a node is found by: the tokens of its first grain."""
    return run.tokens[:_BYTES]


def _common(one: bytes, other: bytes) -> int:
    """Whole grains that two texts begin with alike."""
    size = min(len(one), len(other))
    a, b = np.frombuffer(one[:size], np.int32), np.frombuffer(other[:size], np.int32)
    differ = np.flatnonzero(a != b)
    return int(differ[0] if len(differ) else len(a)) // GRAIN
