"""Servers as users start them: `python -m deployments.local`, each in a cluster of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import ray
from ray._raylet import Config
from ray.serve.context import _get_global_client, _set_global_client

from loadtest.local import free_port
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
START_WITHIN_S = 240


@dataclass(frozen=True)
class Served:
    """A running server, its cluster's address, and where its output goes."""

    url: str
    address: str
    log: Path


@dataclass(frozen=True)
class Started(Served):
    """One that a test has started for itself."""

    process: subprocess.Popen[str]


@contextmanager
def serving(log: Path, *args: str) -> Iterator[Started]:
    """A server with these arguments, interrupted at the end as Ctrl-C would."""
    port = free_port()
    # a wrong address must not matter: the server starts a cluster of its own
    env = os.environ | {"RAY_ADDRESS": "127.0.0.1:1", "PYTHONUNBUFFERED": "1"}
    env.pop("OMP_NUM_THREADS", None)
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.local", f"port={port}", *args],
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        for _ in range(10 * START_WITHIN_S):
            if process.poll() is not None or "serving at" in log.read_text():
                break
            time.sleep(0.1)
        text = log.read_text()
        assert "serving at" in text, text
        found = re.search(r"cluster: ([\w.:]+)", text)
        assert found, text
        yield Started(f"http://127.0.0.1:{port}", found[1], log, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        process.wait(PATIENCE_S)


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Makes the calling process part of a server's cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        Config.initialize("")  # Ray read the mode when it was imported
        ray.init(address, log_to_driver=False)
        # Serve would go on talking to the controller of a cluster before; handles that are still
        # there may have remembered it after its end
        _set_global_client(None)
        try:
            yield
        finally:
            # the handle of a deployment that scales goes on telling its controller of its queue,
            # and once disconnected would start a cluster for it
            if (client := _get_global_client(raise_if_no_controller_running=False)) is not None:
                client.shutdown_cached_handles()
            _set_global_client(None)
            ray.shutdown()


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    """An HTTP client of the served embedded model."""
    with httpx.Client(base_url=served.url, timeout=60) as made:
        yield made
