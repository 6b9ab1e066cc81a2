"""Load tests: `python -m loadtest --host URL --workload mixed --seconds 120 --out FOLDER`.

`python -m loadtest report RUN.json RUN2.json --out page.html` compares runs. Without `--host` an
app is started on a free port for the length of the test: the embedded model's, if `--serve` says
nothing else. Of several workloads each is a run of its own, in a folder of its own, written when it
ends.
"""

import argparse
import asyncio
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.http_transport import HttpTransport
from loadtest.local import serving
from loadtest.output import read_run, write_page, write_run
from loadtest.plan import Level, Plan
from loadtest.processes import Target, run_processes
from loadtest.report import headline
from loadtest.runner import Progress, Replicas, run_plan
from loadtest.schedule import SHAPES, WallClock
from loadtest.stats import Run, summary
from loadtest.workloads import DATA, NAMES, Options

if TYPE_CHECKING:
    from loadtest.agreement import Check

Seen = tuple[list[Level], list[tuple[float, int]], dict[str, Any]]


def parser() -> argparse.ArgumentParser:
    """Options of a run."""
    made = argparse.ArgumentParser("loadtest", description=__doc__)
    add = made.add_argument
    add("--host", default="", help="URL of the server; none: one is started here")
    add(
        "--serve",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="options of the server that is started here, as of make serve",
    )
    add("--out", type=Path, required=True, help="folder for run.json and report.html")
    add("--name", default="", help="what the run is called in reports")
    add(
        "--workload",
        default="mixed",
        help=f"one, or several: race,agents; or all: {', '.join(NAMES)}",
    )
    add("--seconds", type=float, default=120.0, help="of a workload's run, all levels together")
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
    add("--processes", type=int, default=1, help="that the clients over HTTP are in")
    add("--workers", type=int, default=0, help="actors that ask by handle, in place of HTTP")
    add("--app", default="default", help="name of the Serve application")
    return made


def workloads_of(word: str) -> list[str]:
    """What `--workload` names. Raises ValueError for a name that is none."""
    names = list(NAMES) if word == "all" else list(dict.fromkeys(word.split(",")))
    for name in names:
        if name not in NAMES:
            raise ValueError(f"--workload {name!r}; there are {', '.join(NAMES)}, and all")
    return names


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan of the options, of the first workload. Raises ValueError if it would measure
    nothing, or if options do not go together.
    """
    names = workloads_of(args.workload)
    if args.serve and args.host:
        raise ValueError("--serve is for a server that is started here, not for one at --host")
    if args.check and len(names) > 1:
        raise ValueError(f"--check takes one workload, not {len(names)}")
    if args.processes < 1 or (args.processes > 1 and args.workers):
        raise ValueError(
            f"{args.processes} processes of clients; at least 1, and without --workers"
        )
    levels = args.clients or args.rate or "1"
    return Plan(
        workload=names[0],
        loop="closed" if args.clients else "open",
        levels=tuple(float(part) for part in levels.split(",")),
        seconds=args.seconds,
        warmup_s=args.warmup,
        shape=args.arrivals,
        seed=args.seed,
        data=args.data,
        options=Options(args.one_by_one, args.think, args.model),
    )


def over_http(plan: Plan, args: argparse.Namespace, host: str, cluster: str) -> Seen:
    """Runs the plan against a URL."""
    count, target = _counter(cluster, args.app), Target(host, args.key, args.timeout)
    if args.processes == 1:
        return asyncio.run(_over_http(plan, target, count))
    about = asyncio.run(_about(target))
    return *run_processes(plan, target, args.processes, Progress(), count), about


async def _over_http(plan: Plan, target: Target, count: Replicas) -> Seen:
    async with HttpTransport(*target) as transport:
        about = await transport.about()
        levels, replicas = await run_plan(plan, transport, WallClock(), Progress(), count)
    return levels, replicas, about


async def _about(target: Target) -> dict[str, Any]:
    async with HttpTransport(*target) as transport:
        return await transport.about()


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
    """A run of each workload: asks, prints the result, writes the files."""
    plan, names = plan_of(args), workloads_of(args.workload)
    runs: list[Run] = []
    with ExitStack() as stack:
        host, cluster = args.host, args.cluster
        if not (host or (args.workers and cluster)):
            print("starting a server on this machine ...", file=sys.stderr, flush=True)
            server = stack.enter_context(serving(args.out / "server.log", *args.serve))
            host, cluster = server.url, server.address
        for name in names:
            if len(names) > 1:
                print(f"workload {name}", flush=True)
            runs.append(_one(replace(plan, workload=name), args, host, cluster))
            folder = args.out / name if len(names) > 1 else args.out
            for path in write_run(runs[-1], folder):
                print(path, flush=True)
    if len(names) > 1:
        print(write_page(runs, args.out / "report.html"))
    if not all(run.get("check", {"agrees": True})["agrees"] for run in runs):
        raise RuntimeError("the report and the server's metrics do not agree, see above")


def _one(plan: Plan, args: argparse.Namespace, host: str, cluster: str) -> Run:
    """The run of a plan; its numbers are printed."""
    check = _check(args, cluster) if args.check else None
    via = "handle" if args.workers else "http"
    ask = by_handle(plan, args, cluster) if args.workers else over_http(plan, args, host, cluster)
    levels, replicas, about = ask
    result = summary(plan, levels, args.name or plan.workload, via, about, replicas)
    if via == "http":
        result["client"]["processes"] = args.processes
    if check is not None:
        result["check"] = check.result(result["totals"], via)
    for line in headline(result):
        print(line, flush=True)
    return result


def report(words: list[str]) -> None:
    """A page about one run, or comparing several of the same workloads."""
    made = argparse.ArgumentParser("loadtest report", description=report.__doc__)
    made.add_argument("runs", type=Path, nargs="+", help="run.json files")
    made.add_argument("--out", type=Path, required=True, help="the page")
    args = made.parse_args(words)
    print(write_page([read_run(path) for path in args.runs], args.out))


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
