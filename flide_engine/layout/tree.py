"""Token forest of a request: prompts that begin alike share nodes, each prompt ends in a leaf of
its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

MAX_DEPTH = 4
"""Nodes on a path: an opening, a state, a group of questions, a question. Kernels take any depth;
this bounds the host's work, as each level compares every prompt that goes on."""


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


@dataclass(frozen=True)
class Forest:
    """Nodes, parents before children, and the leaf in which each prompt ends."""

    nodes: tuple[Node, ...]
    leaves: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Rows that the forest takes in a stream."""
        return sum(len(node.tokens) for node in self.nodes)

    def path(self, node: int) -> list[int]:
        """The node and its ancestors, root first."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]


def common_prefix(prompts: Sequence[Tokens], start: int, stop: int) -> int:
    """Number of tokens from `start` on, and before `stop`, on which all prompts agree."""
    first, end = prompts[0], stop
    for other in prompts[1:]:
        if other is not first:
            differ = first[start:end] != other[start:end]
            if len(differ) and differ[at := int(differ.argmax())]:
                end = start + at
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
    for i, prompt in enumerate(prompts):
        if len(prompt) <= start:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens, none after position {start}")
    nodes: list[Node] = []
    leaves = [-1] * len(prompts)

    def end_in_leaves(group: list[int], parent: int, depth: int) -> None:
        for i in group:
            leaves[i] = len(nodes)
            nodes.append(Node(parent, depth, prompts[i][depth:]))

    def grow(group: list[int], parent: int, depth: int, above: int) -> None:
        shared = 0
        if len(group) > 1 and above < max_depth - 1:
            stop = min(len(prompts[i]) for i in group) - 1
            shared = common_prefix([prompts[i] for i in group], depth, stop)
        if shared == 0 or (above and shared * (len(group) - 1) < min_saved):
            end_in_leaves(group, parent, depth)
            return
        trunk = len(nodes)
        nodes.append(Node(parent, depth, prompts[group[0]][depth : depth + shared]))
        for below in group_by_token(prompts, group, depth + shared):
            grow(below, trunk, depth + shared, above + 1)

    for group in group_by_token(prompts, range(len(prompts)), start):
        grow(group, -1, start, 0)
    return Forest(tuple(nodes), tuple(leaves))
