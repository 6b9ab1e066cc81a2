"""Work lists hold exactly what the plan says."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flide_engine.layout.stream import Job
from flide_engine.layout.tasks import attention_tiles, chunk_tasks
from flide_engine.layout.tree import Forest
from tests.layout.test_stream import forests, keys_of, plan_of


@settings(max_examples=60, deadline=None)
@given(st.lists(forests(), min_size=1, max_size=3))
def test_chunks_spell_each_node_from_its_grain(trees: list[Forest]) -> None:
    """Tail and own rows in order, stores at the chunk they end."""
    plan = plan_of([Job(t) for t in trees], "token")
    tasks = chunk_tasks(plan)
    stores = {
        (int(n), int(p)): int(s)
        for n, p, s in zip(plan.store_nodes, plan.store_positions, plan.store_slots, strict=True)
    }
    seen = set()
    c = 0
    for node, start in enumerate(plan.starts.tolist()):
        own = range(plan.cu_seqlens[node], plan.cu_seqlens[node + 1])
        chain = keys_before(plan, node) + list(own)
        for at in range(start // 64 * 64, len(chain), 64):
            assert tasks.rows[c].tolist() == [
                chain[p] if p < len(chain) else -1 for p in range(at, at + 64)
            ]
            assert tasks.skips[c] == max(0, start - at)
            assert tasks.slots[c] == stores.get((node, at + 64), -1)
            if tasks.slots[c] >= 0:
                seen.add((node, at + 64))
            c += 1
    assert c == len(tasks.rows)
    assert seen == set(stores)


@settings(max_examples=60, deadline=None)
@given(st.lists(forests(), min_size=1, max_size=3))
def test_every_chunk_is_handed_the_state_after_the_chunk_before(trees: list[Forest]) -> None:
    """Run as the kernels do: scans level by level; what a chunk is handed spells its chain."""
    plan = plan_of([Job(t) for t in trees], "token")
    tasks = chunk_tasks(plan)
    slots: dict[int, list[int]] = {-1: []}
    handed: dict[int, list[int]] = {-1: []}
    for slot, number in tasks.resumed.tolist():
        slots[slot] = handed[number] = [-2 - slot]  # from before the round

    def after(state: list[int], c: int) -> list[int]:
        return state + [r for r in tasks.rows[c].tolist() if r >= 0]

    low = 0
    for high in tasks.level_ends.tolist():
        found = {}
        for first, count, slot, number in tasks.scans[low:high].tolist():
            state = slots[slot]
            for i in range(count):
                state = handed[number + i] = after(state, first + i)
                if tasks.slots[first + i] >= 0:
                    found[int(tasks.slots[first + i])] = state
        slots |= found
        low = high
    assert len(handed) - 1 == tasks.passed
    for c, source in enumerate(tasks.sources.tolist()):
        state, rows = handed[source], tasks.rows[c]
        node = int(np.searchsorted(plan.cu_seqlens, rows[tasks.skips[c]], side="right")) - 1
        chain = keys_before(plan, node) + list(
            range(plan.cu_seqlens[node], plan.cu_seqlens[node + 1])
        )
        assert state == chain[: chain.index(rows[0])]


def keys_before(plan: object, node: int) -> list[int]:
    """Rows of the chain positions before a node's own, as attention finds them."""
    rows = keys_of(plan, node)  # type: ignore[arg-type]
    return rows[: int(plan.starts[node])]  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(st.lists(forests(), min_size=1, max_size=3), st.sampled_from([4, 32]), st.booleans())
def test_tiles_hold_every_query_once_beside_its_keys(
    trees: list[Forest], tile: int, only_reads: bool
) -> None:
    """Queries of a tile share pages and tail, and their own keys lie in its range."""
    plan = plan_of([Job(t) for t in trees], "token")
    rows = plan.read_rows if only_reads else np.arange(plan.num_rows, dtype=np.int32)
    tiles = attention_tiles(plan, rows, tile, 3)
    placed = tiles.queries[tiles.queries >= 0]
    assert sorted(placed.tolist()) == list(range(len(rows)))
    for a, queries in enumerate(tiles.queries):
        shared, last = tiles.nodes[a].tolist()
        for query in queries[queries >= 0]:
            row = int(rows[query])
            node = int(np.searchsorted(plan.cu_seqlens, row, side="right")) - 1
            assert plan.page_lists[node] == plan.page_lists[shared]
            assert plan.starts[node] == plan.starts[shared]
            assert plan.chain_rows[node].tolist() == plan.chain_rows[shared].tolist()
            assert shared <= node <= last
            assert row <= tiles.last_rows[a]
            # whole steps: every query of the tile is past them
            own = row - plan.cu_seqlens[node] + plan.starts[node] % 64
            assert tiles.full[a] == 0 or (shared == last and 64 * tiles.full[a] <= own + 1)
