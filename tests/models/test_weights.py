"""Checkpoint folders: layouts, shards, and what is said when something is wrong."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flide_engine.errors import ConfigError, WeightsError
from flide_engine.kernels import REFERENCE
from flide_engine.models.qwen3_5 import Qwen35, Qwen35Config
from flide_engine.models.registry import load_model
from flide_engine.models.weights import weights_hash
from tests.checkpoints import oracle, save_checkpoint, text_tensors, tiny_config


def load(folder: Path) -> Qwen35:
    """The folder's model in float32 on the CPU."""
    model = load_model(folder, torch.float32, torch.device("cpu"), REFERENCE)
    assert isinstance(model, Qwen35)
    return model


def same(a: Qwen35, b: Qwen35) -> None:
    """Both hold the same numbers."""
    assert torch.equal(a.embedding, b.embedding)
    assert torch.equal(a.output_head, b.output_head)
    for x, y in zip(a.layers, b.layers, strict=True):
        assert torch.equal(x.projected, y.projected)
        assert torch.equal(x.out, y.out)
        assert (x.delta_net is None) == (y.delta_net is None)
        if x.delta_net is not None:
            assert all(torch.equal(v, vars(y.delta_net)[k]) for k, v in vars(x.delta_net).items())


def test_wrapper_layout_equals_text_layout(checkpoint: Path, tmp_path: Path) -> None:
    """The multimodal wrapper's keys, its vision and prediction tensors left out, load to the same
    model.
    """
    config = tiny_config()
    tensors = load_file(checkpoint / "model.safetensors")
    wrapped = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    extra = {
        "model.visual.blocks.0.attn.qkv.weight": torch.zeros(3),
        "mtp.fc.weight": torch.zeros(3),
    }
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": {
            k: v for k, v in config.items() if k not in {"architectures", "tie_word_embeddings"}
        },
        "vision_config": {"depth": 1},
    }
    folder = save_checkpoint(tmp_path / "wrapped", outer, wrapped | extra)
    same(load(folder), load(checkpoint))


def test_sharded_equals_single(checkpoint: Path, tmp_path: Path) -> None:
    """Two shards with an index."""
    tensors = load_file(checkpoint / "model.safetensors")
    folder = save_checkpoint(tmp_path / "sharded", tiny_config(), {})
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, folder / file)
    index = {"weight_map": {n: file for file, held in parts.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    same(load(folder), load(checkpoint))
    (folder / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=re.escape("missing shard b.safetensors")):
        load(folder)


def test_missing_unexpected_and_misshapen_tensors_are_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    """All of them, in one error."""
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.linear_attn.A_log"]
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(7)
    folder = save_checkpoint(tmp_path / "broken", tiny_config(), tensors)
    with pytest.raises(WeightsError) as found:
        load(folder)
    text = str(found.value)
    assert "missing tensor layers.1.linear_attn.A_log" in text
    assert "unexpected tensor model.layers.9.mlp.up_proj.weight" in text
    assert "model.norm.weight has shape (7,), expected (64,)" in text


def test_some_tensors_keep_their_dtype(tmp_path: Path) -> None:
    """A_log and the delta net's norm stay float32 in a bfloat16 model; everything else becomes
    bfloat16.
    """
    config = tiny_config()
    folder = save_checkpoint(tmp_path / "f32", config, text_tensors(oracle(config)))
    model = load_model(folder, torch.bfloat16, torch.device("cpu"), REFERENCE)
    assert isinstance(model, Qwen35)
    assert {k: v.dtype for k, v in vars(model.layers[0].delta_net).items()} == {
        "conv": torch.bfloat16,
        "A_log": torch.float32,
        "dt_bias": torch.bfloat16,
        "norm": torch.float32,
    }
    assert model.embedding.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, object], message: str) -> None:
    """A config that asks for something this model does not do is an error, not another model."""
    with pytest.raises(ConfigError, match=message):
        Qwen35Config.of(tiny_config(**changes))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    """The error says what is supported."""
    (tmp_path / "config.json").write_text('{"architectures": ["Llama"]}')
    with pytest.raises(ConfigError, match=r"\['Llama'\].*supported: Qwen3_5"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no readable config.json"):
        load(tmp_path / "absent")


def test_the_hash_changes_with_any_file_that_decides(checkpoint: Path, tmp_path: Path) -> None:
    """Same content, same hash; another tokenizer, another hash."""
    folder = save_checkpoint(
        tmp_path / "copy", tiny_config(), load_file(checkpoint / "model.safetensors")
    )
    before = weights_hash(folder)
    assert before == weights_hash(folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    assert weights_hash(folder) != before
