"""The `Kernels` of a GPU. Importing this imports Triton."""

from dataclasses import replace

from flide_engine.kernels import Kernels
from flide_engine.kernels.attention import attention
from flide_engine.kernels.delta_net import delta_net
from flide_engine.kernels.invariant_matmul import InvariantLinear
from flide_engine.kernels.label_logits import label_logits
from flide_engine.kernels.pointwise import add_rms_norm, swiglu
from flide_engine.kernels.pointwise_ref import linear_ref

TRITON = Kernels(
    linear=linear_ref,
    add_rms_norm=add_rms_norm,
    swiglu=swiglu,
    attention=attention,
    delta_net=delta_net,
    label_logits=label_logits,
)


def deterministic_kernels() -> Kernels:
    """The same, with products whose rows do not depend on each other."""
    return replace(TRITON, linear=InvariantLinear())
