"""A server on this machine for the length of a load test: `python -m deployments.local` on a free
port.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_WITHIN_S, END_WITHIN_S = 300.0, 120.0

RAY_WAS_SLOW = "The current node timed out during startup"
"""What Ray says when a machine is too busy for the half minute that it gives itself."""

PORTS = range(20_000, 32_000)
"""Below those that a system gives to whoever names none, as the dozens of sockets of a cluster that
starts: one of them may have taken a port from there before its server gets to it.
"""


def free_port() -> int:
    """A port of `PORTS` that nothing listens on."""
    drawn = random.SystemRandom()  # two processes with one seed must not draw alike
    while True:
        port = drawn.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Server:
    """A server that runs: its URL, the address of its Ray cluster, and its process."""

    url: str
    address: str
    process: "subprocess.Popen[str]"


@contextmanager
def serving(log: Path, *args: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that runs until the end of the block, and is interrupted then as by Ctrl-C.

    log: where its output goes. args: `name=value` words of `deployments.local`. env: none: this
    process's. Raises RuntimeError with the output if it does not start.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    for again in (True, True, False):
        port = free_port()
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployments.local", f"port={port}", *args],
                cwd=Path(__file__).parents[1],
                env={**(os.environ if env is None else env), "PYTHONUNBUFFERED": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        try:
            text = _started(process, log)
            if found := re.search(r"serving at[\s\S]*cluster: ([\w.:]+)", text):
                yield Server(f"http://127.0.0.1:{port}", found[1], process)
                return
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:  # as where a shell has it ignore interrupts
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not again or RAY_WAS_SLOW not in text:
            raise RuntimeError(f"the server did not start:\n{text}")


def _started(process: "subprocess.Popen[str]", log: Path) -> str:
    """Its output once it serves, has ended, or is not to be waited for any longer."""
    deadline = time.monotonic() + START_WITHIN_S
    while "\ncluster: " not in (text := log.read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            return log.read_text()
        time.sleep(0.1)
    return text
