"""`model=nano`: a decision model of 1 M random parameters, for tests and benchmarks of what is
around a model.

Its answers mean nothing, but hang on every token of the state: a wrong or stale state shows. The
tokenizer, control tokens and prompts are the embedded model's. Weights come from SHAKE-256 of a
seed and the tensor's name, so that they are the same bits on every machine and with every library.
"""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from flide_engine.models.qwen3_5 import Qwen35Config
from flide_engine.models.registry import read_config

NAME, SEED = "nano", 1

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "dtype": "float32",
}
"""What differs from the embedded model's config.json."""

# Bounds of what is drawn evenly, by the end of a tensor's name; the others get those of a product
# that keeps the variance. Queries and keys are long, so that attention picks tokens out; gates
# close slowly, so that the recurrent states remember thousands of tokens.
BOUNDS = {
    "layernorm.weight": (-0.2, 0.2),
    "embed_tokens.weight": (-1.7, 1.7),
    "A_log": (-3.0, 0.5),
    "dt_bias": (-8.0, -4.0),
    "linear_attn.norm.weight": (0.8, 1.2),
    "q_norm.weight": (0.5, 1.0),
    "k_norm.weight": (0.5, 1.0),
    "norm.weight": (-0.2, 0.2),
    "conv1d.weight": (-0.9, 0.9),
}
HEAD = {"noul.weight": 0.4, "noul.bias": 0.5}
SCALE = 8.0
"""Factor of cosines in the softmax over options."""


def nano_folder(base: Path, cache: Path | None = None) -> Path:
    """The weights folder, written at first use.

    base: weights folder of the embedded model. cache: where it is kept; none: ~/.cache/flide, or
    a new temporary folder if that cannot be written.
    """
    spec = json.dumps([SEED, SHAPE, BOUNDS, HEAD, SCALE]).encode()
    name = f"nano-{hashlib.blake2b(spec, digest_size=4).hexdigest()}"
    try:
        kept = cache or Path.home() / ".cache" / "flide"
        kept.mkdir(parents=True, exist_ok=True)
        return _write_once(base, kept / name)
    except (OSError, RuntimeError):  # read-only, or no home at all
        return _write_once(base, Path(tempfile.mkdtemp(prefix="flide-")) / name)


def _write_once(base: Path, folder: Path) -> Path:
    """Writes beside the folder and renames, so that nobody reads half of it."""
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        made = Path(partial) / folder.name
        made.mkdir()
        _write(base, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first
                raise
    return folder


def _write(base: Path, folder: Path) -> None:
    config = read_config(base) | SHAPE
    decision = json.loads((base / "decision_config.json").read_text()) | {
        "name": NAME,
        "description": "Random weights, for tests: answers mean nothing.",
    }
    shapes = Qwen35Config.of(config).tensor_shapes()
    tensors = {f"model.{name}": _drawn(name, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hidden = {"noul.weight": (config["hidden_size"],), "noul.bias": (1,)}
    head = {name: _drawn(name, hidden[name], (-b, b)) for name, b in HEAD.items()}
    head["scale"] = np.array([SCALE], np.float32)
    save_file(head, folder / decision["head"], metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "decision_config.json", decision)
    shutil.copyfile(base / "tokenizer.json", folder / "tokenizer.json")


def _drawn(
    name: str, shape: tuple[int, ...], bounds: tuple[float, float] | None = None
) -> NDArray[np.float32]:
    """A tensor of values drawn evenly between its bounds."""
    if bounds is None:
        most = math.sqrt(3 / shape[-1])
        bounds = next((b for end, b in BOUNDS.items() if name.endswith(end)), (-most, most))
    drawn = hashlib.shake_256(f"{NAME} {SEED} {name}".encode()).digest(2 * math.prod(shape))
    unit = (np.frombuffer(drawn, "<u2").astype(np.float64) + 0.5) / 65536
    low, high = bounds
    return (low + (high - low) * unit).astype(np.float32).reshape(shape)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
