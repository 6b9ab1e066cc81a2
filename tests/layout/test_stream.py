"""Round plans: what the lookups name is exactly what each row may see, in every tree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flide_engine.layout.plan import CHAIN_COLUMNS, Anchor, Mark, RoundPlan
from flide_engine.layout.stream import Fork, Job, lay_out
from flide_engine.layout.tree import Forest, Node, build_forest
from flide_engine.layout.visibility import visible


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Random forests of up to nine nodes; lengths cluster around the grain."""
    length = st.one_of(st.integers(1, 6), st.integers(58, 70), st.integers(120, 135))
    nodes: list[Node] = []
    for i in range(draw(st.integers(1, 9))):
        parent = draw(st.integers(-1, i - 1))
        start = nodes[parent].end if parent >= 0 else 0
        # token ids name their place: node and offset
        tokens = np.arange(draw(length), dtype=np.int32) + 1000 * (i + 1)
        nodes.append(Node(parent, start, tokens))
    parents = {n.parent for n in nodes}
    return Forest.of(nodes, [i for i in range(len(nodes)) if i not in parents])


def plan_of(jobs: list[Job], fork: Fork) -> RoundPlan:
    """A plan with pages numbered from 100 and slots from 50."""
    layout = lay_out(jobs, fork)
    pages = np.arange(100, 100 + layout.num_pages, dtype=np.int32)
    slots = np.arange(50, 50 + layout.num_slots, dtype=np.int32)
    return layout.bind(pages, slots)[0]


def page_list(plan: RoundPlan, node: int) -> list[int]:
    """Pages of positions 0 .. F-1 of a node's chain, in order."""
    k = int(plan.page_lists[node])
    return plan.pages[plan.page_list_ends[k - 1] if k else 0 : plan.page_list_ends[k]].tolist()


def keys_of(plan: RoundPlan, node: int) -> list[int]:
    """Stream rows of chain positions 0 .. end-1, as attention finds them: pages, tail, own rows."""
    written = {int(p): plan.write_rows[i].tolist() for i, p in enumerate(plan.write_pages)}
    rows = [row for page in page_list(plan, node) for row in written[int(page)]]
    rows += plan.chain_rows[node, 3 : 3 + int(plan.starts[node]) % 64].tolist()
    return rows + list(range(plan.cu_seqlens[node], plan.cu_seqlens[node + 1]))


@settings(max_examples=60, deadline=None)
@given(st.lists(forests(), min_size=1, max_size=3))
def test_the_lookups_agree_with_the_oracle(trees: list[Forest]) -> None:
    """Pages, chain rows and own rows of a node are exactly the rows the oracle lets its last row
    see.
    """
    plan = plan_of([Job(t) for t in trees], "token")
    sees = visible(trees)
    flat = [
        (f, n, i)
        for f, t in enumerate(trees)
        for n, node in enumerate(t.nodes)
        for i in range(len(node.tokens))
    ]
    where = {key: row for row, key in enumerate(flat)}
    names = [1_000_000 * f + int(trees[f].nodes[n].tokens[i]) for f, n, i in flat]
    # rows of the plan by name: a job's tokens repeat across forests, so tell them apart by read
    # order
    owner = _job_of_nodes(plan, trees)
    for node in range(plan.num_nodes):
        f, n = owner[node]
        last = where[f, n, len(trees[f].nodes[n].tokens) - 1]
        want = [names[y] for y in np.flatnonzero(sees[last])]
        got = [1_000_000 * f + int(plan.tokens[row]) for row in keys_of(plan, node)]
        assert sorted(got) == sorted(want)
        positions = [int(plan.positions[row]) for row in keys_of(plan, node)]
        assert positions == list(range(len(positions)))


def _job_of_nodes(plan: RoundPlan, trees: list[Forest]) -> dict[int, tuple[int, int]]:
    """Plan node -> (forest, node): within a level, nodes keep the order of the forests."""
    waiting: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for f, tree in enumerate(trees):
        for n, node in enumerate(tree.nodes):
            waiting.setdefault((int(node.tokens[0]), node.start, len(node.tokens)), []).append(
                (f, n)
            )
    found = {}
    for i in range(plan.num_nodes):
        a, b = plan.cu_seqlens[i], plan.cu_seqlens[i + 1]
        found[i] = waiting[int(plan.tokens[a]), int(plan.starts[i]), int(b - a)].pop(0)
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(forests(), min_size=1, max_size=3), st.sampled_from(["token", "grain"]))
def test_states_come_from_lower_levels(trees: list[Forest], fork: Fork) -> None:
    """A node's initial state is stored, at its own grain, by a node of a lower level; zeros only
    at 0.
    """
    plan = plan_of([Job(t) for t in trees], fork)
    level = np.searchsorted(plan.level_ends, np.arange(plan.num_nodes), side="right")
    stored = {int(s): i for i, s in enumerate(plan.store_slots)}
    assert len(stored) == len(plan.store_slots)
    for node in range(plan.num_nodes):
        grain = int(plan.starts[node]) // 64 * 64
        slot = int(plan.initial_slots[node])
        if grain == 0:
            assert slot == -1
            continue
        at = stored[slot]
        assert plan.store_positions[at] == grain
        assert level[plan.store_nodes[at]] < level[node]
    for node, position in zip(plan.store_nodes, plan.store_positions, strict=True):
        end = plan.starts[node] + plan.cu_seqlens[node + 1] - plan.cu_seqlens[node]
        assert position % 64 == 0
        assert plan.starts[node] < position <= end


@settings(max_examples=60, deadline=None)
@given(st.lists(forests(), min_size=1, max_size=3), st.sampled_from(["token", "grain"]))
def test_chain_rows_are_the_positions_before_a_node(trees: list[Forest], fork: Fork) -> None:
    """Column j holds the row of position F-3+j, and nothing lies before the start of a prompt."""
    plan = plan_of([Job(t) for t in trees], fork)
    assert plan.chain_rows.shape == (plan.num_nodes, CHAIN_COLUMNS)
    for node, start in enumerate(plan.starts):
        grain = start // 64 * 64
        for j, row in enumerate(plan.chain_rows[node]):
            position = grain - 3 + j
            if 0 <= position < start:
                assert plan.positions[row] == position
            else:
                assert row == -1
    for rows, position in zip(plan.store_rows, plan.store_positions, strict=True):
        assert plan.positions[rows].tolist() == list(range(position - 3, position))


def test_reads_come_in_the_order_of_the_prompts() -> None:
    """Whatever the levels do to the rows."""
    state = np.arange(70, dtype=np.int32)
    prompts = [
        np.concatenate([state, np.array(t, np.int32)]) for t in ([500], [501, 7], [502, 8, 9])
    ]
    plan = plan_of([Job(build_forest(prompts)), Job(build_forest([state[:5]]))], "token")
    assert plan.tokens[plan.read_rows].tolist() == [500, 7, 9, 4]


def test_a_resumed_forest_reads_the_checkpoint() -> None:
    """Its slot, its pages first, and its convolution rows where the stream has none."""
    prompt = np.arange(200, dtype=np.int32)
    anchor = Anchor(128, 9, np.array([31, 32], np.int32))
    plan = plan_of([Job(build_forest([prompt], 128), anchor)], "token")
    assert plan.initial_slots.tolist() == [9]
    assert page_list(plan, 0) == [31, 32]
    assert plan.chain_rows[0, :3].tolist() == [-2 - (3 * 9 + i) for i in range(3)]
    assert plan.positions.tolist() == list(range(128, 200))


def test_marks_name_state_and_pages() -> None:
    """A checkpoint in the middle of a node: its slot is stored there, its pages are written."""
    layout = lay_out([Job(build_forest([np.arange(200, dtype=np.int32)]), None, (Mark(0, 128),))])
    plan, checkpoints = layout.bind(np.array([4, 7], np.int32), np.array([3], np.int32))
    (anchor,) = checkpoints[0]
    assert (anchor.position, anchor.slot, anchor.pages.tolist()) == (128, 3, [4, 7])
    assert plan.store_positions.tolist() == [128]
    assert plan.write_rows.tolist() == [list(range(64)), list(range(64, 128))]


@pytest.mark.parametrize("position", [0, 60, 192, 256])
def test_marks_off_the_grain_or_outside_are_refused(position: int) -> None:
    """A node of positions 0 to 190 has checkpoints at 64 and 128 only."""
    with pytest.raises(ValueError, match="no checkpoint at"):
        lay_out([Job(build_forest([np.arange(190, dtype=np.int32)]), None, (Mark(0, position),))])


@pytest.mark.parametrize("anchor", [None, Anchor(64, 3, np.array([5], np.int32))])
def test_a_forest_starts_where_its_checkpoint_ends(anchor: Anchor | None) -> None:
    """Compiled loops that are not checked would read and write anywhere otherwise."""
    text = np.arange(300, dtype=np.int32)
    jobs = [Job(build_forest([text])), Job(build_forest([text], 128), anchor)]
    with pytest.raises(ValueError, match="does not start where its checkpoint ends"):
        lay_out(jobs)


def test_a_window_hides_what_is_older() -> None:
    """The window counts the row itself."""
    sees = visible([build_forest([np.arange(5, dtype=np.int32)])], window=2)
    assert sees.sum(1).tolist() == [1, 2, 2, 2, 2]
