"""When the next round is due, on a clock of the test's own."""

import pytest

from flide_engine.pacing import Pacing

MARGIN = 0.0003


def taught(late: float = 0.0, early: float = 0.0, rounds: int = 64) -> Pacing:
    """Has seen rounds of 10 ms, each launched `late` seconds after it was due, and over a part
    `early` before its time.
    """
    pacing = Pacing()
    for i in range(rounds):
        assert pacing.wait_s(float(i)) == 0.0
        pacing.launched(i + late, 0.010)
        pacing.ended(i + late + 0.010 * (1.0 - early))
    return pacing


def due(pacing: Pacing, now: float, full: bool = False) -> float:
    """When it says so, asked as often as it wants to be, and never late."""
    while wait := pacing.wait_s(now, full):
        assert 50e-6 <= wait <= 1e-3
        now += wait
    return now


@pytest.mark.parametrize(
    ("late", "early", "full", "lead"),
    [
        (0.0, 0.0, False, MARGIN),
        (0.0005, 0.0, False, MARGIN + 0.0005),
        (0.0, 0.05, False, MARGIN + 0.0010),
        (0.0005, 0.05, False, MARGIN + 0.0015),
        (0.0, -0.05, False, MARGIN),  # rounds that take longer allow for nothing
        (0.0, 0.0, True, 0.0050),
        (0.0, 0.4, True, MARGIN + 0.0080),
    ],
)
def test_the_lead_covers_what_was_seen(late: float, early: float, full: bool, lead: float) -> None:
    """Launches that take long, and rounds that end before their time; more if it costs nothing."""
    pacing = taught(late, early)
    pacing.launched(100.0, 0.020)
    assert pacing.lead_s(0.020, full) == pytest.approx(lead)
    assert due(pacing, 100.001, full) == pytest.approx(100.020 - lead, abs=60e-6)


def test_it_begins_at_once_where_nothing_can_be_told() -> None:
    """Nothing runs, nobody knows how long, or too few rounds were seen."""
    pacing = taught()
    assert pacing.wait_s(100.0) == 0.0
    pacing.launched(100.0, 0.0)
    assert pacing.wait_s(100.001) == 0.0
    for rounds in (15, 16):
        new = taught(rounds=rounds)
        new.launched(100.0, 0.010)
        assert (new.wait_s(100.001) == 0.0) == (rounds == 15)


def test_a_round_behind_another_begins_when_that_one_ends() -> None:
    """Its end is counted from there, not from its launch."""
    pacing = taught()
    pacing.launched(100.0, 0.010)
    pacing.wait_s(100.0098)
    pacing.launched(100.0098, 0.020)
    pacing.ended(100.011)
    assert due(pacing, 100.012) == pytest.approx(100.031 - MARGIN, abs=60e-6)
    pacing.ended(100.029)  # a tenth early
    for i in range(64):
        pacing.launched(100.028 + 0.018 * i, 0.020)
        if i:
            pacing.ended(100.029 + 0.018 * i)
    assert pacing.lead_s(0.020) == pytest.approx(MARGIN + 0.002)


def test_waking_up_late_is_learned_and_asking_late_is_not() -> None:
    """A thread that sleeps past the time when a round was due has to be woken earlier; one that had
    something else to do has not.
    """
    pacing = taught()
    for i in range(100, 164):
        pacing.launched(float(i), 0.010)
        woken = i + 0.010 - pacing.lead_s(0.010) + 0.0002
        assert pacing.wait_s(i + 0.005) > 0.0
        assert pacing.wait_s(woken) == 0.0
        pacing.launched(woken, 0.010)
        pacing.ended(i + 0.010)
        pacing.ended(i + 0.020)
    assert pacing.lead_s(0.010) == pytest.approx(MARGIN + 0.0002)
    for i in range(200, 264):
        pacing.launched(float(i), 0.010)
        assert pacing.wait_s(i + 0.0099) == 0.0
        pacing.launched(i + 0.0099, 0.010)
        pacing.ended(i + 0.010)
        pacing.ended(i + 0.020)
    assert pacing.lead_s(0.010) == pytest.approx(MARGIN)


def test_one_that_had_to_wait_for_another_to_end_was_not_launched_late() -> None:
    """Work that shares no round is begun when nothing else runs: that teaches nothing."""
    pacing = taught()
    for i in range(100, 164):
        pacing.launched(float(i), 0.010)
        assert pacing.wait_s(i + 0.0098) == 0.0
        pacing.ended(i + 0.010)
        pacing.launched(i + 0.010, 0.010)
        pacing.ended(i + 0.020)
    assert pacing.lead_s(0.010) == pytest.approx(MARGIN)


def test_a_few_bad_rounds_move_nothing_and_are_forgotten() -> None:
    """One in twenty may be late; what was always late once is not held against the device."""
    pacing = taught()
    for i in range(100, 103):
        pacing.wait_s(float(i))
        pacing.launched(i + 0.005, 0.010)
        pacing.ended(i + 0.015)
    assert pacing.lead_s(0.010) == pytest.approx(MARGIN)
    pacing = taught(late=0.005)
    for i in range(100, 164):
        pacing.wait_s(float(i))
        pacing.launched(float(i), 0.010)
        pacing.ended(i + 0.010)
    assert pacing.lead_s(0.010) == pytest.approx(MARGIN)
