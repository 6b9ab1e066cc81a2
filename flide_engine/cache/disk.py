"""The disk tier: a folder of checkpoints that outlives the process.

A file holds what a checkpoint adds to the one before it on disk: tokens and pages from there on,
and its state. It is written under another name and renamed, so it is there whole or not at all; its
name follows from weights, layout, tenant and prefix, so it is found without being opened. What is
damaged, of other weights or of another layout is refused, reported and never used.
"""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flide_engine.config import GRAIN
from flide_engine.layout.plan import Ints

log = logging.getLogger(__name__)

FORMAT, SUFFIX = "flide-disk-1", ".checkpoint"


@dataclass
class File:
    """What is known of a file: the one it continues ("" for none), its length, its last use, whose
    state it is of, what that goes by and was routed on, tokens of the prefix.
    """

    parent: str
    size: int
    used: float
    tenant: str
    name: str
    anchor: str
    position: int

    def goes_by(self, name: str) -> bool:
        """As `Checkpoint.goes_by`."""
        return name in ("", self.name or self.anchor)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint from disk: tokens [position], pages [position / 64, bytes], state [bytes]."""

    tokens: Ints
    pages: Tensor
    state: Tensor


class DiskTier:
    """Checkpoints in a folder. Any thread may use it."""

    def __init__(
        self, folder: Path, budget: int, weights: str, layout: str, clock: Callable[[], float]
    ) -> None:
        """budget: bytes of all files. weights, layout: what a file must have been made with.

        Looks at the folder's files, and removes what an interrupted process left behind.
        """
        self._folder, self._budget, self._clock = folder, budget, clock
        self._made = {"format": FORMAT, "weights": weights, "layout": layout}
        self._lock = threading.Lock()
        self._files: dict[str, File] = {}
        self.refused = 0
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob(f"*{SUFFIX}*")):
            if path.suffix != SUFFIX:
                path.unlink(missing_ok=True)
            elif (header := self._header(path)) is not None:
                self._files[path.stem] = _file(header, path.stat().st_size, clock())

    def __len__(self) -> int:
        return len(self._files)

    @property
    def bytes_held(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(f.size for f in self._files.values())

    def longest(self, tenant: str, keys: Sequence[bytes], limit: int) -> int:
        """Tokens of the longest checkpoint of a prefix, at no more than `limit`; 0 for none.

        keys: `grain_keys` of the prompt.
        """
        with self._lock:
            for grains in range(min(limit // GRAIN, len(keys)), 0, -1):
                if self._name(tenant, keys[grains - 1]) in self._files:
                    return grains * GRAIN
        return 0

    def of(self, tenant: str | None, name: str = "") -> list[File]:
        """A tenant's checkpoints, of one name or of all; tenant: None for every one's."""
        with self._lock:
            return [
                f for f in self._files.values() if tenant in (None, f.tenant) and f.goes_by(name)
            ]

    def forget(self, tenant: str, name: str, beyond: int = -1) -> int:
        """Removes the files of a named state past `beyond` tokens, and those that continue them:
        how many.
        """
        with self._lock:
            before = len(self._files)
            for stem, file in list(self._files.items()):
                if file.tenant == tenant and file.goes_by(name) and file.position > beyond:
                    self._remove(stem)
            return before - len(self._files)

    def save(
        self, tenant: str, name: str, keys: Sequence[bytes], tokens: Ints,
        read: Callable[[int], tuple[Tensor, Tensor]], anchor: str = "",
    ) -> None:  # fmt: skip
        """Writes a checkpoint, without what the longest one before it holds.

        keys, tokens: of its whole prefix. read: (pages from a grain on [n, bytes], state [bytes]),
        both uint8. An error of the disk is logged, and nothing is written.
        """
        stem = self._name(tenant, keys[-1])
        start = self.longest(tenant, keys, len(tokens) - GRAIN)
        parent = self._name(tenant, keys[start // GRAIN - 1]) if start else ""
        with self._lock:
            if stem in self._files:
                self._files[stem].used = self._clock()
                return
        pages, state = read(start // GRAIN)
        tensors = {
            "tokens": torch.from_numpy(tokens[start:].astype(np.int32)),
            "pages": pages.contiguous(),
            "state": state.contiguous(),
        }
        header = {**self._made, "parent": parent, "start": str(start)}
        header |= {"tenant": tenant, "name": name, "anchor": anchor, "position": str(len(tokens))}
        header["checksum"] = _checksum(header, tensors)
        data = save(tensors, metadata=header)
        path = self._folder / f"{stem}{SUFFIX}"
        try:
            _write(path, data)
        except OSError as error:
            log.warning("checkpoint %s cannot be written: %s", path.name, error)
            return
        with self._lock:
            if parent and parent not in self._files:  # removed meanwhile: the file is of no use
                path.unlink(missing_ok=True)
                return
            self._files[stem] = _file(header, len(data), self._clock())
            self._make_room()

    def load(self, tenant: str, keys: Sequence[bytes], tokens: Ints) -> Loaded | None:
        """The checkpoint of exactly these tokens; None if it is not there or not to be trusted.

        Tokens are compared: a name alone proves nothing. A file that cannot be trusted is dropped.
        """
        pages: list[Tensor] = []
        state: Tensor | None = None
        first = name = self._name(tenant, keys[-1])
        stop = len(tokens)
        while stop:
            found = self._read(name)
            if found is None:
                self._drop(first)
                return None
            header, tensors = found
            start = int(header["start"])
            same = np.array_equal(tensors["tokens"].numpy(), tokens[start:stop])
            if not same or len(tensors["pages"]) != (stop - start) // GRAIN:
                self._refuse(name, "it holds other tokens")
                return None
            pages.insert(0, tensors["pages"])
            state = tensors["state"] if state is None else state
            name, stop = header["parent"], start
        assert state is not None
        return Loaded(tokens, torch.cat(pages), state)

    def _name(self, tenant: str, key: bytes) -> str:
        digest = hashlib.blake2b(json.dumps(self._made, sort_keys=True).encode(), digest_size=16)
        digest.update(b"\0" + tenant.encode() + b"\0" + key)
        return digest.hexdigest()

    def _header(self, path: Path) -> dict[str, str] | None:
        """A file's header if it was made with what this tier is for; others stay untouched."""
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(min(size, 1 << 20)))["__metadata__"]
            foreign = {k: header[k] for k, ours in self._made.items() if header[k] != ours}
            _file(header, 0, 0.0), int(header["start"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._report(path, f"it is no checkpoint ({type(error).__name__})")
            return None
        if foreign:
            self._report(path, f"its {', '.join(foreign)} differ")
            return None
        return header

    def _read(self, name: str) -> tuple[dict[str, str], dict[str, Tensor]] | None:
        with self._lock:
            known = self._files.get(name)
            if known is None:
                return None
            known.used = self._clock()
        path = self._folder / f"{name}{SUFFIX}"
        header = self._header(path)
        if header is None:
            self._drop(name)
            return None
        try:
            tensors = load(path.read_bytes())
            told = header.pop("checksum", None)
            if told != _checksum(header, tensors):
                raise ValueError("the checksum does not agree")
        except (OSError, ValueError, SafetensorError) as error:
            self._refuse(name, str(error))
            return None
        return header, tensors

    def _refuse(self, name: str, why: str) -> None:
        self._report(self._folder / f"{name}{SUFFIX}", why)
        self._drop(name)

    def _report(self, path: Path, why: str) -> None:
        self.refused += 1
        log.warning("checkpoint file %s is refused: %s", path.name, why)

    def _drop(self, name: str) -> None:
        """Forgets a file and those that continue it; they stay for whoever wants to look."""
        with self._lock:
            gone = [name]
            while gone:
                self._files.pop(gone.pop(), None)
                gone += [
                    n for n, f in self._files.items() if f.parent and f.parent not in self._files
                ]

    def _remove(self, stem: str) -> None:
        """Removes a file and those that continue it; the lock is held."""
        for child in [n for n, f in self._files.items() if f.parent == stem]:
            self._remove(child)
        if self._files.pop(stem, None) is not None:
            (self._folder / f"{stem}{SUFFIX}").unlink(missing_ok=True)

    def _make_room(self) -> None:
        """Removes files that none continues, least recently used first, until the budget holds."""
        total = sum(f.size for f in self._files.values())
        while total > self._budget:
            parents = {f.parent for f in self._files.values()}
            ends = [n for n in self._files if n not in parents]
            name = min(ends, key=lambda n: self._files[n].used)
            total -= self._files.pop(name).size
            (self._folder / f"{name}{SUFFIX}").unlink(missing_ok=True)


def _file(header: dict[str, str], size: int, used: float) -> File:
    """Raises KeyError or ValueError if the header lacks something."""
    return File(
        header["parent"], size, used, header["tenant"], header["name"], header.get("anchor", ""),
        int(header["position"]),
    )  # fmt: skip


def _write(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all, also if the machine stops."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0")
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
