"""What a Gateway charges its tenants, on leases from the fleet's ledger.

Charged is what was answered: a request, and the tokens of its `usage`. A request that is at fault
itself is a request without tokens, and so is one that its caller gave up: who hangs up early, or
gives too little time, is held to its requests, too. What failed for another reason (no room, a dead
replica) is not charged, so that asking again charges it once.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from flide_engine.errors import DeadlineExceeded, QuotaExceeded, RequestError
from router.auth import Tenant
from router.body import ClientLeft
from router.quota import Amounts, Lease, Ledger, Purse

log = logging.getLogger("ray.serve")

BYTES_A_TOKEN = 4
"""How many tokens a body is taken to be until its answer says."""

WITHIN_S = 1.0
"""How long the ledger may take; then this process leases itself its even share."""

CALLERS_OWN = (RequestError, DeadlineExceeded, ClientLeft, asyncio.CancelledError)
"""Ends of a request without an answer that are its caller's doing."""


class Book(Protocol):
    """The ledger, where it is."""

    def lease(
        self, tenant: str, rates: dict[str, float], needs: Amounts, ahead: Amounts
    ) -> Awaitable[Lease]:
        """As `Ledger.lease`."""
        ...

    def give_back(self, tenant: str, amounts: Amounts) -> Awaitable[object]:
        """As `Ledger.give_back`."""
        ...


class Charge:
    """One request of a tenant with quotas: an async context manager around its answer."""

    def __init__(self, charges: "Charges", tenant: Tenant, size: int) -> None:
        self._charges, self._tenant = charges, tenant
        self._taken: Amounts = {"requests": 1.0, "tokens": max(1.0, size / BYTES_A_TOKEN)}
        self._tokens: int | None = None

    def answered(self, tokens: int) -> None:
        """The request was answered; tokens: of its usage."""
        self._tokens = tokens

    async def __aenter__(self) -> "Charge":
        """Raises QuotaExceeded if the quota is used up."""
        await self._charges.take(self._tenant, self._taken)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if self._tokens is not None:
            unused = {"tokens": self._taken["tokens"] - self._tokens}
        elif isinstance(error, CALLERS_OWN):
            unused = {"tokens": self._taken["tokens"]}
        else:
            unused = self._taken
        self._charges.settle(self._tenant, unused)


class Charges:
    """The purses of one Gateway. Its methods run on one event loop."""

    def __init__(
        self,
        book: Book | None,
        gateways: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """book: none: quotas are divided evenly between that many Gateways."""
        self._book, self._gateways, self._clock = book, gateways, clock
        self._own = Ledger(clock)
        self._purses: dict[str, Purse] = {}
        self._waiting: dict[str, Amounts] = {}
        self._asking: dict[str, asyncio.Future[None]] = {}
        self._tidying: asyncio.Task[None] | None = None
        self._is_alone, self._tells = False, True

    def charge(self, tenant: Tenant, size: int) -> Charge:
        """The charge of a request whose body has so many bytes."""
        return Charge(self, tenant, size)

    async def take(self, tenant: Tenant, needs: Amounts) -> None:
        """Takes what a request needs from its tenant's quota. Raises QuotaExceeded."""
        rates = rates_of(tenant)
        if not rates:
            return
        purse = self._purses.setdefault(tenant.name, Purse(rates))
        purse.rates = rates
        waiting = self._waiting.setdefault(tenant.name, dict.fromkeys(needs, 0.0))
        while not purse.take(needs, now := self._clock()):
            if now < purse.refused_until:
                raise _exceeded(tenant, purse, needs, self._gateways, now)
            if (asking := self._asking.get(tenant.name)) is None:
                await self._lease(tenant.name, purse, needs)
                continue
            for unit, need in needs.items():
                waiting[unit] += need
            try:
                await asyncio.shield(asking)
            finally:
                for unit, need in needs.items():
                    waiting[unit] -= need

    def settle(self, tenant: Tenant, unused: Amounts) -> None:
        """Puts back what was taken for a request and is not charged."""
        purse = self._purses.get(tenant.name)
        if purse is None:
            return
        purse.settle(unused)
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.get_running_loop().create_task(self._tidy())

    def held(self) -> dict[str, Amounts]:
        """What is leased and not used, by tenant and unit."""
        return {name: dict(purse.held) for name, purse in self._purses.items()}

    @property
    def by_ledger(self) -> bool:
        """Whether leases come from a ledger: it answered when it was last asked."""
        return self._book is not None and not self._is_alone

    async def _lease(self, name: str, purse: Purse, needs: Amounts) -> None:
        """Asks the ledger; whoever else lacks something of this tenant waits for the same answer.

        It goes on if its caller leaves, as others may wait for it, and what it brings is held.
        """
        asked = self._asking[name] = asyncio.ensure_future(self._leased(name, purse, needs))
        await asyncio.shield(asked)

    async def _leased(self, name: str, purse: Purse, needs: Amounts) -> None:
        try:
            await self._fill(name, purse, needs)
        finally:
            # before anyone else runs: whoever waits for what is done already goes on at once, and
            # if that was not enough would try for ever, without a turn for anybody
            self._asking.pop(name, None)

    async def _fill(self, name: str, purse: Purse, needs: Amounts) -> None:
        lacking, ahead = purse.lacking(needs), purse.ahead(self._waiting[name])
        lease = None
        if self._book is not None:
            try:
                asked = self._book.lease(name, purse.rates, lacking, ahead)
                lease = await asyncio.wait_for(asked, WITHIN_S)
                self._is_alone = False
            except Exception as error:
                if not self._is_alone:
                    log.warning("no ledger, quotas are divided evenly: %r", error)
                self._is_alone = True
        if lease is None:
            shares = {unit: rate / self._gateways for unit, rate in purse.rates.items()}
            lease = self._own.lease(name, shares, lacking, ahead)
        purse.leased(lease, self._clock())

    async def _tidy(self) -> None:
        """Tells the ledger what was used beyond leases, and gives back what is not used; ends when
        there is nothing left to tell.
        """
        while any(any(purse.held.values()) for purse in self._purses.values()):
            await asyncio.sleep(1.0)
            for name, purse in list(self._purses.items()):  # others come while one is told
                if not (found := purse.surplus(self._clock())):
                    continue
                try:
                    if self._book is None or self._is_alone:
                        self._own.give_back(name, found)
                    else:
                        await asyncio.wait_for(self._book.give_back(name, found), WITHIN_S)
                    self._tells = True
                except Exception as error:
                    purse.settle(found)  # to be told again, or a debt would be forgiven
                    if self._tells:
                        log.warning("the ledger was not told of %s: %r", name, error)
                    self._tells = False


def rates_of(tenant: Tenant) -> dict[str, float]:
    """A tenant's quotas by unit, a second."""
    by_unit = {"requests": tenant.requests_per_minute, "tokens": tenant.tokens_per_minute}
    return {unit: quota / 60 for unit, quota in by_unit.items() if quota is not None}


def _exceeded(
    tenant: Tenant, purse: Purse, needs: Amounts, gateways: int, now: float
) -> QuotaExceeded:
    unit = next((u for u in purse.rates if purse.lacking(needs)[u] > 0), "requests")
    quota = tenant.requests_per_minute if unit == "requests" else tenant.tokens_per_minute
    retry = math.ceil(1000 * purse.retry_s(needs, gateways, now))
    return QuotaExceeded(unit, quota or 0.0, max(1, retry))
