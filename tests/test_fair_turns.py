"""Turns between tenants: shares of served tokens, credit, weights, and who has no turn."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flide_engine.scheduler import Scheduler
from tests.scheduling import Engine, Item, buckets, cost_ms, names, queue_of

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=60)


@settings(max_examples=500)
@example([1, 284, 100], [400, 1, 1, 283, 333, 168], [117, 218])
@given(SIZES, SIZES, SIZES)
def test_served_tokens_of_tenants_with_work_stay_together(
    first: list[int], second: list[int], third: list[int]
) -> None:
    """By one request and one round at most, at any time while both have work."""
    sizes = {"a": first, "b": second, "c": third}
    items = [Item(f"{t}{i}", n, tenant=t) for t, of in sizes.items() for i, n in enumerate(of)]
    scheduler = queue_of(*items, room=500)
    left = {tenant: len(of) for tenant, of in sizes.items()}
    served = dict.fromkeys(sizes, 0)
    while len(scheduler):
        taken, _ = scheduler.next_round(0.0)
        assert taken
        for item in taken:
            left[item.tenant] -= 1
            served[item.tenant] += item.tokens
        both = [served[tenant] for tenant in sizes if left[tenant]]
        assert max(both, default=0) - min(both, default=0) <= 500 + 400


def test_idle_time_earns_no_credit() -> None:
    """Who comes back gets its share from then on, and not what it did not ask for."""
    scheduler: Scheduler[Item] = Scheduler(1000, 10**9)
    scheduler.add(Item("b", 100, tenant="b"), 0.0)
    for i in range(1000):
        scheduler.add(Item(f"a{i}", 100, tenant="a"), 0.0)
    for _ in range(50):
        scheduler.next_round(0.0)
    for i in range(200):
        scheduler.add(Item(f"b{i}", 100, tenant="b"), 0.0)
    taken = [item.tenant for _ in range(10) for item in scheduler.next_round(0.0)[0]]
    assert taken.count("a") == pytest.approx(50, abs=2)


def test_what_was_not_run_is_not_charged() -> None:
    """A round that did not fit the memory leaves its tenants' turns as they were."""
    scheduler = queue_of(Item("a", 80, tenant="a"), Item("b", 80, tenant="b"))
    taken, _ = scheduler.next_round(0.0)
    scheduler.put_back(taken, front=True)
    assert scheduler.next_round(0.0)[0] == taken


def test_weights_are_shares() -> None:
    """Three times the weight is three times the tokens."""
    scheduler: Scheduler[Item] = Scheduler(1000, 10**9, weights={"a": 3.0})
    for i in range(400):
        scheduler.add(Item(f"a{i}", 100, tenant="a"), 0.0)
        scheduler.add(Item(f"b{i}", 100, tenant="b"), 0.0)
    taken = [item.tenant for _ in range(40) for item in scheduler.next_round(0.0)[0]]
    assert taken.count("a") == pytest.approx(300, abs=10)


def test_who_shares_no_round_waits_for_nobody() -> None:
    """Whatever its class and however urgent others are, piece after piece, and nothing else, not
    even batch work in its padding, is in its rounds.
    """
    scheduler: Scheduler[Item] = Scheduler(100, 10**9, {64: 1.0, 128: 2.0}, buckets)
    for i in range(6):
        scheduler.add(Item(f"a{i}", 50), 0.0)
        scheduler.add(Item(f"urgent{i}", 50, tenant="b", deadline=0.004), 0.0)
        scheduler.add(Item(f"fills{i}", 5, tenant="b"), 0.0, batch=True)
    alone = Item("alone", 50, 3, alone=True)
    scheduler.add(alone, 0.0, batch=True)
    assert alone in scheduler
    for _ in range(3):
        taken, _ = scheduler.next_round(0.0)
        assert taken == [alone]
        alone.pieces -= 1
        if alone.pieces:
            scheduler.put_back(taken)
    scheduler.finished(alone)
    assert len(scheduler.next_round(0.0)[0]) == 2


def test_who_shares_no_round_is_charged() -> None:
    """It goes before the turns of others, and its tenant's other work pays for it."""
    items = [Item(f"{tenant}{i}", 100, tenant=tenant) for i in range(4) for tenant in "ab"]
    scheduler = queue_of(*items, Item("alone", 250, tenant="a", alone=True))
    order = [name for _ in range(7) for name in names(scheduler.next_round(0.0)[0])]
    assert order == ["alone", "b0", "b1", "b2", "a0", "b3", "a1"]


def test_who_shares_no_round_holds_no_checkpoints_beside_another() -> None:
    """Of several rounds, it waits for the one that has begun, and for no other that is to."""
    begun, other = Item("begun", 80, 2), Item("other", 80, 2)
    scheduler = queue_of(begun, other)
    taken, _ = scheduler.next_round(0.0)
    scheduler.add(Item("alone", 80, 2, tenant="b", alone=True))
    scheduler.put_back(taken)
    assert names(scheduler.next_round(0.0)[0]) == ["begun"]
    scheduler.finished(begun)
    assert names(scheduler.next_round(0.0)[0]) == ["alone"]


def test_a_burst_does_not_delay_another_tenant() -> None:
    """One request of another tenant waits about a round, not behind the burst."""
    engine = Engine(Scheduler(8192, 10**9))
    burst = [Item(f"burst{i}", 800, tenant="a") for i in range(1000)]
    engine.serve([*burst, Item("single", 800, tenant="b", at=0.1)])
    assert engine.begun["single"] - 0.1 < 2 * cost_ms(8192) / 1000
