"""The paper's own release, flide 0.1.4, driven with token ids and random weights."""

import tempfile
from typing import Any

import numpy as np
import torch
import transformers
from flide.formats import register
from flide.formats.base import Format, Plan, Read
from flide.formats.next_token import TokenRows
from flide.runtime.engine import Engine
from flide.runtime.online import Batcher

from benchmarks.engines.clock import closed_loop, event_ms, latencies_ms
from benchmarks.shapes import LABELS, SHAPES, WORKLOADS, prompts


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


def checkpoint(shape: str) -> str:
    """A folder with random weights."""
    rope = {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    }  # fmt: skip
    config = {k: v for k, v in SHAPES[shape].items() if k != "architectures"}
    torch.manual_seed(0)
    with torch.device("cuda"):
        text = transformers.Qwen3_5TextConfig(**config, rope_parameters=rope)
        model = transformers.Qwen3_5ForCausalLM(text).to(torch.bfloat16)
    folder = tempfile.mkdtemp(prefix=f"random-{shape}-")
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


def plan_of(work: str, seed: int) -> Any:
    """One request of a workload: its state, and what each question adds."""
    texts, state = prompts(work, seed=seed), WORKLOADS[work][0]
    rests = [text[state:].tolist() for text in texts]
    return Plan(texts[0][:state].tolist(), rests, (Read("letters"),))


class Flide:
    """Its engine, and its batcher for closed loops."""

    def __init__(self, shape: str) -> None:
        self._engine = Engine(
            checkpoint(shape), format="token-ids", backbone_options={"cuda_graphs": True},
            capture=4096, session_cache_gb=0.0,
        )  # fmt: skip
        self._batcher = Batcher(self._engine)

    def one(self, work: str, times: int) -> dict[str, Any]:
        """Milliseconds of single requests."""
        plans = [plan_of(work, seed) for seed in range(times + 1)]
        return {"ms": latencies_ms(lambda plan: self._engine.forward([plan], "batch"), plans)}

    def replay(self, work: str, times: int) -> dict[str, Any]:
        """Milliseconds of the graph alone; null where it leaves its graphs."""
        graphs, plan = self._engine.backbone.request_graphs(), plan_of(work, 0)
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
        plans = [plan_of(work, seed) for seed in range(64)]
        return closed_loop(self._batcher.forward, plans, clients, seconds)


def start(shape: str) -> Flide:
    """See `benchmarks.engines`."""
    return Flide(shape)
