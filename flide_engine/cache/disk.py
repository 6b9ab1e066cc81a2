"""The disk tier: a folder of checkpoints that outlives the process.

A file holds what a checkpoint adds to the one before it on disk: tokens and pages from there on,
and its state. It is written under another name and renamed, so it is there whole or not at all; its
name follows from what it was made with, tenant and prefix, so it is found without being opened. For
whom it is kept may change, and then stands in a small file beside it. What is damaged or was made
otherwise is refused, reported and never used; it counts, and is the first to go.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flide_engine.cache.disk_file import (
    FORMAT,
    NAMES,
    SUFFIX,
    File,
    Loaded,
    Reader,
    contents_of,
    file_of,
    header_of,
    names_of,
    packed,
    part_of,
    remove,
)
from flide_engine.cache.names import Named, names_text
from flide_engine.config import GRAIN
from flide_engine.layout.plan import Ints

log = logging.getLogger(__name__)


class DiskTier:
    """Checkpoints in a folder. Any thread may use it.

    What is given up and for whom files are kept is changed in memory only, where engines may do it
    between two rounds; `flush` makes the folder agree.
    """

    def __init__(
        self, folder: Path, budget: int, made: Mapping[str, str], clock: Callable[[], float]
    ) -> None:
        """budget: bytes of all files. made: what a file must have been made with, by name.

        Looks at the folder's files, which must be this tier's alone, and removes what an
        interrupted process left behind and what is more than the budget.
        """
        self._folder, self.budget, self._clock = folder, budget, clock
        self._made = {"format": FORMAT, **made}
        digested = json.dumps(self._made, sort_keys=True).encode()
        self._digest = hashlib.blake2b(digested, digest_size=16)  # names begin with it
        self._lock = threading.Lock()  # of what is known of files: never held while one is written
        self._folder_lock = threading.Lock()  # of which files are there; taken before the other
        self._files: dict[str, File] = {}
        self._coming: set[File] = set()  # those that are yet to be written
        self._gone: dict[str, None] = {}  # to be removed, in this order
        self._unnoted: set[str] = set()  # kept for others than their files say
        self._others: dict[str, tuple[float, int]] = {}  # (written, bytes) of what is not used
        self.refused = 0
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.part"):
            path.unlink(missing_ok=True)
        # what was written last counts as used last
        for path in sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime):
            if (header := self._header(path)) is None:
                self._put_aside(path.stem)
                continue
            self._files[path.stem] = file_of(path, header, clock())
            self._read_names(path.stem)
        for path in folder.glob(f"*{NAMES}"):
            if not path.with_suffix(SUFFIX).exists():
                path.unlink(missing_ok=True)
        self._make_room("")
        self.flush()

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

    def longest(self, tenant: str, keys: Sequence[bytes], limit: int, least: int = 0) -> int:
        """Tokens of the longest checkpoint of a prefix, at no more than `limit` and more than
        `least`; 0 for none.

        keys: `grain_keys` of the prompt. Waits for nobody: what is told may have changed since.
        """
        for grains in range(min(limit // GRAIN, len(keys)), least // GRAIN, -1):
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
        with self._lock:
            left = [f for f in self._named(tenant, name) if f.position > beyond]
            for file in left:
                file.leave(name)
            self._prune()
            self._note(left)
            return sum(1 for file in left if file not in self._coming)

    def branch(self, tenant: str, name: str, position: int, new: str, anchor: str) -> None:
        """Keeps a named state's files of so many tokens for another name, too. anchor: what that
        name is routed on.
        """
        with self._lock:
            files = self._named(tenant, name, position)
            for file in files:
                file.keep_for(new, anchor)
            self._note(files)

    def pin(self, tenant: str, name: str, position: int | None, pinned: bool) -> None:
        """Keeps a named state's files from eviction, or no longer: those of so many tokens, or
        all.
        """
        with self._lock:
            files = self._named(tenant, name, position)
            for file in files:
                file.pinned = pinned
            self._note(files)

    def flush(self) -> None:
        """Removes what has been given up and writes for whom files are kept. Errors of the disk are
        logged.
        """
        with self._folder_lock:
            with self._lock:
                gone = [stem for stem in self._gone if stem not in self._files]
                names = {s: names_text(self._files[s]) for s in self._unnoted if s in self._files}
                self._gone.clear()
                self._unnoted.clear()
            for stem in gone:
                for suffix in (SUFFIX, NAMES):
                    remove(self._folder / f"{stem}{suffix}")
            for stem, known_as in names.items():
                path = self._folder / f"{stem}{NAMES}"
                try:
                    part_of(path, known_as.encode()).replace(path)
                except OSError as error:
                    log.warning("names of checkpoint %s cannot be written: %s", stem, error)

    def pinned_with(self, more: Sequence[File]) -> set[File]:
        """Pinned files and some more."""
        with self._lock:
            return {f for f in self._files.values() if f.pinned} | set(more)

    def announce(self, tenant: str, known: Named, position: int) -> File:
        """A checkpoint that is going to be saved: what happens to its names until then happens to
        its file. `save` or `withdraw` must follow.
        """
        file = File("", 0, self._clock(), tenant, position, **asdict(known.known()))
        with self._lock:
            self._coming.add(file)
        return file

    def withdraw(self, coming: File) -> None:
        """It is not going to be saved."""
        with self._lock:
            self._coming.discard(coming)

    def save(self, coming: File, keys: Sequence[bytes], tokens: Ints, read: Reader) -> None:
        """Writes a checkpoint, without what the longest one before it holds, unless it is kept for
        nobody any more.

        keys, tokens: of its whole prefix. An error of the disk is logged, and nothing is written.
        """
        try:
            self._save(coming, keys, tokens, read)
        finally:
            self.withdraw(coming)
            self.flush()

    def _save(self, coming: File, keys: Sequence[bytes], tokens: Ints, read: Reader) -> None:
        stem = self._name(coming.tenant, keys[-1])
        start = self.longest(coming.tenant, keys, len(tokens) - GRAIN)
        parent = self._name(coming.tenant, keys[start // GRAIN - 1]) if start else ""
        with self._lock:
            if coming.is_base:
                return
            if (file := self._files.get(stem)) is not None:
                file.used = self._clock()
                before = names_text(file)
                file.learn(coming)
                if names_text(file) != before:
                    self._note([file])
                return
            names = names_text(coming)
        header = {**self._made, "parent": parent, "start": str(start)}
        header |= {"tenant": coming.tenant, "names": names, "position": str(len(tokens))}
        data = packed(header, tokens[start:], *read(start // GRAIN))
        path = self._folder / f"{stem}{SUFFIX}"
        try:
            part = part_of(path, data)
            with self._folder_lock, self._lock:
                # removed meanwhile, or what it continues: the file is of no use
                if coming.is_base or (parent and parent not in self._files):
                    part.unlink()
                    return
                path.with_suffix(NAMES).unlink(missing_ok=True)  # of one that was there before
                part.replace(path)
                coming.parent, coming.size, coming.stem = parent, len(data), stem
                coming.used = self._clock()
                self._coming.discard(coming)
                self._others.pop(stem, None)
                self._files[stem] = coming
                if names_text(coming) != names:
                    self._note([coming])
                self._make_room(stem)
        except OSError as error:
            log.warning("checkpoint %s cannot be written: %s", path.name, error)

    def load(self, tenant: str, keys: Sequence[bytes], tokens: Ints) -> Loaded | None:
        """The checkpoint of exactly these tokens; None if it is not there or not to be trusted.

        Tokens are compared: a name alone proves nothing. A file that cannot be trusted is dropped.
        """
        pages: list[Tensor] = []
        state: Tensor | None = None
        first = name = self._name(tenant, keys[-1])
        stop = len(tokens)
        while stop:
            found = self._read(name, whole=state is None)  # of those before it, no state
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

    def refuse(self, tenant: str, key: bytes) -> None:
        """Removes the checkpoint that ends with the grain of this key: it was found at fault."""
        if (stem := self._name(tenant, key)) in self._files:
            self._refuse(stem, "values computed from it are not finite")
            with self._lock:
                self._remove(stem)

    def _name(self, tenant: str, key: bytes) -> str:
        digest = self._digest.copy()
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

    def _read(self, name: str, whole: bool) -> tuple[dict[str, str], dict[str, Tensor]] | None:
        with self._lock:
            if (known := self._files.get(name)) is None:
                return None
            known.used = self._clock()
        path = self._folder / f"{name}{SUFFIX}"
        if (header := self._header(path)) is None:
            self._drop(name)
            return None
        try:
            return header, contents_of(path, header, whole)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._refuse(name, str(error))
            return None

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
        """Gives up a file that none continues, or that is not used."""
        if self._files.pop(stem, None) is None:
            self._others.pop(stem, None)
        self._gone[stem] = None

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

    def _named(self, tenant: str, name: str, position: int | None = None) -> list[File]:
        """As `of`, with those that are yet to be written; position: only those of so many
        tokens.
        """
        return [
            f
            for f in (*self._files.values(), *self._coming)
            if f.tenant == tenant and f.goes_by(name) and position in (None, f.position)
        ]

    def _note(self, changed: Sequence[File]) -> None:
        """For whom files are kept has changed: if they are there, that is to be written."""
        self._unnoted |= {file.stem for file in changed if file.stem}

    def _read_names(self, stem: str) -> None:
        """Takes in for whom a file is kept, if that has changed since it was written."""
        path = self._folder / f"{stem}{NAMES}"
        try:
            vars(self._files[stem]).update(names_of(path))
        except (OSError, ValueError) as error:
            self._report(path, f"it holds no names ({type(error).__name__})")
