"""Products in which a row's bits depend on nothing but the row and the weights.

A tile's sum over K runs in one order, 16 elements at a time, whatever the tile's shape and however
many rows there are: no split over K, none of a library's choices by shape. Where cuBLAS adds up in
the same order, which is tried with random rows for each weight and number of rows before anything
is captured, its product is taken, as it is faster.
"""

import logging
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

log = logging.getLogger(__name__)


@triton.jit
def _matmul_kernel(
    x, weight, out, rows, columns, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, product: tl.constexpr,
):  # fmt: skip
    """Persistent: tiles of out [rows, columns], GROUP tiles of rows side by side."""
    across = tl.cdiv(columns, BN)
    down = tl.cdiv(rows, BM)
    for tile in range(tl.program_id(0), across * down, tl.num_programs(0)):
        first = tile // (GROUP * across) * GROUP
        size = min(down - first, GROUP)
        m = (first + tile % (GROUP * across) % size) * BM
        n = tile % (GROUP * across) // size * BN
        total = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, width, BK, num_stages=STAGES):
            total = tl.dot(x.load([m, k]), weight.load([n, k]).T, total, input_precision=product)
        out.store([m, n], total.to(out.dtype))


@dataclass(frozen=True)
class MatmulTuning:
    """Shape of a product's tiles; all give the same bits, which a test on the card holds.

    Rows are never fewer than 64: other instructions, which may add up in another order, take fewer.
    """

    rows: int
    columns: int
    width: int
    warps: int
    stages: int


# On an H200, us at 512 rows, gate_up / down / qkvz / out of the 0.8B shape: (64, 128) 18.1 / 13.8 /
# 19.3 / 9.1, (128, 128) 14.4 / 21.0 / 14.9 / 13.5, (64, 64) with 128 of K 17.7 / 10.3 / 20.6 / 6.9,
# cuBLAS 11.6 / 9.0 / 14.5 / 6.4; at 8,192 rows (128, 256) 167 / 77 / 213 / 53, cuBLAS 162 / 76 /
# 204 / 53. All gave cuBLAS's bits.
SMALL = MatmulTuning(64, 64, 128, 4, 4)
MIDDLE = MatmulTuning(128, 128, 64, 8, 4)
LARGE = MatmulTuning(128, 256, 64, 8, 3)


def tuning_for(rows: int, columns: int, processors: int = 132) -> MatmulTuning:
    """The largest tiles that still give most processors one."""
    for tuning in (LARGE, MIDDLE):
        tiles = triton.cdiv(rows, tuning.rows) * triton.cdiv(columns, tuning.columns)
        if tiles >= 0.75 * processors:
            return tuning
    return SMALL


def invariant_matmul(
    x: Tensor, weight: Tensor, tuning: MatmulTuning | None = None, programs: int = 132
) -> Tensor:
    """`invariant_matmul_ref` in one launch; x and weight are contiguous, their rows begin on 16
    bytes. So do the result's: they are as far apart as that takes.
    """
    rows, width = x.shape
    columns, step = len(weight), 16 // x.element_size()
    out = x.new_empty(rows, triton.cdiv(columns, step) * step)[:, :columns]
    if not rows:
        return out
    tuning = tuning or tuning_for(rows, columns)
    exact = x.dtype == torch.float32
    if exact:  # twice the bytes
        tuning = SMALL
    block = tuning.width // 2 if exact else tuning.width
    tiles = triton.cdiv(rows, tuning.rows) * triton.cdiv(columns, tuning.columns)
    _matmul_kernel[(min(programs, tiles),)](
        TensorDescriptor.from_tensor(x, [tuning.rows, block]),
        TensorDescriptor.from_tensor(weight, [tuning.columns, block]),
        TensorDescriptor.from_tensor(out, [tuning.rows, tuning.columns]),
        rows, columns, width, BM=tuning.rows, BN=tuning.columns, BK=block, GROUP=8,
        STAGES=tuning.stages, product="ieee" if exact else "tf32", num_warps=tuning.warps,
    )  # fmt: skip
    return out


LEAST_TRIED = 256
"""Rows from which on cuBLAS is tried: below, it is known to split K for some weights."""


@dataclass
class InvariantLinear:
    """`linear` of deterministic mode: cuBLAS where its bits are those of `invariant_matmul`.

    chosen: by rows and shape of the weight, whether it is. Decided when a shape is first met, which
    must not be inside a capture.
    """

    chosen: dict[tuple[int, int, int], bool] = field(default_factory=dict)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, K] @ weight [N, K]^T -> [T, N] in x's dtype."""
        key = (len(x), *weight.shape)
        if key not in self.chosen:
            self.chosen[key] = self._agrees(x, weight)
        if self.chosen[key]:
            return F.linear(x, weight)
        return invariant_matmul(x.contiguous(), weight)

    def _agrees(self, x: Tensor, weight: Tensor) -> bool:
        """Whether cuBLAS gives the same bits for random rows of this number, and each of them the
        bits that it has with 64 rows.
        """
        if len(x) < LEAST_TRIED or not x.is_cuda:
            return False
        generator = torch.Generator(x.device).manual_seed(len(x))
        trial = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
        want = invariant_matmul(trial, weight)
        same = torch.equal(F.linear(trial, weight), want)
        few = invariant_matmul(trial[-64:].contiguous(), weight)
        if not torch.equal(few, want[-64:]):
            raise RuntimeError(f"rows of {tuple(weight.shape)} have other bits among {len(x)} rows")
        if not same:
            log.info("cuBLAS adds up %d x %s in another order", len(x), tuple(weight.shape))
        return same
