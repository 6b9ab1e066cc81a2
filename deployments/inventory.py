"""What `flide-serve doctor` says of a machine: versions, cores, memory, GPUs."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from deployments.preflight import Finding

PROJECT = "flide-serve"
GIB = 1 << 30
CARDS = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver lists the cards it has, whoever may use them."""
DRIVER = Path("/sys/module/nvidia/version")
SHARED = Path("/dev/shm")


def versions() -> Iterator[Finding]:
    """Of what this release is held to. Another one is wrong for Ray alone, whose router API is
    alpha; others are named.
    """
    yield Finding("python", platform.python_version())
    try:
        yield Finding(PROJECT, version(PROJECT))
        needs = requires(PROJECT) or []
    except PackageNotFoundError:
        yield Finding(PROJECT, "not installed", "pip install -e . in its folder")
        return
    for line in needs:
        need = Requirement(line)
        if need.marker is not None:
            continue  # of an extra
        try:
            found = version(need.name)
        except PackageNotFoundError:
            yield Finding(need.name, "missing", f"pip install '{line}'")
            continue
        if need.specifier.contains(found, prereleases=True):
            yield Finding(need.name, found)
        elif need.name == "ray":
            yield Finding(need.name, found, f"this release needs ray{need.specifier}")
        else:
            yield Finding(need.name, f"{found}, measured with {need.specifier}")


def machine() -> Iterator[Finding]:
    """Cores, memory, GPUs with their driver and compiler."""
    import torch

    yield Finding("system", platform.platform())
    yield Finding("cores", str(os.cpu_count()))
    yield Finding("memory", f"{gib(memory_available())} available")
    if SHARED.is_dir():
        room = shutil.disk_usage(SHARED)
        yield Finding(str(SHARED), f"{gib(room.free)} of {gib(room.total)} free, for Ray's objects")
    if not torch.cuda.is_available():
        yield Finding("gpu", unseen_gpus() or "none")
        return
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        card = torch.cuda.get_device_properties(i)
        kind = f"{card.name}, compute capability {card.major}.{card.minor}"
        yield Finding(f"gpu {i}", f"{kind}, {gib(free)} of {gib(total)} free")
    yield Finding("driver", _driver())
    yield Finding("cuda", f"{torch.version.cuda} of torch")
    try:
        yield Finding("triton", version("triton"))
    except PackageNotFoundError:
        yield Finding("triton", "missing", "pip install triton, which compiles the GPU's kernels")


def unseen_gpus() -> str:
    """Cards that the machine has though torch sees none, and why that may be; "" if that is not
    so.
    """
    import torch

    cards = len(list(CARDS.glob("*")))
    if not cards or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA"
    elif (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them"
    else:
        why = (
            f"driver {_driver()} is too old for CUDA {torch.version.cuda}, or they are kept from us"
        )
    return f"the driver has {cards}, torch sees none: {why}"


def _driver() -> str:
    return DRIVER.read_text().strip() if DRIVER.is_file() else "unknown"


def memory_available() -> int:
    """Bytes that a new process can have, by the machine and by its control group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no limit, or an older kind of groups
    return max(0, free)


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:.2f} GiB"
