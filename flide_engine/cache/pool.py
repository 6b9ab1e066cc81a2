"""The pool: one memory, allocated once, of which pages and slots are taken by number.

A *page* holds keys and values of one grain (64 tokens) for every attention layer. A *slot* holds
the recurrent state and the last three convolution inputs for every recurrent layer. Both are
immutable once written, so checkpoints share them by reference count.

The memory is rows of a unit each (`cache/arena.py`). A page is one row: the keys of all attention
layers, then their values. A slot is a run of rows: the recurrent states of all layers, then their
convolution rows. Kernels address both through views of the whole memory whose strides are a unit
and a run: nothing is copied, and a captured graph may hold the views for ever. Numbers of slots are
places; a page's place may change between rounds, so a round's plan is given places.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from flide_engine.cache.arena import Arena, Held, Ints
from flide_engine.cache.beside import Beside, beside_rounds
from flide_engine.cache.rows import move_rows
from flide_engine.config import GRAIN
from flide_engine.layout.state_shape import STATE_ITEMSIZE, StateShape


@dataclass(frozen=True)
class PoolTensors:
    """The pool's memory, as kernels see it: views of one memory of P units. Offsets in them need 64
    bits.

    keys, values: [attention_layers, P, 64, kv_heads, head_dim] in the activation dtype; a page's
    [64, kv_heads, head_dim] of one layer lie together, the next page is a unit away.
    recurrent_state: [recurrent_layers, S, value_heads, key_dim, value_dim] float32, and
    conv_state: [recurrent_layers, S, conv_rows, conv_channels] in the activation dtype, oldest row
    first: all but the first two dimensions lie together, the next slot is a run of units away.
    """

    keys: Tensor
    values: Tensor
    recurrent_state: Tensor
    conv_state: Tensor

    @classmethod
    def over(cls, memory: Tensor, shape: StateShape, dtype: torch.dtype) -> "PoolTensors":
        """Views of a memory [units * unit_bytes] uint8."""
        size = dtype.itemsize
        unit, run = shape.unit_bytes(size), shape.slot_units(size)
        layers, recurrent = shape.attention_layers, shape.recurrent_layers
        page = (GRAIN, shape.kv_heads, shape.head_dim)
        state = (shape.value_heads, shape.key_dim, shape.value_dim)
        conv = (shape.conv_rows, shape.conv_channels)
        states = recurrent * prod(state) * STATE_ITEMSIZE

        def view(
            kind: torch.dtype, count: int, step: int, at: int, each: tuple[int, ...]
        ) -> Tensor:
            """[count, memory / step, *each]: `each` together, in every step from byte `at` on."""
            inner = [prod(each[i:]) for i in range(len(each) + 1)]
            strides = (inner[0], step // kind.itemsize, *inner[1:])
            sizes = (count, len(memory) // step, *each)
            return memory.view(kind).as_strided(sizes, strides, at // kind.itemsize)

        values = layers * prod(page) * size
        return cls(
            view(dtype, layers, unit, 0, page),
            view(dtype, layers, unit, values, page),
            view(torch.float32, recurrent, run * unit, 0, state),
            view(dtype, recurrent, run * unit, states, conv),
        )


@dataclass(frozen=True)
class Accounting:
    """Bytes of the pool: in all, and held by pages and by slots."""

    bytes_total: int
    page_bytes_held: int
    slot_bytes_held: int

    @property
    def bytes_free(self) -> int:
        """What pages and slots can be taken of."""
        return self.bytes_total - self.page_bytes_held - self.slot_bytes_held

    def by_kind(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(held, total) by tier and kind; what is free is of neither kind and has its own."""
        pages, slots = self.page_bytes_held, self.slot_bytes_held
        return {
            ("device", "page"): (pages, pages),
            ("device", "slot"): (slots, slots),
            ("device", "any"): (0, self.bytes_free),
        }


class Pool:
    """Pages and slots of one model on one device. One thread uses it; nothing here locks."""

    def __init__(
        self,
        shape: StateShape,
        units: int,
        dtype: torch.dtype,
        device: torch.device,
        beside: Beside | None = None,
    ) -> None:
        """units: pages that it can hold. beside: where copies are made while rounds run; None: as
        the device has it.
        """
        self.shape, self.dtype, self.device = shape, dtype, device
        self.beside = beside or beside_rounds(device)
        self._unit = shape.unit_bytes(dtype.itemsize)
        self._arena = Arena(units, shape.slot_units(dtype.itemsize))
        memory = torch.zeros(units * self._unit, dtype=torch.uint8, device=device)
        self.rows = memory.view(units, self._unit)
        self.tensors = PoolTensors.over(memory, shape, dtype)

    @property
    def pages(self) -> Held:
        """Who holds which page."""
        return self._arena.pages

    @property
    def slots(self) -> Held:
        """Who holds which slot."""
        return self._arena.slots

    @property
    def slot_units(self) -> int:
        """Pages' worth of memory that a slot takes."""
        return self._arena.run

    @property
    def units(self) -> int:
        """Pages that fit into it."""
        return self._arena.units

    @property
    def free(self) -> int:
        """Units that are free."""
        return self._arena.free

    def accounting(self) -> Accounting:
        """Bytes held and in all."""
        return Accounting(
            self.units * self._unit,
            self.pages.held * self._unit,
            self.slots.held * self.slot_units * self._unit,
        )

    def take(self, pages: int, slots: int) -> tuple[Ints, Ints]:
        """So many pages and slots, each held once.

        Raises PoolExhausted, taking none, if their units are more than are free. Pages of others
        may move: plans made before must be given places again.
        """
        taken = self._arena.take(pages, slots)
        if len(taken.sources):
            self.beside.join()  # a copy of a page may be under way, to or from where it was
            move_rows(self.rows, taken.targets, self.rows, taken.sources)
        return taken.pages, taken.slots

    @property
    def page_places(self) -> Ints:
        """By number of a page, the row of memory where it is now: its number in `tensors`."""
        return self._arena.places

    def places(self, pages: Ints) -> Ints:
        """Where some pages are."""
        return self.page_places[pages]

    def page_bytes(self, pages: Ints) -> Tensor:
        """Contents of some pages: [n, bytes of a page] uint8 on the pool's device."""
        at = torch.from_numpy(self.places(pages)).long().to(self.device)
        return self.rows[at, : self.shape.page_bytes(self.dtype.itemsize)]

    def slot_bytes(self, slot: int) -> Tensor:
        """Contents of a slot: a view [bytes of a slot] uint8."""
        size = self.shape.slot_bytes(self.dtype.itemsize)
        return self.rows[slot * self.slot_units :].view(-1)[:size]
