"""Operations by name. A `Kernels` is chosen once from the device; models call through it and know
no more.

Every operation has a reference in torch (`<op>_ref.py`), which is its contract and runs anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flide_engine.kernels.causal_conv1d_ref import causal_conv1d_ref
from flide_engine.kernels.fork_attention_ref import fork_attention_ref, write_pages_ref
from flide_engine.kernels.gated_delta_rule_ref import gated_delta_rule_ref
from flide_engine.kernels.pointwise_ref import (
    gated_rms_norm_ref,
    l2_norm_ref,
    linear_ref,
    rms_norm_ref,
    rope_ref,
    swiglu_ref,
)


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation; the signatures are those of the references."""

    causal_conv1d: Callable[..., Any]
    fork_attention: Callable[..., Any]
    write_pages: Callable[..., None]
    gated_delta_rule: Callable[..., None]
    linear: Callable[..., Any]
    rms_norm: Callable[..., Any]
    gated_rms_norm: Callable[..., Any]
    swiglu: Callable[..., Any]
    l2_norm: Callable[..., Any]
    rope: Callable[..., Any]


REFERENCE = Kernels(
    causal_conv1d=causal_conv1d_ref,
    fork_attention=fork_attention_ref,
    write_pages=write_pages_ref,
    gated_delta_rule=gated_delta_rule_ref,
    linear=linear_ref,
    rms_norm=rms_norm_ref,
    gated_rms_norm=gated_rms_norm_ref,
    swiglu=swiglu_ref,
    l2_norm=l2_norm_ref,
    rope=rope_ref,
)
