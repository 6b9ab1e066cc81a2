"""A whole gated delta net mixer between its input and output products: reference in torch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flide_engine.kernels.causal_conv1d_ref import causal_conv1d_ref
from flide_engine.kernels.gated_delta_rule_ref import gated_delta_rule_ref
from flide_engine.kernels.pointwise_ref import gated_rms_norm_ref, l2_norm_ref
from flide_engine.kernels.stream import StreamTensors


@dataclass(frozen=True)
class DeltaNetShape:
    """Heads and widths of a gated delta net layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class DeltaNetWeights:
    """conv [C, 4]; A_log, dt_bias [Hv]; norm [dv], applied as w without 1 +."""

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor


def delta_net_ref(
    projected: Tensor,
    weights: DeltaNetWeights,
    shape: DeltaNetShape,
    recurrent_state: Tensor,
    conv_state: Tensor,
    stream: StreamTensors,
) -> Tensor:
    """Gated delta net of all rows, before the output product: [T, Hv * dv] in projected's dtype.

    projected [T, C + Hv*dv + 2*Hv] = [q | k | v | z | b | a]; recurrent_state [S, Hv, dk, dv]
    float32 and conv_state [S, 3, C]: read where nodes start from, **written** at the stores.
    Nodes run level by level; gates, norms, recurrence in float32.
    Source: transformers 5.17, modeling_qwen3_5.py.
    """
    hk, hv, dk, dv = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim
    u, z, b, a = torch.split(projected, [shape.conv_channels, hv * dv, hv, hv], -1)
    mixed = causal_conv1d_ref(
        u,
        weights.conv,
        conv_state,
        stream.cu_seqlens,
        stream.starts,
        stream.chain_rows,
        stream.store_slots,
        stream.store_rows,
    )
    q, k, v = torch.split(mixed, [hk * dk, hk * dk, hv * dv], -1)
    q = l2_norm_ref(q.reshape(-1, hk, dk)).repeat_interleave(hv // hk, 1) * dk**-0.5
    k = l2_norm_ref(k.reshape(-1, hk, dk)).repeat_interleave(hv // hk, 1)
    v = v.reshape(-1, hv, dv).float()
    g = -weights.A_log.float().exp() * F.softplus(a.float() + weights.dt_bias.float())
    beta = b.float().sigmoid()
    out = torch.zeros_like(v)
    low = 0
    for high in stream.level_ends:
        gated_delta_rule_ref(
            q,
            k,
            v,
            g,
            beta,
            out,
            recurrent_state,
            (low, high),
            stream.cu_seqlens,
            stream.starts,
            stream.initial_slots,
            stream.chain_rows,
            stream.store_nodes,
            stream.store_positions,
            stream.store_slots,
        )
        low = high
    gate = z.reshape(-1, hv, dv)
    return gated_rms_norm_ref(out, gate, weights.norm, shape.eps, projected.dtype).flatten(1)
