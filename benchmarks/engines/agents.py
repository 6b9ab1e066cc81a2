"""Agents that ask a question after every step of a growing history, on any engine."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.requests import TokenRequest

GROWS, ASKS = 600, 60
"""Tokens that a step adds to the history, and of the question about it."""

FIRST, PAST = 1000, 200_000
"""Range of the random token ids."""


class _Agent:
    """A history of random tokens."""

    def __init__(self, seed: int, tokens: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._history = self._some(tokens)

    def _some(self, tokens: int) -> NDArray[np.int32]:
        return self._rng.integers(FIRST, PAST, tokens).astype(np.int32)

    def asks(self) -> TokenRequest:
        """A question about the history as it is."""
        prompt = np.concatenate([self._history, self._some(ASKS)])
        return TokenRequest(len(self._history), (prompt,))

    def steps(self) -> TokenRequest:
        """The history grows, and a question about it."""
        self._history = np.concatenate([self._history, self._some(GROWS)])
        return self.asks()


class Agents(ABC):
    """What an engine that keeps checkpoints is measured with."""

    _made = 0

    @abstractmethod
    def submit(self, asked: TokenRequest) -> "Future[Any]":
        """A future of a request's values, through the engine's queue."""

    @abstractmethod
    def round_ms(self, requests: Sequence[TokenRequest]) -> float:
        """Milliseconds of requests that begin together, token ids to values."""

    @abstractmethod
    def forget(self) -> None:
        """Drops all checkpoints."""

    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of all checkpoints."""

    def step(self, history: int, agents: int, times: int) -> dict[str, Any]:
        """Milliseconds of steps to `history` tokens that some agents take together."""
        spans = []
        for _ in range(times + 1):
            self.forget()
            group = self._primed(agents, history - GROWS)
            spans.append(self.round_ms([agent.steps() for agent in group]))
        return {"ms": spans[1:]}

    def loop(self, history: int, agents: int, steps: int) -> dict[str, Any]:
        """Agents from `history` tokens on, each asking again as soon as it is answered."""
        self.forget()
        group = self._primed(agents, history)
        spans: list[float] = []
        ready = threading.Barrier(agents + 1)

        def live(agent: _Agent) -> None:
            ready.wait()
            for _ in range(steps):
                asked = time.perf_counter()
                self.submit(agent.steps()).result()
                spans.append(1000 * (time.perf_counter() - asked))

        threads = [threading.Thread(target=live, args=(agent,)) for agent in group]
        for thread in threads:
            thread.start()
        ready.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        if len(spans) != agents * steps:
            raise RuntimeError(f"{agents * steps - len(spans)} steps were not answered")
        return {"steps": len(spans), "seconds": seconds, "ms": spans}

    def kept(self, history: int, steps: int) -> dict[str, Any]:
        """Bytes that a step of one agent adds to what is kept."""
        self.forget()
        (agent,) = self._primed(1, history)
        before = self.held_bytes()
        for _ in range(steps):
            self.submit(agent.steps()).result()
        return {"bytes_a_step": round((self.held_bytes() - before) / steps)}

    def _primed(self, agents: int, history: int) -> list[_Agent]:
        """New agents, whose histories the engine has seen."""
        group = [_Agent(self._made + i, history) for i in range(agents)]
        self._made += agents
        for future in [self.submit(agent.asks()) for agent in group]:
            future.result()
        return group
