"""Deterministic mode: label logits are bit for bit those of the prompt alone.

On a GPU with captured graphs and heads as wide as a real model's; elsewhere the same kernels in
Triton's interpreter, through buckets of two lengths.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.bits import Bits, Sizes
from benchmarks.shapes import LABELS
from benchmarks.weights import random_weights
from flide_engine.cache.pool import Pool
from flide_engine.device_plan import Capacity, Tables
from flide_engine.executor import Done, Executor
from flide_engine.graphs import Graphs, ladder
from flide_engine.kernels import Kernels
from flide_engine.kernels.attention import attention
from flide_engine.kernels.delta_net import DeltaNetTuning, delta_net
from flide_engine.kernels.label_logits import label_logits
from flide_engine.kernels.triton_kernels import TRITON, deterministic_kernels
from flide_engine.layout.plan import RoundPlan
from flide_engine.models.qwen3_5 import Qwen35, Qwen35Config
from flide_engine.readout import Asked
from flide_engine.runner import Runner
from tests.kernels.test_triton import (
    DEVICE,
    INTERPRETED,
    pytestmark,  # noqa: F401
)


def config() -> Qwen35Config:
    """Four layers, both kinds, and the last one reads few rows."""
    small = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32,
        "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }  # fmt: skip
    wide = {
        "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }  # fmt: skip
    layers = (
        {"num_hidden_layers": 2, "full_attention_interval": 2}
        if INTERPRETED
        else {"num_hidden_layers": 8}
    )
    rest: dict[str, Any] = {
        "vocab_size": 248320, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    return Qwen35Config.of({**(small if INTERPRETED else wide), **layers, **rest})


class Interpreted:
    """An executor that runs the GPU kernels in the interpreter, padded to one of two lengths."""

    runs_ahead = False

    def __init__(self, model: Qwen35, pool: Pool) -> None:
        self._model, self._state = model, pool.tensors
        self._tables = [Tables(Capacity.of(rows, 32, 64, 3), DEVICE) for rows in (96, 224)]

    def bucket_of(self, tokens: int) -> int:
        """See Executor."""
        return 96 if tokens <= 96 else 224

    def start(self, plan: RoundPlan, asked: Asked) -> Done:
        """See Executor."""
        tables = next(t for t in self._tables if t.fill(plan, asked))
        tables.upload()
        hidden = self._model.forward(tables.stream, self._state)
        logits = self._model.label_logits(hidden, tables.label_reads, tables.label_rows)
        return Done(tables.capacity.rows, logits[: len(asked.reads)].clone().numpy(), None)

    def check(self) -> None:
        """See Executor."""


def bits(kernels: Kernels) -> Bits:
    """A harness around a model with random weights."""
    if INTERPRETED:  # a program of the interpreter takes a millisecond, also if it finds no work
        kernels = replace(
            kernels,
            delta_net=partial(delta_net, tuning=DeltaNetTuning(2, 4)),
            attention=partial(attention, programs=2),
            label_logits=partial(label_logits, programs=2),
        )
    made, dtype = config(), torch.float32 if INTERPRETED else torch.bfloat16
    weights = random_weights(made, DEVICE)
    if INTERPRETED:
        weights = {name: weight.float() for name, weight in weights.items()}
    model = Qwen35(made, weights, kernels)
    shape = model.state_shape
    pool = Pool(shape, 256 + 32 * shape.slot_units(dtype.itemsize), dtype, DEVICE)
    executor: Executor
    if INTERPRETED:
        executor = Interpreted(model, pool)
    else:
        executor = Graphs(model, pool.tensors, ladder(4096, 66))
    return Bits(Runner(executor, pool, "token"), LABELS, 240_000, model, pool)


def test_company_forks_and_checkpoints_change_no_bit() -> None:
    """Random rounds: other requests, openings in common, resumed at any grain, other buckets."""
    harness = bits(deterministic_kernels())
    rng = np.random.default_rng(6)
    if INTERPRETED:
        harness.check(rng, Sizes(86, 2, 5, 2), rounds=3, documents=2)
    else:
        for _ in range(10):
            harness.check(rng, Sizes(900, 12, 90, 3), rounds=6, documents=4)
        assert harness.compared >= 300
    assert harness.compared >= 6
    assert harness.resumed > 0
    assert not harness.differing, harness.differing[:3]


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="its product is wrong for the two lengths above")
def test_a_wrong_product_is_found() -> None:
    """The harness sees a product whose rows depend on how many there are."""

    def uneven(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight.T
        return y * (1 + 2**-6) if len(x) > 96 and len(weight) > 64 else y

    harness = bits(replace(TRITON, linear=uneven))
    harness.check(np.random.default_rng(6), Sizes(86, 2, 5, 2), rounds=2, documents=2)
    assert harness.differing
    assert all(d.where.startswith("layer 0, mixer, position") for d in harness.differing)
