"""Our engine without one of the things it is made of, to see what that is worth.

no_fork: every question is a sequence of its own, state included. no_graphs: the same kernels, each
launched from Python. padded: a batch of sequences instead of the flat stream, states and questions
padded to the next of the lengths and numbers that a graph would be captured for; only timed, since
what is padded asks something else.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.engines.clock import closed_loop
from benchmarks.engines.ours import Ours, as_rendered
from benchmarks.requests import TokenRequest, request
from flide_engine.errors import RoundTooLarge
from flide_engine.executor import Executor
from flide_engine.families.base import Rendered
from flide_engine.graphs import Graphs
from flide_engine.layout.plan import RoundPlan
from flide_engine.models.base import DecisionModel
from flide_engine.models.registry import load_model
from flide_engine.readout import Asked
from flide_engine.resolve import resolve_kernels

MODES = ("no_fork", "no_graphs", "padded")


class Launches:
    """An Executor that launches what `Graphs` replays, from the same tables."""

    runs_ahead = True

    def __init__(self, model: DecisionModel, state: Any, graphs: Graphs) -> None:
        self._model, self._state, self._graphs = model, state, graphs
        self.lengths = graphs.lengths
        self.bucket_of, self.check = graphs.bucket_of, graphs.check

    @torch.inference_mode()
    def start(self, plan: RoundPlan, asked: Asked) -> "Launched":
        """See Executor. Raises RoundTooLarge."""
        bucket = self._graphs.fill(plan, asked)
        if bucket is None:
            raise RoundTooLarge(plan.num_rows, plan.num_nodes, 0, 0)
        tables = bucket.tables
        tables.upload()
        hidden = self._model.forward(tables.stream, self._state)
        logits = self._model.label_logits(hidden, tables.label_reads, tables.label_rows)
        return Launched(tables.capacity.rows, logits, len(asked.reads))


class Launched:
    """A Pending of logits alone."""

    def __init__(self, rows: int, logits: torch.Tensor, count: int) -> None:
        self.rows = rows
        self._logits = torch.empty(count, dtype=torch.float32, pin_memory=True)
        self._logits.copy_(logits[:count], non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def is_done(self) -> bool:
        """See Pending."""
        return bool(self._done.query())

    def wait(self) -> tuple[NDArray[np.float32], None]:
        """See Pending."""
        self._done.synchronize()
        return self._logits.numpy(), None


def rung(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16 ..."""
    steps = sorted(size << k for k in range(20) for size in (2, 3))
    return next(s for s in [1, *steps] if s >= count)


def padded(asked: TokenRequest) -> TokenRequest:
    """As many rows as a padded batch of the request has: one sequence, or a state and a batch of
    questions. A state is padded in front, a question after its first token.
    """
    prompts = asked.prompts
    longest = max(map(len, prompts))
    if len(prompts) == 1:
        return TokenRequest(asked.state, (_longer(prompts[0], 0, rung(longest)),))
    state, width = rung(asked.state), rung(longest - asked.state)
    made = [
        _longer(_longer(p, 0, len(p) + state - asked.state), state + 1, state + width)
        for p in prompts
    ]
    for i in range(rung(len(made)) - len(made)):
        extra = made[0].copy()
        extra[state] = 230_000 + i  # another question, so that it is no part of one
        made.append(extra)
    return TokenRequest(state, tuple(made))


def _longer(tokens: NDArray[np.int32], at: int, length: int) -> NDArray[np.int32]:
    """The tokens with zeros before place `at`, `length` in all."""
    longer = np.zeros(length, np.int32)
    longer[:at], longer[at + length - len(tokens) :] = tokens[:at], tokens[at:]
    return longer


class Ablations:
    """One engine, and what can be left out of it."""

    def __init__(self, ours: Ours) -> None:
        self._ours = ours
        whole = ours.runner.executor
        self._executors: dict[str, Executor] = dict.fromkeys(MODES, whole)
        if isinstance(whole, Graphs):
            kernels = resolve_kernels("auto", ours.device)
            model = load_model(ours.weights, torch.bfloat16, ours.device, kernels)
            self._executors["no_graphs"] = Launches(model, ours.pool.tensors, whole)

    def _requests(self, work: str, seed: int, mode: str) -> list[Rendered]:
        """What is asked instead of a workload's request."""
        asked = request(work, seed)
        if mode == "no_fork":
            return [as_rendered(TokenRequest(asked.state, (p,))) for p in asked.prompts]
        return [as_rendered(padded(asked) if mode == "padded" else asked)]

    def one(self, work: str, times: int, mode: str) -> dict[str, Any]:
        """Milliseconds of single requests on the engine's thread, token ids to values."""
        self._ours.runner.executor = self._executors[mode]
        every = [self._requests(work, seed, mode) for seed in range(times + 1)]
        return {"ms": self._ours.groups_ms(every, share=False)}

    def closed(self, work: str, clients: int, seconds: float, mode: str) -> dict[str, Any]:
        """A closed loop through the engine's queue."""
        self._ours.runner.executor = self._executors[mode]
        every = [self._requests(work, seed, mode) for seed in range(64)]
        return closed_loop(self._all, every, clients, seconds)

    def _all(self, requests: Sequence[Rendered]) -> "Future[Any]":
        """A future of the last of some requests, each by a tenant of its own."""
        done: Future[Any] = Future()
        futures = [self._ours.submitted(r, str(i)) for i, r in enumerate(requests)]
        left = [len(futures)]

        def count(_: "Future[Any]") -> None:
            left[0] -= 1
            if not left[0]:
                done.set_result(None)

        for future in futures:
            future.add_done_callback(count)
        return done


def start(shape: str, mode: str, weights: str, pool_gib: float = 8) -> Ablations:
    """See `benchmarks.engines`; the mode comes with each command."""
    return Ablations(Ours(weights, {"dtype": "bfloat16"}, pool_gib, None))
