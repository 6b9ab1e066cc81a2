"""How a slot's bytes are kept beyond the device: as they are, or with recurrent states rounded."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flide_engine.layout.state_shape import STATE_ITEMSIZE, StateShape


@dataclass(frozen=True)
class StateFormat:
    """Bytes of a slot of a pool, on host and disk.

    itemsize: of the pool's activations. rounded: recurrent states as bfloat16, which halves them
    and is not exact; convolution rows stay as they are.
    """

    shape: StateShape
    itemsize: int
    rounded: bool = False

    @property
    def size(self) -> int:
        """Bytes of a state as it is kept."""
        whole = self.shape.slot_bytes(self.itemsize)
        return whole - self._states // 2 if self.rounded else whole

    def pack(self, slot: Tensor) -> Tensor:
        """A slot's bytes [*] uint8 as they are kept: [size], on the same device."""
        if not self.rounded:
            return slot
        states = slot[: self._states].view(torch.float32).to(torch.bfloat16)
        return torch.cat([states.view(torch.uint8), slot[self._states :]])

    def unpack(self, slot: Tensor, fill: Callable[[Tensor], object]) -> None:
        """Writes a slot's bytes; fill: copies those that were kept to where it is told."""
        if not self.rounded:
            fill(slot)
            return
        kept = torch.empty(self.size, dtype=torch.uint8, device=slot.device)
        fill(kept)
        half = self._states // 2
        slot[: self._states].view(torch.float32).copy_(kept[:half].view(torch.bfloat16))
        slot[self._states :].copy_(kept[half:])

    @property
    def _states(self) -> int:
        shape = self.shape
        each = shape.value_heads * shape.key_dim * shape.value_dim
        return shape.recurrent_layers * each * STATE_ITEMSIZE
