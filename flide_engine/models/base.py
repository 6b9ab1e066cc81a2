"""What a model is to the engine: a forward over one stream, and the shape of the state it keeps."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flide_engine.layout.plan import RoundPlan
from flide_engine.layout.state_shape import StateShape


class StateTensors(Protocol):
    """The pool's memory as a model sees it; shapes as in `cache.pool.PoolTensors`."""

    @property
    def keys(self) -> Tensor:
        """[attention_layers, P, 64, kv_heads, head_dim]."""
        ...

    @property
    def values(self) -> Tensor:
        """As `keys`."""
        ...

    @property
    def recurrent_state(self) -> Tensor:
        """[recurrent_layers, S, value_heads, key_dim, value_dim] float32."""
        ...

    @property
    def conv_state(self) -> Tensor:
        """[recurrent_layers, S, conv_rows, conv_channels]."""
        ...


@dataclass(frozen=True)
class StreamTensors:
    """A `RoundPlan` on a device: the same names, int32 tensors; `level_ends` stays on the host."""

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    starts: Tensor
    level_ends: tuple[int, ...]
    initial_slots: Tensor
    chain_rows: Tensor
    page_lists: Tensor
    page_list_ends: Tensor
    pages: Tensor
    write_pages: Tensor
    write_rows: Tensor
    store_nodes: Tensor
    store_positions: Tensor
    store_slots: Tensor
    store_rows: Tensor
    read_rows: Tensor

    @classmethod
    def of(cls, plan: RoundPlan, device: torch.device) -> "StreamTensors":
        """Copies the plan's arrays to `device`."""
        arrays = {
            name: torch.from_numpy(getattr(plan, name)).to(device)
            for name in cls.__dataclass_fields__
            if name != "level_ends"
        }
        return cls(level_ends=tuple(plan.level_ends.tolist()), **arrays)


class DecisionModel(Protocol):
    """A decoder that runs one flat stream."""

    vocab_size: int
    hidden_size: int
    max_positions: int
    state_shape: StateShape
    output_head: Tensor
    """[V, H]: rows are read by `readout`, never multiplied whole."""

    def forward(self, stream: StreamTensors, state: StateTensors) -> Tensor:
        """Final-norm hidden vectors of `stream.read_rows`: [R, H] in the activation dtype.

        Writes the stream's pages and state stores into `state`.
        """
        ...
