"""Token forest of a request: prompts that begin alike share nodes, each prompt ends in a leaf of
its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from flide_engine.layout.growing import alike, grow
from flide_engine.layout.plan import joined

Tokens = NDArray[np.int32]

MAX_DEPTH = 4
"""Nodes on a path: an opening, a state, a group of questions, a question. Kernels take any depth;
this bounds the host's work, as each level compares every prompt that goes on."""

FLAT_TOKENS = 1024
"""Prompts of more tokens than that on average are compared where they lie first, and then copied
without what they all begin with: copying costs more than a call."""


class Node(NamedTuple):
    """One run of tokens of the forest.

    parent: index of the parent node, or -1 for a root (it continues the resumed checkpoint, if
    any).
    start: chain position of the first token, counted from the start of the prompt.
    tokens: [n] int32, n >= 1.
    """

    parent: int
    start: int
    tokens: Tokens

    @property
    def end(self) -> int:
        """Chain position one past the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, eq=False)
class Forest:
    """N nodes, parents before children, and the leaf in which each of P prompts ends.

    parents, starts, ends [N]: see `Node`. tokens [rows]: those of all nodes, one node after the
    other. leaves [P]: node of each prompt's last token.
    """

    parents: Tokens
    starts: Tokens
    ends: Tokens
    tokens: Tokens
    leaves: Tokens

    @classmethod
    def of(cls, nodes: Sequence[Node], leaves: Sequence[int]) -> Self:
        """From single nodes."""
        shape = [[n.parent for n in nodes], [n.start for n in nodes], [n.end for n in nodes]]
        parents, starts, ends = np.array(shape, np.int32)
        tokens = np.concatenate([n.tokens for n in nodes])
        return cls(parents, starts, ends, tokens, np.array(leaves, np.int32))

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """One by one."""
        shape = zip(self.parents.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True)
        nodes, at = [], 0
        for parent, start, end in shape:
            nodes.append(Node(parent, start, self.tokens[at : at + end - start]))
            at += end - start
        return tuple(nodes)

    @property
    def num_tokens(self) -> int:
        """Rows that the forest takes in a stream."""
        return len(self.tokens)

    def path(self, node: int) -> list[int]:
        """The node and its ancestors, root first."""
        found, at = [], int(node)
        while at >= 0:
            found.append(at)
            at = int(self.parents[at])
        return found[::-1]


def common_prefix(prompts: Sequence[Tokens], start: int, stop: int) -> int:
    """Number of tokens from `start` on, and before `stop`, which none is shorter than, on which all
    prompts agree.
    """
    first, end = prompts[0], stop
    for other in prompts[1:]:
        if other is not first:
            end = start + alike(first[start:end], other[start:end])
    return end - start


def group_by_token(prompts: Sequence[Tokens], group: Sequence[int], at: int) -> list[list[int]]:
    """The prompts of `group` by their token at position `at`, in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for i in group:
        groups.setdefault(int(prompts[i][at]), []).append(i)
    return list(groups.values())


def build_forest(
    prompts: Sequence[Tokens], start: int = 0, min_saved: int = 64, max_depth: int = MAX_DEPTH
) -> Forest:
    """The forest of whole isolated prompts, of which positions before `start` are already computed.

    Prompts with a first token in common share their longest common prefix: the trunk. Below it a
    group of prompts shares a further node if that saves at least `min_saved` tokens of the stream
    (a node that saves little may still cost a dependency level). Every prompt keeps at least one
    token of its own, so equal prompts, and a prompt that begins another, end in different leaves.
    No path has more than `max_depth` nodes: deeper prompts repeat what they have in common.

    Raises ValueError if a prompt has no token after `start`.
    """
    lengths = [len(prompt) for prompt in prompts]
    for i, length in enumerate(lengths):
        if length <= start:
            raise ValueError(f"prompt {i} has {length} tokens, none after position {start}")
    if len(prompts) == 1:
        (end,) = lengths
        shape = np.array([[-1, start, end, 0]], np.int32)
        return Forest(shape[:, 0], shape[:, 1], shape[:, 2], prompts[0][start:], shape[:, 3])
    known = 0
    if sum(lengths) > (start + FLAT_TOKENS) * len(lengths):
        known = common_prefix(prompts, start, min(lengths) - 1)
    since = start + known
    flat = joined([prompt[since:] for prompt in prompts])
    ends = np.cumsum(np.array(lengths, np.int32) - since, dtype=np.int32)
    head = np.ascontiguousarray(prompts[0][start:since], np.int32)
    return Forest(*grow(flat, ends, start, head, min_saved, max_depth))
