"""Gated delta rule over one dependency level of a forked stream: reference in torch, float32
throughout.
"""

import torch
from torch import Tensor

CHUNK = 64


def gated_delta_rule_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    recurrent_state: Tensor,
    nodes: tuple[int, int],
    cu_seqlens: Tensor,
    starts: Tensor,
    initial_slots: Tensor,
    chain_rows: Tensor,
    store_nodes: Tensor,
    store_positions: Tensor,
    store_slots: Tensor,
) -> None:
    """Outputs of nodes[0] .. nodes[1]-1 into `out`, their marked states into `recurrent_state`.

    q, k [T, Hv, dk] (normalised, q scaled), v [T, Hv, dv], g [T, Hv] log decay <= 0, beta [T, Hv];
    all float32. out [T, Hv, dv] float32, rows of other nodes untouched. recurrent_state
    [S, Hv, dk, dv] float32: read at `initial_slots` (-1: zeros), written at `store_slots`. The
    rest: see RoundPlan.

    Per step S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q, in the chunk form, with chunks
    at absolute multiples of 64 of the chain: a node's first chunk begins with the rows that
    `chain_rows` names between the grain and its first token, so any fork of a prompt groups sums
    alike. A stored state is the one after `store_positions` tokens, always the end of
    a chunk.
    """
    low, high = nodes
    ids = range(low, high)
    bounds, first = cu_seqlens.tolist(), starts.tolist()
    chains = [
        torch.cat(
            [
                chain_rows[n, 3 : 3 + first[n] % CHUNK].long(),
                torch.arange(bounds[n], bounds[n + 1], device=q.device),
            ]
        )
        for n in ids
    ]
    state = torch.stack(
        [
            recurrent_state[s] if s >= 0 else torch.zeros_like(recurrent_state[0])
            for s in initial_slots[low:high].tolist()
        ]
    )  # [n, Hv, dk, dv]
    stores: dict[tuple[int, int], list[int]] = {}
    for node, position, slot in zip(
        store_nodes.tolist(), store_positions.tolist(), store_slots.tolist(), strict=True
    ):
        stores.setdefault((node, position), []).append(slot)
    for c in range(max((len(chain) + CHUNK - 1) // CHUNK for chain in chains)):
        live = [i for i, chain in enumerate(chains) if len(chain) > c * CHUNK]
        rows = torch.full((len(live), CHUNK), -1, dtype=torch.long, device=q.device)
        for j, i in enumerate(live):
            part = chains[i][c * CHUNK : (c + 1) * CHUNK]
            rows[j, : len(part)] = part
        q_c, k_c, v_c, g_c, beta_c = (_rows(t, rows) for t in (q, k, v, g, beta))
        o, after = _chunk(q_c, k_c, v_c, g_c, beta_c, state[live])
        state[live] = after
        for j, i in enumerate(live):
            skip = first[low + i] % CHUNK if c == 0 else 0
            mine = rows[j, skip : len(chains[i]) - c * CHUNK]
            out[mine] = o[j, skip : skip + len(mine)]
            end = first[low + i] // CHUNK * CHUNK + (c + 1) * CHUNK
            for slot in stores.get((low + i, end), []):
                recurrent_state[slot] = after[j]


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """[n, 64, ...] of x by row, zeros where the row is -1."""
    picked = x[rows.clamp(min=0)]
    return picked.masked_fill((rows < 0).view(*rows.shape, *(1,) * (x.dim() - 1)), 0.0)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk of n nodes. q, k, v [n, 64, Hv, d], g, beta [n, 64, Hv], state [n, Hv, dk, dv]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [n, Hv, 64, d]
    beta = beta.transpose(1, 2)[..., None]
    total = g.transpose(1, 2).cumsum(-1)  # [n, Hv, 64]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    system = ((k * beta) @ k.transpose(-1, -2)) * decay  # its strict lower triangle is used
    scaled = torch.cat([v * beta, k * beta * total[..., None].exp()], -1)
    solved = torch.linalg.solve_triangular(system, scaled, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    new = u - w @ state
    o = (q * total[..., None].exp()) @ state + ((q @ k.transpose(-1, -2)) * decay) @ new
    last = total[..., -1:]
    carried = (k * (last - total)[..., None].exp()).transpose(-1, -2) @ new
    return o.transpose(1, 2), state * last[..., None].exp() + carried
