"""Logits of a few head rows at a few hidden vectors: reference in torch."""

from torch import Tensor


def label_logits_ref(hidden: Tensor, head: Tensor, reads: Tensor, rows: Tensor) -> Tensor:
    """hidden[reads[i]] . head[rows[i]] in float32: [K].

    hidden [R, H]; head [V, H]; reads, rows [K] int32, entries with a negative read are undefined.
    """
    return (hidden[reads.clamp(min=0)].float() * head[rows].float()).sum(-1)
