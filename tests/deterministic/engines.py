"""Engines that promise bits: the references in a fixed order, Triton's kernels in its interpreter,
and the captured graphs of a GPU.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import SHAPES
from benchmarks.weights import write_folder
from flide_engine import Engine, EngineConfig
from flide_engine.cache.pool import Pool
from flide_engine.device_plan import Capacity, Tables
from flide_engine.executor import Done
from flide_engine.kernels import Kernels
from flide_engine.layout.plan import RoundPlan
from flide_engine.models.qwen3_5 import Qwen35
from flide_engine.readout import Asked
from tests.deterministic.fixed_order import FIXED_ORDER
from tests.interpreter import add_up_in_order

SMALL = SHAPES["test"] | {"full_attention_interval": 2}
"""Four layers, both kinds twice."""

SMALLEST = SMALL | {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 1,
}  # fmt: skip
"""For the interpreter."""

WIDE = SHAPES["0.8B"] | {"num_hidden_layers": 8}

ANY_WAIT = {"max_queue_ms": 10**9, "max_queued_tokens": 10**9}
"""A slow machine refuses nothing."""

Made = Callable[[], Engine]


def fixed_order(
    patch: pytest.MonkeyPatch, folder: Path, kernels: Kernels = FIXED_ORDER, **options: Any
) -> Made:
    """Engines on a CPU whose kernels add up in one order."""
    patch.setattr("flide_engine.engine.resolve_kernels", lambda *_: kernels)
    weights = write_folder(SMALL, folder / "weights")
    config = {
        "model": str(weights), "device": "cpu", "pool_bytes": 8 << 20, "host_bytes": 16 << 20,
        "disk_folder": folder / "files", "disk_bytes": 64 << 20, "max_round_tokens": 1024,
        "max_prompt_tokens": 4096, "compute_threads": 1, **ANY_WAIT,
    }  # fmt: skip
    return lambda: Engine(EngineConfig(**config | options))


class Interpreted:
    """An executor that runs the GPU kernels in the interpreter, padded to one of two lengths."""

    runs_ahead = False
    lengths = (96, 224)

    def __init__(self, model: Qwen35, pool: Pool) -> None:
        self._model, self._state = model, pool.tensors
        self._tables = [Tables(Capacity.of(rows, 32, 64, 3), pool.device) for rows in self.lengths]

    def bucket_of(self, tokens: int) -> int:
        """See Executor."""
        return next(rows for rows in self.lengths if tokens <= rows)

    def start(self, plan: RoundPlan, asked: Asked) -> Done:
        """See Executor."""
        tables = next(t for t in self._tables if t.fill(plan, asked))
        tables.upload()
        hidden = self._model.forward(tables.stream, self._state)
        logits = self._model.label_logits(hidden, tables.label_reads, tables.label_rows)
        return Done(tables.capacity.rows, logits[: len(asked.reads)].clone().numpy(), None)

    def check(self) -> None:
        """See Executor."""


def interpreted_kernels() -> Kernels:
    """Few programs: one takes a millisecond in the interpreter, also if it finds no work."""
    from flide_engine.kernels.attention import attention
    from flide_engine.kernels.delta_net import DeltaNetTuning, delta_net
    from flide_engine.kernels.label_logits import label_logits
    from flide_engine.kernels.triton_kernels import deterministic_kernels

    return replace(
        deterministic_kernels(),
        delta_net=partial(delta_net, tuning=DeltaNetTuning(2, 4)),
        attention=partial(attention, programs=2),
        label_logits=partial(label_logits, programs=2),
    )


def interpreted(patch: pytest.MonkeyPatch, folder: Path, kernels: Kernels) -> Made:
    """Engines in Triton's interpreter."""
    add_up_in_order(patch)
    patch.setattr("flide_engine.engine.resolve_kernels", lambda *_: kernels)
    patch.setattr(
        "flide_engine.engine.executor_for", lambda model, pool, *_: Interpreted(model, pool)
    )
    weights = write_folder(SMALLEST, folder / "weights")
    longest = Interpreted.lengths[-1]
    config = EngineConfig(
        model=str(weights), device="cpu", pool_bytes=4 << 20, host_bytes=4 << 20,
        max_round_tokens=longest, max_prompt_tokens=longest, max_request_tokens=2048, **ANY_WAIT,
    )  # fmt: skip
    return lambda: Engine(config)


def on_the_card(folder: Path) -> Made:
    """Engines on a GPU, as they are, with a model that is as wide as a real one."""
    weights = write_folder(WIDE, folder / "weights")
    config = EngineConfig(
        model=str(weights), device="cuda", deterministic=True, pool_bytes=4 << 30,
        host_bytes=2 << 30, disk_folder=folder / "files", disk_bytes=8 << 30,
        max_round_tokens=4096, **ANY_WAIT,
    )  # fmt: skip
    assert torch.cuda.is_available()
    return lambda: Engine(config)
