"""The references with every sum in one order: bits of a row that depend on nothing but its prompt.

The references hold a tolerance, because a library's order of adding up follows the number of rows.
Here each product gets whole tiles of 64 rows, a row always stands in the place of its position, and
pointwise operations get whole vectors, so that a CPU of today holds bits in milliseconds.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flide_engine.config import GRAIN
from flide_engine.kernels import REFERENCE
from flide_engine.kernels.attention_ref import AttentionShape
from flide_engine.kernels.delta_net_ref import DeltaNetShape, DeltaNetWeights, delta_net_ref
from flide_engine.kernels.fork_attention_ref import write_pages_ref
from flide_engine.kernels.invariant_matmul_ref import invariant_matmul_ref
from flide_engine.kernels.pointwise_ref import rms_norm_ref, rope_ref, swiglu_ref
from flide_engine.kernels.stream import StreamTensors


def whole(x: Tensor) -> Tensor:
    """x [T, ...] and rows of zeros up to a multiple of 64."""
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, -len(x) % GRAIN))


def swiglu(gate_up: Tensor) -> Tensor:
    """See swiglu_ref."""
    return swiglu_ref(whole(gate_up))[: len(gate_up)]


def delta_net(
    projected: Tensor,
    weights: DeltaNetWeights,
    shape: DeltaNetShape,
    recurrent_state: Tensor,
    conv_state: Tensor,
    stream: StreamTensors,
) -> Tensor:
    """See delta_net_ref."""
    states = recurrent_state, conv_state
    return delta_net_ref(whole(projected), weights, shape, *states, stream)[: len(projected)]


def attention(
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
    """See attention_ref; a step is a grain of queries over a grain of keys."""
    hd, eps, count = shape.head_dim, shape.eps, len(q_gate)
    k, v = k_v.view(-1, 2, shape.kv_heads, hd).unbind(1)
    k = rope_ref(rms_norm_ref(k, k_norm, eps, 1.0), cos, sin)
    if rows is None:
        rows = torch.arange(count, dtype=torch.int32)
    query, gate = q_gate.view(count, shape.heads, 2, hd).unbind(2)
    query = rope_ref(rms_norm_ref(query, q_norm, eps, 1.0), cos[rows], sin[rows])
    write_pages_ref(k, v, keys, values, stream.write_pages, stream.write_rows)
    mixed = torch.zeros(count, shape.heads, hd)
    node_of = torch.searchsorted(stream.cu_seqlens, rows, right=True) - 1
    position = rows - stream.cu_seqlens[node_of] + stream.starts[node_of]
    ends = stream.page_list_ends.tolist()
    for node, grain in {*zip(node_of.tolist(), (position // GRAIN).tolist(), strict=True)}:
        start, first = int(stream.starts[node]), int(stream.cu_seqlens[node])
        which = int(stream.page_lists[node])
        held = stream.pages[ends[which - 1] if which else 0 : ends[which]].long()
        tail = stream.chain_rows[node, 3 : 3 + start % GRAIN].long()
        own = torch.arange(first, first + (grain + 1) * GRAIN - start)
        own = own[own < int(stream.cu_seqlens[node + 1])]
        k_chain, v_chain = [
            whole(torch.cat([pages[held].flatten(0, 1), new[tail], new[own]]))[
                : (grain + 1) * GRAIN
            ]
            for pages, new in ((keys, k), (values, v))
        ]
        mine = ((node_of == node) & (position // GRAIN == grain)).nonzero()[:, 0]
        tile = torch.zeros(GRAIN, shape.heads, hd)
        tile[position[mine] % GRAIN] = query[mine]
        mixed[mine] = _tile(tile, k_chain, v_chain, hd**-0.5)[position[mine] % GRAIN]
    gated = whole(mixed.flatten(1)) * whole(gate.flatten(1)).sigmoid()
    return gated[:count]


def _tile(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The last grain's queries q [64, nh, hd] over k, v [G * 64, nkv, hd], grain by grain."""
    shared = q.shape[1] // k.shape[1]
    q = q.transpose(0, 1) * scale
    k, v = (t.repeat_interleave(shared, 1).transpose(0, 1).contiguous() for t in (k, v))
    most = torch.full((*q.shape[:2], 1), -torch.inf)
    total, out = torch.zeros_like(most), torch.zeros_like(q)
    for at in range(0, k.shape[1], GRAIN):
        scores = torch.stack([a @ b.T for a, b in zip(q, k[:, at : at + GRAIN], strict=True)])
        if at + GRAIN == k.shape[1]:
            later = torch.ones(GRAIN, GRAIN, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        higher = torch.maximum(most, scores.amax(-1, keepdim=True))
        shrink, weights = (most - higher).exp(), (scores - higher).exp()
        most, total = higher, total * shrink + weights.sum(-1, keepdim=True)
        added = [a @ b for a, b in zip(weights, v[:, at : at + GRAIN], strict=True)]
        out = out * shrink + torch.stack(added)
    return (out / total).transpose(0, 1)


FIXED_ORDER = replace(
    REFERENCE, linear=invariant_matmul_ref, swiglu=swiglu, delta_net=delta_net, attention=attention
)
