"""Depthwise causal convolution over a forked stream: reference in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_rows(stream: Tensor, slots: Tensor, codes: Tensor) -> Tensor:
    """Rows by code: >= 0 a stream row, -1 zeros, <= -2 row (-2 - code) of the slots taken as one
    list.

    stream [T, C]; slots [S, R, C]; codes [...] integer. Returns [..., C] in the stream's dtype.
    """
    rows = stream[codes.clamp(min=0).long()]
    at = (-2 - codes).clamp(min=0).long()
    past = slots[at // slots.shape[1], at % slots.shape[1]]
    keep = codes[..., None]
    return torch.where(keep >= 0, rows, torch.where(keep < -1, past, torch.zeros_like(rows)))


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    chain_rows: Tensor,
    store_slots: Tensor,
    store_rows: Tensor,
) -> Tensor:
    """silu(depthwise causal convolution), each node continued from its ancestors or from a slot.

    x [T, C]; weight [C, 4], tap 3 meets the current token; conv_state [S, 3, C]: slot rows are read
    where `chain_rows` names them and **written** at `store_slots` with the raw rows `store_rows`;
    cu_seqlens [N+1], starts [N], chain_rows [N, 66], store_slots [M], store_rows [M, 3]: see
    RoundPlan.
    Rows past cu_seqlens[-1] are padding; their result is unspecified but finite.
    Returns [T, C] in x's dtype; sums and silu in float32.
    Source: transformers 5.17, modeling_qwen3_5.py.
    """
    taps = weight.shape[1]
    used = int(cu_seqlens[-1])
    rows, w = x.float(), weight.float()
    total = torch.zeros_like(rows)
    for lag in reversed(range(taps)):
        total[lag:] += rows[: len(rows) - lag] * w[:, taps - 1 - lag]
    # the first rows of a node do not follow the row before them, but what chain_rows says
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    node = torch.repeat_interleave(torch.arange(len(starts), device=x.device), lengths)
    offset = torch.arange(used, device=x.device) - cu_seqlens[:-1].long()[node]
    head = (offset < taps - 1).nonzero()[:, 0]
    node, offset = node[head], offset[head]
    column = starts.long()[node] % 64 + (taps - 1) + offset
    first = torch.zeros(len(head), x.shape[1], dtype=torch.float32, device=x.device)
    for lag in reversed(range(taps)):
        before = chain_rows[node, (column - lag).clamp(max=chain_rows.shape[1] - 1)].long()
        codes = torch.where(offset >= lag, head - lag, before)
        first += gather_rows(x, conv_state, codes).float() * w[:, taps - 1 - lag]
    total[head] = first
    if len(store_slots):
        conv_state[store_slots.long()] = gather_rows(x, conv_state, store_rows)
    return F.silu(total).to(x.dtype)
