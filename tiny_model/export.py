"""A weights folder from a trained model, and a model from a weights folder."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_model.model import DecisionModel
from tiny_model.shape import ModelShape
from tiny_model.tokenizer import CONTROL_IDS, CONTROL_TOKENS

KEPT_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
WEIGHTS, HEAD, CONFIG, DECISION = (
    "model.safetensors",
    "decision_head.safetensors",
    "config.json",
    "decision_config.json",
)


def stored_dtype(name: str) -> torch.dtype:
    """The dtype a tensor has in the checkpoint."""
    return torch.float32 if name.endswith(KEPT_FLOAT32) else torch.bfloat16


def round_to_stored(model: DecisionModel) -> None:
    """Rounds a model's weights in place to what the exported checkpoint will hold."""
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            parameter.copy_(parameter.to(stored_dtype(name)))


def decoder_tensors(model: DecisionModel) -> dict[str, Tensor]:
    """The checkpoint's tensors under transformers' keys."""
    return {
        f"model.{name}": parameter.detach().cpu().to(stored_dtype(name)).contiguous().clone()
        for name, parameter in model.model.named_parameters()
    }


def head_tensors(model: DecisionModel) -> dict[str, Tensor]:
    """The readouts: noul.weight [H], noul.bias [1], scale [1] (positive), float32."""
    scale = model.log_scale.detach().exp().clamp(max=60.0)
    return {
        "noul.weight": model.noul.weight.detach()[0].float().cpu().clone(),
        "noul.bias": model.noul.bias.detach().float().cpu().clone(),
        "scale": scale.float().reshape(1).cpu().clone(),
    }


def decision_config(name: str, version: str, release_date: str, description: str) -> dict[str, Any]:
    """The document that tells serving how to ask this model."""
    return {
        "family": "option_vectors",
        "name": name,
        "version": version,
        "release_date": release_date,
        "description": description,
        "control_tokens": {text: CONTROL_IDS[key] for key, text in CONTROL_TOKENS.items()},
        "head": HEAD,
    }


def export(model: DecisionModel, folder: Path, decision: dict[str, Any] | None = None) -> None:
    """Writes config.json, the weights and the head; `decision` becomes decision_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(decoder_tensors(model), folder / WEIGHTS, metadata={"format": "pt"})
    save_file(head_tensors(model), folder / HEAD, metadata={"format": "pt"})
    _write_json(folder / CONFIG, model.model.shape.config())
    if decision is not None:
        _write_json(folder / DECISION, decision)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> DecisionModel:
    """A float32 model from a weights folder."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "linear_heads": "linear_num_key_heads",
        "head_dim": "head_dim",
    }
    shape = ModelShape(**{ours: config[theirs] for ours, theirs in names.items()})
    model = DecisionModel(shape)
    tensors = load_file(folder / WEIGHTS)
    model.model.load_state_dict(
        {name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()}
    )
    head = load_file(folder / HEAD)
    with torch.no_grad():
        model.noul.weight.copy_(head["noul.weight"][None])
        model.noul.bias.copy_(head["noul.bias"])
        model.log_scale.copy_(head["scale"][0].log())
    return model


def save_checkpoint(model: DecisionModel, path: Path, extra: dict[str, Any]) -> None:
    """A training checkpoint: shape, weights and whatever a resumed run needs."""
    saved = {"shape": asdict(model.model.shape), "model": model.state_dict(), **extra}
    partial = path.with_suffix(".partial")
    torch.save(saved, partial)
    partial.replace(path)


def model_from_checkpoint(path: Path, averaged: bool) -> DecisionModel:
    """The model of a training checkpoint; `averaged` takes the moving average of its weights."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model = DecisionModel(ModelShape(**saved["shape"]))
    model.load_state_dict(saved["average" if averaged else "model"])
    return model
