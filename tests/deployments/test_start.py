"""What `python -m deployments.local` refuses to start with, without a cluster, and what it says."""

import errno
import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve

from deployments import local
from loadtest.local import free_port


class Started(Exception):
    """It went on to start something."""


class Machine:
    """Ray and Serve, which start nothing. down: what was shut down, in order."""

    def __init__(self) -> None:
        self.resources = {"CPU": 2.0, "memory": 1e9}
        self.down: list[str] = []
        self.interrupts = ""

    def init(self, **_: Any) -> Any:
        if self.interrupts == "ray":
            os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(address_info={"session_dir": "/s", "address": "a:1"})

    def run(self, *_: Any, **__: Any) -> None:
        if self.interrupts == "serve":
            os.kill(os.getpid(), signal.SIGINT)
        raise Started


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Of two cores, with a network."""
    made = Machine()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or it may be ignored here
    monkeypatch.setattr(ray, "init", made.init)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: made.resources)
    monkeypatch.setattr(ray, "shutdown", lambda: made.down.append("ray"))
    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(serve, "run", made.run)
    monkeypatch.setattr(serve, "shutdown", lambda: made.down.append("serve"))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv("RAY_ADDRESS", "x")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t")
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def start(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """As the command line would."""
    monkeypatch.setattr("sys.argv", ["local", f"port={free_port()}", *words])
    local.main()


def test_a_cluster_without_a_token_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless nobody can reach it, or that is said to be so."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(SystemExit, match="can run code in the cluster.*insecure=true"):
        start(monkeypatch)
    assert not machine.down
    with pytest.raises(Started):
        start(monkeypatch, "insecure=true")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    with pytest.raises(Started):
        start(monkeypatch)
    with pytest.raises(SystemExit, match="insecure='maybe'"):
        start(monkeypatch, "insecure=maybe")


@pytest.mark.parametrize(
    "words",
    [
        ("num_replicas=2",),
        ("num_replicas=auto", "min_replicas=2"),
        ("gpus_per_replica=1",),
        ("gateway_replicas=11",),
    ],
)
def test_replicas_that_find_no_room_are_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Serve would wait for it for ever; the cluster is taken down again."""
    with pytest.raises(SystemExit, match="Ray would not place all") as told:
        start(monkeypatch, *words)
    assert "Traceback" not in str(told.value)
    assert machine.down == ["serve", "ray"]
    with pytest.raises(Started):
        start(monkeypatch)


@pytest.mark.parametrize("interrupts", ["ray", "serve"])
def test_an_interrupt_ends_a_start(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupts: str,
) -> None:
    """Wherever it is, and what was started is taken down; the status is that of an interrupt."""
    machine.interrupts = interrupts
    with pytest.raises(SystemExit) as told:
        start(monkeypatch)
    assert told.value.code == 130
    assert machine.down == ["serve", "ray"]
    shown = capsys.readouterr().out
    assert ("loading the model ..." in shown) == (interrupts == "serve")
    assert "serving at" not in shown


@pytest.mark.parametrize(
    ("number", "port", "told"),
    [
        (errno.EADDRINUSE, 8000, "port 8000 is busy; another one: make serve PORT=8001"),
        (errno.EADDRINUSE, 65535, "port 65535 is busy; another one: make serve PORT=65534"),
        (errno.EACCES, 80, r"port 80: Permission denied; another one: make serve PORT=8000"),
    ],
)
def test_a_port_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, number: int, port: int, told: str
) -> None:
    """Says why, and names one that there is."""

    class Probe(socket.socket):
        def bind(self, address: Any) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Probe)
    with pytest.raises(SystemExit, match=f"^{told}$"):
        local.refuse_busy_port(port)
