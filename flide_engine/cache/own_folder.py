"""Which part of a folder is one engine's: several on a machine are given the same one.

It has numbered folders, each with a lock that goes with its process. So a replica that is started
anew finds the files of one that died, and never touches those of one that lives.
"""

import fcntl
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import IO

from flide_engine.errors import ConfigError

LOCK = "lock"


class OwnFolder:
    """A numbered folder, locked until it is released or the process ends.

    path: where it is.
    """

    def __init__(self, shared: Path, kind: str) -> None:
        """Takes the first that nobody has, of those whose last owner was of the same kind before
        others; makes one if all are taken.

        kind: of the files, one line. Raises ConfigError if the folder cannot be used.
        """
        try:
            shared.mkdir(parents=True, exist_ok=True)
            self.path, self._held = _taken(shared, kind)
            self._held.truncate(0)
            self._held.write(kind)
            self._held.flush()
        except OSError as error:
            raise ConfigError(f"disk_folder {shared} cannot be used: {error}") from error

    def release(self) -> None:
        """Lets another have it."""
        self._held.close()


def _taken(shared: Path, kind: str) -> tuple[Path, IO[str]]:
    """A folder and its locked file."""
    candidates = _candidates(shared, kind)
    while True:
        path = next(candidates)
        path.mkdir(exist_ok=True)
        if (held := _locked(path / LOCK)) is not None:
            return path, held


def _candidates(shared: Path, kind: str) -> Iterator[Path]:
    """Folders in the order in which they are tried, without end."""
    there = sorted((p for p in shared.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    yield from (p for p in there if _last_kind(p) == kind)
    yield from (shared / str(number) for number in count())


def _last_kind(path: Path) -> str:
    try:
        return (path / LOCK).read_text()
    except OSError:
        return ""


def _locked(path: Path) -> IO[str] | None:
    """The file, locked; None if another process or engine has it."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        raise
    return file
