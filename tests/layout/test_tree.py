"""Token forests: what is shared, what each prompt keeps, how deep it goes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flide_engine.layout import tree
from flide_engine.layout.plan import joined
from flide_engine.layout.tree import Node, Tokens, build_forest, common_prefix, group_by_token

PROMPTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda t: np.array(t, np.int32)),
    min_size=1,
    max_size=8,
)


def spelled(prompts: list[Tokens], forest_start: int, min_saved: int) -> None:
    """Asserts the invariants of a forest."""
    forest = build_forest(prompts, forest_start, min_saved)
    assert len(set(forest.leaves)) == len(prompts)
    parents = {node.parent for node in forest.nodes}
    for leaf, prompt in zip(forest.leaves, prompts, strict=True):
        path = forest.path(leaf)
        text = np.concatenate([forest.nodes[i].tokens for i in path])
        assert text.tolist() == prompt[forest_start:].tolist()
        assert leaf not in parents
        starts = [forest.nodes[i].start for i in path]
        assert starts == [forest_start, *(forest.nodes[i].end for i in path[:-1])]
    assert all(len(node.tokens) >= 1 for node in forest.nodes)
    assert all(node.parent < i for i, node in enumerate(forest.nodes))


@given(PROMPTS, st.sampled_from([1, 4, 64]))
def test_every_prompt_is_spelled_by_its_path(prompts: list[Tokens], min_saved: int) -> None:
    """The tokens from a root to a prompt's leaf are the prompt, whatever is shared."""
    spelled(prompts, 0, min_saved)


@given(PROMPTS)
def test_a_resumed_forest_holds_what_comes_after(prompts: list[Tokens]) -> None:
    """With a start, only positions from it on are rows."""
    start = min(map(len, prompts)) - 1
    spelled(prompts, start, 1)


@given(PROMPTS)
def test_sharing_never_costs_rows(prompts: list[Tokens]) -> None:
    """A forest has at most the rows of its prompts, and at full sharing no fewer than distinct
    prefixes.
    """
    rows = build_forest(prompts, min_saved=1).num_tokens
    prefixes = {tuple(p[: i + 1]) for p in prompts for i in range(len(p))}
    # a prompt that ends inside another, or twice, repeats its last token and so ends in its own
    # leaf
    assert len(prefixes) <= rows <= sum(map(len, prompts))


def grown(prompts: list[Tokens], start: int, saved: int, most: int) -> list[tuple[object, ...]]:
    """What `build_forest` is to find, said by recursion: nodes, and leaves by prompt."""
    nodes: list[Node] = []
    leaves: dict[int, int] = {}

    def grow(group: list[int], parent: int, depth: int, above: int) -> None:
        shared = 0
        if len(group) > 1 and above < most - 1:
            texts = [prompts[i] for i in group]
            shared = common_prefix(texts, depth, min(map(len, texts)) - 1)
        if not shared or (above and shared * (len(group) - 1) < saved):
            for i in group:
                leaves[i] = len(nodes)
                nodes.append(Node(parent, depth, prompts[i][depth:]))
            return
        trunk = len(nodes)
        nodes.append(Node(parent, depth, prompts[group[0]][depth : depth + shared]))
        for below in group_by_token(prompts, group, depth + shared):
            grow(below, trunk, depth + shared, above + 1)

    for group in group_by_token(prompts, range(len(prompts)), start):
        grow(group, -1, start, 0)
    found: list[tuple[object, ...]] = [(n.parent, n.start, n.tokens.tolist()) for n in nodes]
    return [*found, tuple(leaves[i] for i in range(len(prompts)))]


@given(
    PROMPTS,
    st.data(),
    st.sampled_from([1, 3, 64]),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([1, 11, 31]),
)
def test_it_is_the_forest_of_the_recursion(
    prompts: list[Tokens], data: st.DataObject, saved: int, most: int, apart: bool, times: int
) -> None:
    """Compiled, with prompts copied as they are or without what they all begin with; with so much
    in common, where each token comes several times, that many are compared at once.
    """
    prompts = [np.repeat(prompt, times) for prompt in prompts]
    start = data.draw(st.integers(0, min(map(len, prompts)) - 1))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tree, "FLAT_TOKENS", -1 if apart else 1 << 20)
        forest = build_forest(prompts, start, saved, most)
    found: list[tuple[object, ...]] = [(n.parent, n.start, n.tokens.tolist()) for n in forest.nodes]
    assert [*found, tuple(forest.leaves.tolist())] == grown(prompts, start, saved, most)


def test_the_trunk_is_the_longest_common_prefix() -> None:
    """Three questions about one state share exactly the tokens on which all agree."""
    a = np.array([5, 6, 7, 8, 1, 1], np.int32)
    b = np.array([5, 6, 7, 8, 2], np.int32)
    c = np.array([5, 6, 7, 9], np.int32)
    forest = build_forest([a, b, c])
    assert [len(n.tokens) for n in forest.nodes] == [3, 3, 2, 1]
    assert common_prefix([a, b, c], 0, 4) == 3


def test_a_small_group_is_not_worth_a_node() -> None:
    """Below the trunk, two prompts that share three tokens share a node only if that is asked
    for.
    """
    prompts = [np.array(t, np.int32) for t in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7])]
    assert len(build_forest(prompts).nodes) == 4
    assert len(build_forest(prompts, min_saved=3).nodes) == 5


def test_what_is_joined_is_of_int32() -> None:
    """As arrays of anything else are bytes that mean something else."""
    arrays = [np.arange(3, dtype=np.int32), np.zeros(0, np.int32), np.array([7], np.int32)]
    assert joined(arrays).tolist() == [0, 1, 2, 7]
    assert joined(arrays).flags.writeable  # compiled for arrays that can be written
    with pytest.raises(TypeError, match="int32"):
        joined([*arrays, np.arange(2)])


def test_a_prompt_with_nothing_after_the_start_is_refused() -> None:
    """The error names the prompt."""
    with pytest.raises(ValueError, match="prompt 1 has 2 tokens"):
        build_forest([np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)], 2)
