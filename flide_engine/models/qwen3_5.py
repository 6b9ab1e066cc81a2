"""Qwen3.5 text decoder: gated delta net layers, with full attention every few layers.

Source of the equations: transformers 5.17, modeling_qwen3_5.py, read and run against.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from flide_engine.errors import ConfigError
from flide_engine.kernels import Kernels
from flide_engine.kernels.attention_ref import AttentionShape
from flide_engine.kernels.delta_net_ref import DeltaNetShape, DeltaNetWeights
from flide_engine.kernels.stream import StreamTensors
from flide_engine.layout.state_shape import StateShape
from flide_engine.models.base import StateTensors
from flide_engine.models.weights import load_tensors

LINEAR, FULL = "linear_attention", "full_attention"
KEEP_DTYPE = re.compile(r"\.(A_log|linear_attn\.norm\.weight)$")


@dataclass(frozen=True)
class Qwen35Config:
    """The text part of a Qwen3.5 config.json, under the checkpoint's own names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] = ()
    rope_theta: float = 10_000_000.0
    partial_rotary_factor: float = 0.25
    hidden_act: str = "silu"
    attention_bias: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """From a config.json, of a text checkpoint or of the multimodal wrapper.

        Raises ConfigError if a field is missing or says something this file does not compute.
        """
        text = config.get("text_config", config)
        rope = text.get("rope_parameters") or {}
        known = {name: text[name] for name in cls.__dataclass_fields__ if name in text}
        known |= {k: rope[k] for k in ("rope_theta", "partial_rotary_factor") if k in rope}
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
        if tied is not None:
            known["tie_word_embeddings"] = tied
        interval = text.get("full_attention_interval", 4)
        layers = int(text.get("num_hidden_layers", 0))
        kinds = text.get("layer_types") or [
            FULL if i % interval == interval - 1 else LINEAR for i in range(layers)
        ]
        try:
            made = cls(**{**known, "layer_types": tuple(kinds)})
        except TypeError as error:
            raise ConfigError(f"config.json is not a Qwen3.5 text config: {error}") from error
        made._check(rope.get("rope_type", "default"))
        return made

    def _check(self, rope_type: str) -> None:
        wrong = {
            "rope_type": rope_type if rope_type != "default" else None,
            "hidden_act": self.hidden_act if self.hidden_act != "silu" else None,
            "attention_bias": self.attention_bias or None,
            "linear_conv_kernel_dim": self.linear_conv_kernel_dim
            if self.linear_conv_kernel_dim != 4
            else None,
            "layer_types": set(self.layer_types) - {LINEAR, FULL} or None,
        }
        found = {name: value for name, value in wrong.items() if value is not None}
        if found:
            raise ConfigError(f"unsupported in config.json: {found}")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"{len(self.layer_types)} layer_types for {self.num_hidden_layers} layers"
            )

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return self.delta_net_shape().conv_channels

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    def state_shape(self) -> StateShape:
        """Pages for the attention layers, slots for the recurrent ones."""
        return StateShape(
            attention_layers=self.layer_types.count(FULL),
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            recurrent_layers=self.layer_types.count(LINEAR),
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_channels=self.conv_channels,
            conv_rows=self.linear_conv_kernel_dim - 1,
        )

    def attention_shape(self) -> AttentionShape:
        """Heads of the full-attention layers."""
        return AttentionShape(
            self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.rms_norm_eps
        )

    def delta_net_shape(self) -> DeltaNetShape:
        """Heads of the recurrent layers."""
        return DeltaNetShape(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.rms_norm_eps,
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint by its text-only name without `model.`, with its shape."""
        h, i, hd = self.hidden_size, self.intermediate_size, self.head_dim
        nh, nkv, hv = (
            self.num_attention_heads,
            self.num_key_value_heads,
            self.linear_num_value_heads,
        )
        value = hv * self.linear_value_head_dim
        mixers: dict[str, dict[str, tuple[int, ...]]] = {
            LINEAR: {
                "linear_attn.in_proj_qkv.weight": (self.conv_channels, h),
                "linear_attn.in_proj_z.weight": (value, h),
                "linear_attn.in_proj_b.weight": (hv, h),
                "linear_attn.in_proj_a.weight": (hv, h),
                "linear_attn.conv1d.weight": (self.conv_channels, 1, self.linear_conv_kernel_dim),
                "linear_attn.A_log": (hv,),
                "linear_attn.dt_bias": (hv,),
                "linear_attn.norm.weight": (self.linear_value_head_dim,),
                "linear_attn.out_proj.weight": (h, value),
            },
            FULL: {
                "self_attn.q_proj.weight": (2 * nh * hd, h),
                "self_attn.k_proj.weight": (nkv * hd, h),
                "self_attn.v_proj.weight": (nkv * hd, h),
                "self_attn.o_proj.weight": (h, nh * hd),
                "self_attn.q_norm.weight": (hd,),
                "self_attn.k_norm.weight": (hd,),
            },
        }
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            "mlp.gate_proj.weight": (i, h),
            "mlp.up_proj.weight": (i, h),
            "mlp.down_proj.weight": (h, i),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab_size, h),
            "norm.weight": (h,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, h)
        for n, kind in enumerate(self.layer_types):
            shapes |= {
                f"layers.{n}.{name}": shape for name, shape in (layer | mixers[kind]).items()
            }
        return shapes


def rename(tied: bool, name: str) -> str | None:
    """A checkpoint's tensor name -> ours; None for vision, multi-token prediction and a tied
    head.
    """
    if name.startswith(("model.visual.", "visual.", "mtp.")) or (tied and name == "lm_head.weight"):
        return None
    return re.sub(r"^model\.(language_model\.)?", "", name)


@dataclass
class _Layer:
    """Weights of one layer; products over one input are one matrix.

    index: among the layers of its kind, which pages or slots it uses.
    projected: LINEAR [qkv | z | b | a]; FULL [q and gate by head | k | v].
    """

    kind: str
    index: int
    norm_in: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor
    projected: Tensor
    out: Tensor
    delta_net: DeltaNetWeights | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class Qwen35:
    """One Qwen3.5 text decoder on one device."""

    def __init__(self, config: Qwen35Config, weights: dict[str, Tensor], kernels: Kernels) -> None:
        self.config, self.ops = config, kernels
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_positions = config.max_position_embeddings
        self.state_shape = config.state_shape()
        self.attention, self.delta_net = config.attention_shape(), config.delta_net_shape()
        self.query_heads = config.num_attention_heads // config.num_key_value_heads
        self.embedding = weights["embed_tokens.weight"]
        self.output_head = (
            self.embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        )
        self.final_norm = weights["norm.weight"]
        seen = {LINEAR: 0, FULL: 0}
        self.layers = []
        for n, kind in enumerate(config.layer_types):
            self.layers.append(_gather_layer(kind, seen[kind], n, weights))
            seen[kind] += 1
        half = config.rotary_dim // 2
        exponents = torch.arange(0, 2 * half, 2, dtype=torch.float32) / config.rotary_dim
        # on the CPU: a GPU's pow can differ in the last bit
        self.inv_freq = (1.0 / config.rope_theta**exponents).to(self.embedding.device)

    @classmethod
    def load(
        cls,
        folder: Path,
        config: dict[str, Any],
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> Self:
        """From a checkpoint folder. Raises ConfigError or WeightsError."""
        made = Qwen35Config.of(config)
        tied = made.tie_word_embeddings
        weights = load_tensors(
            folder, made.tensor_shapes(), lambda name: rename(tied, name), KEEP_DTYPE, dtype, device
        )
        return cls(made, weights, kernels)

    @torch.inference_mode()
    def forward(self, stream: StreamTensors, state: StateTensors) -> Tensor:
        """See DecisionModel.forward."""
        ops, eps = self.ops, self.config.rms_norm_eps
        x, delta = self.embedding[stream.tokens], None  # [T, H]
        angles = stream.positions[:, None].float() * self.inv_freq
        rotation = angles.cos(), angles.sin()  # [T, rotary_dim / 2] float32
        last = len(self.layers) - 1
        for n, layer in enumerate(self.layers):
            x, h = ops.add_rms_norm(x, delta, layer.norm_in, eps)
            # nobody reads the last layer's other rows: only what they leave behind is needed
            rows = stream.read_rows if n == last else None
            if layer.kind == LINEAR:
                mixed = self._delta_net(layer, h, stream, state)
                mixed = mixed if rows is None else mixed[rows]
            else:
                mixed = self._attention(layer, h, rotation, rows, stream, state)
            x = x if rows is None else x[rows]
            x, h = ops.add_rms_norm(x, ops.linear(mixed, layer.out), layer.norm_mlp, eps)
            delta = ops.linear(ops.swiglu(ops.linear(h, layer.gate_up)), layer.down)
        return ops.add_rms_norm(x, delta, self.final_norm, eps)[1]

    @torch.inference_mode()
    def label_logits(self, hidden: Tensor, reads: Tensor, rows: Tensor) -> Tensor:
        """See DecisionModel.label_logits."""
        return self.ops.label_logits(hidden, self.output_head, reads, rows)

    def _attention(
        self,
        layer: _Layer,
        h: Tensor,
        rotation: tuple[Tensor, Tensor],
        rows: Tensor | None,
        stream: StreamTensors,
        state: StateTensors,
    ) -> Tensor:
        """Gated full attention of the given rows (None: all), before the output product."""
        queries = 2 * self.attention.heads * self.attention.head_dim
        if rows is None:
            projected = self.ops.linear(h, layer.projected)
            q_gate, k_v = projected[:, :queries], projected[:, queries:]
        else:
            q_gate = self.ops.linear(h[rows], layer.projected[:queries])
            k_v = self.ops.linear(h, layer.projected[queries:])
        return self.ops.attention(
            q_gate,
            k_v,
            layer.q_norm,
            layer.k_norm,
            *rotation,
            rows,
            state.keys[layer.index],
            state.values[layer.index],
            self.attention,
            stream,
        )

    def _delta_net(
        self, layer: _Layer, h: Tensor, stream: StreamTensors, state: StateTensors
    ) -> Tensor:
        """Gated delta net of all rows, before the output product."""
        return self.ops.delta_net(
            self.ops.linear(h, layer.projected),
            layer.delta_net,
            self.delta_net,
            state.recurrent_state[layer.index],
            state.conv_state[layer.index],
            stream,
        )


def _gather_layer(kind: str, index: int, n: int, weights: dict[str, Tensor]) -> _Layer:
    """One layer's weights, taken out of `weights` so that fused copies do not double the memory."""

    def take(*names: str) -> Tensor:
        parts = [weights.pop(f"layers.{n}.{name}") for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    common: dict[str, Any] = {
        "norm_in": take("input_layernorm.weight"),
        "norm_mlp": take("post_attention_layernorm.weight"),
        "gate_up": take("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": take("mlp.down_proj.weight"),
    }
    if kind == FULL:
        inputs = [f"self_attn.{name}_proj.weight" for name in ("q", "k", "v")]
        return _Layer(
            kind,
            index,
            projected=take(*inputs),
            out=take("self_attn.o_proj.weight"),
            q_norm=take("self_attn.q_norm.weight"),
            k_norm=take("self_attn.k_norm.weight"),
            **common,
        )
    inputs = [f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")]
    return _Layer(
        kind,
        index,
        projected=take(*inputs),
        out=take("linear_attn.out_proj.weight"),
        delta_net=DeltaNetWeights(
            conv=take("linear_attn.conv1d.weight")[:, 0],
            A_log=take("linear_attn.A_log"),
            dt_bias=take("linear_attn.dt_bias"),
            norm=take("linear_attn.norm.weight"),
        ),
        **common,
    )
