"""Marks stand on grains, inside what is computed, and where the next prompt will need them."""

from hypothesis import given
from hypothesis import strategies as st

from flide_engine.cache.marks import MarkPolicy


@given(st.integers(0, 40_000), st.integers(0, 600), st.integers(0, 40_000))
def test_marks_are_legal(state: int, resumed_grains: int, agreed: int) -> None:
    """Multiples of the grain, after the resumed position, not after the state."""
    resumed = min(64 * resumed_grains, state // 64 * 64)
    marks = MarkPolicy().positions(state, resumed, min(agreed, state))
    assert marks == sorted(set(marks))
    assert all(m % 64 == 0 and resumed < m <= state for m in marks)
    assert len(marks) <= 9


def test_where_they_stand() -> None:
    """The last grain, the point of divergence, the last turn, doubling distances from the end."""
    policy = MarkPolicy(spacing=2048)
    assert policy.positions(9000, 0, 640, [100, 8100]) == [640, 4096, 6144, 8064, 8960]
    assert policy.positions(9000, 64, 640, [100, 8100]) == [640, 4096, 6144, 8960]
    assert policy.positions(9000, 8960) == []
    assert policy.positions(63, 0) == []
    assert (
        MarkPolicy(last=False, turns=0, spacing=0, divergence=False).positions(9000, 0, 640) == []
    )
