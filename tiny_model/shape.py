"""The sizes of a decision model and the `config.json` that says them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen3.5 text decoder; delta-rule and attention heads are equally wide."""

    vocab_size: int = 8192
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    linear_heads: int = 4
    head_dim: int = 64
    conv_width: int = 4
    eps: float = 1e-6
    rope_theta: float = 1e7
    rotary_factor: float = 0.25
    full_every: int = 4

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that turn with the position."""
        return int(self.head_dim * self.rotary_factor)

    def is_full(self, index: int) -> bool:
        """Whether layer `index` is full attention; the last layer always is."""
        return index % self.full_every == self.full_every - 1

    def config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`."""
        kinds = [
            "full_attention" if self.is_full(i) else "linear_attention"
            for i in range(self.num_layers)
        ]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": kinds,
            "full_attention_interval": self.full_every,
            "linear_conv_kernel_dim": self.conv_width,
            "linear_key_head_dim": self.head_dim,
            "linear_value_head_dim": self.head_dim,
            "linear_num_key_heads": self.linear_heads,
            "linear_num_value_heads": self.linear_heads,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 65536,
            "rms_norm_eps": self.eps,
            "partial_rotary_factor": self.rotary_factor,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_factor,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_cache": True,
        }
