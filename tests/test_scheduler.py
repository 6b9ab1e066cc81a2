"""Rounds as policy: order, budget, classes, deadlines, turns, long work. No engine, no clock but
the one given.
"""

import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flide_engine.fairness import Entry, FairQueue
from flide_engine.scheduler import Scheduler
from tests.scheduling import Engine, Item, buckets, cost_ms, names, queue_of

TABLE = {tokens: cost_ms(tokens) for tokens in (64, 256, 1024, 4096, 8192)}


def test_first_come_first_served_within_the_budget() -> None:
    """A round takes what fits, in order, and lets smaller work fill the rest."""
    scheduler = queue_of(Item("a", 60), Item("b", 60), Item("c", 30), Item("d", 20))
    assert names(scheduler.next_round(0.0)[0]) == ["a", "c"]
    assert names(scheduler.next_round(0.0)[0]) == ["b", "d"]
    assert len(scheduler) == 0


def test_work_larger_than_a_round_is_taken_alone() -> None:
    """It can only be larger if the caller cut it so; leaving it would starve it."""
    scheduler = queue_of(Item("big", 150), Item("small", 1))
    assert names(scheduler.next_round(0.0)[0]) == ["big"]


def test_work_whose_state_is_coming_lets_others_go_first() -> None:
    """It keeps its place, and is taken when it has come, or when nothing else can run."""
    coming = Item("coming", 60, is_coming=True)
    scheduler = queue_of(coming, Item("a", 60), Item("b", 60))
    assert names(scheduler.next_round(0.0)[0]) == ["a"]
    coming.is_coming = False
    assert names(scheduler.next_round(0.0)[0]) == ["coming"]
    scheduler.add(Item("later", 30, is_coming=True))
    assert names(scheduler.next_round(0.0)[0]) == ["b"]
    scheduler.add(Item("batch", 10, batch=True, is_coming=True), batch=True)
    assert names(scheduler.next_round(0.0)[0]) == ["later"]
    assert names(scheduler.next_round(0.0)[0]) == ["batch"]
    assert len(scheduler) == 0


def test_those_who_left_are_not_run() -> None:
    """Cancelled work leaves the queue without taking room, also from deep inside it."""
    scheduler = queue_of(Item("left", 90, gone_at=5.0), Item("here", 90), Item("deep", 90, 1, 5.0))
    taken, gone = scheduler.next_round(5.0)
    assert (names(taken), names(gone)) == (["here"], ["left", "deep"])
    assert (len(scheduler), scheduler.queued_tokens) == (0, 0)


def test_late_work_leaves_at_its_deadline_wherever_it_stands() -> None:
    """Nobody waits for an answer that is of no more use."""
    late = [Item(f"late{i}", 90, deadline=1.0 + i / 1000) for i in range(300)]
    scheduler = queue_of(*(Item(f"here{i}", 90) for i in range(100)), *late)
    assert names(scheduler.next_round(2.0)[1]) == names(late)


def test_one_long_request_at_a_time_and_short_ones_between() -> None:
    """Only one request holds checkpoints between rounds, so two never wait for each other's
    memory.
    """
    first, second, short = Item("first", 80, 3), Item("second", 80, 3), Item("short", 90)
    scheduler = queue_of(first, second, short)
    taken, _ = scheduler.next_round(0.0)
    assert names(taken) == ["first"]
    scheduler.put_back(taken)
    assert names(scheduler.next_round(0.0)[0]) == ["short"]
    taken, _ = scheduler.next_round(0.0)
    assert names(taken) == ["first"]
    scheduler.finished(first)
    assert names(scheduler.next_round(0.0)[0]) == ["second"]


def test_what_became_long_when_it_had_begun_goes_on() -> None:
    """It was cut as its round did not fit, and holds checkpoints before another one does."""
    cut, long = Item("cut", 60), Item("long", 60, 3)
    scheduler = queue_of(cut, long)
    taken, _ = scheduler.next_round(0.0)
    assert names(taken) == ["cut"]
    cut.pieces = 2
    scheduler.put_back(taken)
    assert names(scheduler.next_round(0.0)[0]) == ["cut"]
    scheduler.finished(cut)
    assert names(scheduler.next_round(0.0)[0]) == ["long"]


def test_long_requests_of_two_tenants_alternate() -> None:
    """A tenant with many long requests does not keep another's from beginning."""
    mine = [Item(f"mine{i}", 80, 3, tenant="a") for i in range(6)]
    theirs = [Item(f"theirs{i}", 80, 3, tenant="b") for i in range(2)]
    engine = Engine(queue_of(*mine, *theirs))
    engine.serve([])
    order = list(engine.ended)
    assert len(order) == 8
    assert order.index("theirs1") <= 4


def test_a_long_batch_request_that_has_begun_goes_on() -> None:
    """What holds checkpoints does not wait for gaps that may not come."""
    engine = Engine(queue_of(Item("long", 80, 3, batch=True)))
    engine.step()
    engine.serve([Item(f"i{n}", 90, at=n / 1000) for n in range(10)])
    assert list(engine.ended).index("long") < 6


def test_what_shares_no_round_any_more_is_next_though_it_might_wait() -> None:
    """It is done once more, alone: whatever its class, it neither fills a gap nor waits for one."""
    again, company = Item("again", 10, batch=True), Item("company", 10, batch=True)
    scheduler = queue_of(again, company)
    taken, _ = scheduler.next_round(0.0)
    assert names(taken) == ["again", "company"]
    scheduler.finished(company)
    again.alone = True
    scheduler.add(Item("interactive", 10))
    scheduler.put_back([again])
    assert names(scheduler.next_round(0.0)[0]) == ["again"]
    assert names(scheduler.next_round(0.0)[0]) == ["interactive"]


def test_put_back_at_the_front_keeps_the_order() -> None:
    """Work that did not fit the pool runs first next time."""
    scheduler = queue_of(Item("later", 10))
    scheduler.put_back([Item("x", 10), Item("y", 10)], front=True)
    assert names(scheduler.next_round(0.0)[0]) == ["x", "y", "later"]


def test_drain_empties() -> None:
    """Everything that waits comes out once, in order of arrival."""
    items = [Item("a", 10, tenant="x"), Item("b", 10, batch=True), Item("c", 10, tenant="x")]
    scheduler = queue_of(*items)
    assert scheduler.drain() == items
    assert (len(scheduler), scheduler.queued_tokens, list(scheduler)) == (0, 0, [])


def test_only_what_may_be_taken_is_planned() -> None:
    """Planning shrinks work; what has no turn yet is not planned, and what did not fit is not
    planned again before it can.
    """
    planned: list[str] = []

    def plan(item: Item) -> None:
        planned.append(item.name)
        if item.name.startswith("known"):
            item.tokens = 10

    items = [Item(f"known{i}", 80) for i in range(8)] + [Item("big", 90), Item("last", 90)]
    scheduler = queue_of(*items, *(Item(f"more{i}", 100) for i in range(100)))
    taken, _ = scheduler.next_round(0.0, plan)
    assert names(taken) == [f"known{i}" for i in range(8)]
    assert len(planned) == 16
    planned.clear()
    assert names(scheduler.next_round(0.0, plan)[0]) == ["big"]
    assert len(planned) < 10


def test_a_fault_in_planning_loses_nothing() -> None:
    """Everything is back in the queue when the error reaches the caller."""

    def plan(item: Item) -> None:
        if item.name == "bad":
            raise ZeroDivisionError

    scheduler = queue_of(Item("a", 10), Item("gone", 10, gone_at=0.0), Item("bad", 10))
    with pytest.raises(ZeroDivisionError):
        scheduler.next_round(0.0, plan)
    assert sorted(names(scheduler)) == ["a", "bad", "gone"]
    assert scheduler.queued_tokens == 30
    assert scheduler.load(0.0).wait_ms == 0.0


def test_a_fault_where_turns_are_charged_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it may be: what was about to be taken is in the queue again."""
    scheduler = queue_of(Item("a", 10), Item("b", 10))

    def fail(tenant: str, tokens: int) -> None:
        if tokens:
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(scheduler._interactive, "charge", fail)
        with pytest.raises(ZeroDivisionError):
            scheduler.next_round(0.0)
    assert scheduler.queued_tokens == 20
    assert scheduler.load(0.0).wait_ms == 0.0
    assert names(scheduler.next_round(0.0)[0]) == ["a", "b"]


def test_batch_work_fills_what_a_bucket_leaves() -> None:
    """Interactive work first; batch work only in rows that would be padding."""
    scheduler: Scheduler[Item] = Scheduler(8192, 10**6, TABLE, buckets)
    for i in range(20):
        scheduler.add(Item(f"b{i}", 100), 0.0, batch=True)
    scheduler.add(Item("i", 700), 0.0)
    taken, _ = scheduler.next_round(0.0)
    assert names(taken) == ["i", "b0", "b1", "b2"]
    taken, _ = scheduler.next_round(0.0)
    assert len(taken) == 17


def test_batch_work_is_never_starved() -> None:
    """Under interactive load that fills every round, it still is served after its age."""
    scheduler: Scheduler[Item] = Scheduler(1000, 10**9, batch_age_s=1.0)
    load = [Item(f"i{n}", 1000, at=0.0036 * n) for n in range(2000)]
    batch = [Item(f"b{n}", 100, batch=True) for n in range(20)]
    engine = Engine(scheduler)
    engine.serve([*batch, *load], until=5.0)
    assert all(1.0 <= engine.ended[item.name] < 2.0 for item in batch)


def test_old_batch_work_does_not_take_over() -> None:
    """However much of it has aged, interactive work keeps seven eighths of the rounds."""
    scheduler: Scheduler[Item] = Scheduler(1000, 10**9, batch_age_s=1.0)
    for i in range(500):
        scheduler.add(Item(f"b{i}", 100, batch=True), 0.0, batch=True)
    taken: list[bool] = []
    for n in range(40):
        for i in range(10):
            scheduler.add(Item(f"i{n} {i}", 100), 5.0)
        taken += [item.batch for item in scheduler.next_round(5.0)[0]]
    assert len(taken) == 400
    assert 40 <= taken.count(True) <= 80


def test_what_a_tenant_has_waiting_is_counted() -> None:
    """Also while others' work stays."""
    queue: FairQueue[Item] = FairQueue({})
    for seq, tenant in enumerate("aabb"):
        queue.append(Entry(Item(str(seq), 10 + seq, tenant=tenant), seq, 0.0, False, 10 + seq))
    entry = queue.pop()
    assert entry is not None
    assert [queue.backlog_of(tenant).tokens for tenant in "abc"] == [11, 25, 0]
    queue.put_aside_back([entry])
    assert (queue.backlog_of("a").tokens, queue.backlog.tokens, queue.weight) == (21, 46, 2.0)


def test_urgent_work_goes_first_where_that_changes_who_makes_it() -> None:
    """Of three rounds of work, what can wait waits, and the round ends in time."""
    scheduler: Scheduler[Item] = Scheduler(8192, 10**6, TABLE)
    for i in range(30):
        scheduler.add(Item(f"i{i}", 800), 0.0)
    for name, ms in (("second", 8.0), ("first", 6.0), ("patient", 900.0), ("hopeless", 1.0)):
        scheduler.add(Item(name, 800, deadline=ms / 1000), 0.0)
    engine = Engine(scheduler)
    assert names(engine.step()) == ["first", "second"]
    assert engine.gone == ["hopeless"]
    assert engine.now <= 0.006
    assert names(engine.step())[0] == "i0"
    engine.serve([])
    assert engine.ended["patient"] < 0.9
    assert engine.gone == ["hopeless"]


@given(st.lists(st.integers(1, 40), min_size=2, max_size=12, unique=True), st.randoms())
def test_among_equals_the_earliest_deadline_is_met(tens: list[int], rng: object) -> None:
    """Whatever the order of arrival, if all can be met one after the other, all are."""
    scheduler: Scheduler[Item] = Scheduler(1024, 10**6, TABLE)
    size, each = 1000, cost_ms(1024) / 1000
    items = [Item(str(n), size, deadline=(i + 1.01) * each) for i, n in enumerate(sorted(tens))]
    rng.shuffle(items)  # type: ignore[attr-defined]
    engine = Engine(scheduler)
    engine.serve(items)
    assert not engine.gone
    assert all(engine.ended[item.name] <= (item.deadline or 0.0) for item in items)


def test_predictions_that_are_far_too_long_do_not_last() -> None:
    """Work that seems hopeless is run where there is no other: else nothing ever would be again."""
    slow = {tokens: 1000 * ms for tokens, ms in TABLE.items()}
    engine = Engine(Scheduler(8192, 10**9, slow))
    for i in range(100):
        at = i / 10
        engine.serve([Item(f"{i} {n}", 800, deadline=at + 1.0, at=at) for n in "ab"])
    assert 0 < len(engine.gone) < 40
    assert len(engine.gone) + len(engine.ended) == 200


def test_deadlines_buy_no_larger_share() -> None:
    """A tenant whose every request is urgent is ahead by a round and a request at most."""
    scheduler: Scheduler[Item] = Scheduler(8192, 10**9, TABLE)
    engine = Engine(scheduler)
    for i in range(300):
        scheduler.add(Item(f"calm{i}", 800, tenant="calm"), 0.0)
        scheduler.add(Item(f"hasty{i}", 800, tenant="hasty", deadline=0.01 + i / 400), 0.0)
    served = {"calm": 0, "hasty": 0}
    for _ in range(20):
        for item in engine.step():
            served[item.tenant] += item.tokens
        assert served["hasty"] - served["calm"] <= 8192 + 800


WORK = st.builds(
    Item,
    name=st.just(""),
    tokens=st.integers(1, 300),
    pieces=st.integers(1, 3),
    gone_at=st.sampled_from([1e9, 1e9, 0.01]),
    tenant=st.sampled_from("abc"),
    deadline=st.sampled_from([None, None, 0.005, 0.02, 0.1]),
    batch=st.booleans(),
    at=st.floats(0, 0.02),
    is_coming=st.sampled_from([False, False, True]),
    alone=st.sampled_from([False, False, False, True]),
)


@settings(max_examples=300)
@given(st.lists(WORK, max_size=40), st.sampled_from([None, buckets]), st.booleans())
@example(  # a long one alone waits for a long one that has begun, of a tenant that is far ahead
    [
        Item("", 122, tenant="c", pieces=2, at=0.008, alone=True),
        Item("", 300, tenant="a", pieces=3, at=0.006),
        Item("", 40, tenant="a", at=0.018),
        Item("", 122, tenant="b", at=0.006, alone=True),
    ],
    None,
    True,
)
def test_everything_comes_out_once(items: list[Item], bucket: object, known: bool) -> None:
    """Each request ends or is given up, once; a round is never empty while work can run, and never
    too long.
    """
    for i, item in enumerate(items):
        item.name = str(i)
    table = {64: 1.0, 256: 1.5} if known else None
    scheduler: Scheduler[Item] = Scheduler(256, 10**9, table, bucket, None, 0.01)  # type: ignore[arg-type]
    engine = Engine(scheduler)
    engine.serve(items)
    assert sorted([*engine.ended, *engine.gone], key=int) == names(items)
    assert (len(scheduler), scheduler.queued_tokens) == (0, 0)
    for taken in engine.rounds:
        assert len(taken) == 1 or sum(item.tokens for item in taken) <= 256
        assert len(taken) == 1 or not any(item.alone for item in taken)
    assert scheduler.load(engine.now).wait_ms == 0.0
    empty = [taken for taken in engine.rounds if not taken]
    assert len(empty) <= len(engine.gone)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_inside_a_tenant_equal_work_keeps_its_order(gaps: list[int]) -> None:
    """First come, first served."""
    items = [Item(str(i), 30, at=sum(gaps[:i]) / 1e4) for i in range(len(gaps))]
    engine = Engine(queue_of(room=100))
    engine.serve(items)
    assert list(engine.ended) == names(items)


def test_a_long_queue_costs_no_more_than_a_short_one() -> None:
    """With 4,096 waiting, a round asks few of them whether they have left, and calls hardly more
    functions than with 256.
    """
    asked = 0

    class Asked(Item):
        def is_gone(self, now: float) -> bool:
            nonlocal asked
            asked += 1
            return False

    def calls_of_a_round(waiting: int) -> int:
        """Counted, as the time that they take is the machine's affair."""
        calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        scheduler: Scheduler[Item] = Scheduler(8192, 10**9, TABLE, buckets)
        for i in range(waiting):
            scheduler.add(Asked(str(i), 800, tenant=str(i % 7), deadline=1e6), 0.0)
        sys.setprofile(count)
        try:
            taken, _ = scheduler.next_round(0.0)
        finally:
            sys.setprofile(None)
        assert len(taken) == 10
        return calls

    few, many = calls_of_a_round(256), calls_of_a_round(4096)
    assert asked < 200
    assert many < 1.5 * few
