"""The gated delta rule in its chunk-parallel form, for training: plain torch, differentiable, no
custom backward.

Per head and token:  S <- e^g S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def _chunk_terms(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What one chunk needs besides the state it starts from.

    q, k [..., C, dk], v [..., C, dv], g and beta [..., C], all float32. Returns the lower
    triangle of the system [..., C, C] (unit diagonal left out), the scores of tokens on earlier
    tokens [..., C, C], beta v, beta k e^G, and G = cumsum(g) [..., C].
    """
    length = q.shape[-2]
    total = g.cumsum(-1)
    lower = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    gap = total[..., :, None] - total[..., None, :]
    decay = torch.exp(gap.masked_fill(~lower, float("-inf")))
    k_beta = k * beta[..., None]
    system = (k_beta @ k.transpose(-1, -2)) * decay
    scores = (q @ k.transpose(-1, -2)) * decay
    return system, scores, v * beta[..., None], k_beta * total.exp()[..., None], total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Every sequence of a batch from a zero state.

    q, k [B, L, H, dk] (q already scaled, both unit length), v [B, L, H, dv], g and beta [B, L,
    H], float32. Returns o [B, L, H, dv]. Right padding is harmless: a token sees only earlier
    ones.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _in_chunks(q, k, v, g, beta)


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`gated_delta_rule` on chunks of at most 64 tokens."""
    batch, length, heads, _ = q.shape
    chunk = min(CHUNK, length)
    pad = -length % chunk
    q, k, v = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (q, k, v))
    g, beta = (F.pad(t, (0, 0, 0, pad)) for t in (g, beta))
    count = (length + pad) // chunk
    # [B, L, H, D] -> [N, B, H, C, D]
    q, k, v = (t.view(batch, count, chunk, heads, -1).permute(1, 0, 3, 2, 4) for t in (q, k, v))
    g, beta = (t.view(batch, count, chunk, heads).permute(1, 0, 3, 2) for t in (g, beta))
    system, scores, v_beta, k_decayed, total = _chunk_terms(q, k, v, g, beta)
    if count == 1:
        fresh = _solve(system, v_beta)
        out = scores @ fresh
    else:
        out = _scan(q, k, system, scores, torch.cat((v_beta, k_decayed), -1), total)
    out = out.permute(1, 0, 3, 2, 4).reshape(batch, count * chunk, heads, -1)[:, :length]
    return out.clone()  # no view: a compiled caller would specialise on what it is a view of


class UnitLowerInverse(torch.autograd.Function):
    """(I + strict_lower(A))^-1 of a batch of small matrices, by joining blocks of doubled size.

    With X the inverse of the diagonal blocks of size b, the inverse at 2 b is X - X A' X, where
    A' holds the blocks of A that join two neighbours. Products only, so a GPU runs them as
    batched matrix products; unlike a power series no intermediate value outgrows the result.
    """

    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        """[..., C, C] -> [..., C, C]; what stands on or above the diagonal is ignored."""
        allowed = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # TF32 is allowed in training, but not here
        inverse = UnitLowerInverse._join_blocks(system)
        torch.set_float32_matmul_precision(allowed)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def _join_blocks(system: Tensor) -> Tensor:
        size = system.shape[-1]
        place = torch.arange(size, device=system.device)
        inverse = torch.eye(size, device=system.device, dtype=system.dtype)
        block = 1
        while block < size:
            row, column = place[:, None] // block, place[None] // block
            joins = (row // 2 == column // 2) & (row > column)
            part = system * joins
            inverse = inverse - (part if block == 1 else inverse @ part @ inverse)
            block *= 2
        return inverse.expand_as(system)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """-X^T dX X^T below the diagonal."""
        inverse: Tensor = ctx.saved_tensors[0]
        turned = inverse.transpose(-1, -2)
        return -(turned @ grads[0] @ turned).tril(-1)


def _solve(system: Tensor, rows: Tensor) -> Tensor:
    """(I + strict_lower(system))^-1 rows."""
    inverse: Tensor = UnitLowerInverse.apply(system)  # type: ignore[no-untyped-call]
    return inverse @ rows


def _scan(
    q: Tensor, k: Tensor, system: Tensor, scores: Tensor, rows: Tensor, total: Tensor
) -> Tensor:
    """Chunks in order, each from the state before it. All [N, B, H, C, ...]; returns o."""
    dk = k.shape[-1]
    solved = _solve(system, rows)
    fresh, seen = solved[..., :-dk], solved[..., -dk:]
    q_decayed = q * total.exp()[..., None]
    k_left = (k * torch.exp(total[..., -1:] - total)[..., None]).transpose(-1, -2)
    keep = total[..., -1].exp()[..., None, None]
    out = []
    state: Tensor | None = None
    for n in range(q.shape[0]):
        value = fresh[n] if state is None else fresh[n] - seen[n] @ state
        inside = scores[n] @ value
        out.append(inside if state is None else inside + q_decayed[n] @ state)
        update = k_left[n] @ value
        state = update if state is None else state * keep[n] + update
    return torch.stack(out)
