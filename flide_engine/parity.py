"""Whether Triton's kernels compute here what their references do: a probe of some seconds.

One round of three questions about a state, forked inside a grain; each operation of a layer gets
random inputs, and its output is compared in norm. It finds a driver or compiler that gives wrong
numbers; the gate for changes is `tests/kernels`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flide_engine.device_plan import Capacity, Tables
from flide_engine.executor import to_device
from flide_engine.kernels import REFERENCE, Kernels
from flide_engine.kernels.attention_ref import AttentionShape
from flide_engine.kernels.delta_net_ref import DeltaNetShape, DeltaNetWeights
from flide_engine.layout.stream import Job, lay_out
from flide_engine.layout.tree import build_forest
from flide_engine.readout import Asked

TRUNK, BRANCHES = 130, (1, 5, 66)
PAGES, SLOTS = 16, 16
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest relative error, by type: what the kernels are tested to."""


@dataclass(frozen=True)
class Widths:
    """Of heads: in the recurrent layers, and in attention."""

    recurrent: int = 128
    attention: int = 256


@dataclass(frozen=True)
class Parity:
    """One operation: the norm of the difference over that of the reference, and the most it may
    be.
    """

    kernel: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether it computes what it should."""
        return self.error <= self.limit


def probe(
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    widths: Widths | None = None,
    padded: bool = True,
) -> Iterator[Parity]:
    """Each operation against its reference, one after the other.

    dtype: of weights and activations, float32 or bfloat16. padded: as captured graphs call them,
    which references do not take. Raises what a kernel raises that cannot be compiled or launched.
    """
    made = _Probe(device, dtype, widths or Widths())
    for name in ("add_rms_norm", "swiglu", "label_logits", "attention", "delta_net"):
        run: Callable[[Kernels, bool], list[Tensor]] = getattr(made, name)
        pairs = zip(run(kernels, padded), run(REFERENCE, False), strict=True)
        yield Parity(name, max(_error(*pair) for pair in pairs), LIMITS[dtype])


def _error(got: Tensor, want: Tensor) -> float:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    return error if math.isfinite(error) else math.inf  # NaN gets lost in a maximum


class _Probe:
    """Inputs of every operation, and how it is called with them: `padded`, in a bucket with room to
    spare and with work lists, as captured graphs are; else exactly.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, widths: Widths) -> None:
        self._device, self._dtype, self._widths = device, dtype, widths
        rng = np.random.default_rng(0)
        trunk = rng.integers(0, 50, TRUNK)
        prompts = [
            np.concatenate([trunk, [100 + i], rng.integers(0, 50, n - 1)]).astype(np.int32)
            for i, n in enumerate(BRANCHES)
        ]
        layout = lay_out([Job(build_forest(prompts))])
        pages = np.arange(1, 1 + layout.num_pages, dtype=np.int32)
        slots = np.arange(1, 1 + layout.num_slots, dtype=np.int32)
        self._plan, _ = layout.bind(pages, slots)
        self._rows = self._plan.num_rows
        self._tables = Tables(Capacity.of(self._rows + 11, 16, 64), device)
        assert self._tables.fill(self._plan, Asked.every_vector(len(self._plan.read_rows)))
        self._tables.upload()
        self._exact = to_device(self._plan, device)

    def _random(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        made = torch.randn(*shape, generator=generator) * scale
        return made.to(self._device, dtype or self._dtype)

    def add_rms_norm(self, kernels: Kernels, padded: bool) -> list[Tensor]:
        """A residual stream and its norm."""
        x, delta = self._random(7, 1000), self._random(8, 1000)[:7]
        return list(kernels.add_rms_norm(x, delta, self._random(1000), 1e-6))

    def swiglu(self, kernels: Kernels, padded: bool) -> list[Tensor]:
        """A gated product."""
        return [kernels.swiglu(self._random(7, 3000))]

    def label_logits(self, kernels: Kernels, padded: bool) -> list[Tensor]:
        """Some rows of a head at some vectors."""
        reads, rows = (
            torch.tensor(values, dtype=torch.int32, device=self._device)
            for values in ((0, 3, 3, 1), (5, 0, 8, 2))
        )
        return [kernels.label_logits(self._random(4, 1000), self._random(9, 1000), reads, rows)]

    def attention(self, kernels: Kernels, padded: bool) -> list[Tensor]:
        """All rows, and the pages that are written."""
        shape = AttentionShape(6, 2, self._widths.attention, 1e-6)
        hd, rows = shape.head_dim, self._tables.capacity.rows
        angle = self._random(rows, hd // 8, dtype=torch.float32)
        inputs = [self._random(rows, 12 * hd), self._random(rows, 4 * hd)]
        turns = [angle.cos(), angle.sin()]
        if not padded:
            inputs, turns = ([x[: self._rows] for x in both] for both in (inputs, turns))
        norms = self._random(hd, scale=0.1), self._random(hd + 1, scale=0.1)[:hd]
        keys, values = (self._random(PAGES, 64, 2, hd) for _ in range(2))
        stream = self._tables.stream if padded else self._exact
        out = kernels.attention(*inputs, *norms, *turns, None, keys, values, shape, stream)
        return [out[: self._rows], keys, values]

    def delta_net(self, kernels: Kernels, padded: bool) -> list[Tensor]:
        """All rows, and the states and convolution rows that are stored."""
        width = self._widths.recurrent
        shape = DeltaNetShape(2, 4, width, width, 1e-6)
        channels, heads = shape.conv_channels, shape.value_heads
        weights = DeltaNetWeights(
            conv=self._random(channels, 4, scale=0.5),
            A_log=self._random(heads, dtype=torch.float32) - 1,
            dt_bias=self._random(heads),
            norm=self._random(width, dtype=torch.float32),
        )
        rows = self._tables.capacity.rows if padded else self._rows
        everything = self._tables.capacity.rows
        projected = self._random(everything, channels + heads * width + 2 * heads)[:rows]
        state = self._random(SLOTS, heads, width, width, dtype=torch.float32)
        conv = self._random(SLOTS, 3, channels)
        stream = self._tables.stream if padded else self._exact
        out = kernels.delta_net(projected, weights, shape, state, conv, stream)
        return [out[: self._rows], state, conv]
