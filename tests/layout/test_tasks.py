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
    """Tail and own rows in order, three rows before each chunk, stores at the chunk they end."""
    plan = plan_of([Job(t) for t in trees], "token")
    tasks = chunk_tasks(plan)
    low = 0
    stores = {
        (int(n), int(p)): int(s)
        for n, p, s in zip(plan.store_nodes, plan.store_positions, plan.store_slots, strict=True)
    }
    seen = set()
    for node, high in enumerate(tasks.node_ends):
        start = int(plan.starts[node])
        grain = start // 64 * 64
        chain = keys_before(plan, node) + list(
            range(plan.cu_seqlens[node], plan.cu_seqlens[node + 1])
        )
        for i, c in enumerate(range(low, high)):
            at = grain + 64 * i
            assert tasks.rows[c].tolist() == [
                chain[p] if 0 <= p < len(chain) else -1 for p in range(at - 3, at + 64)
            ]
            assert tasks.lengths[c] == min(64, len(chain) - at)
            assert tasks.skips[c] == (start - grain if i == 0 else 0)
            assert tasks.slots[c] == stores.get((node, at + 64), -1)
            if tasks.slots[c] >= 0:
                seen.add((node, at + 64))
        low = int(high)
    assert seen == set(stores)


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
    tiles = attention_tiles(plan, rows, tile)
    placed = tiles.queries[tiles.queries >= 0]
    assert sorted(placed.tolist()) == list(range(len(rows)))
    for a, queries in enumerate(tiles.queries):
        shared = int(tiles.nodes[a])
        for query in queries[queries >= 0]:
            row = int(rows[query])
            node = int(np.searchsorted(plan.cu_seqlens, row, side="right")) - 1
            assert plan.page_lists[node] == plan.page_lists[shared]
            assert plan.starts[node] == plan.starts[shared]
            assert plan.chain_rows[node].tolist() == plan.chain_rows[shared].tolist()
            assert tiles.first_keys[a] <= plan.cu_seqlens[node]
            assert row <= tiles.last_keys[a]
