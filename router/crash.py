"""What a process says as it ends by a fault of its own, for whoever asks afterwards.

To its callers a process that is gone is gone: a fault in native code and a SIGKILL from outside
look the same. faulthandler writes on SIGSEGV, SIGFPE, SIGABRT, SIGBUS and SIGILL, and nothing
on SIGKILL; so a file that it writes to tells them apart. It lies on the node of the process, and
is read there.
"""

import faulthandler
import logging
import os
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

log = logging.getLogger("ray.serve")


class LastWords:
    """A file that this process writes to if it ends by a fault of its own, until it is closed. The
    newest one is written to.
    """

    _lock = threading.Lock()
    _newest: "LastWords | None" = None

    def __init__(self) -> None:
        handle, self.path = tempfile.mkstemp(prefix="flide-last-words-")
        self._file: IO[bytes] = os.fdopen(handle, "wb")
        with self._lock:
            faulthandler.enable(self._file)
            LastWords._newest = self

    def close(self) -> None:
        """The process has not ended."""
        with self._lock:
            if LastWords._newest is self:
                LastWords._newest = None
                faulthandler.enable(sys.__stderr__ or sys.stderr, all_threads=False)  # as Ray does
        self._file.close()
        with suppress(FileNotFoundError):
            Path(self.path).unlink()


def taken(node: str, path: str, within_s: float) -> str:
    """The last words of a process of a node, which are gone then; "" if it had none, or the node or
    the time does not let them be read. Blocks.
    """
    if node == ray.get_runtime_context().get_node_id():
        return _take(path)
    try:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(_take).options(scheduling_strategy=there)
        words: str = ray.get(task.remote(path), timeout=within_s)
    except Exception as error:  # the node is gone, or busy: nothing is known
        log.warning("the last words of a process of node %s cannot be read: %r", node, error)
        return ""
    return words


def _take(path: str) -> str:
    try:
        words = Path(path).read_text(errors="replace")
        Path(path).unlink()
    except OSError:
        return ""
    return words
