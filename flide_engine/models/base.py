"""What a model is to the engine: a forward over one stream, and the shape of the state it keeps."""

from typing import Protocol

from torch import Tensor

from flide_engine.kernels.stream import StreamTensors
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


class DecisionModel(Protocol):
    """A decoder that runs one flat stream."""

    vocab_size: int
    hidden_size: int
    max_positions: int
    state_shape: StateShape
    query_heads: int
    """Query heads of one key head, in the attention layers."""

    def forward(self, stream: StreamTensors, state: StateTensors) -> Tensor:
        """Final-norm hidden vectors of `stream.read_rows`: [R, H] in the activation dtype.

        Writes the stream's pages and state stores into `state`.
        """
        ...

    def label_logits(self, hidden: Tensor, reads: Tensor, rows: Tensor) -> Tensor:
        """Products of hidden vectors [R, H] with rows of the output head, in float32: [K].

        reads, rows [K] int32: vector and head row of each product. The head is never multiplied
        whole.
        """
        ...
