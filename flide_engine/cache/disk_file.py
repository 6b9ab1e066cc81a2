"""A file of the disk tier: what its header says, how it is written whole, and its checksums."""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from flide_engine.cache.names import Named, names_in
from flide_engine.layout.plan import Ints

log = logging.getLogger(__name__)

FORMAT, SUFFIX, NAMES = "flide-disk-3", ".checkpoint", ".names"

_MOST_HEADER = 1 << 20

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
        header: dict[str, Any] = json.loads(file.read(min(size, _MOST_HEADER)))["__metadata__"]
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
    """A file of these contents (Loaded), with a checksum of each and one of its header."""
    tensors = {
        "tokens": torch.from_numpy(tokens.astype(np.int32)),
        "pages": pages.contiguous(),
        "state": state.contiguous(),
    }
    sums = {n: _checksum(t.shape, t.view(torch.uint8).numpy().data) for n, t in tensors.items()}
    whole = {**header, "sums": json.dumps(sums)}
    return bytes(save(tensors, metadata={**whole, "checksum": _of_header(whole)}))


def contents_of(path: Path, header: dict[str, str], whole: bool) -> dict[str, Tensor]:
    """What `packed` was given, or without the state, which is not read then.

    Raises OSError, and ValueError, KeyError or TypeError if a checksum does not agree.
    """
    told = {k: v for k, v in header.items() if k != "checksum"}
    if header.get("checksum") != _of_header(told):
        raise ValueError("the checksum does not agree")
    sums = json.loads(header["sums"])
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        places = json.loads(file.read(min(size, _MOST_HEADER)))
        names = ("tokens", "pages", "state") if whole else ("tokens", "pages")
        return {name: _tensor(file, 8 + size, name, places[name], sums[name]) for name in names}


def _tensor(
    file: BufferedReader, after: int, name: str, place: dict[str, Any], checksum: str
) -> Tensor:
    """One of a file's tensors; after: bytes of its header. Raises ValueError."""
    start, stop = place["data_offsets"]
    there = 0 <= start < stop <= os.fstat(file.fileno()).st_size - after
    data = bytearray(stop - start if there else 0)
    file.seek(after + start if there else 0)
    if file.readinto(data) < len(data) or checksum != _checksum(place["shape"], data):
        raise ValueError(f"the checksum of its {name} does not agree")
    kind = torch.int32 if name == "tokens" else torch.uint8
    return torch.frombuffer(data, dtype=kind).reshape(place["shape"])


def _checksum(shape: Iterable[int], data: memoryview | bytearray) -> str:
    digest = hashlib.blake2b(json.dumps([*shape]).encode(), digest_size=16)
    digest.update(data)
    return digest.hexdigest()


def _of_header(header: dict[str, str]) -> str:
    text = json.dumps(header, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
