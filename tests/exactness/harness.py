"""One model twice: as transformers computes an isolated prompt, and as our runner computes a
forest.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flide_engine.cache.pool import Pool
from flide_engine.executor import Eager
from flide_engine.kernels import REFERENCE
from flide_engine.layout.plan import Anchor, Mark
from flide_engine.layout.stream import Fork, Job
from flide_engine.layout.tree import build_forest
from flide_engine.models.qwen3_5 import Qwen35, Qwen35Config
from flide_engine.readout import Asked
from flide_engine.runner import Runner
from tests.checkpoints import oracle, text_tensors

Tokens = NDArray[np.int32]

TOLERANCE = 1e-5
"""Largest difference of a logit, relative to the largest logit: four layers in float32."""


class Both:
    """The oracle and our runner over the same weights, with a small dirty pool."""

    def __init__(self, config: dict[str, Any], fork: Fork = "token", seed: int = 0) -> None:
        self.oracle = oracle(config, seed)
        weights = {k.removeprefix("model."): v for k, v in text_tensors(self.oracle).items()}
        self.model = Qwen35(Qwen35Config.of(config), weights, REFERENCE)
        units = 64 + 16 * self.model.state_shape.slot_units(4)
        self.pool = Pool(self.model.state_shape, units, torch.float32, torch.device("cpu"))
        executor = Eager(self.model, self.pool.tensors, torch.device("cpu"))
        self.runner = Runner(executor, self.pool, fork)
        self.rng = np.random.default_rng(seed)
        self.soil()

    def soil(self) -> None:
        """Fills the whole pool with NaN: whatever is read without having been written shows."""
        self.pool.rows.view(torch.float32).fill_(float("nan"))

    def tokens(self, count: int) -> Tokens:
        """Random token ids."""
        return self.rng.integers(0, 1400, count).astype(np.int32)

    def isolated(self, prompt: Tokens) -> Tensor:
        """Logits [V] at the last token of a prompt run alone by transformers, uncached."""
        with torch.inference_mode():
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            return torch.as_tensor(self.oracle(ids, use_cache=False).logits[0, -1])

    def forked(self, jobs: Sequence[Job]) -> Tensor:
        """Logits [R, V] of all reads of a round; its checkpoints are dropped."""
        return self.hidden(jobs) @ self.model.output_head.T

    def hidden(self, jobs: Sequence[Job]) -> Tensor:
        """Hidden vectors [R, H] of all reads of a round; its checkpoints are dropped."""
        reads = sum(len(job.forest.leaves) for job in jobs if job.reads)
        started = self.runner.start(jobs, Asked.every_vector(reads))
        for marks in started.checkpoints:
            for anchor in marks:
                self.runner.drop(anchor)
        hidden = started.pending.wait()[1]
        assert hidden is not None
        return torch.from_numpy(hidden)

    def checkpoint(self, prompt: Tokens, position: int, before: Anchor | None = None) -> Anchor:
        """Runs a prompt's first `position` tokens, from an earlier checkpoint if given, and keeps
        the state.
        """
        start = before.position if before else 0
        job = Job(
            build_forest([prompt[:position]], start), before, (Mark(0, position),), reads=False
        )
        return self.runner.start([job], Asked.every_vector(0)).checkpoints[0][0]

    def assert_equal(self, got: Tensor, prompts: Sequence[Tokens]) -> None:
        """Every read equals its prompt run alone, within the tolerance."""
        assert len(got) == len(prompts)
        for i, (row, prompt) in enumerate(zip(got, prompts, strict=True)):
            want = self.isolated(prompt)
            error = float((row - want).abs().max() / want.abs().max())
            assert error < TOLERANCE, (
                f"prompt {i} of {len(prompt)} tokens: relative error {error:.1e}"
            )


def prompts_on(trunk: Tokens, both: Both, lengths: Sequence[int]) -> list[Tokens]:
    """A trunk continued by random branches that differ in their first token."""
    branches = [both.tokens(n) for n in lengths]
    for i, branch in enumerate(branches):
        branch[0] = 1400 + i  # reserved for this, so that the trunk is the common prefix exactly
    return [np.concatenate([trunk, b]) for b in branches]
