"""CUDA C++ of this folder, compiled by NVRTC for the GPU at hand and launched on torch's stream."""

import ctypes
import functools
import hashlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

FOLDER = Path(__file__).parent
HOPPER = (9, 0)
"""Compute capability that the code is written for."""

Argument = Any
"""A ctypes object: what a kernel takes, by value."""


class Launch(Protocol):
    """A kernel that can be launched."""

    def __call__(
        self, blocks: int, threads: int, shared_bytes: int, arguments: Sequence[Argument]
    ) -> None:
        """So many blocks of so many threads, each with so much shared memory."""


@functools.cache
def has_hopper(device: torch.device) -> bool:
    """Whether the device runs this folder's code, and NVRTC is there to compile it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return False
    try:
        return find_spec("cuda.bindings.nvrtc") is not None
    except ImportError:  # of what it lies in
        return False


@functools.cache
def processors_of(device: torch.device) -> int:
    """How many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def pointers_to(arguments: Sequence[Argument]) -> Any:
    """`void**` of a launch."""
    return (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))


@functools.cache
def compiled(source: str, defined: tuple[tuple[str, str | int], ...]) -> Mapping[str, Launch]:
    """The kernels of a source file of this folder, by name.

    defined: macros, by name. Raises RuntimeError with the compiler's log.
    """
    return _Module(source, _cubin(source, dict(defined)))


class _Module(dict[str, Launch]):
    """A loaded module: its kernels by name, looked up when first asked for."""

    def __init__(self, source: str, cubin: bytes) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream()  # the context that the module is loaded into
        super().__init__()
        self._driver = driver
        self._module = _checked(driver.cuModuleLoadData(cubin), f"loading {source}")

    def __missing__(self, name: str) -> Launch:
        driver = self._driver
        function = _checked(driver.cuModuleGetFunction(self._module, name.encode()), name)
        most = 0

        def launch(
            blocks: int, threads: int, shared_bytes: int, arguments: Sequence[Argument]
        ) -> None:
            nonlocal most
            if shared_bytes > most:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                set_to = driver.cuFuncSetAttribute(function, limit, shared_bytes)
                _checked(set_to, f"{shared_bytes} bytes of shared memory for {name}")
                most = shared_bytes
            held = pointers_to(arguments)
            done = driver.cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, shared_bytes,
                torch.cuda.current_stream().cuda_stream, ctypes.addressof(held), 0,
            )  # fmt: skip
            _checked(done, f"launching {name}")

        self[name] = launch
        return launch


def _checked(result: tuple[Any, ...], what: str) -> Any:
    """What a call of `cuda.bindings` returns beside its error. Raises RuntimeError if it failed."""
    error, *values = result
    if error.value != 0:
        raise RuntimeError(f"{what}: {error}")
    return values[0] if len(values) == 1 else values


def _cubin(source: str, defined: Mapping[str, str | int]) -> bytes:
    """Machine code, from Triton's cache if it has been compiled before."""
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    files = [FOLDER / source, *sorted(FOLDER.glob("*.cuh"))]
    texts = {path.name: path.read_bytes() for path in files}
    options = ["--gpu-architecture=sm_90a", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defined.items()]
    compiler = _checked(nvrtc.nvrtcVersion(), "NVRTC's version")
    key = hashlib.sha256(repr((texts, options, compiler)).encode()).hexdigest()
    cache, name = get_cache_manager(key), f"{Path(source).stem}.cubin"
    if (path := cache.get_file(name)) is not None:
        return Path(path).read_bytes()
    cubin = _compile(nvrtc, source, texts, options)
    cache.put(cubin, name, binary=True)
    return cubin


def _compile(nvrtc: Any, source: str, texts: Mapping[str, bytes], options: Sequence[str]) -> bytes:
    headers = [name for name in texts if name != source]
    made = nvrtc.nvrtcCreateProgram(
        texts[source], source.encode(), len(headers), [texts[name] for name in headers],
        [name.encode() for name in headers],
    )  # fmt: skip
    program = _checked(made, source)
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if error.value != 0:
        text = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "size of the log")
        _checked(nvrtc.nvrtcGetProgramLog(program, text), "the log")
        raise RuntimeError(f"{source} does not compile: {text.decode(errors='replace')}")
    cubin: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "size of the code")
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin), "the code")
    _checked(nvrtc.nvrtcDestroyProgram(program), source)
    return cubin
