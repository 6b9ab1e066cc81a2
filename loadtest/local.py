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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

START_WITHIN_S = 180.0

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


@contextmanager
def serving(log: Path, *args: str) -> Iterator[tuple[str, str]]:
    """(URL, address of its Ray cluster) of a server that runs until the end of the block.

    log: where its output goes. args: `name=value` words of `deployments.local`. Raises
    RuntimeError with the output if it does not start.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.local", f"port={port}", *args],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_WITHIN_S
        while "serving at" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.2)
        found = re.search(r"cluster: ([\w.:]+)", log.read_text())
        yield f"http://127.0.0.1:{port}", found[1] if found else ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        process.wait(90)
