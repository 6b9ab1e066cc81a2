"""The pool: pages and slots allocated once, handed out by number, shared by count.

A *page* holds keys and values of one grain (64 tokens) for every attention layer. A *slot* holds
the recurrent state and the last three convolution inputs for every recurrent layer. Both are
immutable once written, so checkpoints share them by reference count. Kernels address tensors by
page and slot number; nothing is copied.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flide_engine.config import GRAIN
from flide_engine.errors import ConfigError, PoolExhausted
from flide_engine.layout.state_shape import StateShape

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class PoolTensors:
    """The pool's memory, as kernels see it.

    keys, values: [attention_layers, P, 64, kv_heads, head_dim] in the activation dtype.
    recurrent_state: [recurrent_layers, S, value_heads, key_dim, value_dim] float32.
    conv_state: [recurrent_layers, S, conv_rows, conv_channels] in the activation dtype, oldest row
    first.
    """

    keys: Tensor
    values: Tensor
    recurrent_state: Tensor
    conv_state: Tensor


class Counted:
    """Numbers 0 .. total-1, each free or held by a number of holders."""

    def __init__(self, kind: str, total: int) -> None:
        self.kind = kind
        self.counts = np.zeros(total, np.int32)
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many numbers are free."""
        return len(self._free)

    def take(self, count: int) -> Ints:
        """`count` free numbers, each held once.

        Raises PoolExhausted, taking none, if there are fewer.
        """
        if count > len(self._free):
            raise PoolExhausted(self.kind, count, len(self._free), len(self.counts))
        rest = len(self._free) - count
        taken = np.array(self._free[rest:][::-1], np.int32)
        del self._free[rest:]
        self.counts[taken] = 1
        return taken

    def retain(self, numbers: Ints) -> None:
        """One more holder for each number; all must be held already."""
        assert (self.counts[numbers] > 0).all(), f"retained free {self.kind}"
        np.add.at(self.counts, numbers, 1)

    def release(self, numbers: Ints) -> None:
        """One holder less for each number; those without a holder are free again."""
        if not len(numbers):
            return
        np.subtract.at(self.counts, numbers, 1)
        assert (self.counts[numbers] >= 0).all(), f"released free {self.kind}"
        self._free += [int(n) for n in np.unique(numbers) if self.counts[n] == 0]


@dataclass(frozen=True)
class Accounting:
    """Bytes of the pool by kind."""

    page_bytes_total: int
    page_bytes_held: int
    slot_bytes_total: int
    slot_bytes_held: int


def split_budget(
    shape: StateShape, budget: int, slot_share: float, dtype: torch.dtype
) -> tuple[int, int]:
    """(pages, slots) that `budget` bytes hold. Raises ConfigError under two of each."""
    page, slot = shape.page_bytes(dtype.itemsize), shape.slot_bytes(dtype.itemsize)
    slots = int(budget * slot_share) // max(1, slot)
    pages = int(budget * (1 - slot_share)) // max(1, page)
    if min(slots, pages) < 2:
        raise ConfigError(
            f"pool_bytes {budget} holds {pages} pages of {page} bytes and {slots} slots of"
            f" {slot} bytes; at least 2 of each are needed"
        )
    return pages, slots


class Pool:
    """Pages and slots of one model on one device. One thread uses it; nothing here locks."""

    def __init__(
        self, shape: StateShape, pages: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.pages, self.slots = Counted("pages", pages), Counted("slots", slots)
        page = (shape.attention_layers, pages, GRAIN, shape.kv_heads, shape.head_dim)
        state = (shape.recurrent_layers, slots, shape.value_heads, shape.key_dim, shape.value_dim)
        conv = (shape.recurrent_layers, slots, shape.conv_rows, shape.conv_channels)
        self.tensors = PoolTensors(
            keys=torch.zeros(page, dtype=dtype, device=device),
            values=torch.zeros(page, dtype=dtype, device=device),
            recurrent_state=torch.zeros(state, dtype=torch.float32, device=device),
            conv_state=torch.zeros(conv, dtype=dtype, device=device),
        )

    def accounting(self) -> Accounting:
        """Bytes held and in all."""
        page, slot = (
            self.shape.page_bytes(self.dtype.itemsize),
            self.shape.slot_bytes(self.dtype.itemsize),
        )
        pages, slots = len(self.pages.counts), len(self.slots.counts)
        return Accounting(
            page * pages,
            page * (pages - self.pages.free),
            slot * slots,
            slot * (slots - self.slots.free),
        )

    def page_bytes(self, pages: Ints) -> Tensor:
        """Contents of some pages: [n, bytes of a page] uint8 on the pool's device."""
        at = self._places(pages)
        parts = [t[:, at].movedim(1, 0) for t in (self.tensors.keys, self.tensors.values)]
        size = self.shape.page_bytes(self.dtype.itemsize)
        return torch.stack(parts, 1).contiguous().view(torch.uint8).reshape(len(pages), size)

    def put_pages(self, pages: Ints, rows: Tensor) -> None:
        """Writes what `page_bytes` gave, from any device, to `pages`."""
        if not len(pages):
            return
        at, target = self._places(pages), self.tensors.keys
        shape = (len(pages), 2, target.shape[0], *target.shape[2:])
        both = rows.to(target.device).contiguous().view(self.dtype).reshape(shape)
        target[:, at] = both[:, 0].movedim(0, 1)
        self.tensors.values[:, at] = both[:, 1].movedim(0, 1)

    def slot_bytes(self, slot: int) -> Tensor:
        """Contents of a slot: [bytes of a slot] uint8 on the pool's device."""
        parts = (self.tensors.recurrent_state[:, slot], self.tensors.conv_state[:, slot])
        return torch.cat([t.contiguous().view(torch.uint8).reshape(-1) for t in parts])

    def put_slot(self, slot: int, row: Tensor) -> None:
        """Writes what `slot_bytes` gave, from any device, to `slot`."""
        row = row.to(self.tensors.keys.device)
        at = 0
        for target in (self.tensors.recurrent_state[:, slot], self.tensors.conv_state[:, slot]):
            size = target.numel() * target.element_size()
            # a copy of its own: the bytes of a type must begin at a multiple of its size
            target.copy_(row[at : at + size].clone().view(target.dtype).reshape(target.shape))
            at += size

    def _places(self, pages: Ints) -> Tensor:
        return torch.from_numpy(pages).long().to(self.tensors.keys.device)
