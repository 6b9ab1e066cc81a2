"""Operations by name. A `Kernels` is chosen once from the device; models call through it only.

Every operation has a reference in torch (`<op>_ref.py`), which is its contract and runs anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flide_engine.kernels.attention_ref import attention_ref
from flide_engine.kernels.delta_net_ref import delta_net_ref
from flide_engine.kernels.label_logits_ref import label_logits_ref
from flide_engine.kernels.pointwise_ref import add_rms_norm_ref, linear_ref, swiglu_ref


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation; the signatures are those of the references."""

    linear: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    delta_net: Callable[..., Tensor]
    label_logits: Callable[..., Tensor]


REFERENCE = Kernels(
    linear=linear_ref,
    add_rms_norm=add_rms_norm_ref,
    swiglu=swiglu_ref,
    attention=attention_ref,
    delta_net=delta_net_ref,
    label_logits=label_logits_ref,
)
