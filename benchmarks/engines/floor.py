"""The matrix products of a Qwen3.5 decoder alone, replayed as one CUDA graph: a yardstick."""

import statistics
from typing import Any

import torch

from benchmarks.engines.clock import captured, event_ms
from benchmarks.shapes import SHAPES, tokens_of


def linears(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(inputs, outputs) of every linear layer, in order."""
    h, inner, hd = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    nh, kv = config["num_attention_heads"], config["num_key_value_heads"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    hv = config["linear_num_value_heads"]
    value = hv * config["linear_value_head_dim"]
    mixers = {
        True: [(h, 2 * nh * hd + 2 * kv * hd), (nh * hd, h)],
        False: [(h, 2 * key + 2 * value + 2 * hv), (value, h)],
    }
    return [
        pair
        for layer in range(config["num_hidden_layers"])
        for pair in (*mixers[layer % 4 == 3], (h, 2 * inner), (inner, h))
    ]


class Floor:
    """One shape's products at the lengths that are asked for."""

    def __init__(self, shape: str) -> None:
        pairs = linears(SHAPES[shape])
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._weights = [torch.randn(o, i, device=self._device).bfloat16() * 0.02 for i, o in pairs]

    def replay(self, work: str, times: int) -> dict[str, Any]:
        """Milliseconds of all products over the workload's tokens."""
        rows = tokens_of(work)
        inputs = {
            w.shape[1]: torch.randn(rows, w.shape[1], device=self._device).bfloat16()
            for w in self._weights
        }

        def run() -> None:
            for weight in self._weights:
                torch.mm(inputs[weight.shape[1]], weight.t())

        replay = captured(run)
        return {"ms": statistics.median(event_ms(replay) for _ in range(times))}


def start(shape: str, mode: str) -> Floor:
    """See `benchmarks.engines`; there is one mode."""
    return Floor(shape)
