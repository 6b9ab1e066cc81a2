"""The pool: reference counts, exhaustion, budgets."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flide_engine.cache.pool import Counted, Pool, split_budget
from flide_engine.errors import ConfigError, PoolExhausted
from flide_engine.layout.state_shape import StateShape

SHAPE = StateShape(2, 2, 32, 6, 4, 32, 32, 256, 3)


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "retain", "release"]), st.integers(1, 5)), max_size=40
    )
)
def test_counts_follow_a_simple_model(steps: list[tuple[str, int]]) -> None:
    """Numbers are free exactly when nobody holds them, and none is handed out twice."""
    counted = Counted("pages", 8)
    held: list[np.ndarray] = []
    for what, n in steps:
        if what == "take":
            if n > counted.free:
                with pytest.raises(
                    PoolExhausted, match=f"{n} pages needed, {counted.free} of 8 free"
                ):
                    counted.take(n)
            else:
                held.append(counted.take(n))
        elif held and what == "retain":
            counted.retain(held[n % len(held)])
            held.append(held[n % len(held)])
        elif held:
            counted.release(held.pop(n % len(held)))
        holders = np.zeros(8, np.int64)
        for numbers in held:
            holders[numbers] += 1
        assert counted.counts.tolist() == holders.tolist()
        assert counted.free == (holders == 0).sum()


def test_a_budget_is_split_and_refused_with_numbers() -> None:
    """Bytes of pages and slots come from the model's shape; too little is an error that says how
    much.
    """
    page, slot = SHAPE.page_bytes(4), SHAPE.slot_bytes(4)
    assert (page, slot) == (2 * 2 * 64 * 2 * 32 * 4, 6 * (4 * 32 * 32 * 4 + 3 * 256 * 4))
    pages, slots = split_budget(SHAPE, 10_000_000, 0.25, torch.float32)
    assert pages * page <= 7_500_000 < (pages + 1) * page
    assert slots * slot <= 2_500_000 < (slots + 1) * slot
    with pytest.raises(ConfigError, match=f"of {page} bytes"):
        split_budget(SHAPE, 100_000, 0.25, torch.float32)


def test_memory_is_what_the_shape_says() -> None:
    """The tensors hold exactly the bytes that the accounting reports."""
    pool = Pool(SHAPE, 5, 3, torch.bfloat16, torch.device("cpu"))
    pool.pages.take(2)
    pool.slots.take(1)
    tensors = pool.tensors
    held = pool.accounting()
    assert tensors.keys.nbytes + tensors.values.nbytes == held.page_bytes_total
    assert tensors.recurrent_state.nbytes + tensors.conv_state.nbytes == held.slot_bytes_total
    assert tensors.recurrent_state.dtype == torch.float32
    assert held.page_bytes_held == 2 * SHAPE.page_bytes(2)
    assert held.slot_bytes_held == SHAPE.slot_bytes(2)
