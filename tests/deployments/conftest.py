"""Servers as users start them: `python -m deployments.local`, each in a cluster of its own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray._private import auto_init_hook
from ray._raylet import Config
from ray.serve.context import _get_global_client, _set_global_client

from loadtest import local

ROOT = Path(__file__).parents[2]

# Nobody here asks Ray for a cluster without saying so; what a handle leaves behind would, between
# one test's cluster and the next one's.
auto_init_hook.enable_auto_connect = False


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
    # a wrong address must not matter: the server starts a cluster of its own
    env = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    env.pop("OMP_NUM_THREADS", None)
    with local.serving(log, *args, env=env) as server:
        yield Started(server.url, server.address, log, server.process)


def start_ray(**options: Any) -> None:
    """Starts a cluster of this process, again if the machine is too busy for Ray's own patience."""
    for again in (True, True, False):
        try:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, **options)
            return
        except Exception as error:
            ray.shutdown()
            if not again or local.RAY_WAS_SLOW not in str(error):
                raise


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
