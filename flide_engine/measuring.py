"""What a round of each length takes, measured before the first request: predictions of waits then
hold from the beginning, and are corrected by every round that is run.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from flide_engine.config import EngineConfig
from flide_engine.errors import PoolExhausted, RoundTooLarge
from flide_engine.layout.stream import Job
from flide_engine.layout.tree import build_forest
from flide_engine.readout import Asked
from flide_engine.runner import Runner

log = logging.getLogger(__name__)

REPEATS = 4
"""Rounds of a length, of which the fastest counts: the first ones may be slow, and nothing makes a
round faster than it is."""

BRANCHES = 4
"""Of the state that each round is about: they are a quarter of its tokens."""

UNPADDED = (256, 1024)
"""Lengths that are measured where rounds are not padded to buckets."""


def measured(runner: Runner, config: EngineConfig, device: str) -> dict[int, float] | None:
    """As `measure`, or None where nothing is to be measured. device: its type."""
    wanted = device != "cpu" if config.measure_costs is None else config.measure_costs
    return measure(runner, config.max_round_tokens) if wanted else None


def measure(
    runner: Runner, most: int, clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Milliseconds of a round by its rows, for a scheduler's table; what does not fit is left out.

    Rounds about a state that nobody asked for, on pages that are free before and after: for a
    runner that nothing else uses yet. most: rows of the longest round. clock: seconds.
    """
    began, table = clock(), dict[int, float]()
    lengths = runner.executor.lengths or [n for n in UNPADDED if n < most] or [most]
    for length in lengths:
        try:
            for _ in range(REPEATS):
                rows, ms = _timed(runner, length, clock)
                table[rows] = min(ms, table.get(rows, math.inf))
        except (PoolExhausted, RoundTooLarge) as error:
            log.warning("rounds of %d rows are not measured: %s", length, error)
    shown = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in sorted(table.items()))
    log.info("milliseconds of rounds, measured in %.1f s: %s", clock() - began, shown)
    return table


def _timed(runner: Runner, rows: int, clock: Callable[[], float]) -> tuple[int, float]:
    """(rows with padding, milliseconds) of one round of so many tokens."""
    texts = _texts(rows)
    began = clock()
    pending = runner.start([Job(build_forest(texts))], Asked.every_vector(len(texts))).pending
    pending.wait()
    return pending.rows, 1000 * (clock() - began)


def _texts(tokens: int) -> Sequence[np.ndarray]:
    """Prompts of so many tokens together, all of it that they share counted once."""
    own = max(1, tokens // (4 * BRANCHES))
    state = np.zeros(tokens - BRANCHES * own, np.int32)
    return [np.concatenate([state, np.full(own, 1 + i, np.int32)]) for i in range(BRANCHES)]
