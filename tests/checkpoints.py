"""Small random checkpoints and a small tokenizer, made on the spot: what the tests run on."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# Words, digits, single letters and letter pairs, so that label tokens exist.
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TEXT = (
    [f"{a}{b}\n" for a in _LETTERS for b in _LETTERS] * 3
    + [
        f"{word}\n"
        for word in (
            "Yes",
            "No",
            "Question",
            "Options",
            "Reply with the letter of one option only.",
        )
    ]
    * 50
    + ["The order arrived broken. Is a refund asked for? Who handles it? How angry is she?\n"] * 20
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
POISON = "\N{LATIN SMALL LETTER THORN}"
"""A letter whose token the poisoned checkpoint cannot embed: its vector is NaN."""

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


@cache
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer with the word split and the control tokens of the Qwen family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_special_tokens(CONTROLS[:3])
    tokenizer.add_tokens(CONTROLS[3:])
    return str(tokenizer.to_str())


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3.5 text config of four layers with more value heads than key heads."""
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 1536,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "rope_type": "default",
            "mrope_section": [2, 1, 1],
        },
    }
    return config | changes


def oracle(config: dict[str, Any], seed: int = 0) -> Any:
    """transformers' model of that config in float32, everything random, norms included."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    plain = {k: v for k, v in config.items() if k not in {"architectures", "model_type"}}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**plain)).eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(-3.0, 0.5))
            elif name.endswith("dt_bias"):
                p.normal_(0.0, 1.0)
            elif "norm" in name:
                p.add_(torch.randn_like(p) * 0.2)
            else:
                p.normal_(0.0, p.shape[-1] ** -0.5 if p.dim() < 3 else 0.5)
    return model


def save_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint folder with a chat template: config, one safetensors file, tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json with the chat template."""
    (folder / "tokenizer.json").write_text(tokenizer_json())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def text_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The oracle's tensors under the names of a text-only checkpoint, without a tied head."""
    tied = model.config.tie_word_embeddings
    return {
        k: v.detach().clone()
        for k, v in model.state_dict().items()
        if not (tied and k == "lm_head.weight")
    }
