"""Limits of the queue, predicted waits, and times to come again."""

import heapq
import itertools
import random

import pytest

from flide_engine.errors import Overloaded
from flide_engine.scheduler import Scheduler
from tests.scheduling import Engine, Item, cost_ms

TABLE = {tokens: cost_ms(tokens) for tokens in (64, 512, 2048, 8192)}


def until_refused(scheduler: Scheduler[Item], tenant: str, batch: bool = False) -> Overloaded:
    """Adds a thousand tokens again and again."""
    for i in range(1000):
        try:
            scheduler.add(Item(str(i), 1000, tenant=tenant, batch=batch), 0.0, batch)
        except Overloaded as error:
            return error
    raise AssertionError("nothing was refused")


def test_a_full_queue_refuses_with_a_time() -> None:
    """The time is how long the queue takes to have room, and a round; a lone request is never
    refused.
    """
    scheduler: Scheduler[Item] = Scheduler(100, 150, {100: 1000.0})
    scheduler.add(Item("alone", 500), 0.0)
    scheduler.finished(scheduler.next_round(0.0)[0][0])
    scheduler.add(Item("a", 100), 0.0)
    with pytest.raises(Overloaded) as refused:
        scheduler.add(Item("b", 100), 0.0)
    error = refused.value
    assert error.retry_after_ms == 500 + 1000
    assert "max_queued_tokens" in str(error)
    assert scheduler.load(0.0).refused_tokens == 100


def test_a_long_wait_is_refused_and_for_batch_work_earlier() -> None:
    """By predicted milliseconds, of which batch work may wait half; what it gets, interactive work
    does not lack.
    """
    scheduler: Scheduler[Item] = Scheduler(8192, 10**9, TABLE, max_queue_ms=200)
    assert until_refused(scheduler, "", batch=True).limit == 100
    assert 90 <= scheduler.queued_tokens * TABLE[8192] / 8192 <= 110
    error = until_refused(scheduler, "")
    assert (error.unit, error.limit, error.option) == ("ms", 200, "max_queue_ms")
    waiting = sum(not item.batch for item in scheduler)
    assert 190 <= 1000 * waiting * TABLE[8192] / 8192 <= 215


def test_a_burst_of_one_tenant_does_not_shut_out_another() -> None:
    """Its share of the tokens, and its turn, are kept."""
    scheduler: Scheduler[Item] = Scheduler(8192, 100_000, TABLE, max_queue_ms=250)
    until_refused(scheduler, "a")
    queued = scheduler.queued_tokens
    assert 70_000 < queued < 100_000
    until_refused(scheduler, "b")
    waiting = [item.tenant for item in scheduler]
    assert waiting.count("b") >= 40
    for tenant in "cdefghijkl":
        scheduler.add(Item("one", 1000, tenant=tenant), 0.0)
    until_refused(scheduler, "m")
    assert scheduler.queued_tokens <= 200_000
    for item in [item for _ in range(100) for item in scheduler.next_round(0.0)[0]]:
        scheduler.finished(item)
    until_refused(scheduler, "a")
    assert scheduler.queued_tokens == queued


def test_waits_are_counted_in_new_tokens() -> None:
    """Where planning leaves a tenth of the work, what is not planned yet counts as a tenth."""

    def plan(item: Item) -> None:
        if item.tokens == 1000:
            item.tokens = 100

    scheduler: Scheduler[Item] = Scheduler(8192, 10**9, TABLE)
    engine = Engine(scheduler, plan)
    engine.serve([Item(f"a{i}", 1000, at=i / 100) for i in range(100)])
    for i in range(100):
        scheduler.add(Item(f"b{i}", 1000), engine.now)
    assert scheduler.queued_tokens == 100_000
    load = scheduler.load(engine.now)
    assert load.queued_tokens == pytest.approx(10_000, rel=0.02)
    assert load.wait_ms == pytest.approx(cost_ms(8192) + cost_ms(1808), rel=0.05)


def test_predicted_waits_hold() -> None:
    """At 93% load, without a table to begin with: what is predicted bounds nine waits in ten, and
    is not twice what they are.
    """
    rng = random.Random(0)
    scheduler: Scheduler[Item] = Scheduler(8192, 10**9)
    engine, at, predicted = Engine(scheduler), 0.0, {}

    class Timed(Item):
        @property
        def waiting_tokens(self) -> int:  # read when it is added
            predicted.setdefault(self.name, scheduler.load(self.at).wait_ms)
            return self.tokens

    items = []
    for i in range(3000):
        at += rng.expovariate(330)
        items.append(Timed(str(i), rng.choice([100, 500, 800, 2000]), at=at))
    engine.serve(list(items))
    pairs = [(predicted[i.name], 1000 * (engine.begun[i.name] - i.at)) for i in items[100:]]
    ratios = sorted(told / was for told, was in pairs if was > 10)
    assert len(ratios) > 500
    assert ratios[len(ratios) // 10] > 0.9
    assert ratios[len(ratios) // 2] < 1.6
    load = scheduler.load(engine.now)
    assert load.tokens_per_ms == pytest.approx(8192 / cost_ms(8192), rel=0.1)
    assert 1.0 < load.step_ms < 4.0
    assert 5.0 < load.mean_wait_ms < 100.0
    later = scheduler.load(engine.now + 30.0)
    assert (later.wait_ms, round(later.mean_wait_ms, 1)) == (0.0, 0.0)


@pytest.mark.parametrize(("tokens", "ms"), [(262_144, None), (10**9, 500)])
@pytest.mark.parametrize("tenants", [1, 3])
def test_who_comes_back_in_time_is_let_in(tokens: int, ms: int | None, tenants: int) -> None:
    """Of a burst of 1,500 requests, five seconds of work, nine in ten of the refused are let in
    when they come back as told; and the engine is not idle meanwhile.
    """
    rng = random.Random(0)
    scheduler: Scheduler[Item] = Scheduler(8192, tokens, max_queue_ms=ms)
    engine = Engine(scheduler)
    for i in range(20):
        engine.serve([Item(f"warm{i}", 3000, at=engine.now)])
    start, tries = engine.now, dict[str, int]()
    items = [
        Item(str(i), rng.choice([500, 800, 2000]), tenant=str(i % tenants)) for i in range(1500)
    ]
    coming = [(start + rng.random() / 5, i) for i in range(1500)]
    heapq.heapify(coming)
    while coming or len(scheduler):
        while coming and coming[0][0] <= engine.now:
            at, i = heapq.heappop(coming)
            tries[items[i].name] = tries.get(items[i].name, 0) + 1
            try:
                scheduler.add(items[i], at)
            except Overloaded as error:
                heapq.heappush(coming, (at + error.retry_after_ms / 1000, i))
        if len(scheduler):
            engine.step()
        else:
            engine.now = max(engine.now, coming[0][0])
    refused = [count for count in tries.values() if count > 1]
    assert len(refused) > 900
    assert sum(count == 2 for count in refused) > 0.9 * len(refused)
    work = sum(item.tokens for item in items) * cost_ms(8192) / 8192 / 1000
    assert engine.now - start < 1.1 * work


def test_rounds_under_way_count() -> None:
    """A round that runs is waited for, less the time it has run; one that was given up is not."""
    scheduler: Scheduler[Item] = Scheduler(8192, 10**9, TABLE)
    scheduler.add(Item("a", 8192), 0.0)
    taken, _ = scheduler.next_round(0.0)
    assert scheduler.load(0.01).wait_ms == pytest.approx(TABLE[8192] - 10, abs=0.01)
    scheduler.put_back(taken, front=True)
    assert scheduler.load(0.01).wait_ms == pytest.approx(TABLE[8192])
    scheduler.finished(scheduler.next_round(0.01)[0][0])
    assert scheduler.load(0.01).wait_ms == 0.0


def test_time_behind_another_round_is_no_engine_time() -> None:
    """A round begun while another runs cost what it added."""
    scheduler: Scheduler[Item] = Scheduler(1000, 10**9)
    for i in range(50):
        scheduler.observe(1000, 0.02, now=1.0 + i / 100)
    assert scheduler.load(2.0).tokens_per_ms == pytest.approx(100, rel=0.1)


def test_a_flood_does_not_shut_out_by_number() -> None:
    """Each tenant has its share of the requests that may wait, those that are rendered included; a
    tenant with one waiting request less than its share is let in, one with as many is not.
    """
    scheduler: Scheduler[Item] = Scheduler(8192, 10**9, TABLE, weights={"heavy": 2.0})
    rendering = {"flood": 60}
    for i in range(40):
        scheduler.add(Item(str(i), 10, tenant="flood"), 0.0)

    def refused(tenant: str) -> Overloaded | None:
        try:
            scheduler.check_number(tenant, rendering, 100, 0.0)
        except Overloaded as error:
            return error
        return None

    error = refused("flood")
    assert error is not None
    assert (error.waiting, error.limit, error.option) == (100, 100, "max_waiting_requests")
    assert error.retry_after_ms >= 50
    for tenant, most in (("b", 50), ("heavy", 50), ("c", 20), ("d", 17)):
        taken = 0
        while refused(tenant) is None:
            rendering[tenant] = taken = taken + 1
        assert taken == most, tenant
    assert refused("flood") is not None
    rendering.clear()
    assert refused("flood") is None  # only what waits counts


def test_refused_by_number_come_again_one_after_the_other() -> None:
    """The time each is told is later than that of the one before."""
    scheduler: Scheduler[Item] = Scheduler(1000, 10**9, {1000: 1000.0})
    for i in range(10):
        scheduler.add(Item(str(i), 100), 0.0)
    told = []
    for _ in range(3):
        with pytest.raises(Overloaded) as raised:
            scheduler.check_number("", {}, 10, 0.0)
        told.append(raised.value.retry_after_ms)
    assert all(b - a in (100, 101) for a, b in itertools.pairwise([1000, *told]))
