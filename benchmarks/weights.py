"""Random weights of a shape in a checkpoint folder, so that every engine reads the same ones."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.shapes import LABELS, SHAPES
from flide_engine.models.qwen3_5 import KEEP_DTYPE, Qwen35Config
from flide_engine.resolve import EMBEDDED

LOGIT_STD = 2.5
"""Standard deviation of a question's logits: with 2 to 38 options the top probability then covers
0.3 to 0.99, so that thresholds anywhere in it can be crossed by an error."""

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<|read|>"
VERSION = 2
"""Raised when what is written changes, so that an old folder is not taken for a new one."""


def random_weights(config: Qwen35Config, device: torch.device) -> dict[str, Tensor]:
    """Weights whose activations keep their size, by our names.

    bfloat16, but for those whose stored dtype is kept: float32 with values that bfloat16 holds too,
    so that an engine that rounds them computes the same function.
    """
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        scale = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
        value = torch.randn(shape, generator=generator, device=device) * scale
        if name.endswith("linear_attn.norm.weight"):
            value += 1.0
        elif name.endswith("A_log"):
            value = torch.rand(shape, generator=generator, device=device) * 3 - 2
        elif name.endswith("conv1d.weight"):
            value = torch.randn(shape, generator=generator, device=device) * 0.5
        elif name == "embed_tokens.weight":
            value *= shape[-1] ** 0.5
        rounded = value.to(torch.bfloat16)
        weights[name] = rounded.float() if KEEP_DTYPE.search(name) else rounded
    head = weights["embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    labels = torch.from_numpy(LABELS).long().to(device)
    rows = torch.randn(len(labels), config.hidden_size, generator=generator, device=device)
    head[labels] = (rows * (LOGIT_STD * config.hidden_size**-0.5)).to(head.dtype)
    return weights


def tokenizer() -> dict[str, Any]:
    """The embedded model's tokenizer without its space before a text: labels are one token then."""
    found: dict[str, Any] = json.loads((EMBEDDED / "tokenizer.json").read_text())
    normalizers = found["normalizer"]["normalizers"]
    found["normalizer"]["normalizers"] = [n for n in normalizers if n["type"] != "Prepend"]
    return found


def weights_folder(shape: str, where: Path | None = None) -> Path:
    """A folder with the shape's weights, config, tokenizer and chat template; made once.

    where: the folder that holds those of all shapes; none: one among the temporary files.
    """
    where = where or Path(tempfile.gettempdir()) / "flide-benchmarks"
    folder = where / f"{shape}-{VERSION}"
    return folder if folder.is_dir() else write_folder(SHAPES[shape], folder)


def write_folder(shape: dict[str, Any], folder: Path) -> Path:
    """A new folder with random weights of a config, and with what else a checkpoint has."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = Qwen35Config.of(shape)
    tensors = {
        name if name == "lm_head.weight" else f"model.{name}": tensor
        for name, tensor in random_weights(config, device).items()
    }
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text(json.dumps(shape, indent=1))
    (made / "tokenizer.json").write_text(json.dumps(tokenizer()))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    made.rename(folder)
    if device.type == "cuda":
        del tensors
        torch.cuda.empty_cache()
    return folder
