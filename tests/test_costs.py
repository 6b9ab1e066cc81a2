"""Costs of rounds: read off a table, learned, never falling, not led astray."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flide_engine.costs import Costs
from flide_engine.errors import ConfigError

MEASURED = {510: 2.148, 780: 3.384, 1960: 6.697, 4790: 14.432, 6310: 18.788, 8180: 24.938}
"""Replays of the 0.8B shape on an H200 (`benchmarks/results/engine.json`)."""


def test_a_table_is_read_between_its_lengths() -> None:
    """Straight lines; below the first length its cost, above the last whole rounds and a rest."""
    costs = Costs(8192, MEASURED)
    assert costs.ms(510) == 2.148
    assert costs.ms((510 + 780) / 2) == pytest.approx((2.148 + 3.384) / 2)
    assert (costs.ms(0), costs.ms(1)) == (0.0, 2.148)
    assert costs.ms(2 * 8192 + 780) == pytest.approx(2 * costs.ms(8192) + 3.384)
    assert costs.tokens_per_ms == pytest.approx(328, rel=0.01)


def test_nothing_is_known_before_the_first_round() -> None:
    """Costs are 0 then, so that nothing is refused on a guess."""
    costs = Costs(8192)
    assert (costs.is_known, costs.ms(5000), costs.tokens_per_ms) == (False, 0.0, 0.0)
    assert costs.tokens_within(1.0) == 8192


@pytest.mark.parametrize("table", [{0: 1.0}, {64: 0.0}, {64: math.nan}])
def test_a_bad_table_is_refused(table: dict[int, float]) -> None:
    """A length or a cost that is not positive is a mistake."""
    with pytest.raises(ConfigError, match="cannot cost"):
        Costs(8192, table)


ROUNDS = st.lists(st.tuples(st.integers(-5, 20_000), st.floats(-1.0, 1e6)), max_size=50)


@given(ROUNDS, st.sampled_from([None, MEASURED, {100: 5.0, 200: 1.0}]), st.integers(1, 10_000))
def test_costs_never_fall(
    rounds: list[tuple[int, float]], table: dict[int, float] | None, most: int
) -> None:
    """With tokens, whatever was observed; and a round within a time takes no more than that."""
    costs = Costs(most, table)
    for tokens, ms in rounds:
        costs.observe(tokens, ms)
    line = [costs.ms(most * i / 50) for i in range(101)]
    assert line == sorted(line)
    assert all(math.isfinite(ms) for ms in line)
    if costs.is_known:
        fitting = costs.tokens_within(line[20])
        assert costs.ms(fitting) <= line[20] * (1 + 1e-9)


@pytest.mark.parametrize("table", [None, {64: 10.0, 8192: 10.0}])
def test_costs_are_learned_despite_slow_rounds(table: dict[int, float] | None) -> None:
    """A first round fifty times too slow, and every twentieth ten times, leave the costs within a
    fifth.
    """
    rng, costs = random.Random(0), Costs(8192, table)
    true = {tokens: ms for tokens, ms in MEASURED.items() if tokens != 6310}
    costs.observe(8180, 1200.0)
    for i in range(1000):
        tokens = rng.choice(list(true))
        slow = 10 if i % 20 == 0 else 1
        costs.observe(tokens, slow * true[tokens] * rng.uniform(0.95, 1.05))
    for tokens, ms in true.items() if table is None else []:
        assert costs.ms(tokens) == pytest.approx(ms, rel=0.2), tokens
    assert costs.ms(8192) == pytest.approx(true[8180], rel=0.2)


def test_one_length_tells_of_the_others() -> None:
    """Lengths never run are put at what is likely, not at nothing."""
    costs = Costs(8192)
    for _ in range(20):
        costs.observe(780, 3.384)
    assert costs.ms(780) == pytest.approx(3.384, rel=0.05)
    assert 1.0 < costs.ms(64) < 2.5
    assert 20.0 < costs.ms(8192) < 35.0
