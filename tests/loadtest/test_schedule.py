"""Arrivals: by seed, at their rates."""

import pytest

from loadtest.schedule import SHAPES, arrivals


@pytest.mark.parametrize("shape", SHAPES)
def test_arrivals_increase_and_repeat_by_seed(shape: str) -> None:
    """The same seed gives the same due times, within the run."""
    first, again, other = (list(arrivals(shape, 50, 40, seed)) for seed in (1, 1, 2))
    assert first == again == sorted(first)
    assert 0 <= first[0] <= first[-1] < 40
    assert shape == "even" or first != other


def test_rates() -> None:
    """Means within four standard deviations; a ramp ends high, bursts come at their times."""
    for shape, mean in (("poisson", 50), ("even", 50), ("bursts", 50), ("ramp", 27.5)):
        count = len(list(arrivals(shape, 50, 200, 0)))
        assert abs(count - mean * 200) < 4 * (mean * 200) ** 0.5, shape
    ramp = list(arrivals("ramp", 50, 200, 0))
    assert sum(at > 180 for at in ramp) > 5 * sum(at < 20 for at in ramp)
    bursts = list(arrivals("bursts", 50, 200, 0))
    assert sum(at % 10 < 2 for at in bursts) / len(bursts) == pytest.approx(0.8, abs=0.02)


def test_a_shape_that_is_not_there() -> None:
    """It is named."""
    with pytest.raises(ValueError, match="no arrivals 'square'; there are poisson, even"):
        list(arrivals("square", 1, 1, 0))
