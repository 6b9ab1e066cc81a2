"""Model shapes and workloads that the benchmarks share."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}


def qwen_config(
    hidden: int, inner: int, layers: int, heads: int, kv: int, value: int, tied: bool = True
) -> dict[str, Any]:
    """A Qwen3.5 text config; head widths, key heads and vocabulary are those of the family."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": tied,
        "rope_parameters": ROPE,
    }


SHAPES = {
    "0.8B": qwen_config(1024, 3584, 24, 8, 2, 16),
    "2B": qwen_config(2048, 6144, 24, 8, 2, 16),
    "4B": qwen_config(2560, 9216, 32, 16, 4, 32),
    "9B": qwen_config(4096, 12288, 32, 16, 4, 32, tied=False),
    # small enough for a CPU: what the benchmarks themselves are tested with
    "test": qwen_config(64, 96, 4, 4, 2, 4)
    | {
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]},
    },
}

# state tokens, questions, tokens of a question
WORKLOADS = {
    "race1": (420, 1, 90),
    "race_all": (420, 4, 90),
    "multirc": (400, 26, 60),
    "di47": (1500, 47, 70),
    "quality1": (6200, 1, 110),
    "quality_all": (6200, 18, 110),
    "short36x9": (40, 36, 9),
    "short100x4": (100, 100, 4),
    "jev2x255": (300, 510, 12),
    "long24k": (24000, 8, 90),
}

LABELS = np.arange(240_000, 240_038, dtype=np.int32)
"""Head rows that every question reads; no prompt holds them as tokens."""


def tokens_of(work: str) -> int:
    """Tokens of one request: the state once, each question once."""
    state, questions, tokens = WORKLOADS[work]
    return state + questions * tokens


def prompts(work: str, vocab: int = 200_000, seed: int = 0) -> list[NDArray[np.int32]]:
    """Random token ids of one request: a state, continued by questions that differ at once."""
    state, questions, tokens = WORKLOADS[work]
    rng = np.random.default_rng(seed)
    trunk = rng.integers(1000, vocab, state)
    firsts = rng.permutation(1000)[:questions]
    return [
        np.concatenate([trunk, [first], rng.integers(1000, vocab, tokens - 1)]).astype(np.int32)
        for first in firsts
    ]
