"""The paper's own release, flide 0.1.4, driven with token ids."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flide.formats import register
from flide.formats.base import Format, Plan, Read
from flide.formats.next_token import TokenRows
from flide.runtime.engine import Engine
from flide.runtime.online import Batcher
from numpy.typing import NDArray

from benchmarks.bits.company import compare
from benchmarks.engines.agents import Agents
from benchmarks.engines.clock import closed_loop, event_ms, latencies_ms, wall_ms
from benchmarks.requests import TokenRequest, request
from benchmarks.shapes import LABELS


@register("token-ids")
class TokenIds(Format):  # type: ignore[misc]
    """Requests that are plans already."""

    tokenizer = None

    def __init__(self, model_dir: str, **options: Any) -> None:
        pass

    def load_heads(self, backbone: Any) -> dict[str, Any]:
        """The label rows that ours reads too."""
        weight, bias = backbone.output_head()
        return {"letters": TokenRows(weight, LABELS.tolist(), bias)}

    def plan(self, request: Any, **options: Any) -> Any:
        """As it came."""
        return request


def as_plan(asked: TokenRequest) -> Any:
    """A request's state, and what each question adds."""
    rests = [prompt[asked.state :].tolist() for prompt in asked.prompts]
    return Plan(asked.prompts[0][: asked.state].tolist(), rests, (Read("letters"),))


class Flide(Agents):
    """Its engine, and its batcher for requests of several clients."""

    def __init__(
        self, weights: str, invariant: bool, sessions_gib: float, texts: str | None
    ) -> None:
        """invariant: its batch-invariant products. sessions_gib: what its checkpoints may take."""
        self._texts = Path(texts) if texts else None
        self._engine = Engine(
            weights, format="token-ids", backbone_options={"cuda_graphs": True}, capture=4096,
            session_cache_gb=sessions_gib, batch_invariant=invariant,
        )  # fmt: skip
        self._batcher = Batcher(self._engine)

    def plan(self, work: str, seed: int, most: int | None = None) -> Any:
        """A workload's request."""
        return as_plan(request(work, seed, self._texts, most))

    def one(self, work: str, times: int) -> dict[str, Any]:
        """Milliseconds of single requests."""
        plans = [self.plan(work, seed) for seed in range(times + 1)]
        return {"ms": latencies_ms(lambda plan: self._engine.forward([plan], "batch"), plans)}

    def replay(self, work: str, times: int) -> dict[str, Any]:
        """Milliseconds of the graph alone; null where it leaves its graphs."""
        graphs, plan = self._engine.backbone.request_graphs(), self.plan(work, 0)
        item = (plan.prefix, plan.suffixes, None)
        rows = graphs.flat_shape([item])
        if not rows:
            return {"ms": None}
        with torch.inference_mode():
            graphs._stage_flat([item], rows)
        graph = graphs.graphs["flat", rows]
        graph.replay()
        return {"ms": float(np.median([event_ms(graph.replay) for _ in range(times)]))}

    def closed(self, work: str, clients: int, seconds: float) -> dict[str, Any]:
        """A closed loop through its batcher."""
        plans = [self.plan(work, seed) for seed in range(64)]
        return closed_loop(self._batcher.forward, plans, clients, seconds)

    def logits(self, work: str, seeds: list[int], most: int | None = None) -> dict[str, Any]:
        """By request and question, the logits of LABELS, as requests that come together get them.

        most: questions of a request.
        """
        futures = [self._batcher.forward(self.plan(work, seed, most)) for seed in seeds]
        return {"logits": [[reads[0][0] for reads in f.result()[0]] for f in futures]}

    def answers(self, requests: Sequence[TokenRequest]) -> list[list[NDArray[np.float32]]]:
        """By request and question, the logits of LABELS, of requests that share a round."""
        found, _ = self._engine.forward([as_plan(asked) for asked in requests], "batch")
        return [[np.array(reads[0][0], np.float32) for reads in branches] for branches in found]

    def company(self, rounds: int, seed: int, seconds: float) -> dict[str, Any]:
        """How often bits depend on who shares a round: see `benchmarks.bits.company`."""
        return compare(self.answers, rounds, seed, seconds).told()

    def submit(self, asked: TokenRequest) -> "Future[Any]":
        """See Agents."""
        future: Future[Any] = self._batcher.forward(as_plan(asked))
        return future

    def round_ms(self, requests: Sequence[TokenRequest]) -> float:
        """See Agents."""
        plans = [as_plan(asked) for asked in requests]
        return wall_ms(partial(self._engine.forward, plans, "batch"))

    def forget(self) -> None:
        """See Agents."""
        self._engine.sessions.clear()

    def held_bytes(self) -> int:
        """See Agents."""
        return int(self._engine.sessions.used)


def start(
    shape: str, mode: str, weights: str, sessions_gib: float = 0.0, texts: str | None = None
) -> Flide:
    """See `benchmarks.engines`. mode: default, or deterministic for its batch-invariant products.

    weights: folder. texts: folder of workload files.
    """
    return Flide(weights, mode == "deterministic", sessions_gib, texts)
