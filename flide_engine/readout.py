"""From hidden vectors to what a family asked for, in float32, checked to be finite."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flide_engine.errors import NonFiniteOutput
from flide_engine.families.base import Read


def read_values(
    hidden: Tensor, reads: Sequence[Read], output_head: Tensor
) -> list[NDArray[np.float32]]:
    """One value for each read, in order: logits of its head rows, or the hidden vector itself.

    hidden [R, H]: final-norm hidden vectors, one a read; output_head [V, H]. Products are float32
    whatever the weights are, over the label rows only. Raises NonFiniteOutput naming the first
    read whose value is not finite.
    """
    vectors = hidden.float()
    values: list[Tensor] = []
    for vector, read in zip(vectors, reads, strict=True):
        if read.head_rows is None:
            values.append(vector)
            continue
        rows = torch.from_numpy(read.head_rows).to(output_head.device).long()
        values.append(output_head[rows].float() @ vector)
    found = [value.cpu().numpy() for value in values]
    for value, read in zip(found, reads, strict=True):
        if not np.isfinite(value).all():
            raise NonFiniteOutput(read.about)
    return found
