"""Our engine's loop, graphs and kernels, driven with token ids."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines.agents import Agents
from benchmarks.engines.clock import closed_loop, event_ms, latencies_ms, wall_ms
from benchmarks.requests import TokenRequest, request
from benchmarks.shapes import LABELS
from flide_engine import Engine, EngineConfig, graphs
from flide_engine.cache.pool import Pool
from flide_engine.executor import to_device
from flide_engine.families.base import Read, Rendered
from flide_engine.graphs import Bucket, Graphs
from flide_engine.kernels import REFERENCE
from flide_engine.layout.plan import RoundPlan
from flide_engine.layout.stream import Job, lay_out
from flide_engine.layout.tree import build_forest
from flide_engine.models.registry import load_model
from flide_engine.readout import Asked
from flide_engine.work import RequestWork

ROUND_TOKENS = 8192


def as_rendered(asked: TokenRequest) -> Rendered:
    """A request, as a family would render it."""
    reads = tuple(Read(i, LABELS, f"question {i}") for i in range(len(asked.prompts)))
    longest = max(map(len, asked.prompts))
    tokens = asked.state + sum(len(p) - asked.state for p in asked.prompts)
    return Rendered(asked.prompts, reads, tokens, longest, len(asked.prompts), asked.state, None)


class Ours(Agents):
    """One shape, its engine built as `Engine` builds it and driven with token ids."""

    def __init__(
        self, weights: str, config: dict[str, Any], pool_gib: float, texts: str | None
    ) -> None:
        """config: options of EngineConfig."""
        self._texts, self.weights = Path(texts) if texts else None, Path(weights)
        config = {
            "keep_checkpoints": False,
            "max_round_tokens": ROUND_TOKENS,
            "max_queued_tokens": 10**9,
            "max_queue_ms": 10**9,
            **config,
        }
        self.round_tokens = config["max_round_tokens"]
        pool = int(pool_gib * 2**30)
        self.engine = Engine(EngineConfig(model=weights, pool_bytes=pool, **config))
        self._loop, self._checkpoints = self.engine._loop, self.engine._checkpoints
        self._loop._done = _finish
        self._scheduler, self.runner = self._loop._scheduler, self._loop._runner
        self.pool = self.runner._pool
        self.device = self.pool.tensors.keys.device

    def rendered(self, work: str, seed: int, most: int | None = None) -> Rendered:
        """A workload's request."""
        return as_rendered(request(work, seed, self._texts, most))

    def plan(self, work: str) -> tuple[RoundPlan, Asked]:
        """A workload's round, on pages and slots that nobody holds."""
        asked = self.rendered(work, 0)
        layout = lay_out([Job(build_forest(asked.prompts))])
        pages, slots = self.pool.take(layout.num_pages, layout.num_slots)
        plan = layout.bind(pages, slots, self.pool.page_places)[0]
        self.pool.pages.release(pages)
        self.pool.slots.release(slots)
        return plan, Asked.of(asked.reads)

    def one(self, work: str, times: int) -> dict[str, Any]:
        """Milliseconds of single requests on the engine's thread, token ids to values."""
        return {"ms": self.groups_ms([[self.rendered(work, seed)] for seed in range(times + 1)])}

    def groups_ms(self, groups: Sequence[Sequence[Rendered]], share: bool = True) -> list[float]:
        """Milliseconds of all but the first of some groups of requests that begin together, on the
        engine's thread.

        share: whether they may share what their prompts have in common.
        """
        together = partial(self._together, share=share)
        spans: list[float] = self._loop.call(partial(latencies_ms, together, groups))
        return spans

    def _together(self, requests: Sequence[Rendered], share: bool = True) -> None:
        """Requests from plans to values, round after round, as the loop would run them."""
        tenants = ["" if share else str(i) for i in range(len(requests))]
        waiting = [
            RequestWork(r, Future(), None, None, tenant, "", self._keys(r, tenant))
            for tenant, r in zip(tenants, requests, strict=True)
        ]
        for work in waiting:
            self._checkpoints.plan(work, self.round_tokens)
        while waiting:
            taken: list[RequestWork] = []
            room = self.round_tokens
            while len(taken) < len(waiting) and waiting[len(taken)].tokens <= room:
                room -= waiting[len(taken)].tokens
                taken.append(waiting[len(taken)])
            self._loop._collect(self._loop._begin(taken))
            self._scheduler.drain()  # requests of several rounds go back to the queue
            for work in taken:
                if work.future.done():
                    work.future.result()  # raises what went wrong
            waiting = [work for work in waiting if not work.is_done]

    def _keys(self, asked: Rendered, tenant: str) -> list[bytes]:
        """What checkpoints are found by, where any are kept."""
        if not self.engine.config.keep_checkpoints:
            return []
        return self._checkpoints.keys(tenant, asked.prompts[0][: asked.state_tokens])

    def bucket(self, plan: RoundPlan, asked: Asked) -> Bucket | None:
        """The captured graph that runs a plan; None where none does, and on a CPU."""
        executor = self.runner.executor
        return executor.fill(plan, asked) if isinstance(executor, Graphs) else None

    def replay(self, work: str, times: int) -> dict[str, Any]:
        """Milliseconds of the graph alone; null where the work takes several rounds."""
        plan, asked = self.plan(work)
        bucket = self.bucket(plan, asked)
        if bucket is None:
            return {"ms": None}
        bucket.replay(plan, asked).wait()
        spans = [event_ms(bucket.graph.replay) for _ in range(times)]
        return {"ms": float(np.median(spans)), "rows": bucket.tables.capacity.rows}

    def closed(self, work: str, clients: int, seconds: float) -> dict[str, Any]:
        """A closed loop through the engine's loop."""
        requests = [self.rendered(work, seed) for seed in range(64)]
        return closed_loop(self.submitted, requests, clients, seconds)

    def host(self, work: str, times: int) -> dict[str, Any]:
        """Microseconds of the host's part of a round, by stage."""
        asked = self.rendered(work, 0)
        forest = build_forest(asked.prompts)
        plan, wanted = self.plan(work)
        bucket = self.bucket(plan, wanted)
        assert bucket is not None
        stages: dict[str, Any] = {
            "forest": lambda: build_forest(asked.prompts),
            "layout": lambda: lay_out([Job(forest)]),
            "fill": lambda: bucket.tables.fill(plan, wanted),
            "launch": lambda: bucket.replay(plan, wanted),
        }
        found = {"nodes": plan.num_nodes}
        for name, run in stages.items():
            spans = []
            for _ in range(times):
                spans.append(wall_ms(run))
                torch.cuda.synchronize()
            found[name] = round(1000 * float(np.median(spans)))
        return found

    def profile(self, work: str) -> dict[str, Any]:
        """Kernels of a replay: (microseconds in all, launches) by name, largest first."""
        plan, asked = self.plan(work)
        bucket = self.bucket(plan, asked)
        assert bucket is not None
        bucket.replay(plan, asked).wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(5):
                bucket.graph.replay()
            torch.cuda.synchronize()
        events = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)[:16]
        return {e.key[:60]: [round(e.device_time_total / 5, 1), e.count / 5] for e in events}

    def check(self, work: str, most: int) -> dict[str, Any]:
        """Relative error of hidden vectors against the float32 references on isolated prompts."""
        texts = self.rendered(work, 0).prompts
        plan, _ = self.plan(work)
        hidden = self.runner.executor.start(plan, Asked.every_vector(len(texts))).wait()[1]
        assert hidden is not None
        model = load_model(self.weights, torch.float32, self.device, REFERENCE)
        shape = model.state_shape
        state = Pool(shape, shape.slot_units(4), torch.float32, self.device).tensors
        errors = []
        for text, row in list(zip(texts, hidden, strict=True))[:most]:
            layout = lay_out([Job(build_forest([text]))])
            nothing = np.zeros(0, np.int32)
            stream = to_device(layout.bind(nothing, nothing)[0], self.device)
            want = model.forward(stream, state)[0].cpu().numpy()
            errors.append(float(np.linalg.norm(row - want) / np.linalg.norm(want)))
        return {"hidden_relative_error": round(max(errors), 5)}

    def logits(self, work: str, seeds: list[int], most: int | None = None) -> dict[str, Any]:
        """By request and question, the logits of LABELS, as requests that come together get them.

        most: questions of a request.
        """
        futures = [self.submitted(self.rendered(work, seed, most)) for seed in seeds]
        return {"logits": [[row.tolist() for row in f.result()] for f in futures]}

    def submitted(self, asked: Rendered, tenant: str = "") -> "Future[Any]":
        """A future of a request's values, through the engine's queue."""
        future: Future[Any] = Future()
        keys = self._keys(asked, tenant)
        self._loop.add(RequestWork(asked, future, None, None, tenant, "", keys))
        return future

    def submit(self, asked: TokenRequest) -> "Future[Any]":
        """See Agents."""
        return self.submitted(as_rendered(asked))

    def round_ms(self, requests: Sequence[TokenRequest]) -> float:
        """See Agents."""
        group = [as_rendered(asked) for asked in requests]
        span: float = self._loop.call(lambda: wall_ms(lambda: self._together(group)))
        return span

    def forget(self) -> None:
        """See Agents."""
        self.engine.drop_checkpoints()

    def held_bytes(self) -> int:
        """See Agents."""
        held = self.engine.accounting()
        return held.page_bytes_held + held.slot_bytes_held


def _finish(work: RequestWork) -> None:
    values: Any = [work.values[i] for i in range(len(work.rendered.reads))]
    work.future.set_result(values)


def start(
    shape: str,
    mode: str,
    weights: str,
    config: dict[str, Any] | None = None,
    pool_gib: float = 24,
    texts: str | None = None,
    part: int = 0,
) -> Ours:
    """See `benchmarks.engines`. mode: default, deterministic, or what `config` makes of it.

    weights: folder. config: further options of EngineConfig. texts: folder of workload files. part:
    grains of keys that one program of attention takes of a tile; 0: as the engine has it.
    """
    graphs.PART = part or graphs.PART
    config = {"deterministic": mode == "deterministic", **(config or {})}
    return Ours(weights, config, pool_gib, texts)
