"""A row of a product has the same bits among any others, in any place, in any tile."""

import pytest
import torch

pytest.importorskip("triton")

from flide_engine.kernels.invariant_matmul import (
    LARGE,
    MIDDLE,
    SMALL,
    InvariantLinear,
    invariant_matmul,
)
from flide_engine.kernels.invariant_matmul_ref import invariant_matmul_ref
from tests.interpreter import add_up_in_order
from tests.kernels.test_triton import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    RELATIVE_ERROR,
    pytestmark,  # noqa: F401
    relative_error,
)

WIDTH, COLUMNS = (96, 72) if INTERPRETED else (3584, 1032)


def operands(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and a weight; neither is a whole number of tiles.

    Interpreted, tiles are multiplied by NumPy's library, which adds up the rows at the end of a
    tile in another order on some processors: small integers, whose sums are exact.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, WIDTH, generator=generator)
    weight = torch.randn(COLUMNS, WIDTH, generator=generator)
    if INTERPRETED:
        return (x * 8).round().to(dtype), (weight * 8).round().to(dtype)
    weight *= WIDTH**-0.5
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 63, 130])
def test_it_is_the_product(rows: int, dtype: torch.dtype) -> None:
    """Against the reference, and against the library's product."""
    x, weight = operands(rows, dtype)
    got = invariant_matmul(x, weight, programs=5)
    assert got.shape == (rows, COLUMNS)
    assert relative_error(got, invariant_matmul_ref(x, weight)) < RELATIVE_ERROR[dtype]
    assert relative_error(got, x @ weight.T) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_the_row_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in every slot of a tile, among more rows, with every tuning."""
    if INTERPRETED:
        add_up_in_order(monkeypatch)
    x, weight = operands(200 if INTERPRETED else 1000, dtype)
    want = invariant_matmul(x, weight)
    for count in (1, 2, 17, 64, 65, 129):
        assert torch.equal(invariant_matmul(x[:count].contiguous(), weight), want[:count])
        moved = torch.cat([x[count:], x[:count]])
        assert torch.equal(invariant_matmul(moved, weight)[-count:], want[:count])
    for tuning in (SMALL, MIDDLE, LARGE):
        assert torch.equal(invariant_matmul(x, weight, tuning), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_has_one_answer_for_every_number_of_rows(dtype: torch.dtype) -> None:
    """Whether or not the library's product was found to have the same bits."""
    x, weight = operands(64 if INTERPRETED else 2048, dtype)
    linear = InvariantLinear()
    want = invariant_matmul(x, weight)
    for count in (1, 40, 64, 255, 256, 300, 640, 1024, 2048):
        part = x[:count]
        assert torch.equal(linear(part, weight), want[: len(part)])
        assert (len(part), *weight.shape) in linear.chosen


def test_the_reference_has_no_rows_that_depend_on_others() -> None:
    """Also for one row, where the library on a CPU takes another order."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(70, 1024, generator=generator), torch.randn(8, 1024)
    want = invariant_matmul_ref(x, weight)
    for count in (1, 2, 15, 64, 65):
        assert torch.equal(invariant_matmul_ref(x[-count:], weight), want[-count:])
    assert invariant_matmul_ref(x[:0], weight).shape == (0, 8)
