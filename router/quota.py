"""Quotas that hold for a fleet: pure rules on a clock that is handed in.

One `Ledger` has a bucket for each tenant and unit, filled at the quota's rate. Each Gateway has a
`Purse` for each tenant, with what the ledger leased it: what it is about to need, so that the
ledger is asked a few times a second and not for every request. What a purse does not use it gives
back. A bucket may be overdrawn by one request, so that a large one is not shut out by small ones;
nobody gets anything before that is made up for.

Standard library only: a ledger travels by value to the actor that keeps it.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

BURST_S = 5.0
"""Seconds of its quota that a tenant may save up: of any minute it gets at most 108%."""

AHEAD_S = 0.25
"""Seconds of its late use that a Gateway leases beside what it needs now."""

IDLE_S = 1.0
"""Seconds without use after which a lease is given back."""

MOST_RETRY_S = 60.0
_SOON_S = 1e-3
_LEAST_WAIT_S = 0.02  # between two questions to the ledger by a Gateway that got nothing

Amounts = dict[str, float]
"""By unit, "requests" and "tokens"; a unit without a quota is not there."""


@dataclass
class _Bucket:
    """What a tenant has left of one unit; below zero what it owes."""

    level: float
    at: float

    def fill(self, rate: float, now: float) -> None:
        """Time has passed, at so many a second."""
        most = max(1.0, BURST_S * rate)
        self.level = min(most, self.level + rate * max(0.0, now - self.at))
        self.at = now


Lease = tuple[Amounts, float]
"""What a ledger gave, and if that is less than was needed, seconds until there is more. Builtins,
as it crosses processes often.
"""


class Ledger:
    """Buckets of all tenants. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def lease(
        self, tenant: str, rates: Mapping[str, float], needs: Amounts, ahead: Amounts
    ) -> Lease:
        """Takes what is needed of each unit if there is anything at all, and of what is wanted
        ahead as much as there is. rates: of the tenant's quota, a second.
        """
        now, given, wait = self._clock(), dict[str, float](), 0.0
        for unit, rate in rates.items():
            bucket = self._buckets.get((tenant, unit))
            if bucket is None:
                bucket = self._buckets[tenant, unit] = _Bucket(math.inf, now)
            bucket.fill(rate, now)
            need = needs.get(unit, 0.0)
            if bucket.level <= 0.0 < need:
                wait = max(wait, -bucket.level / rate + _SOON_S)
                continue
            more = min(ahead.get(unit, 0.0), rate, max(0.0, bucket.level - need))
            bucket.level -= need + more
            given[unit] = need + more
        return given, wait

    def give_back(self, tenant: str, amounts: Amounts) -> None:
        """Takes back what a Gateway did not use of its leases; less than zero: what it used beyond
        them.
        """
        for unit, amount in amounts.items():
            if (bucket := self._buckets.get((tenant, unit))) is not None:
                bucket.level += amount


@dataclass
class Purse:
    """What one Gateway holds for one tenant. rates: of its quota, a second."""

    rates: dict[str, float]
    held: Amounts = field(default_factory=dict)
    refused_until: float = -math.inf
    touched: float = -math.inf
    _use: Amounts = field(default_factory=dict)  # a second, lately
    _slot: float = -math.inf  # when the next one who is refused should come

    def take(self, needs: Amounts, now: float) -> bool:
        """Takes what one request needs, if all of it is there."""
        if any(self.held.get(unit, 0.0) < needs[unit] - 1e-9 for unit in self.rates):
            return False
        kept = math.exp(min(0.0, self.touched - now))
        self.touched = now
        for unit in self.rates:
            self.held[unit] -= needs[unit]
            self._use[unit] = self._use.get(unit, 0.0) * kept + needs[unit]
        return True

    def settle(self, amounts: Amounts) -> None:
        """Puts back what was taken and is not charged; below zero: charges what was not taken."""
        for unit, amount in amounts.items():
            if unit in self.rates:
                self.held[unit] = self.held.get(unit, 0.0) + amount

    def lacking(self, needs: Amounts) -> Amounts:
        """What is missing for a request."""
        return {u: max(0.0, needs[u] - self.held.get(u, 0.0)) for u in self.rates}

    def ahead(self, waiting: Amounts) -> Amounts:
        """What to lease beside what one request lacks: for others that wait, and those to come."""
        return {u: waiting.get(u, 0.0) + AHEAD_S * self._use.get(u, 0.0) for u in self.rates}

    def leased(self, lease: Lease, now: float) -> None:
        """Takes in a lease."""
        given, wait_s = lease
        self.settle(given)
        if wait_s:
            self.refused_until = now + max(_LEAST_WAIT_S, wait_s)

    def retry_s(self, needs: Amounts, gateways: int, now: float) -> float:
        """When a refused request should come again, in seconds: one after the other, as fast as the
        quota allows; told all the same time they would be refused again.
        """
        slot = max(self._slot, self.refused_until, now)
        spent = max((needs[unit] / rate for unit, rate in self.rates.items()), default=0.0)
        self._slot = min(slot + spent * gateways, now + MOST_RETRY_S)
        return min(slot - now, MOST_RETRY_S)

    def surplus(self, now: float) -> Amounts:
        """Takes out what the ledger should hear of: what was used beyond the leases, and what was
        not used for a while.
        """
        idle = now - self.touched >= IDLE_S
        found = {u: amount for u, amount in self.held.items() if amount < 0.0 or (amount and idle)}
        for unit in found:
            self.held[unit] = 0.0
        return found
