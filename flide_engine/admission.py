"""How long work will wait, who is let in, and when those who were refused should come again.

Learned from what the scheduler saw, on the clock that it was handed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from flide_engine.costs import Costs
from flide_engine.errors import Overloaded
from flide_engine.fairness import Backlog, FairQueue, W

_RETRY_MS = (50, 60_000)
_MEAN_WAIT_S = 3.0
_GAIN = 0.05  # of the newest in running means
_MANY_SLOTS = 1024
_BATCH_PART = 0.5  # of the limits, for batch work


@dataclass(frozen=True)
class Load:
    """What an engine has to do, for routing and autoscaling.

    wait_ms: predicted engine time of what goes before an interactive request that arrives now.
    mean_wait_ms: its mean over the last seconds. step_ms: mean engine time of a request.
    tokens_per_ms: speed of full rounds. queued_tokens: expected new tokens that wait.
    refused_tokens: those of all refused requests since the start, counted again each time they are
    refused.
    """

    wait_ms: float
    mean_wait_ms: float
    step_ms: float
    tokens_per_ms: float
    queued_tokens: int
    refused_tokens: int


class Forecast:
    """Predictions in milliseconds, from costs of rounds and from what planning leaves of work."""

    def __init__(self, round_tokens: int, table: Mapping[int, float] | None) -> None:
        """table: milliseconds of a round by its tokens; none: learned. Raises ConfigError."""
        self.costs = Costs(round_tokens, table)
        self.step_ms = 0.0
        """Mean engine time of a request."""
        self.mean_wait_ms = 0.0
        """Mean over the last seconds of the waits told."""
        self.refused_tokens = 0.0
        """Expected new tokens of all refused requests."""
        self._round_tokens = round_tokens
        self._before = self._after = 0.0  # decaying sums of tokens before and after planning
        self._round_ms = self._run_tokens = 0.0  # means of a round
        self._under_way = 0  # tokens
        self._since = 0.0  # when the round that is run now began, as far as known
        self._collected = -math.inf
        self._told = 0.0
        self._slots: dict[str, float] = {}  # when the next one a tenant is refused should come

    @property
    def new_share(self) -> float:
        """Part of unplanned tokens that is new, as it was for the work planned so far."""
        return min(1.0, self._after / self._before) if self._before else 1.0

    def planned(self, before: int, after: int) -> None:
        """Work of `before` tokens has `after` new ones."""
        self._before += before - _GAIN * self._before
        self._after += after - _GAIN * self._after

    def expected(self, *backlogs: Backlog) -> float:
        """New tokens of all that waits there."""
        share, total = self.new_share, 0.0
        for backlog in backlogs:
            total += backlog.planned + share * backlog.unplanned
        return total

    def drain_ms(self, unplanned: float) -> float:
        """Time until so many unplanned tokens less wait."""
        speed = self.costs.tokens_per_ms
        return unplanned * self.new_share / speed if speed else 0.0

    def began(self, tokens: int, now: float) -> None:
        """Tokens were taken into a round."""
        if not self._under_way:
            self._since = now
        self._under_way += tokens

    def returned(self, tokens: int) -> None:
        """Those tokens are no longer under way."""
        self._under_way -= tokens

    def reset(self) -> None:
        """Nothing is under way."""
        self._under_way = 0

    def under_way_ms(self, now: float) -> float:
        """Rest of the rounds that are under way."""
        if not self._under_way:
            return 0.0
        return max(0.0, self.costs.ms(self._under_way) - 1000 * (now - self._since))

    def observe(self, tokens: int, padded: int, seconds: float, now: float | None) -> None:
        """A round of `tokens` in a bucket of `padded` is over, `seconds` after it was begun."""
        if now is not None:
            seconds = min(seconds, now - self._collected)
            self._collected = now
        self._since = self._told if now is None else now
        ms = 1000 * max(seconds, 1e-6)
        self.costs.observe(padded, ms)
        self._round_ms += (_GAIN if self._round_ms else 1.0) * (ms - self._round_ms)
        self._run_tokens += (_GAIN if self._run_tokens else 1.0) * (tokens - self._run_tokens)

    def finished(self, tokens: int) -> None:
        """A request is over that took so many tokens of rounds."""
        if self._run_tokens:
            ms = tokens * self._round_ms / self._run_tokens
            self.step_ms += (_GAIN if self.step_ms else 1.0) * (ms - self.step_ms)

    def told(self, wait_ms: float, now: float) -> None:
        """The wait at some time, for the mean."""
        if now > self._told:
            part = 1.0 - math.exp((self._told - now) / _MEAN_WAIT_S)
            self.mean_wait_ms += part * (wait_ms - self.mean_wait_ms)
            self._told = now

    def refuse(self, tenant: str, share: float, tokens: int, need_ms: float, now: float) -> int:
        """Counts a refused request: in how many milliseconds it should come again.

        need_ms: until there is room for it. share: of the rounds, that its tenant has. Those
        refused one after the other are told times one after the other, as far apart as the engine
        needs for each; else all would come at once, and all but a few would be refused again.
        """
        self.refused_tokens += tokens * self.new_share
        if len(self._slots) > _MANY_SLOTS:
            self._slots = {name: at for name, at in self._slots.items() if at > now}
        # queues get shorter by whole rounds
        free = now + (need_ms + self.costs.ms(self._round_tokens)) / 1000
        slot = max(free, self._slots.get(tenant, 0.0))
        after = slot + self.drain_ms(tokens) / share / 1000
        self._slots[tenant] = min(after, now + _RETRY_MS[1] / 1000)
        return as_retry(1000 * (slot - now))


class Admission(Generic[W]):
    """The limits of a queue: tokens, and predicted wait."""

    def __init__(
        self,
        forecast: Forecast,
        interactive: FairQueue[W],
        batch: FairQueue[W],
        longs: FairQueue[W],
        max_queued_tokens: int,
        max_queue_ms: int | None,
    ) -> None:
        """longs: long requests, of both classes, that wait until another has ended."""
        self._forecast = forecast
        self._interactive, self._batch, self._longs = interactive, batch, longs
        self._max_tokens, self._max_ms = max_queued_tokens, max_queue_ms

    def wait_ms(self, now: float, tenant: str | None = None, batch: bool = False) -> float:
        """Predicted time until all has run that goes before work that comes now: an upper bound
        of its wait, as it may join the last of those rounds. tenant: its turns are counted.
        """
        forecast = self._forecast
        ahead = forecast.expected(self._interactive.backlog, self._longs.backlog)
        if batch:
            ahead += forecast.expected(self._batch.backlog)
        elif tenant is not None:
            ahead = min(ahead, forecast.expected(*self._own(tenant)) / self._share(tenant))
        return forecast.under_way_ms(now) + forecast.costs.ms(ahead)

    def check(self, tenant: str, tokens: int, now: float, batch: bool) -> None:
        """Raises Overloaded if work of so many tokens must not be queued."""
        forecast, share = self._forecast, self._share(tenant)
        part = _BATCH_PART if batch else 1.0
        queues = [self._interactive, self._longs] + ([self._batch] if batch else [])
        queued, limit = sum(queue.backlog.tokens for queue in queues), int(part * self._max_tokens)
        over = float(queued + tokens - limit)
        if over > 0 and not batch and share < 1.0:
            own = sum(backlog.tokens for backlog in self._own(tenant))
            over = min(over, max(own + tokens - share * limit, over - limit))
        if over > 0:
            need = forecast.under_way_ms(now) + forecast.drain_ms(over)
            retry = forecast.refuse(tenant, share, tokens, need, now)
            raise Overloaded(queued, "tokens", limit, "max_queued_tokens", retry)
        if self._max_ms is None:
            return
        wait, most = self.wait_ms(now, tenant, batch), int(part * self._max_ms)
        if wait > most:
            retry = forecast.refuse(tenant, share, tokens, wait - most, now)
            raise Overloaded(int(wait), "ms", most, "max_queue_ms", retry)

    def check_number(
        self, tenant: str, rendering: Mapping[str, int], most: int, now: float
    ) -> None:
        """Raises Overloaded if one more request of a tenant makes more than `most` that wait.

        A tenant below its share of `most` is let in also when others fill it; of k tenants that
        come one after the other, at most `most` (1 + ln k) wait then. rendering: requests by tenant
        that are on their way into the queues.
        """
        queues = (self._interactive, self._batch, self._longs)
        waiting = sum(rendering.values()) + sum(map(len, queues))
        if waiting < most:
            return
        weight_of = self._interactive.weight_of
        tenants = {tenant, *rendering}.union(*(queue.tenants() for queue in queues))
        share = weight_of(tenant) / sum(map(weight_of, tenants))
        own = rendering.get(tenant, 0) + sum(queue.count_of(tenant) for queue in queues)
        if own < share * most:
            return
        tokens = sum(queue.backlog.tokens for queue in queues) // max(1, sum(map(len, queues)))
        need = self._forecast.under_way_ms(now) + self._forecast.drain_ms(tokens)
        retry = self._forecast.refuse(tenant, share, tokens, need, now)
        raise Overloaded(waiting, "requests", most, "max_waiting_requests", retry)

    def _own(self, tenant: str) -> tuple[Backlog, Backlog]:
        """What waits of a tenant, but for batch work."""
        return self._interactive.backlog_of(tenant), self._longs.backlog_of(tenant)

    def _share(self, tenant: str) -> float:
        """Part of the rounds that a tenant has, or would have if it had work."""
        weight, others = self._interactive.weight_of(tenant), self._interactive.weight
        return min(
            1.0, weight / (others if self._interactive.count_of(tenant) else others + weight)
        )


def as_retry(ms: float) -> int:
    """A time to come again that callers can be told."""
    return math.ceil(min(max(ms, _RETRY_MS[0]), _RETRY_MS[1]))
