"""A file of the disk tier: what its header says, how it is written whole, and its checksum."""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flide_engine.cache.names import Named, names_in
from flide_engine.layout.plan import Ints

log = logging.getLogger(__name__)

FORMAT, SUFFIX, NAMES = "flide-disk-3", ".checkpoint", ".names"

Reader = Callable[[int], tuple[Tensor, Tensor]]
"""A checkpoint's pages from some grain on [n, bytes] and its state [bytes], both uint8."""


@dataclass(eq=False)
class File(Named):
    """What is known of a file: the one it continues ("" for none), its length, its last use, whose
    state it is of, tokens of the prefix, its path's stem ("" until it is there).
    """

    parent: str
    size: int
    used: float
    tenant: str
    position: int
    stem: str = ""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint from disk: tokens [position], pages [position / 64, bytes], state [bytes] as it
    is kept (StateFormat), and for whom it is kept.
    """

    tokens: Ints
    pages: Tensor
    state: Tensor
    known: Named = field(default_factory=Named)


def header_of(path: Path, made: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """A file's header, and what of it differs from how files are made here.

    Raises OSError, ValueError, KeyError or TypeError if it is no checkpoint.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(min(size, 1 << 20)))["__metadata__"]
    foreign = [k for k, ours in made.items() if k not in header or header[k] != ours]
    if not foreign:
        file_of(path, header, 0.0), int(header["start"])
    return header, foreign


def file_of(path: Path, header: dict[str, str], used: float) -> File:
    """What is known of a file. Raises OSError, KeyError or ValueError if the header lacks
    something.
    """
    position, names = int(header["position"]), names_in(header["names"])
    size = path.stat().st_size
    return File(header["parent"], size, used, header["tenant"], position, path.stem, **names)


def names_of(path: Path) -> dict[str, Any]:
    """What a file of names says of a checkpoint, nothing if there is none. Raises OSError or
    ValueError.
    """
    try:
        return names_in(path.read_text())
    except FileNotFoundError:
        return {}


def remove(path: Path) -> None:
    """Removes a file if it is there. Errors of the disk are logged."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)


def part_of(path: Path, data: bytes) -> Path:
    """A file beside `path`, written out: to be renamed to it, so that it is there whole or not at
    all, also if the machine stops. Raises OSError.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def packed(header: dict[str, str], tokens: Ints, pages: Tensor, state: Tensor) -> bytes:
    """A file of these contents (Loaded), with a checksum of them and its header."""
    tensors = {
        "tokens": torch.from_numpy(tokens.astype(np.int32)),
        "pages": pages.contiguous(),
        "state": state.contiguous(),
    }
    return bytes(save(tensors, metadata={**header, "checksum": _checksum(header, tensors)}))


def contents_of(path: Path, header: dict[str, str]) -> dict[str, Tensor]:
    """What `packed` was given. Raises OSError, and ValueError if the checksum does not agree."""
    try:
        tensors: dict[str, Tensor] = load(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    told = {k: v for k, v in header.items() if k != "checksum"}
    if header.get("checksum") != _checksum(told, tensors):
        raise ValueError("the checksum does not agree")
    return tensors


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0")
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
