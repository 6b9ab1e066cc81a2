"""Our app and the peer's own server on one card, asked by one client:
`python -m benchmarks.servers 0.8B --peer FOLDER --out build/servers`.

Both start beside each other, with random weights of a shape, or `nano` without a GPU. Then for each
workload ours is asked, then the peer's, each in closed loops of every number of clients
(`python -m loadtest`). OUT/NAME/WORK/run.json is written as each ends; at the end their rows
go into benchmarks/results/load.json (`benchmarks.load`) and OUT/report.html compares them. Nothing
is begun that would not end within the budget.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results_file import RESULTS
from benchmarks.serving import ENVIRONMENT
from benchmarks.shapes import SHAPES
from loadtest.workloads import DATA

WORKS = (
    "mixed", "agents", "race", "quality_all", "race_all", "response_eval", "multirc", "routing",
)  # fmt: skip
"""Those that say most first: what does not fit is left out."""

SECONDS = {"quality_all": 6.5, "response_eval": 6.5, "agents": 6.5, "mixed": 5.0}
"""Of a level, 3 of other works: a client's second request has to begin within it, and 128 clients
of these wait for seconds."""

CLIENTS = "1,16,64,128"
STARTING_S = 30
"""What is left at least when a server that does not come up is waited for no longer."""

ENDING_S = 20
"""For the report, and until the servers have ended."""

HAPROXY = ENVIRONMENT["haproxy"] | {"RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(1 << 20)}


@dataclass
class Server:
    """A server in a process of its own. environment: beside ours. out: folder of its runs."""

    name: str
    command: Sequence[str]
    url: str
    out: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    failed: int = 0

    def start(self) -> None:
        """Begins; what it says goes into a log beside its runs."""
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "server.log").open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment}, start_new_session=True,
            )  # fmt: skip

    def is_up(self) -> bool:
        """Whether it answers. Raises RuntimeError if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} has ended with {self.process.returncode}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Asks it to end, and all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


@contextmanager
def running(servers: Sequence[Server], grace_s: float = 12.0) -> Iterator[None]:
    """Servers that are started, and ended whatever happens."""
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.interrupt()
        until = time.monotonic() + grace_s
        for server in servers:
            try:
                server.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                server.interrupt(signal.SIGKILL)
                server.process.wait()


def come_up(servers: Sequence[Server], left: Callable[[], float]) -> list[Server]:
    """Those that answer, once all do, have ended, or time is short; says what becomes of each."""
    waiting, found = list(servers), []
    while waiting and left() > STARTING_S:
        for server in list(waiting):
            try:
                if not server.is_up():
                    continue
                print(f"{server.name} answers", flush=True)
                found.append(server)
            except RuntimeError as error:
                print(error, flush=True)
            waiting.remove(server)
        time.sleep(0.5)
    for server in waiting:
        print(f"{server.name} did not come up", flush=True)
    return [server for server in servers if server in found]


@dataclass(frozen=True)
class Load:
    """How servers are asked. options: further ones of `loadtest`; left: seconds that are left."""

    clients: str
    seconds: Mapping[str, float]
    options: Sequence[str]
    left: Callable[[], float]

    def level_s(self, work: str) -> float:
        """Seconds of a level."""
        return self.seconds.get(work, 3.0)

    def needed_s(self, work: str) -> float:
        """Seconds of a work's levels and what is around them."""
        return len(self.clients.split(",")) * self.level_s(work) + 8

    def ask(self, server: Server, work: str, out: Path) -> bool:
        """Whether a work's load test ended, and anything was answered."""
        seconds = self.needed_s(work) - 8
        command = [
            sys.executable, "-m", "loadtest", "--host", server.url, "--workload", work,
            "--name", server.name, "--clients", self.clients, "--seconds", str(seconds),
            "--out", str(out), *self.options,
        ]  # fmt: skip
        limit = min(self.left() - 5, 2 * seconds + 35)
        with (server.out / "client.log").open("a") as log:
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL,
                    text=True, timeout=limit, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                print(f"{server.name} {work} was not done after {limit:.0f} s", flush=True)
                return False
        for line in done.stdout.splitlines():
            if "clients:" in line:
                print(f"{server.name:6} {work:14} {line}", flush=True)
        return done.returncode == 0 and "answered 0.0/s" not in done.stdout


def asked_in_turn(servers: Sequence[Server], works: Sequence[str], load: Load) -> bool:
    """Asks all servers all works that fit, a server that failed twice no more; whether all were."""
    whole = True
    for work in works:
        for server in servers:
            if server.failed == 2:
                continue
            if load.left() < load.needed_s(work) + ENDING_S:
                print(f"{server.name} is not asked {work}: {load.left():.0f} s left", flush=True)
                whole = False
            elif load.ask(server, work, server.out / work):
                server.failed = 0
            else:
                server.failed, whole = server.failed + 1, False
    return whole


def kept(shape: str, servers: Sequence[Server], out: Path, results: Path) -> None:
    """Rows of all runs, and a page that compares them."""
    pairs = [f"{s.name}={s.out}" for s in servers if any(s.out.glob("*/run.json"))]
    if not pairs:
        return
    rows = [sys.executable, "-m", "benchmarks.load", shape, *pairs, "--out", str(results)]
    subprocess.run(rows, check=True)
    runs = sorted(str(path) for s in servers for path in s.out.glob("*/run.json"))
    page = [sys.executable, "-m", "loadtest", "report", *runs, "--out", str(out / "report.html")]
    subprocess.run(page, check=True)


def servers_of(args: argparse.Namespace) -> list[Server]:
    """Ours, and the peer's if its folder is named."""
    weights = args.shape
    if args.shape in SHAPES:
        from benchmarks.weights import weights_folder

        weights = str(weights_folder(args.shape, args.weights))
    ours = [sys.executable, "-m", "deployments.local", f"port={args.port}", f"model={weights}"]
    url = "http://127.0.0.1:{}".format
    found = [
        Server(
            "ours", [*ours, "insecure=true", *args.option], url(args.port), args.out / "ours",
            HAPROXY,
        )
    ]  # fmt: skip
    if args.peer is not None:
        port = args.port + 1
        flide = [sys.executable, "-m", "flide.cli", "serve", "--model", weights]
        flide += ["--host", "127.0.0.1", "--port", str(port), *args.peer_option]
        paths = [str(args.peer), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        found.append(Server("flide", flide, url(port), args.out / "flide", environment))
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help=f"one of {', '.join(SHAPES)}, or nano without a GPU")
    parser.add_argument("--peer", type=Path, help="folder with flide 0.1.4 and fla 0.5.2")
    parser.add_argument("--works", nargs="*", default=list(WORKS), choices=WORKS)
    parser.add_argument("--clients", default=CLIENTS, help="of closed loops: 1,16,64")
    parser.add_argument("--seconds", type=float, help="of every level")
    parser.add_argument("--budget", type=float, default=3600, help="seconds in all")
    parser.add_argument("--processes", type=int, default=4, help="of the client")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of workload files")
    parser.add_argument(
        "--option", nargs="*", default=["gateway_replicas=4", "device_share=0.45"],
        help="of our app, as of make serve; the card is shared by two",
    )  # fmt: skip
    parser.add_argument("--peer-option", nargs="*", default=[], help="of flide serve")
    parser.add_argument("--port", type=int, default=18931)
    parser.add_argument("--weights", type=Path, help="folder for weights")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def measured(servers: Sequence[Server], args: argparse.Namespace) -> bool:
    """Starts servers, asks them, keeps what came of it; whether nothing was left out or failed."""
    until = time.monotonic() + args.budget
    seconds = dict.fromkeys(WORKS, args.seconds) if args.seconds else SECONDS
    options = ["--warmup", "0.6", "--think", "0", "--timeout", "30", "--data", str(args.data)]
    options += ["--processes", str(args.processes)]
    load = Load(args.clients, seconds, options, lambda: until - time.monotonic())
    with running(servers):
        up = come_up(servers, load.left)
        warm = Load("16", {"mixed": 3.0}, options, load.left)
        for server in up:  # connections, code, the first graphs
            warm.ask(server, "mixed", server.out / "warm-up" / "mixed")
        whole = asked_in_turn(up, args.works, load)
        kept(args.shape, up, args.out, args.results)
    return whole and len(up) == len(servers)


def main() -> None:
    """Measures; exits with 1 if anything was left out or failed."""
    args = parsed()
    sys.exit(not measured(servers_of(args), args))


if __name__ == "__main__":
    main()
