"""Row-wise pieces of a decoder layer: references in torch, float32 inside, one rounding."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_ref(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] @ weight [M, K]^T -> [T, M] in x's dtype."""
    return F.linear(x, weight)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (offset + weight.float())).to(x.dtype)


def add_rms_norm_ref(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + delta, its rms norm with 1 + weight): the residual stream and the next product's input.

    x, delta [T, H]; weight [H]. The sum is rounded to x's dtype; the norm is of the rounded sum.
    """
    total = x if delta is None else x + delta
    return total, rms_norm_ref(total, weight, eps, 1.0)


def gated_rms_norm_ref(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """rms_norm(x) * weight * silu(gate): norm, then weight, then gate; x, gate [..., d], weight
    [d].
    """
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float() * F.silu(gate.float())).to(dtype)


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [T, 2 * I] = [gate | up] -> [T, I] in its dtype."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def l2_norm_ref(x: Tensor) -> Tensor:
    """x * rsqrt(sum(x^2) + 1e-6) over the last dimension, float32."""
    y = x.float()
    return y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the first rd channels: x [T, heads, hd], cos and sin [T, rd / 2]
    float32.
    """
    half = cos.shape[-1]
    y = x.float()
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1).to(x.dtype)
