"""Architecture name of a checkpoint's config.json -> the class that runs it, imported on demand."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from flide_engine.errors import ConfigError
from flide_engine.kernels import Kernels
from flide_engine.models.base import DecisionModel

REGISTRY = {
    "Qwen3_5ForCausalLM": "flide_engine.models.qwen3_5:Qwen35",
    "Qwen3_5ForConditionalGeneration": "flide_engine.models.qwen3_5:Qwen35",
}


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ConfigError if there is none or it is not JSON."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"no readable config.json in {folder}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config.json in {folder} is not an object")
    return config


def load_model(
    folder: Path, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> DecisionModel:
    """The model in `folder`. Raises ConfigError for an architecture that is not in the registry."""
    config = read_config(folder)
    names = config.get("architectures") or []
    target = next((REGISTRY[name] for name in names if name in REGISTRY), None)
    if target is None:
        raise ConfigError(f"architectures {names} in {folder}; supported: {', '.join(REGISTRY)}")
    module, _, cls = target.partition(":")
    model: DecisionModel = getattr(import_module(module), cls).load(
        folder, config, dtype, device, kernels
    )
    return model
