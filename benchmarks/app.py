"""An app in a cluster of its own, for benchmarks: on this machine, over HTTP and by handle."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve

from deployments.app import build
from deployments.config import AppArgs

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class App:
    """url: of its HTTP server."""

    url: str

    @property
    def engine(self) -> Any:
        """A handle of the engines, as `DecisionClient` holds one."""
        return serve.get_deployment_handle("Engine", "default").options(_by_reference=False)

    def counters(self) -> list[dict[str, Any]]:
        """What each engine replica has counted."""
        return list(self.engine.broadcast("counters").results(timeout_s=30))


@contextmanager
def app(args: AppArgs) -> Iterator[App]:
    """The app of these arguments, gone at the end. With RAY_SERVE_ENABLE_HA_PROXY=1 in the
    environment HAProxy is in front of it, else Ray's Python proxy.
    """
    os.environ.pop("RAY_ADDRESS", None)
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(args), name="default", route_prefix="/")
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # Serve has set it back
        yield App(f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()


def processes() -> dict[str, list[int]]:
    """Process ids of the app's parts, by part; of every app on this machine."""
    marks = {
        "engine": "ServeReplica:default:Engine",
        "gateway": "ServeReplica:default:Gateway",
        "proxy": "ProxyActor",
        "haproxy": "haproxy",
    }
    found: dict[str, list[int]] = {name: [] for name in marks}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        part = next((name for name, mark in marks.items() if mark in line), None)
        if part is not None:
            found[part].append(int(folder.name))
    return found


def cpu_seconds(process: int) -> float:
    """Processor time that a process has used; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def resident_bytes(process: int | str = "self") -> int:
    """Resident memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
