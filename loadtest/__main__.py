"""Load tests: `python -m loadtest --host URL --workload mixed --seconds 120 --out FOLDER`.

`python -m loadtest report RUN.json RUN2.json --out page.html` compares runs. Without `--host` the
embedded model's app is started on a free port for the length of the test.
"""

import argparse
import asyncio
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.http_transport import HttpTransport
from loadtest.local import serving
from loadtest.output import read_run, write_run
from loadtest.plan import Level, Plan
from loadtest.report import headline, page
from loadtest.runner import Progress, run_plan
from loadtest.schedule import SHAPES, WallClock
from loadtest.stats import summary
from loadtest.workloads import DATA, NAMES, Options

if TYPE_CHECKING:
    from loadtest.agreement import Check

Seen = tuple[list[Level], list[tuple[float, int]], dict[str, Any]]


def parser() -> argparse.ArgumentParser:
    """Options of a run."""
    made = argparse.ArgumentParser("loadtest", description=__doc__)
    add = made.add_argument
    add("--host", default="", help="URL of the server; none: one is started here")
    add("--out", type=Path, required=True, help="folder for run.json and report.html")
    add("--name", default="", help="what the run is called in reports")
    add("--workload", choices=NAMES, default="mixed")
    add("--seconds", type=float, default=120.0, help="of the whole run, all levels together")
    add("--warmup", type=float, default=5.0, help="seconds of each level left out")
    load = made.add_mutually_exclusive_group()
    load.add_argument("--rate", default="", help="open loop: requests/s, or levels: 1,2,4")
    load.add_argument("--clients", default="", help="closed loop: clients, or levels: 1,16,64")
    add("--arrivals", choices=SHAPES, default="poisson", help="of the open loop")
    add("--one-by-one", action="store_true", help="a request for each question")
    add("--think", type=float, default=5.0, help="mean think time of an agent, seconds")
    add("--model", default="jev-latest", help="the model asked for")
    add("--seed", type=int, default=0)
    add("--data", type=Path, default=DATA, help="folder of workload files; synthetic if absent")
    add("--timeout", type=float, default=60.0, help="seconds until a request is given up")
    add("--key", default=os.environ.get("LOADTEST_KEY", ""), help="API key, or LOADTEST_KEY")
    add("--cluster", default="", help="Ray address: also counts engine replicas")
    add(
        "--check",
        action="store_true",
        help="hold the report to the server's counters (needs --cluster, or no --host); nobody else"
        " may ask it meanwhile; exits with 1 if they differ",
    )
    add(
        "--metrics-period",
        type=float,
        default=10.0,
        help="seconds between Ray's exports of metrics (RAY_metrics_report_interval_ms)",
    )
    add("--workers", type=int, default=0, help="actors that ask by handle, in place of HTTP")
    add("--app", default="default", help="name of the Serve application")
    return made


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan of the options. Raises ValueError if it would measure nothing."""
    levels = args.clients or args.rate or "1"
    return Plan(
        workload=args.workload,
        loop="closed" if args.clients else "open",
        levels=tuple(float(part) for part in levels.split(",")),
        seconds=args.seconds,
        warmup_s=args.warmup,
        shape=args.arrivals,
        seed=args.seed,
        data=args.data,
        options=Options(args.one_by_one, args.think, args.model),
    )


async def over_http(plan: Plan, args: argparse.Namespace, host: str, cluster: str) -> Seen:
    """Runs the plan against a URL."""
    count = _counter(cluster, args.app)
    async with HttpTransport(host, args.key, args.timeout) as transport:
        about = await transport.about()
        levels, replicas = await run_plan(plan, transport, WallClock(), Progress(), count)
    return levels, replicas, about


def by_handle(plan: Plan, args: argparse.Namespace, cluster: str) -> Seen:
    """Runs the plan through worker actors in the cluster."""
    handles = _connected(cluster or "auto")
    seen = handles.run_handles(plan, args.workers, Progress(), args.app, args.timeout)
    return *seen, handles.about(args.app)


def _counter(cluster: str, app: str) -> Any:
    if not cluster:
        return lambda: None
    return partial(_connected(cluster).replicas, app)


def _check(args: argparse.Namespace, cluster: str) -> "Check":
    """A first look at the server's metrics. Raises ValueError if nobody says where they are."""
    if not cluster:
        raise ValueError("--check needs --cluster: the cluster's nodes tell the metrics")
    urls = _connected(cluster).metrics_urls()
    from loadtest.agreement import Check

    return Check(urls, args.app, args.metrics_period, fresh=not args.host)


def _connected(cluster: str) -> Any:
    """`loadtest.handles`, in the cluster of this address."""
    # clusters that Serve starts ask for a token; Ray reads this when it is imported
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from loadtest import handles

    handles.connect(cluster)
    return handles


def run(args: argparse.Namespace) -> None:
    """One run: asks, prints the result, writes the files."""
    plan = plan_of(args)
    with ExitStack() as stack:
        host, cluster = args.host, args.cluster
        if not (host or (args.workers and cluster)):
            print("starting a server on this machine ...", file=sys.stderr, flush=True)
            server = stack.enter_context(serving(args.out / "server.log"))
            host, cluster = server.url, server.address
        check = _check(args, cluster) if args.check else None
        if args.workers:
            levels, replicas, about = by_handle(plan, args, cluster)
        else:
            levels, replicas, about = asyncio.run(over_http(plan, args, host, cluster))
        via = "handle" if args.workers else "http"
        result = summary(plan, levels, args.name or args.workload, via, about, replicas)
        if check is not None:
            result["check"] = check.result(result["totals"], via)
    for line in headline(result):
        print(line)
    for path in write_run(result, args.out):
        print(path)
    if not result.get("check", {"agrees": True})["agrees"]:
        raise RuntimeError("the report and the server's metrics do not agree, see above")


def report(words: list[str]) -> None:
    """A page about one run, or comparing several."""
    made = argparse.ArgumentParser("loadtest report", description=report.__doc__)
    made.add_argument("runs", type=Path, nargs="+", help="run.json files")
    made.add_argument("--out", type=Path, required=True, help="the page")
    args = made.parse_args(words)
    args.out.write_text(page([read_run(path) for path in args.runs]))
    print(args.out)


def main() -> None:
    """Runs what the command line asks for; a mistake in it exits with a sentence."""
    try:
        if sys.argv[1:2] == ["report"]:
            report(sys.argv[2:])
        else:
            run(parser().parse_args())
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"loadtest: {error}")


if __name__ == "__main__":
    main()
