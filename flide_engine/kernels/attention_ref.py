"""A whole attention mixer between its input and output products: reference in torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flide_engine.kernels.fork_attention_ref import fork_attention_ref, write_pages_ref
from flide_engine.kernels.pointwise_ref import rms_norm_ref, rope_ref
from flide_engine.kernels.stream import StreamTensors


@dataclass(frozen=True)
class AttentionShape:
    """Heads and widths of an attention layer, and how it normalises and looks back."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    window: int | None = None


def attention_ref(
    q_gate: Tensor,
    k_v: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    keys: Tensor,
    values: Tensor,
    shape: AttentionShape,
    stream: StreamTensors,
) -> Tensor:
    """Gated attention of `rows` (None: of all) over their chains, before the output product.

    q_gate [R, nh * 2 * hd], per head [query | gate]; k_v [T, 2 * nkv * hd] = [keys | values];
    q_norm, k_norm [hd], applied as 1 + w; cos, sin [T, rotary / 2] float32; rows [R] int32, in any
    order; keys, values [P, 64, nkv, hd]: the round's pages are **written**, then read.
    Returns [R, nh * hd] in q_gate's dtype.
    Source: transformers 5.17, modeling_qwen3_5.py.
    """
    hd, nkv, eps = shape.head_dim, shape.kv_heads, shape.eps
    k, v = k_v.view(-1, 2, nkv, hd).unbind(1)  # [T, nkv, hd]
    k = rope_ref(rms_norm_ref(k, k_norm, eps, 1.0), cos, sin)
    if rows is None:
        rows = torch.arange(len(q_gate), dtype=torch.int32, device=q_gate.device)
    else:
        cos, sin = cos[rows], sin[rows]
    query, gate = q_gate.view(len(q_gate), shape.heads, 2, hd).unbind(2)
    query = rope_ref(rms_norm_ref(query, q_norm, eps, 1.0), cos, sin)
    write_pages_ref(k, v, keys, values, stream.write_pages, stream.write_rows)
    # reads come in the order they were asked for, the kernel wants rows ascending
    order = rows.argsort()
    mixed = torch.empty_like(query)
    mixed[order] = fork_attention_ref(
        query[order],
        k,
        v,
        keys,
        values,
        rows[order],
        hd**-0.5,
        shape.window,
        stream.cu_seqlens,
        stream.starts,
        stream.chain_rows,
        stream.page_lists,
        stream.page_list_ends,
        stream.pages,
    )
    return (mixed.float() * gate.float().sigmoid()).to(q_gate.dtype).flatten(1)
