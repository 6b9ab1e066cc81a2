"""transformers in float32, every prompt by itself and uncached: what all engines are held to."""

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.requests import request
from benchmarks.shapes import LABELS


class Transformers:
    """One model."""

    def __init__(self, weights: str, texts: str | None) -> None:
        # transformers takes fla's delta rule where it finds it, which rounds its operands
        sys.modules.update(dict.fromkeys(("fla", "causal_conv1d")))  # type: ignore[arg-type]
        from transformers import Qwen3_5ForCausalLM

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self._texts = Path(texts) if texts else None
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = Qwen3_5ForCausalLM.from_pretrained(weights, dtype=torch.float32)
        self._model = model.eval().to(self._device)
        labels = torch.from_numpy(LABELS).long().to(self._device)
        self._labels = model.get_output_embeddings().weight[labels]

    @torch.inference_mode()
    def logits(self, work: str, seeds: list[int], most: int | None = None) -> dict[str, Any]:
        """By request and question, the logits of LABELS. most: questions of a request."""
        found = []
        for seed in seeds:
            asked = request(work, seed, self._texts, most)
            rows = []
            for prompt in asked.prompts:
                tokens = torch.from_numpy(prompt).long().to(self._device)[None]
                hidden = self._model.model(tokens, use_cache=False).last_hidden_state[0, -1]
                rows.append((self._labels @ hidden).tolist())
            found.append(rows)
        return {"logits": found}


def start(shape: str, mode: str, weights: str, texts: str | None = None) -> Transformers:
    """See `benchmarks.engines`; shape and mode are the weights' and float32."""
    return Transformers(weights, texts)
