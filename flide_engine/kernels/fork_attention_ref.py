"""Causal attention over a forked stream: reference in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 1024
"""Query rows of one product: bounds the mask's memory and changes nothing else."""


def write_pages_ref(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, write_pages: Tensor, write_rows: Tensor
) -> None:
    """Keys and values of whole grains into their pages.

    k, v [T, nkv, hd]; keys, values [P, 64, nkv, hd], written at write_pages [W] from write_rows
    [W, 64].
    """
    if len(write_pages):
        keys[write_pages.long()] = k[write_rows.long()]
        values[write_pages.long()] = v[write_rows.long()]


def fork_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    query_rows: Tensor,
    scale: float,
    window: int | None,
    cu_seqlens: Tensor,
    starts: Tensor,
    chain_rows: Tensor,
    page_lists: Tensor,
    page_list_ends: Tensor,
    pages: Tensor,
) -> Tensor:
    """Attention of `query_rows` over their chains: pages of [0, F), rows of F .. start-1, then own
    rows.

    q [R, nh, hd]: queries of the rows query_rows [R], ascending; k, v [T, nkv, hd] of all rows;
    keys, values [P, 64, nkv, hd]: pages, those of this round already written. A row sees its chain
    up to itself, and with a `window` only the last `window` positions, itself included. Query head
    h reads key head h // (nh / nkv). The rest: see RoundPlan. Returns [R, nh, hd] in q's dtype,
    softmax in float32.
    """
    out = torch.zeros_like(q)
    bounds, first = cu_seqlens.tolist(), starts.tolist()
    ends = page_list_ends.tolist()
    # rows of node n among the queries: cuts[n] .. cuts[n+1]
    cuts = torch.searchsorted(query_rows.contiguous(), cu_seqlens.to(query_rows.dtype)).tolist()
    for n, start in enumerate(first):
        if cuts[n] == cuts[n + 1]:
            continue
        which = int(page_lists[n])
        held = pages[ends[which - 1] if which else 0 : ends[which]].long()
        tail = chain_rows[n, 3 : 3 + start % 64].long()
        own = slice(bounds[n], bounds[n + 1])
        k_chain = torch.cat([keys[held].flatten(0, 1), k[tail], k[own]])  # [start + own, nkv, hd]
        v_chain = torch.cat([values[held].flatten(0, 1), v[tail], v[own]])
        time = query_rows[cuts[n] : cuts[n + 1]].long() - bounds[n] + start
        out[cuts[n] : cuts[n + 1]] = _attend(
            q[cuts[n] : cuts[n + 1]], k_chain, v_chain, time, scale, window
        )
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, time: Tensor, scale: float, window: int | None
) -> Tensor:
    """Queries at chain positions `time` [R] over the keys of positions 0 .. L-1."""
    shared = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, 1).transpose(0, 1) for t in (k, v))  # [nh, L, hd]
    parts = []
    for a in range(0, len(time), QUERY_BLOCK):
        t = time[a : a + QUERY_BLOCK, None]
        upto = int(t.max()) + 1
        age = t - torch.arange(upto, device=q.device)
        seen = (age >= 0) & (age < window) if window else age >= 0
        rows = q[a : a + QUERY_BLOCK].transpose(0, 1)[None]  # four dimensions: torch's fused form
        parts.append(
            F.scaled_dot_product_attention(
                rows, k[None, :, :upto], v[None, :, :upto], attn_mask=seen, scale=scale
            )[0]
        )
    return torch.cat(parts, 1).transpose(0, 1)
