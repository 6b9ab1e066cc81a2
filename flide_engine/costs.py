"""What a round costs: milliseconds by tokens, measured at start and corrected by every round run.

Pure arithmetic on what it is told. Costs never fall with more tokens, and lie on straight lines
between the lengths that are kept.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from flide_engine.errors import ConfigError

_LEAST_LENGTH = 64  # tokens; shorter rounds cost as much as one of these
_LEAST_MS = 1e-3
_FIXED = 256  # tokens that the fixed part of a round is worth, where nothing is measured yet
_GAIN = 0.1  # of the newest round in a length's cost
_TRUST = 8.0  # rounds that a measurement at start counts as
_SLOWER, _FASTER = 0.5, 2.0  # most of a round's deviation that counts, as natural logarithms


class Costs:
    """Predicted milliseconds of rounds of up to `most` tokens, and of work of several rounds."""

    def __init__(self, most: int, table: Mapping[int, float] | None = None) -> None:
        """most: tokens of the longest round. table: milliseconds by tokens, measured; none: learned
        from the rounds. Noise that makes a longer round cheaper is smoothed out. Raises ConfigError
        for a length or a cost that is not positive.
        """
        for tokens, ms in (table or {}).items():
            if tokens <= 0 or not 0 < ms < math.inf:
                raise ConfigError(f"a round of {tokens} tokens cannot cost {ms} ms")
        self._lengths = _lengths(most, table)
        self._ms = [0.0] * len(self._lengths)
        self._seen = [0.0] * len(self._lengths)
        for tokens, ms in sorted((table or {}).items()):
            at = bisect_left(self._lengths, tokens)
            if at < len(self._lengths):
                self._ms[at] = max(ms, self._ms[at - 1] if at else _LEAST_MS)
                self._seen[at] = _TRUST
        self._fill_in()

    @property
    def is_known(self) -> bool:
        """Whether anything was measured; until then every cost is 0."""
        return self._ms[-1] > 0.0

    @property
    def tokens_per_ms(self) -> float:
        """Tokens a millisecond in rounds of the greatest length; 0 until known."""
        return self._lengths[-1] / self._ms[-1] if self._ms[-1] else 0.0

    def ms(self, tokens: float) -> float:
        """Milliseconds of work of that many tokens; more than a round's are full rounds and a
        rest.
        """
        if 0 < tokens < self._lengths[-1]:
            return self._one(tokens)
        full, rest = divmod(max(tokens, 0.0), self._lengths[-1])
        return full * self._ms[-1] + (self._one(rest) if rest else 0.0)

    def tokens_within(self, ms: float) -> int:
        """The longest round that takes at most `ms`, in tokens; the greatest until known."""
        if not self.is_known or ms >= self._ms[-1]:
            return self._lengths[-1]
        at = bisect_right(self._ms, ms)
        if at == 0:
            return 0
        part = (ms - self._ms[at - 1]) / (self._ms[at] - self._ms[at - 1])
        return int(self._lengths[at - 1] + part * (self._lengths[at] - self._lengths[at - 1]))

    def observe(self, tokens: int, ms: float) -> None:
        """A round of `tokens` took `ms`. What makes no sense is ignored.

        A round may be slowed by what has nothing to do with it, and never is much faster than it
        is: deviations upwards count for less.
        """
        if tokens <= 0 or not 0 < ms < math.inf:
            return
        most, ms = self._lengths[-1], max(ms, _LEAST_MS)
        if tokens > most:
            tokens, ms = most, ms * most / tokens
        at = bisect_left(self._lengths, tokens)
        below = self._lengths[at - 1] if at else 0
        share = (tokens - below) / (self._lengths[at] - below) if at else 1.0
        if not self.is_known:
            scale = ms / _shape(tokens)
            self._ms = [scale * _shape(length) for length in self._lengths]
        deviation = min(max(math.log(ms / self._one(tokens)), -_FASTER), _SLOWER)
        self._move(at, share, deviation)
        if share < 1.0:
            self._move(at - 1, 1.0 - share, deviation)
        self._fill_in()

    def _one(self, tokens: float) -> float:
        """Milliseconds of one round."""
        at = bisect_left(self._lengths, tokens)
        if at == 0:
            return self._ms[0]
        low, high = self._lengths[at - 1], self._lengths[at]
        part = (tokens - low) / (high - low)
        return self._ms[at - 1] + part * (self._ms[at] - self._ms[at - 1])

    def _move(self, at: int, share: float, deviation: float) -> None:
        """Moves the cost of one length, and those that would no longer be in order with it."""
        gain = max(_GAIN, 1.0 / (1.0 + self._seen[at])) * share
        ms = self._ms[at] = self._ms[at] * math.exp(gain * deviation)
        self._seen[at] += share
        for i in range(at + 1, len(self._ms)):
            if self._ms[i] >= ms:
                break
            self._ms[i] = ms
        for i in range(at - 1, -1, -1):
            if self._ms[i] <= ms:
                break
            self._ms[i] = ms

    def _fill_in(self) -> None:
        """Lengths that were never seen cost what the nearest seen one makes likely."""
        if all(self._seen):
            return
        seen = [i for i, times in enumerate(self._seen) if times]
        if not seen:
            return
        for i, length in enumerate(self._lengths):
            if not self._seen[i]:
                near = min(seen, key=lambda j: abs(j - i))
                guess = self._ms[near] * _shape(length) / _shape(self._lengths[near])
                above = next((self._ms[j] for j in seen if j > i), math.inf)
                self._ms[i] = min(max(guess, self._ms[i - 1] if i else 0.0), above)


def _shape(tokens: float) -> float:
    return _FIXED + tokens


def _lengths(most: int, table: Mapping[int, float] | None) -> list[int]:
    """Ascending lengths at which costs are kept; the last is `most`."""
    if table:
        return [*sorted(t for t in table if t < most), most]
    lengths = []
    length = _LEAST_LENGTH
    while length < most:
        lengths.append(length)
        length *= 2
    return [*lengths, most]
