"""The pool: what its tensors are views of, contents that survive a move, budgets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flide_engine.cache.pool import Pool, PoolTensors
from flide_engine.layout.state_shape import StateShape

SHAPE = StateShape(2, 2, 32, 6, 4, 32, 32, 256, 3)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        StateShape(3, 1, 16, 2, 1, 8, 8, 24, 3),  # pages smaller than a unit
        StateShape(0, 2, 32, 3, 2, 16, 16, 40, 3),  # no attention layer
        StateShape(2, 2, 32, 0, 2, 16, 16, 40, 3),  # no recurrent one
    ],
    ids=str,
)
def test_every_tensor_has_bytes_of_its_own(shape: StateShape, dtype: torch.dtype) -> None:
    """A page's and a slot's bytes, layer by layer, fill their rows without touching any others'."""
    pool = Pool(shape, 3 * shape.slot_units(dtype.itemsize) + 5, dtype, CPU)
    pages, slots = pool.take(4, 2)
    t = pool.tensors
    for kind, at in (("keys", pages), ("values", pages)):
        for layer in range(shape.attention_layers):
            for page in at:
                view = getattr(t, kind)[layer, pool.places(page)]
                assert not view.view(torch.uint8).any()
                view.fill_(1 + layer + (kind == "values") * shape.attention_layers)
    for layer in range(shape.recurrent_layers):
        for slot in slots:
            for view in (t.recurrent_state[layer, slot], t.conv_state[layer, slot]):
                assert not view.view(torch.uint8).any()
                view.fill_(100 + layer)
    page, slot = shape.page_bytes(dtype.itemsize), shape.slot_bytes(dtype.itemsize)
    used = pool.rows.count_nonzero(1)
    # a number's lower bytes are zero: what counts is that the rows are the right ones
    assert used.count_nonzero() == bool(page) * 4 + bool(slot) * 2 * pool.slot_units
    for number in pages:
        data = pool.page_bytes(np.array([number], np.int32))[0].view(dtype)
        layers = data.view(2 * shape.attention_layers, -1) if page else data.view(0, 1)
        want = torch.arange(1, 1 + 2 * shape.attention_layers, dtype=dtype)[:, None]
        assert (layers == want).all()
    if slot:
        state = pool.slot_bytes(int(slots[0]))
        cut = slot - shape.recurrent_layers * shape.conv_rows * shape.conv_channels * dtype.itemsize
        layers = torch.arange(100, 100 + shape.recurrent_layers)[:, None]
        assert (state[:cut].view(torch.float32).view(len(layers), -1) == layers).all()
        assert (state[cut:].view(dtype).view(len(layers), -1) == layers).all()


def test_kernels_get_aligned_pointers_that_stay() -> None:
    """Every layer's part of a page and a slot begins at a multiple of 128 bytes (0.8B shape), and
    no move of pages changes the tensors.
    """
    shape = StateShape(6, 2, 256, 18, 16, 128, 128, 6144, 3)
    assert shape.page_bytes(2) == shape.unit_bytes(2) == 786_432
    assert shape.slot_units(2) == 25
    pool = Pool(shape, 60, torch.bfloat16, CPU)
    before = [t.data_ptr() for t in vars(pool.tensors).values()]
    for tensor in vars(pool.tensors).values():
        for part in (tensor[0, 1], tensor[1, 0], tensor[-1, -1]):
            assert part.is_contiguous()
            assert (part.data_ptr() - pool.rows.data_ptr()) % 128 == 0
    pages, _ = pool.take(60, 0)
    pool.pages.release(pages[pool.places(pages) % 25 > 0])
    pool.take(0, 2)
    assert before == [t.data_ptr() for t in vars(pool.tensors).values()]


def test_offsets_need_and_have_64_bits() -> None:
    """The last page and the last slot of a pool of 100 GiB lie where its rows end."""
    shape = StateShape(6, 2, 256, 18, 16, 128, 128, 6144, 3)
    unit = shape.unit_bytes(2)
    units = (100 << 30) // unit
    memory = torch.empty(units * unit, dtype=torch.uint8, device="meta")
    tensors = PoolTensors.over(memory, shape, torch.bfloat16)
    layer = 64 * 2 * 256 * 2
    for kind, first in ((tensors.keys, 0), (tensors.values, 6 * layer)):
        assert kind.shape[1] == units
        assert 2 * kind[5, -1].storage_offset() == (units - 1) * unit + first + 5 * layer
    slots = units // 25
    states = 18 * 16 * 128 * 128 * 4
    state, conv = tensors.recurrent_state, tensors.conv_state
    assert state.shape[1] == conv.shape[1] == slots
    assert 4 * state[17, -1].storage_offset() == (slots - 1) * 25 * unit + states // 18 * 17
    assert 2 * conv[0, -1].storage_offset() == (slots - 1) * 25 * unit + states
    assert 2 * conv[0, -1].storage_offset() > 2**36


@settings(deadline=None)  # the first example may compile
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 20), st.booleans()),
        max_size=25,
    )
)
def test_contents_survive_moves(steps: list[tuple[int, int, int, bool]]) -> None:
    """Whatever is taken and given up: each page and slot holds what was written to it."""
    shape = StateShape(1, 1, 16, 1, 1, 64, 72, 8, 3)
    pool = Pool(shape, 31, torch.float32, CPU)
    assert pool.slot_units == 3
    held: list[tuple[np.ndarray, np.ndarray, int]] = []
    for mark, (pages, slots, which, give) in enumerate(steps):
        if pages + 3 * slots <= pool.free:
            taken = (*pool.take(pages, slots), mark)
            pool.tensors.keys[:, pool.places(taken[0])] = mark
            pool.tensors.recurrent_state[:, taken[1]] = mark
            held.append(taken)
        if give and held:
            gone = held.pop(which % len(held))
            pool.pages.release(gone[0])
            pool.slots.release(gone[1])
        for a, b, value in held:
            assert (pool.tensors.keys[:, pool.places(a)] == value).all()
            assert (pool.tensors.recurrent_state[:, b] == value).all()
    found = pool.accounting()
    assert found.bytes_free == pool.free * shape.unit_bytes(4)
    assert found.page_bytes_held == sum(len(a) for a, _, _ in held) * shape.unit_bytes(4)
    assert found.slot_bytes_held == sum(len(b) for _, b, _ in held) * 3 * shape.unit_bytes(4)
    assert found.bytes_total == pool.rows.nbytes
