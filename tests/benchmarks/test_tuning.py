"""Launch shapes beside each other."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from benchmarks.kernels import Calls
from benchmarks.tuning import (
    ATTENTIONS,
    DELTA_NETS,
    SHARED_BYTES,
    TILES,
    compared,
    products,
    shared_bytes,
)


def test_ways_have_room_and_names_of_their_own() -> None:
    """No program asks for more than a processor has; each tile is tried at least once."""
    assert all(shared_bytes(tile) <= SHARED_BYTES for tile in TILES)
    assert len(set(TILES)) == len(TILES)
    ways = products(132)
    assert next(iter(ways)) == "cuBLAS"
    shapes = {name.partition(",")[0] for name in ways} - {"cuBLAS"}
    assert shapes == {f"{t.rows}x{t.columns}x{t.width}" for t in TILES}
    assert {run.keywords["programs"] for name, run in ways.items() if name != "cuBLAS"} == {  # type: ignore[attr-defined]
        132, 264, 396,
    }  # fmt: skip
    assert {"hopper", "small", "large"} == set(DELTA_NETS)
    assert {name: way.keywords for name, way in ATTENTIONS.items()} == {  # type: ignore[attr-defined]
        "triton": {"hopper": False},
        "hopper": {"hopper": True},
    }


def test_ways_run_the_same_calls_and_bits_are_compared() -> None:
    """On a CPU: two ways that agree and one that does not."""
    x = [torch.randn(5, 8) for _ in range(3)]
    weight = torch.randn(4, 8)
    calls = Calls("linear", "5x8 4x8", {}, [partial(F.linear, each, weight) for each in x])
    ways = {"a": F.linear, "b": F.linear, "c": lambda x, w: F.linear(x, w) + 1}
    rows = compared(calls, ways, passes=2)
    assert [(row["way"], row["bits"]) for row in rows] == [("a", True), ("b", True), ("c", False)]
    assert all(row["calls"] == 3 and row["us"] > 0 for row in rows)
