"""What an engine may take of its device, and what is refused, with numbers."""

import logging

import pytest
import torch

from flide_engine.config import EngineConfig
from flide_engine.errors import ConfigError
from flide_engine.layout.state_shape import StateShape
from flide_engine.memory import Card, MemoryPlan, plan_memory

GIB = 1 << 30
SHAPE = StateShape(6, 2, 256, 18, 16, 128, 128, 6144, 3)
"""0.8B in bfloat16: a page is 786,432 bytes, a state 25 of them."""


def plan(card: Card | None, **options: object) -> MemoryPlan:
    return plan_memory(EngineConfig.model_validate(options), SHAPE, torch.bfloat16, card)


def test_the_pool_takes_what_a_share_of_the_card_leaves() -> None:
    """Never more than is free, nor than the share holds beside weights and work buffers."""
    page = 786_432
    card = Card(140 * GIB, 138 * GIB, 2 * GIB)
    assert plan(card).units == (138 - 24) * GIB // page
    assert plan(Card(140 * GIB, 60 * GIB, 2 * GIB)).units == (60 - 24) * GIB // page
    quarter = plan(card, device_share=0.25)
    assert quarter.units == (35 - 2 - 7) * GIB // page
    assert (quarter.allowed, quarter.weights, quarter.work) == (35 * GIB, 2 * GIB, 7 * GIB)
    assert quarter.pool == quarter.units * page
    told = str(quarter)
    for part in ("26.00 GiB", "35498 pages", "takes 25", "2.00 GiB", "7.00 GiB", "35.00 GiB"):
        assert part in told
    assert plan(card, pool_bytes=10 * GIB).units == 10 * GIB // page


def test_what_does_not_fit_is_refused() -> None:
    """Nothing left, more asked for than is left, too little for one prompt."""
    with pytest.raises(ConfigError, match=r"device_share 0\.1 of .* leaves 0 for the pool"):
        plan(Card(80 * GIB, 10 * GIB, 6 * GIB), device_share=0.1)
    card = Card(140 * GIB, 138 * GIB, 2 * GIB)
    wanted = 120 * GIB
    with pytest.raises(ConfigError, match=f"leaves {114 * GIB} for pool_bytes {wanted}"):
        plan(card, pool_bytes=wanted)
    needed = (32768 + 8192) // 64 + 1 + 50
    for where in (card, None):
        with pytest.raises(ConfigError, match=f"needs {needed}, of which two states take 50"):
            plan(where, pool_bytes=(needed - 1) * 786_432)
        assert plan(where, pool_bytes=needed * 786_432).units == needed


def test_a_cpu_takes_what_it_needs_and_a_bit() -> None:
    """The longest prompt, one round, some states, and 256 MiB."""
    made = plan(None)
    assert made.units == 641 + (2 + 16) * 25 + (256 << 20) // 786_432
    assert made.allowed == made.work == 0
    assert "weights" not in str(made)


def test_graphs_that_take_more_than_was_kept_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A warning with both numbers; else a line of information, however much an engine that starts
    beside this one takes of the card.
    """
    made = plan(Card(140 * GIB, 138 * GIB, 2 * GIB))
    before = Card(140 * GIB, 60 * GIB, 70 * GIB)
    with caplog.at_level(logging.INFO, "flide_engine.memory"):
        made.check_work(before, Card(140 * GIB, 57 * GIB, 73 * GIB))
        made.check_work(before, Card(140 * GIB, 29 * GIB, 72 * GIB))
        made.check_work(before, Card(140 * GIB, 34 * GIB, 95 * GIB))
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO", "WARNING"]
    alone, beside, too_much = (r.getMessage() for r in caplog.records)
    assert "take 3.00 GiB of 24.00 GiB kept for them; 3.00 GiB less" in alone
    assert "take 2.00 GiB of 24.00 GiB kept for them; 31.00 GiB less" in beside
    assert "take 25.00 GiB of 24.00 GiB kept for them; 26.00 GiB less" in too_much
