"""What a replica tells the autoscaler, on a virtual clock."""

import pytest

from deployments import demand
from deployments.autoscaling import Objectives, Signal, needs_of
from deployments.demand import AGENT_S, Demand


class Told:
    """A replica's demand, as time passes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.demand = Demand(clock=lambda: self.now)

    def asked(self, *anchors: int, after: float = 0.0) -> None:
        """So many seconds later these states are asked about."""
        self.now += after
        for anchor in anchors:
            self.demand.asked(anchor)

    def agents(self, after: float = 0.0) -> float:
        """What is told so many seconds later."""
        self.now += after
        return self.demand.told(0.0, 0.0, 0.0, 100.0)["agents"]


@pytest.fixture
def told() -> Told:
    """A replica that was asked nothing yet."""
    return Told()


def test_demand_is_of_the_last_period(told: Told) -> None:
    """Busy time and refusals since the last telling."""
    told.now = 10.0
    assert told.demand.told(5.0, 0.0, 0.0, 100.0)["busy"] == 0.5
    told.now = 20.0
    found = told.demand.told(15.0, 1.0, 1_000_000.0, 100.0)
    assert found == {"busy": 1.0, "wait_ms": 1.0, "agents": 0.0, "refused": 1.0}
    told.now = 65.0
    found = told.demand.told(15.0, 1.0, 1_000_000.0, 100.0)
    assert found == {"busy": 0.0, "wait_ms": 1.0, "agents": 0.0, "refused": 0.0}


def test_a_state_that_comes_again_is_an_agent(told: Told) -> None:
    """Until it has not come for a minute; a pause of a minute makes it new."""
    told.asked(1, 2)
    assert told.agents() == 0
    told.asked(1, after=AGENT_S)
    assert told.agents() == 1
    told.asked(1, after=40)
    assert told.agents(after=AGENT_S) == 1
    assert told.agents(after=1) == 0
    told.asked(1)
    assert told.agents() == 0
    told.asked(1, 2, 2)
    assert told.agents() == 2


def test_requests_that_come_once_are_no_agents(told: Told) -> None:
    """Five a second for an hour at 2% busy want no replica beyond their load."""
    for i in range(5 * 3600):
        told.asked(i, after=0.2)
    needs = needs_of([Signal(busy=0.02, agents=told.agents())], Objectives())
    assert needs.agents == 0
    assert needs.load == pytest.approx(0.02 / 0.7)


def test_nothing_is_kept_for_longer_than_it_counts(told: Told) -> None:
    """Though nobody asks for it, as without autoscaling."""
    for i in range(2000):
        told.asked(i, after=1.0)
        assert len(told.demand) <= AGENT_S + 1


def test_what_is_kept_is_bounded(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast states come; those that came last are kept, and counts stay right."""
    monkeypatch.setattr(demand, "MOST", 10)
    told.asked(*range(5), *range(5), *range(100, 108))
    assert len(told.demand) == 10
    assert told.agents() == 2
    told.asked(*range(200, 210))
    assert told.agents() == 0
