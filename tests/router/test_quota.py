"""Quotas of a fleet on a virtual clock: what two Gateways let through, what is charged, and what
happens without a ledger.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from flide_engine.errors import (
    DeadlineExceeded,
    EngineStopped,
    FlideError,
    InvalidRequest,
    NotReady,
    Overloaded,
    QuotaExceeded,
)
from router.auth import Tenant
from router.body import ClientLeft
from router.charging import Charges
from router.quota import BURST_S, Amounts, Lease, Ledger, Purse
from tests.loadtest.virtual import VirtualClock

REQUESTS = Tenant("r", requests_per_minute=600)
TOKENS = Tenant("t", tokens_per_minute=60_000)
SIZE = 400  # bytes, taken to be 100 tokens


@dataclass
class Book:
    """A ledger some way off."""

    ledger: Ledger
    delay_s: float = 0.005
    away: bool = False
    asked: int = 0

    async def lease(
        self, tenant: str, rates: dict[str, float], needs: Amounts, ahead: Amounts
    ) -> Lease:
        await self._travel()
        return self.ledger.lease(tenant, rates, needs, ahead)

    async def give_back(self, tenant: str, amounts: Amounts) -> None:
        await self._travel()
        self.ledger.give_back(tenant, amounts)

    async def _travel(self) -> None:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        if self.away:
            raise ConnectionError("no ledger")


@dataclass
class Fleet:
    """Two Gateways in virtual time. answered: (when, Gateway, tokens)."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    answered: list[tuple[float, int, int]] = field(default_factory=list)
    refused: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.clock.now)
        self.book = Book(self.ledger)
        self.gateways = [Charges(self.book, 2, self.clock.now) for _ in range(2)]

    async def ask(self, gateway: int, tenant: Tenant, tokens: int, spent: float = 0.01) -> None:
        """One request that is answered if its quota allows it. Raises QuotaExceeded."""
        async with self.gateways[gateway].charge(tenant, SIZE) as charge:
            await asyncio.sleep(spent)
            charge.answered(tokens)
        self.answered.append((self.clock.now(), gateway, tokens))

    async def client(
        self, tenant: Tenant, tokens: int, until: float, where: Callable[[float], int]
    ) -> None:
        """Asks again and again; comes back when it is told to."""
        while self.clock.now() < until:
            try:
                await self.ask(where(self.clock.now()), tenant, tokens)
            except QuotaExceeded as error:
                self.refused += 1
                await asyncio.sleep(error.retry_after_ms / 1000)

    def flood(
        self, tenant: Tenant, tokens: int, seconds: float, where: list[Callable[[float], int]]
    ) -> None:
        """A client for each way of choosing a Gateway."""

        async def run() -> None:
            await asyncio.gather(*(self.client(tenant, tokens, seconds, way) for way in where))
            await idle(self.gateways)

        self.clock.run(run())

    def within(self, first: float, last: float) -> int:
        """Requests answered in a span of time."""
        return sum(first <= at < last for at, _, _ in self.answered)


async def idle(gateways: list[Charges]) -> None:
    """Until nothing is left to be told to the ledger."""
    for gateway in gateways:
        if gateway._tidying is not None:
            await gateway._tidying


def run(work: Callable[[Fleet], Coroutine[Any, Any, None]]) -> Fleet:
    """A fleet after some work."""
    fleet = Fleet()

    async def all_of_it() -> None:
        await work(fleet)
        await idle(fleet.gateways)

    fleet.clock.run(all_of_it())
    return fleet


WAYS: dict[str, list[Callable[[float], int]]] = {
    "both": [lambda _: 0, lambda _: 1] * 16,
    "one": [lambda _: 0] * 32,
    "nine to one": ([lambda _: 0] * 9 + [lambda _: 1]) * 3,
    "in turns": [lambda at: int(at / 3) % 2] * 32,
    "any": [lambda at: int(at * 997) % 2] * 32,
}


@pytest.mark.parametrize("way", WAYS)
def test_two_gateways_let_a_quota_through(way: str) -> None:
    """Of requests: whichever Gateways they come to, every later minute has the quota within 10%,
    and the first one at most what may be saved up more.
    """
    fleet = Fleet()
    fleet.flood(REQUESTS, 1, 240, WAYS[way])
    for minute in (1, 2, 3):
        assert 540 <= fleet.within(60 * minute, 60 * minute + 60) <= 660, minute
    assert fleet.within(0, 60) <= 600 * (1 + BURST_S / 60) + 32
    assert fleet.refused > 0


@pytest.mark.parametrize("tokens", [30, 100, 350])
@pytest.mark.parametrize("way", ["both", "in turns"])
def test_tokens_are_those_of_the_answers(way: str, tokens: int) -> None:
    """However wrong the first guess from the body's size is."""
    fleet = Fleet()
    fleet.flood(TOKENS, tokens, 240, WAYS[way])
    for minute in (1, 2, 3):
        used = tokens * fleet.within(60 * minute, 60 * minute + 60)
        assert 54_000 <= used <= 66_000, minute


def test_tenants_do_not_share() -> None:
    """A flood of one leaves another's quota alone, and asks the ledger seldom."""
    other = Tenant("other", requests_per_minute=600)
    fleet = Fleet()

    async def work() -> None:
        flood = [fleet.client(REQUESTS, 1, 60, way) for way in WAYS["both"]]
        asked = asyncio.gather(*flood)
        for _ in range(500):
            await fleet.ask(0, other, 1)
            await asyncio.sleep(0.1)
        await asked
        await idle(fleet.gateways)

    fleet.clock.run(work())
    assert fleet.book.asked < 60 * 2 * 60


@pytest.mark.parametrize(
    "failure",
    [
        EngineStopped("gone"),
        Overloaded(1, "requests", 1, "max_waiting_requests", 50),
        NotReady("asleep"),
        ZeroDivisionError(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_a_retry_is_charged_once(failure: BaseException) -> None:
    """What failed through no fault of its own costs nothing, also on another Gateway's try."""
    tenant = Tenant("x", requests_per_minute=0.001, tokens_per_minute=0.001)

    async def work(fleet: Fleet) -> None:
        with pytest.raises(type(failure)):
            async with fleet.gateways[0].charge(tenant, SIZE):
                raise failure
        await idle(fleet.gateways)
        await fleet.ask(1, tenant, 7)
        await idle(fleet.gateways)

    fleet = run(work)
    assert {unit: round(b.level, 2) for (_, unit), b in fleet.ledger._buckets.items()} == {
        "requests": 0.0,
        "tokens": -6.0,
    }
    assert not any(any(p.held.values()) for g in fleet.gateways for p in g._purses.values())


@pytest.mark.parametrize(
    "end",
    [InvalidRequest(()), DeadlineExceeded(1.0), ClientLeft(), asyncio.CancelledError()],
    ids=lambda e: type(e).__name__,
)
def test_a_faulty_request_is_a_request(end: BaseException) -> None:
    """Without tokens, and so is one that its caller gave up."""

    async def work(fleet: Fleet) -> None:
        tenant = Tenant("x", requests_per_minute=120, tokens_per_minute=60)
        with pytest.raises(type(end)):
            async with fleet.gateways[0].charge(tenant, SIZE):
                raise end
        purse = fleet.gateways[0]._purses["x"]
        assert purse.held["requests"] <= 0.0 < purse.held["tokens"]

    run(work)


def test_a_refusal_says_what_and_when() -> None:
    """The quota's number and unit; whoever comes then is let in, and those refused one after the
    other are told times one after the other.
    """

    async def work(fleet: Fleet) -> None:
        tenant = Tenant("x", requests_per_minute=60)
        for _ in range(int(BURST_S) + 1):  # the last one overdraws
            await fleet.ask(0, tenant, 1, spent=0.0)
        told = []
        for _ in range(3):
            with pytest.raises(QuotaExceeded, match="60 requests a minute is used up") as raised:
                await fleet.ask(0, tenant, 1)
            told.append(raised.value.retry_after_ms)
        assert told == sorted(told)
        assert len(set(told)) == 3
        assert told[0] <= 1001
        await asyncio.sleep(told[0] / 1000)
        await fleet.ask(0, tenant, 1)

    run(work)


def test_one_larger_than_all_that_may_be_saved_up_waits_its_turn() -> None:
    """It is let in when there is anything, and made up for before the next."""
    tenant = Tenant("x", tokens_per_minute=6000)

    async def work(fleet: Fleet) -> None:
        await fleet.ask(0, tenant, 3000)
        await asyncio.sleep(2)  # the Gateway tells what the answer had beyond its guess
        with pytest.raises(QuotaExceeded, match="6000 tokens a minute") as raised:
            await fleet.ask(1, tenant, 10)
        assert 22_000 <= raised.value.retry_after_ms <= 24_000
        await asyncio.sleep(raised.value.retry_after_ms / 1000)
        await fleet.ask(1, tenant, 10)

    run(work)


def test_without_a_ledger_gateways_share_evenly() -> None:
    """While it is away; the quota is kept, and when it is back all is as before."""
    fleet = Fleet()
    fleet.book.away = True

    async def work() -> None:
        flood = asyncio.gather(*(fleet.client(REQUESTS, 1, 180, way) for way in WAYS["both"]))
        await asyncio.sleep(120)
        assert not any(gateway.by_ledger for gateway in fleet.gateways)
        fleet.book.away = False
        await flood
        assert all(gateway.by_ledger for gateway in fleet.gateways)
        await idle(fleet.gateways)

    fleet.clock.run(work())
    assert 540 <= fleet.within(60, 120) <= 660
    assert 540 <= fleet.within(130, 180) * 60 / 50 <= 680


def test_a_ledger_that_hangs_delays_by_its_limit() -> None:
    """And no longer."""

    async def work(fleet: Fleet) -> None:
        fleet.book.delay_s = 3600.0
        await fleet.ask(0, REQUESTS, 1, spent=0.0)
        assert fleet.clock.now() == pytest.approx(1.0)

    run(work)


@pytest.mark.parametrize("away", ["hangs", "fails"])
def test_a_debt_that_could_not_be_told_is_told_later(
    away: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, however long the ledger is away; the log says so once."""
    tenant = Tenant("x", tokens_per_minute=0.001)

    async def work(fleet: Fleet) -> None:
        await fleet.ask(0, tenant, 3000)
        fleet.book.away, fleet.book.delay_s = away == "fails", 60.0 if away == "hangs" else 0.005
        await asyncio.sleep(30)
        fleet.book.away, fleet.book.delay_s = False, 0.005
        await idle(fleet.gateways)

    fleet = run(work)
    (level,) = (bucket.level for bucket in fleet.ledger._buckets.values())
    assert level == pytest.approx(1.0 - 3000, abs=0.01)
    assert [r.getMessage() for r in caplog.records if "was not told" in r.getMessage()] != []
    assert len(caplog.records) == 1


def test_a_tenant_who_comes_while_the_ledger_is_told() -> None:
    """Holds up nobody: what is left of all is told."""
    first, second = (Tenant(name, tokens_per_minute=6000) for name in "ab")

    async def work(fleet: Fleet) -> None:
        fleet.book.delay_s = 0.5
        await fleet.ask(0, first, 300)
        telling = fleet.gateways[0]._tidying
        assert telling is not None
        await asyncio.sleep(1.2)  # it begins after one second
        asked = fleet.book.asked
        await fleet.ask(0, second, 300)
        assert asked == 2
        await telling
        await idle(fleet.gateways)
        assert not any(any(p.held.values()) for p in fleet.gateways[0]._purses.values())

    run(work)


def test_one_who_leaves_while_the_ledger_is_asked() -> None:
    """Others wait for the same answer, and get it."""

    async def work(fleet: Fleet) -> None:
        first = asyncio.create_task(fleet.ask(0, REQUESTS, 1))
        rest = [asyncio.create_task(fleet.ask(0, REQUESTS, 1)) for _ in range(3)]
        await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.gather(*rest)
        assert first.cancelled()
        assert fleet.book.asked <= 2
        await idle(fleet.gateways)

    assert len(run(work).answered) == 3


def test_no_quota_no_ledger() -> None:
    """Tenants without quotas cost nothing."""

    async def work(fleet: Fleet) -> None:
        for tenant in (Tenant(), Tenant("free")):
            await fleet.ask(0, tenant, 10**9)

    assert run(work).book.asked == 0


def test_changed_quotas_hold_from_the_next_request() -> None:
    """A purse follows what the keys say."""

    async def work(fleet: Fleet) -> None:
        await fleet.ask(0, REQUESTS, 1)
        await fleet.ask(0, Tenant("r", tokens_per_minute=60), 10)
        assert set(fleet.gateways[0]._purses["r"].rates) == {"tokens"}
        await fleet.ask(0, Tenant("r"), 10)

    run(work)


def test_amounts_are_kept() -> None:
    """Of what ledgers give, purses lose nothing: given = used + held + given back."""
    now = itertools.count()
    ledger = Ledger(lambda: float(next(now)))
    purse = Purse({"requests": 10.0})
    used = given = 0.0
    for i in range(200):
        needs = {"requests": 1.0}
        if not purse.take(needs, float(i)):
            lease = ledger.lease("x", purse.rates, purse.lacking(needs), purse.ahead(needs))
            given += lease[0].get("requests", 0.0)
            purse.leased(lease, float(i))
            assert purse.take(needs, float(i))
        used += 1.0
    assert given == pytest.approx(used + purse.held["requests"])
    assert purse.surplus(199.5) == {}
    assert sum(purse.surplus(300.0).values()) == pytest.approx(given - used)


def test_errors_are_of_the_tree() -> None:
    """Callers catch one class, and are told to come again."""
    assert issubclass(QuotaExceeded, FlideError)
    assert "try again in 5 ms" in str(QuotaExceeded("tokens", 10.0, 5))
