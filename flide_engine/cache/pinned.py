"""Pinned memory of the host, as much as is asked for.

torch's allocator of pinned memory rounds up to a power of two, which costs up to as much again. Its
option against that (`pinned_max_round_threshold_mb`) is for the whole process and not in every
release; in those without pytorch/pytorch#192722 it can hand out a block that is too small. So the
memory is ordinary memory that the CUDA runtime is told to pin.
"""

import logging
from contextlib import suppress
from weakref import finalize

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def pinned(size: int) -> Tensor:
    """Zeros [size] uint8, pinned as long as the tensor itself lives; for memory that is kept for
    long.

    Where the runtime refuses to pin it, torch does, and may take up to twice as much.
    """
    memory = torch.zeros(size, dtype=torch.uint8)
    try:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
    except (AttributeError, RuntimeError, TypeError) as error:
        log.warning(
            "%d bytes are pinned by torch, which may take up to twice as much: %s", size, error
        )
        return _by_torch(size)
    end = finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    end.atexit = False  # then the process gives back everything
    return memory


def _by_torch(size: int) -> Tensor:
    with suppress(RuntimeError):  # the next kernel would meet the runtime's last error
        torch.zeros(1, device="cuda").add_(1)
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
