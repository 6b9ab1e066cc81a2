"""When the next round is put together: as late as the one that runs allows, so that what comes
meanwhile joins it instead of the one after it.

Pure arithmetic on the times it is told; not thread-safe.
"""

from collections import deque
from collections.abc import Collection

_MARGIN_S = 0.3e-3  # of the lead, beside what is learned
_KEPT = 64  # rounds whose times are remembered
_ENOUGH = 16  # rounds to learn from before one is waited for
_SURE = 0.95  # of the rounds remembered, those that the lead is long enough for
_FULL_PART = 0.25  # of a round that the next one is due before its end, if it will be full anyway
_LOOKS_S = (50e-6, 1e-3)  # least and most time between two looks at the round that runs
_LOOK_PART = 0.25  # of the time that is left, after which to look again


class Pacing:
    """How long to wait, while one round runs, before the next one is put together.

    The next one is due a lead before the end that is predicted of the running one. The lead is
    learned, so that the device is not kept waiting: a high quantile of the times from when a round
    was due until it was launched, with what the thread woke up late, and one of the parts by which
    rounds ended before their time; and a margin. If what waits fills a round, waiting longer makes
    none fuller: it only lets a tenant in who has had less, or somebody in a hurry. The lead is a
    quarter of the round then, and what is predicted wrongly costs nothing.
    """

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=_KEPT)  # seconds from due to launched
        self._early: deque[float] = deque(maxlen=_KEPT)  # parts of the predicted time
        self._runs: deque[tuple[float, float]] = deque()  # launched, predicted seconds
        self._ended = 0.0  # when the last one ended
        self._looked: float | None = None  # when it was last asked for the next one, too early
        self._due: float | None = None  # of the next one, once it is time

    def lead_s(self, seconds: float, full: bool = False) -> float:
        """How long before the end of a round of so many predicted seconds the next one is due.

        full: whether what waits now fills it.
        """
        learned = _high(self._late) + max(0.0, _high(self._early)) * seconds + _MARGIN_S
        return max(learned, _FULL_PART * seconds) if full else learned

    def wait_s(self, now: float, full: bool = False) -> float:
        """Seconds after which to ask again; 0: the next round is due, as the running one is about
        to end, or nobody knows when, or none runs.
        """
        looked, self._looked, self._due = self._looked, None, None
        due = now
        if self._runs and len(self._late) >= _ENOUGH:
            launched, seconds = self._runs[0]
            if seconds > 0.0:
                due = max(launched, self._ended) + seconds - self.lead_s(seconds, full)
        if now < due:
            self._looked = now
            return min(max(_LOOK_PART * (due - now), _LOOKS_S[0]), _LOOKS_S[1])
        self._due = now if looked is None else max(due, looked)
        return 0.0

    def launched(self, now: float, seconds: float) -> None:
        """A round was given to the device, behind those that are there. seconds: that it will take;
        0: nobody knows.
        """
        if self._due is not None:
            self._late.append(now - self._due)
        self._due = None
        self._runs.append((now, seconds))

    def ended(self, now: float) -> None:
        """The first of the rounds on the device is over."""
        launched, seconds = self._runs.popleft()
        if seconds > 0.0:
            expected = max(launched, self._ended) + seconds
            self._early.append((expected - now) / seconds)
        self._ended = now
        self._looked = self._due = None  # one that had to wait for this was not launched late


def _high(values: Collection[float]) -> float:
    return sorted(values)[round(_SURE * (len(values) - 1))] if values else 0.0
