"""CUDA C++ of `kernels/hopper` on a CPU: compiled by g++, a block's threads as fibers."""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from flide_engine.kernels.hopper.program import (
    FOLDER,
    Argument,
    Launch,
    has_hopper,
    pointers_to,
)

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
ON_GPU = has_hopper(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
MARKS = (
    [pytest.mark.gpu]
    if torch.cuda.is_available()
    else [pytest.mark.skipif(COMPILER is None, reason="needs a Hopper GPU, or g++")]
)
"""Of tests that run on a GPU as it is, and emulated elsewhere."""


@functools.cache
def emulated(
    source: str, kernels: tuple[str, ...], defined: tuple[tuple[str, str | int], ...]
) -> Mapping[str, Launch]:
    """The launches of a source file. kernels: their names; defined: macros, by name."""
    assert COMPILER is not None
    sources = sorted([*FOLDER.glob("*.cu*"), HERE / "emulator.h", HERE / "emulated.cpp"])
    digest = hashlib.sha256(
        repr((source, kernels, defined)).encode() + b"".join(p.read_bytes() for p in sources)
    )
    library = Path(tempfile.gettempdir()) / f"flide-emulated-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        made = library.with_suffix(f".{id(digest)}")
        flags = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-I{HERE}", f"-I{FOLDER}"]
        macros = [f"-D{name}={value}" for name, value in defined]
        macros += [f'-DSOURCE="{source}"', f"-DENTRIES={' '.join(f'ENTRY({k})' for k in kernels)}"]
        subprocess.run([COMPILER, *flags, *macros, "-o", made, HERE / "emulated.cpp"], check=True)
        made.replace(library)
    emulate = ctypes.CDLL(str(library)).emulate

    def launch(name: str) -> Launch:
        def run(
            blocks: int, threads: int, shared_bytes: int, arguments: Sequence[Argument]
        ) -> None:
            held = pointers_to(arguments)
            assert emulate(name.encode(), blocks, threads, shared_bytes, held) == 0

        return run

    return {name: launch(name) for name in kernels}
