"""The disk tier: a folder of checkpoints that outlives the process.

A file holds what a checkpoint adds to the one before it on disk: tokens and pages from there on,
and its state. It is written under another name and renamed, so it is there whole or not at all; its
name follows from weights, layout, tenant and prefix, so it is found without being opened. For whom
it is kept may change, and then stands in a small file beside it. What is damaged, of other weights
or of another layout is refused, reported and never used; it counts, and is the first to go.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flide_engine.cache.disk_file import (
    FORMAT,
    NAMES,
    SUFFIX,
    File,
    Loaded,
    checksum_of,
    file_of,
    header_of,
    write_whole,
)
from flide_engine.cache.names import Named, names_in, names_text
from flide_engine.config import GRAIN
from flide_engine.layout.plan import Ints

log = logging.getLogger(__name__)


class DiskTier:
    """Checkpoints in a folder. Any thread may use it."""

    def __init__(
        self, folder: Path, budget: int, weights: str, layout: str, clock: Callable[[], float]
    ) -> None:
        """budget: bytes of all files. weights, layout: what a file must have been made with.

        Looks at the folder's files, which must be this tier's alone, and removes what an
        interrupted process left behind and what is more than the budget.
        """
        self._folder, self.budget, self._clock = folder, budget, clock
        self._made = {"format": FORMAT, "weights": weights, "layout": layout}
        self._lock = threading.Lock()
        self._files: dict[str, File] = {}
        self._others: dict[str, tuple[float, int]] = {}  # (written, bytes) of what is not used
        self.refused = 0
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"*{SUFFIX}.*"):
            path.unlink(missing_ok=True)
        # what was written last counts as used last
        for path in sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime):
            if (header := self._header(path)) is None:
                self._put_aside(path.stem)
                continue
            self._files[path.stem] = file_of(header, path.stat().st_size, clock())
            self._read_names(path.stem)
        for path in folder.glob(f"*{NAMES}"):
            if not path.with_suffix(SUFFIX).exists():
                path.unlink(missing_ok=True)
        self._make_room("")

    def __len__(self) -> int:
        return len(self._files)

    @property
    def bytes_held(self) -> int:
        """Bytes of all files, also of those that are not used."""
        with self._lock:
            return self._held()

    @property
    def distinct_tokens(self) -> int:
        """Tokens in all files: each continues a whole other one or begins where its prompt does."""
        with self._lock:
            before = (self._files.get(f.parent) for f in self._files.values())
            return sum(f.position for f in self._files.values()) - sum(
                f.position for f in before if f is not None
            )

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
        """Keeps a named state's files past `beyond` tokens for it no longer: how many.

        Those that are kept for no other name are removed, or stay as the base of files that are.
        """
        left = [f for f in self.of(tenant, name) if f.position > beyond]
        with self._lock:
            for file in left:
                file.leave(name)
            self._prune()
            self._note(left)
        return len(left)

    def branch(self, files: Sequence[File], new: str, anchor: str) -> None:
        """Keeps files for another name, too. anchor: what that name is routed on."""
        with self._lock:
            for file in files:
                file.keep_for(new, anchor)
            self._note(files)

    def pin(self, files: Sequence[File], pinned: bool) -> None:
        """Keeps files from eviction, or no longer."""
        with self._lock:
            for file in files:
                file.pinned = pinned
            self._note(files)

    def bytes_with(self, more: Sequence[File]) -> int:
        """Bytes of pinned files and of some more."""
        with self._lock:
            pinned = {f for f in self._files.values() if f.pinned} | set(more)
            return sum(f.size for f in pinned)

    def save(
        self, tenant: str, known: Named, keys: Sequence[bytes], tokens: Ints,
        read: Callable[[int], tuple[Tensor, Tensor]],
    ) -> None:  # fmt: skip
        """Writes a checkpoint, without what the longest one before it holds.

        known: for whom it is kept. keys, tokens: of its whole prefix. read: (pages from a grain on
        [n, bytes], state [bytes]), both uint8. An error of the disk is logged, and nothing is
        written.
        """
        stem = self._name(tenant, keys[-1])
        start = self.longest(tenant, keys, len(tokens) - GRAIN)
        parent = self._name(tenant, keys[start // GRAIN - 1]) if start else ""
        with self._lock:
            if (file := self._files.get(stem)) is not None:
                file.used = self._clock()
                before = names_text(file)
                file.learn(known)
                if names_text(file) != before:
                    self._note([file])
                return
        pages, state = read(start // GRAIN)
        tensors = {
            "tokens": torch.from_numpy(tokens[start:].astype(np.int32)),
            "pages": pages.contiguous(),
            "state": state.contiguous(),
        }
        header = {**self._made, "parent": parent, "start": str(start)}
        header |= {"tenant": tenant, "names": names_text(known), "position": str(len(tokens))}
        header["checksum"] = checksum_of(header, tensors)
        data = save(tensors, metadata=header)
        path = self._folder / f"{stem}{SUFFIX}"
        try:
            write_whole(path, data)
        except OSError as error:
            log.warning("checkpoint %s cannot be written: %s", path.name, error)
            return
        with self._lock:
            if parent and parent not in self._files:  # removed meanwhile: the file is of no use
                path.unlink(missing_ok=True)
                return
            self._others.pop(stem, None)
            self._files[stem] = file_of(header, len(data), self._clock())
            self._make_room(stem)

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
        with self._lock:
            file = self._files.get(first)
        return Loaded(tokens, torch.cat(pages), state, file.known() if file else Named())

    def _name(self, tenant: str, key: bytes) -> str:
        digest = hashlib.blake2b(json.dumps(self._made, sort_keys=True).encode(), digest_size=16)
        digest.update(b"\0" + tenant.encode() + b"\0" + key)
        return digest.hexdigest()

    def _header(self, path: Path) -> dict[str, str] | None:
        """A file's header if it was made with what this tier is for; others stay untouched."""
        try:
            header, foreign = header_of(path, self._made)
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
            if told != checksum_of(header, tensors):
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
        """Forgets a file and those that continue it; they stay for whoever wants to look, while
        there is room.
        """
        with self._lock:
            gone = [name]
            while gone:
                stem = gone.pop()
                if self._files.pop(stem, None) is not None:
                    self._put_aside(stem)
                gone += [
                    n for n, f in self._files.items() if f.parent and f.parent not in self._files
                ]

    def _put_aside(self, stem: str) -> None:
        """Counts a file that is not used; the lock is held, here and below."""
        try:
            found = (self._folder / f"{stem}{SUFFIX}").stat()
        except OSError:
            return
        self._others[stem] = found.st_mtime, found.st_size

    def _held(self) -> int:
        return sum(f.size for f in self._files.values()) + sum(n for _, n in self._others.values())

    def _remove(self, stem: str) -> None:
        """Removes a file that none continues, or that is not used."""
        if self._files.pop(stem, None) is None:
            del self._others[stem]
        for suffix in (SUFFIX, NAMES):
            (self._folder / f"{stem}{suffix}").unlink(missing_ok=True)

    def _prune(self) -> None:
        """Removes files that are kept for nobody and that none continues."""
        while True:
            parents = {f.parent for f in self._files.values()}
            gone = [n for n, f in self._files.items() if f.is_base and n not in parents]
            if not gone:
                return
            for stem in gone:
                self._remove(stem)

    def _make_room(self, newest: str) -> None:
        """Removes files until the budget holds: those that are not used, the oldest first, then
        those that none continues, least recently used first.

        Pinned ones stay; if nothing else is left, the newest goes.
        """
        while self._held() > self.budget:
            if self._others:
                self._remove(min(self._others, key=lambda stem: self._others[stem]))
                continue
            parents = {f.parent for f in self._files.values()}
            ends = [n for n, f in self._files.items() if n not in parents and not f.pinned]
            if not ends and newest not in self._files:
                return
            self._remove(min(ends or [newest], key=lambda n: self._files[n].used))
            self._prune()

    def _note(self, changed: Sequence[File]) -> None:
        """Writes for whom files are kept now, if they are still there."""
        stems = {id(file): stem for stem, file in self._files.items()}
        for file in changed:
            if (stem := stems.get(id(file))) is not None:
                try:
                    write_whole(self._folder / f"{stem}{NAMES}", names_text(file).encode())
                except OSError as error:
                    log.warning("names of checkpoint %s cannot be written: %s", stem, error)

    def _read_names(self, stem: str) -> None:
        """Takes in for whom a file is kept, if that has changed since it was written."""
        path = self._folder / f"{stem}{NAMES}"
        try:
            for what, value in names_in(path.read_text()).items():
                setattr(self._files[stem], what, value)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._report(path, f"it holds no names ({type(error).__name__})")
