"""The simulation of early and late rounds: its accounts, and the reason that it gives."""

import pytest

from benchmarks.late_rounds import Case, Simulation, ms_of
from benchmarks.results_file import Row

RACE = 510
"""Tokens of a request of race1."""


def ran(case: Case, late: bool, round_tokens: int = 16384) -> tuple[Simulation, Row]:
    """A simulation after its run."""
    simulation = Simulation(case, round_tokens, late)
    return simulation, simulation.run()


@pytest.mark.parametrize("late", [False, True])
def test_nobody_is_lost(late: bool) -> None:
    """Every client of a closed loop waits, runs or thinks; a run can be repeated to the last digit;
    time that was not idle was spent on rounds.
    """
    case = Case("8 clients", "race1", 8, seconds=1.0)
    simulation, row = ran(case, late)
    running = simulation._under_way
    there = len(running.works) if running else 0
    assert len(simulation.scheduler) + there + len(simulation._coming) == 8
    assert ran(case, late)[1] == row
    spent = simulation.rounds * ms_of("race1", simulation.tokens // simulation.rounds) / 1000
    assert spent + simulation.idle == pytest.approx(case.seconds, rel=0.08)


def test_clients_form_three_groups_early_and_two_late() -> None:
    """Those answered by one round have missed the next, if that was formed before it ran: a third
    of the clients in a round, and half of them if it is formed late.
    """
    case = Case("48 clients", "race1", 48, seconds=4.0)
    early, late = (ran(case, late)[1] for late in (False, True))
    assert early["round_mean"] == pytest.approx(48 * RACE / 3, rel=0.05)
    assert late["round_mean"] == pytest.approx(48 * RACE / 2, rel=0.05)
    assert late["p50_ms"] < early["p50_ms"]
    assert late["idle_share"] < 0.002


def test_who_asks_little_waits_for_one_round_less() -> None:
    """Beside batch work that fills every round."""
    case = Case("beside batch", "race1", 64, 20.0, batch=True, seconds=4.0)
    early, late = (ran(case, late, 8192)[1] for late in (False, True))
    assert late["open_p50_ms"] < 0.75 * early["open_p50_ms"]
    assert late["clients_rps"] == pytest.approx(early["clients_rps"], rel=0.02)
