"""Memory of the host tier on a GPU's machine: as many bytes as were asked for."""

import gc
from typing import Any

import pytest
import torch

from flide_engine.cache import pinned
from flide_engine.cache.host import HostTier
from tests.cache.test_tiers import SHAPE, full_pool


class Runtime:
    """The calls of the CUDA runtime that are used, without a GPU."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.held = error, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self.error:
            self.held[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.held[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """In the place of torch's."""
    made = Runtime()

    def check(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return made


def test_a_host_tier_takes_what_it_was_given_and_gives_it_back(runtime: Runtime) -> None:
    """Not the next power of two."""
    pool: Any = full_pool()
    pool.device = torch.device("cuda")
    row = SHAPE.unit_bytes(pool.dtype.itemsize)
    host = HostTier(pool, 37 * row, clock=lambda: 0.0)
    assert host.pinned
    assert runtime.held == {host._rows.data_ptr(): 37 * row}
    assert host.bytes_total == 37 * row
    del host
    gc.collect()
    assert not runtime.held


def test_where_it_cannot_be_registered_torch_pins_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is logged that this may take more."""
    runtime.error = 2
    monkeypatch.setattr(pinned, "_by_torch", lambda size: torch.full((size,), 3, dtype=torch.uint8))
    assert pinned.pinned(100).tolist() == [3] * 100
    assert "CUDA error 2" in caplog.text
    assert not runtime.held


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_is_pinned_outside_torchs_allocator() -> None:
    """Copies from it and back hold what was there."""
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    memory = pinned.pinned((5 << 20) + 4096)
    assert memory.is_pinned()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before
    memory.random_(0, 256)
    there = memory.to("cuda", non_blocking=True)
    back = torch.empty_like(memory)
    back.copy_(there)
    assert torch.equal(back, memory)
