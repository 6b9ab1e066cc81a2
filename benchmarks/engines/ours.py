"""Our engine's loop, graphs and kernels, driven with token ids and random weights."""

import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.engines.clock import closed_loop, event_ms, latencies_ms, wall_ms
from benchmarks.shapes import LABELS, SHAPES, prompts
from flide_engine.cache.marks import MarkPolicy
from flide_engine.cache.pool import Pool
from flide_engine.checkpoints import Checkpoints
from flide_engine.executor import to_device
from flide_engine.families.base import Read, Rendered
from flide_engine.graphs import Graphs, Replay, ladder
from flide_engine.kernels import REFERENCE
from flide_engine.kernels.triton_kernels import TRITON
from flide_engine.layout.plan import RoundPlan
from flide_engine.layout.stream import Job, lay_out
from flide_engine.layout.tree import build_forest
from flide_engine.loop import RoundLoop
from flide_engine.models.qwen3_5 import Qwen35, Qwen35Config
from flide_engine.readout import Asked
from flide_engine.runner import Runner
from flide_engine.scheduler import Scheduler
from flide_engine.work import RequestWork

CUDA = torch.device("cuda")
ROUND = 8192


def random_weights(config: Qwen35Config, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights whose activations keep their size; A_log and the gated norm are float32."""
    generator = torch.Generator(CUDA).manual_seed(0)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        kind = torch.float32 if name.endswith(("A_log", "linear_attn.norm.weight")) else dtype
        scale = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
        value = torch.randn(shape, generator=generator, device=CUDA) * scale
        if name.endswith("linear_attn.norm.weight"):
            value += 1.0
        elif name.endswith("A_log"):
            value = torch.rand(shape, generator=generator, device=CUDA) * 3 - 2
        elif name.endswith("conv1d.weight"):
            value = torch.randn(shape, generator=generator, device=CUDA) * 0.5
        elif name == "embed_tokens.weight":
            value *= shape[-1] ** 0.5
        weights[name] = value.to(kind)
    return weights


def rendered(work: str, seed: int) -> Rendered:
    """One request of a workload, as a family would render it."""
    texts = prompts(work, seed=seed)
    reads = tuple(Read(i, LABELS, f"question {i}") for i in range(len(texts)))
    longest = max(map(len, texts))
    return Rendered(tuple(texts), reads, longest, longest, len(texts), 0, None)


class Ours:
    """One shape."""

    def __init__(self, shape: str) -> None:
        self.config = Qwen35Config.of(SHAPES[shape])
        self.model = Qwen35(self.config, random_weights(self.config, torch.bfloat16), TRITON)
        self.pool = Pool(self.model.state_shape, 2048, 256, torch.bfloat16, CUDA)
        self.graphs = Graphs(
            self.model, self.pool.tensors, ladder(ROUND, 132 // self.config.num_key_value_heads)
        )
        self.runner = Runner(self.graphs, self.pool, "token")
        self._checkpoints = Checkpoints(self.pool, MarkPolicy(), False, time.monotonic)
        self._scheduler: Scheduler[RequestWork] = Scheduler(ROUND, 10**9)
        self._loop = RoundLoop(
            self.runner, self._scheduler, self._checkpoints, ROUND, time.monotonic, _finish
        )

    def plan(self, work: str) -> tuple[RoundPlan, Asked]:
        """A workload's round, on pages and slots from 0 up."""
        asked = rendered(work, 0)
        layout = lay_out([Job(build_forest(asked.prompts))])
        pages = np.arange(layout.num_pages, dtype=np.int32)
        plan, _ = layout.bind(pages, np.arange(layout.num_slots, dtype=np.int32))
        return plan, Asked.of(asked.reads)

    def one(self, work: str, times: int) -> dict[str, Any]:
        """Milliseconds of single requests on the engine's thread, token ids to values."""
        requests = [rendered(work, seed) for seed in range(times + 1)]
        return {"ms": self._loop.call(partial(latencies_ms, self._alone, requests))}

    def _alone(self, request: Rendered) -> None:
        """A request from plan to values, round after round, as the loop would run it."""
        item = RequestWork(request, Future(), None, None, "", "", [])
        self._checkpoints.plan(item, ROUND)
        while not item.is_done:
            self._loop._collect(self._loop._begin([item]))
            self._scheduler.drain()  # a request of several rounds goes back to the queue

    def replay(self, work: str, times: int) -> dict[str, Any]:
        """Milliseconds of the graph alone; null where the work takes several rounds."""
        plan, asked = self.plan(work)
        bucket = self.graphs.fill(plan, asked)
        if bucket is None:
            return {"ms": None}
        bucket.replay(plan, asked).wait()
        spans = [event_ms(bucket.graph.replay) for _ in range(times)]
        return {"ms": float(np.median(spans)), "rows": bucket.tables.capacity.rows}

    def closed(self, work: str, clients: int, seconds: float) -> dict[str, Any]:
        """A closed loop through the engine's loop."""
        requests = [rendered(work, seed) for seed in range(64)]
        return closed_loop(self._submit, requests, clients, seconds)

    def host(self, work: str, times: int) -> dict[str, Any]:
        """Microseconds of the host's part of a round, by stage."""
        asked = rendered(work, 0)
        forest = build_forest(asked.prompts)
        plan, wanted = self.plan(work)
        bucket = self.graphs.fill(plan, wanted)
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
        bucket = self.graphs.fill(plan, asked)
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
        texts = rendered(work, 0).prompts
        plan, _ = self.plan(work)
        found: Replay = self.graphs.start(plan, Asked.every_vector(len(texts)))
        hidden = found.wait()[1]
        assert hidden is not None
        plain = {n: t.float() for n, t in random_weights(self.config, torch.bfloat16).items()}
        model = Qwen35(self.config, plain, REFERENCE)
        state = Pool(self.model.state_shape, 2, 2, torch.float32, CUDA).tensors
        errors = []
        for text, row in list(zip(texts, hidden, strict=True))[:most]:
            layout = lay_out([Job(build_forest([text]))])
            nothing = np.zeros(0, np.int32)
            stream = to_device(layout.bind(nothing, nothing)[0], CUDA)
            want = model.forward(stream, state)[0].cpu().numpy()
            errors.append(float(np.linalg.norm(row - want) / np.linalg.norm(want)))
        return {"hidden_relative_error": round(max(errors), 5)}

    def _submit(self, request: Rendered) -> "Future[Any]":
        future: Future[Any] = Future()
        self._loop.add(RequestWork(request, future, None, None, "", "", []))
        return future


def _finish(work: RequestWork) -> None:
    values: Any = [work.values[i] for i in range(len(work.rendered.reads))]
    work.future.set_result(values)


def start(shape: str) -> Ours:
    """See `benchmarks.engines`."""
    return Ours(shape)
