"""The decision model in training form: the Qwen3.5 text architecture with the readouts of option
vectors.

Module names follow the checkpoint's keys, so a state dict is the checkpoint. Sequences are
padded on the right: everything is causal, so what stands after a row cannot change it.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_model.delta import gated_delta_rule
from tiny_model.shape import ModelShape
from tiny_model.tokenizer import CONTROL_IDS


class ZeroCentredNorm(nn.Module):
    """RMS norm whose stored weight w stands for 1 + w; float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape, float32."""
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


class OutputNorm(nn.Module):
    """RMS norm of a value head with a plain weight (no 1 +)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] float32 -> the same shape."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class DepthwiseConv(nn.Module):
    """Holds `weight` [C, 1, W] under the checkpoint's name; tap W-1 meets the current token."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-0.5, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, L, C] -> [B, L, C], causal, zeros before the start."""
        width, length = self.weight.shape[-1], x.shape[1]
        padded = F.pad(x.float(), (0, 0, width - 1, 0))
        taps = self.weight[:, 0].unbind(-1)
        out = padded[:, :length] * taps[0]
        for tap in range(1, width):
            out = out + padded[:, tap : tap + length] * taps[tap]
        return out


class GatedDeltaNet(nn.Module):
    """The linear-attention mixer of three layers in four."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.dim = shape.linear_heads, shape.head_dim
        inner = self.heads * self.dim
        self.in_proj_qkv = nn.Linear(shape.hidden_size, 3 * inner, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, inner, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, self.heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, self.heads, bias=False)
        self.conv1d = DepthwiseConv(3 * inner, shape.conv_width)
        step = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1.0, 16.0).log())
        self.norm = OutputNorm(self.dim, shape.eps)
        self.out_proj = nn.Linear(inner, shape.hidden_size, bias=False)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x [B, L, hidden] -> q, k, v, z [B, L, H, D], g, beta [B, L, H], all but z in float32."""
        mixed = F.silu(self.conv1d(self.in_proj_qkv(x)))
        q, k, v = mixed.view(*mixed.shape[:-1], 3, self.heads, self.dim).unbind(2)
        q, k = _unit(q) * self.dim**-0.5, _unit(k)
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        z = self.in_proj_z(x).unflatten(-1, (self.heads, self.dim))
        return q, k, v, z, g, beta

    def finish(self, out: Tensor, z: Tensor) -> Tensor:
        """out [B, L, H, D] float32 and the gate z -> [B, L, hidden]."""
        gated = self.norm(out) * F.silu(z.float())
        return cast(Tensor, self.out_proj(gated.flatten(-2)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, hidden] -> [B, L, hidden]; the rotary tables are not used here."""
        q, k, v, z, g, beta = self.prepare(x)
        return self.finish(gated_delta_rule(q, k, v, g, beta), z)


class GatedAttention(nn.Module):
    """Full attention with an output gate, query and key norms and partial rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, shape.hidden_size, bias=False)
        self.q_norm = ZeroCentredNorm(self.dim, shape.eps)
        self.k_norm = ZeroCentredNorm(self.dim, shape.eps)

    def prepare(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, L, hidden] -> q [B, H, L, D], k and v [B, Hkv, L, D], gate [B, L, H D]."""
        both: Tensor = self.q_proj(x)
        q, gate = both.view(*both.shape[:-1], self.heads, 2 * self.dim).chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        q = _rotate(self.q_norm(q), cos, sin).to(v.dtype)
        k = _rotate(self.k_norm(k), cos, sin).to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(-2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, hidden], cos and sin [L, rotary] -> [B, L, hidden]."""
        q, k, v, gate = self.prepare(x, cos, sin)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate)
        return cast(Tensor, self.o_proj(out))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the first channels; x [B, L, H, D], cos and sin [L, rotary]."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    left, right = turned.chunk(2, -1)
    swapped = torch.cat((-right, left), -1)
    return torch.cat((turned * cos[:, None] + swapped * sin[:, None], rest), -1)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, hidden] -> [B, L, hidden]."""
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)), dropout on both."""

    def __init__(self, shape: ModelShape, index: int, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = ZeroCentredNorm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = ZeroCentredNorm(shape.hidden_size, shape.eps)
        self.mlp = Mlp(shape)
        self.dropout = dropout
        if shape.is_full(index):
            self.self_attn = GatedAttention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.is_full = shape.is_full(index)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, hidden] float32, the residual stream."""
        mixer = self.self_attn if self.is_full else self.linear_attn
        mixed = mixer(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(mixed, self.dropout, self.training)
        added = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(added, self.dropout, self.training)


class Decoder(nn.Module):
    """Embedding, layers, final norm; its state dict, prefixed `model.`, is the checkpoint."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, index, dropout) for index in range(shape.num_layers)
        )
        self.norm = ZeroCentredNorm(shape.hidden_size, shape.eps)
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        with (
            torch.no_grad()
        ):  # so that what `<|read|>` gathers outweighs its own embedding from the start
            self.embed_tokens.weight[: len(CONTROL_IDS)] *= 0.1
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                if name.endswith(("out_proj", "o_proj", "down_proj")):
                    std *= (2 * self.shape.num_layers) ** -0.5
                nn.init.normal_(module.weight, std=std)

    def rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [length, rotary] float32; the frequencies are computed on the CPU."""
        width = self.shape.rotary_dim
        inverse = 1.0 / self.shape.rope_theta ** (torch.arange(0, width, 2).float() / width)
        angles = torch.arange(length, device=device).float()[:, None] * inverse.to(device)
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, L] -> final-norm hidden states [B, L, hidden] float32."""
        x = self.embed_tokens(ids).float()
        x = F.dropout(x, self.dropout, self.training)
        cos, sin = self.rotary(ids.shape[1], ids.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.norm(x))


class DecisionModel(nn.Module):
    """A decoder with the two readouts: a scaled cosine to option vectors, a scalar head for
    yes/no.
    """

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Decoder(shape, dropout)
        self.noul = nn.Linear(shape.hidden_size, 1)
        nn.init.normal_(self.noul.weight, std=0.02)
        nn.init.zeros_(self.noul.bias)
        self.log_scale = nn.Parameter(torch.tensor(math.log(12.0)))

    def read(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, L], rows [B] (where `<|read|>` stands) -> h [B, hidden] and all hidden states."""
        hidden = self.model(ids)
        return hidden[torch.arange(len(rows), device=rows.device), rows], hidden

    def choice_logits(self, h: Tensor, vectors: Tensor) -> Tensor:
        """h [B, hidden], vectors [O, hidden] -> s * cos [B, O], float32."""
        cosine = F.normalize(h.float(), dim=-1) @ F.normalize(vectors.float(), dim=-1).T
        return self.log_scale.exp().clamp(max=60.0) * cosine

    def noul_logits(self, h: Tensor) -> Tensor:
        """h [B, hidden] -> logits of yes [B], float32."""
        return F.linear(h.float(), self.noul.weight.float(), self.noul.bias.float())[:, 0]
