"""Work lists hold exactly what the plan says."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flide_engine.device_plan import Capacity, Tables
from flide_engine.layout.plan import RoundPlan
from flide_engine.layout.stream import Job
from flide_engine.layout.tree import Forest
from flide_engine.readout import Asked
from tests.layout.test_stream import forests, keys_of, page_list, plan_of


def lists_of(plan: RoundPlan, tile: int = 4, split: int = 0) -> SimpleNamespace:
    """A plan's work lists, cut to what is there."""
    tables = Tables(Capacity.exactly(plan, tile, 3, split), torch.device("cpu"))
    for array in tables.host.values():
        array.fill(-77)
    assert tables.fill(plan, Asked.every_vector(len(plan.read_rows)))
    chunks, tiles, reads, _, resumed, scans, parts, read_parts, *_ = tables.host["counts"].tolist()
    lists = {k: v.copy() for k, v in tables.host.items()}
    for name, array in lists.items():
        if name.startswith("chunk_"):
            lists[name] = array[:chunks]
        elif name.startswith("tile_"):
            lists[name] = array[:tiles]
        elif name.startswith("read_tile_"):
            lists[name] = array[:reads]
    lists["tile_parts"] = tables.host["tile_parts"][:parts]
    lists["read_tile_parts"] = tables.host["read_tile_parts"][:read_parts]
    lists["resumed"], lists["scans"] = lists["resumed"][:resumed], lists["scans"][:scans]
    return SimpleNamespace(**lists)


def place_of(plan: RoundPlan, tasks: SimpleNamespace, c: int) -> tuple[int, int]:
    """Node and first position of a chunk, from its first row that is the node's own."""
    row = int(tasks.chunk_rows[c, tasks.chunk_skips[c]])
    node = int(np.searchsorted(plan.cu_seqlens, row, side="right")) - 1
    return node, int(plan.starts[node] + row - plan.cu_seqlens[node]) // 64 * 64


def chain_of(plan: RoundPlan, node: int) -> list[int]:
    """Rows of all positions up to a node's end."""
    own = range(plan.cu_seqlens[node], plan.cu_seqlens[node + 1])
    return keys_before(plan, node) + list(own)


@settings(max_examples=60, deadline=None)
@given(st.lists(forests(), min_size=1, max_size=3))
def test_chunks_spell_each_node_from_its_grain(trees: list[Forest]) -> None:
    """Every chunk once: tail and own rows in order, stores at the chunk they end."""
    plan = plan_of([Job(t) for t in trees], "token")
    tasks = lists_of(plan)
    stores = {
        (int(n), int(p)): int(s)
        for n, p, s in zip(plan.store_nodes, plan.store_positions, plan.store_slots, strict=True)
    }
    places = [place_of(plan, tasks, c) for c in range(len(tasks.chunk_rows))]
    assert sorted(places) == [
        (node, at)
        for node, start in enumerate(plan.starts.tolist())
        for at in range(start // 64 * 64, len(chain_of(plan, node)), 64)
    ]
    for c, (node, at) in enumerate(places):
        chain = chain_of(plan, node)[at : at + 64]
        assert tasks.chunk_rows[c].tolist() == chain + [-1] * (64 - len(chain))
        assert tasks.chunk_skips[c] == max(0, plan.starts[node] - at)
        assert tasks.chunk_slots[c] == stores.get((node, at + 64), -1)
    assert sum(s >= 0 for s in tasks.chunk_slots.tolist()) == len(stores)


def state_before(plan: RoundPlan, node: int, at: int) -> list[int]:
    """What a state after `at` tokens of a node's chain stands for: the rows that made it."""
    return chain_of(plan, node)[:at]


@settings(max_examples=60, deadline=None)
@given(st.lists(forests(), min_size=1, max_size=3))
def test_every_chunk_is_handed_the_state_after_the_chunk_before(
    trees: list[Forest],
) -> None:
    """Run as the kernels do, ancestors first: what a chunk is handed spells its chain."""
    plan = plan_of([Job(t) for t in trees], "token")
    follow(plan, lists_of(plan))


def follow(plan: RoundPlan, tasks: SimpleNamespace) -> None:
    """Asserts that chunks are handed the right states, running as the kernels do."""
    slots: dict[int, list[int]] = {-1: []}
    handed: dict[int, list[int]] = {-1: []}
    for slot, number in tasks.resumed.tolist():
        slots[slot] = handed[number] = [-2 - slot]  # from before the round
    stored: dict[int, tuple[int, int]] = {}
    for at, (first, count, slot, number, *awaited) in enumerate(tasks.scans.tolist()):
        assert tuple(awaited) == stored.get(slot, (-1, 0))
        state, kept_here = slots[slot], 0
        for i in range(count):
            rows = [r for r in tasks.chunk_rows[first + i].tolist() if r >= 0]
            state = handed[number + i] = state + rows
            if (kept := int(tasks.chunk_slots[first + i])) >= 0:
                kept_here += 1
                slots[kept], stored[kept] = state, (at, kept_here)
    for c, source in enumerate(tasks.chunk_sources.tolist()):
        node, at = place_of(plan, tasks, c)
        assert handed[source] == state_before(plan, node, at)


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
    lists = vars(lists_of(plan, tile))
    prefix = "read_tile_" if only_reads else "tile_"
    tiles = SimpleNamespace(**{n: lists[prefix + n] for n in ("queries", "nodes", "ends", "pages")})
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
            pages = plan.pages[tiles.pages[a, 0] :][: tiles.pages[a, 1]]
            assert pages.tolist() == page_list(plan, node)
            assert row <= tiles.ends[a, 0]
            # whole steps: every query of the tile is past them
            own = row - plan.cu_seqlens[node] + plan.starts[node] % 64
            assert tiles.ends[a, 1] == 0 or (shared == last and 64 * tiles.ends[a, 1] <= own + 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(forests(), min_size=1, max_size=3), st.sampled_from([1, 2]), st.booleans())
def test_parts_cover_every_tile_in_order(trees: list[Forest], split: int, only_reads: bool) -> None:
    """As many as its last query needs, each after those before it; each sum has its own place."""
    plan = plan_of([Job(t) for t in trees], "token")
    rows = plan.read_rows if only_reads else np.arange(plan.num_rows, dtype=np.int32)
    lists, prefix = vars(lists_of(plan, 4, split)), "read_tile_" if only_reads else "tile_"
    parts: dict[int, list[int]] = {}
    for tile, part in lists[prefix + "parts"].tolist():
        parts.setdefault(tile, []).append(part)
    assert len(parts) == len(lists[prefix + "queries"])
    places = []
    for tile, queries in enumerate(lists[prefix + "queries"]):
        count, place = lists[prefix + "sums"][tile].tolist()
        deepest = 0
        for row in rows[queries[queries >= 0]].tolist():
            node = int(np.searchsorted(plan.cu_seqlens, row, side="right")) - 1
            deepest = max(deepest, int(plan.starts[node] + row - plan.cu_seqlens[node]))
        assert parts[tile] == list(range(count))
        assert 64 * split * (count - 1) <= deepest < 64 * split * count
        assert (place >= 0) == (count > 1)
        places += [place] if place >= 0 else []
    assert places == list(range(len(places)))
