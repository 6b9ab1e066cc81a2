"""Load through Ray handles: agent workers as actors, each with a `DecisionClient` of its own.

The counterpart of `loadtest.runner` without HTTP: the same plan, run by several processes.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray import serve

from deployments.client import DecisionClient
from flide_engine.errors import DeadlineExceeded, FlideError
from loadtest.driver import TIMEOUT, Reply, Sample
from loadtest.http_transport import answered
from loadtest.plan import Level, Plan, run_level
from loadtest.runner import Progress, level_name
from loadtest.schedule import WallClock
from loadtest.workloads import Request

RUNNING = "RUNNING"


class HandleTransport:
    """Requests straight to an engine replica."""

    def __init__(self, app: str, timeout_s: float) -> None:
        """app: name of the Serve application. timeout_s: for one request, all tries included."""
        self._client = DecisionClient(app, timeout_s)

    async def send(self, request: Request) -> Reply:
        """The reply; kind of error: the class of the error tree, or of Ray's exception."""
        try:
            response = await self._client.adecide(request.body)
        except DeadlineExceeded:
            return Reply(TIMEOUT)
        except FlideError as error:
            return Reply(type(error).__name__)
        except Exception as error:
            # a dead cluster and the like: counted by kind, as a lost connection is over HTTP
            return Reply(f"transport {type(error).__name__}")
        # a plain dict is answered by a typed response here, whose dump is the JSON of HTTP
        return answered(response if isinstance(response, dict) else response.model_dump())


class AgentWorker:
    """A process of agents: runs its part of every level."""

    def __init__(self, plan: Plan, app: str, timeout_s: float, part: tuple[int, int]) -> None:
        """part: (this worker, number of workers)."""
        self._plan, self._part = plan, part
        self._transport = HandleTransport(app, timeout_s)
        self._unseen: list[Sample] = []

    async def ready(self) -> None:
        """Returns when the process runs; the first call also opens its connections."""

    async def run(self, level: int) -> None:
        """Runs this worker's part of a level."""
        seen = self._unseen.append
        await run_level(self._plan, level, self._transport, WallClock(), seen, self._part)

    async def drain(self) -> list[Sample]:
        """The samples since the call before."""
        taken, self._unseen[:] = list(self._unseen), []
        return taken


def replicas(app: str = "default") -> int | None:
    """Engine replicas that run now; None if the cluster does not say."""
    try:
        found = serve.status().applications[app].deployments["Engine"]
    except (KeyError, ray.exceptions.RayError):
        return None
    return int(found.replica_states.get(RUNNING, 0))


def metrics_urls() -> list[str]:
    """Where the cluster's nodes tell their metrics."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [f"http://{n['NodeManagerAddress']}:{n['MetricsExportPort']}/metrics" for n in nodes]


def about(app: str = "default") -> dict[str, Any]:
    """What an engine replica says of itself."""
    handle = serve.get_deployment_handle("Engine", app_name=app)
    return dict(handle.describe.remote().result(timeout_s=60))


def connect(address: str) -> None:
    """Joins the running cluster at this address. Raises ConnectionError if there is none."""
    if not ray.is_initialized():
        ray.init(address, log_to_driver=False)


def run_handles(
    plan: Plan, workers: int, progress: Progress, app: str = "default", timeout_s: float = 60.0
) -> tuple[list[Level], list[tuple[float, int]]]:
    """(levels, replicas over time) of a plan run by so many worker actors; `connect` first."""
    actor: Any = ray.remote(num_cpus=0)(AgentWorker)
    actors = [actor.remote(plan, app, timeout_s, (i, workers)) for i in range(workers)]
    ray.get([one.ready.remote() for one in actors])
    try:
        return asyncio.run(_levels(plan, actors, progress, app))
    finally:
        for one in actors:
            ray.kill(one)
        progress.close()


async def _levels(
    plan: Plan, actors: Sequence[Any], progress: Progress, app: str
) -> tuple[list[Level], list[tuple[float, int]]]:
    start = time.monotonic()
    levels: list[Level] = []
    counted: list[tuple[float, int]] = []

    async def drain(level: Level) -> None:
        for part in await asyncio.gather(*(actor.drain.remote() for actor in actors)):
            for sample in part:
                level.samples.append(sample)
                progress.seen(sample)

    for i, offered in enumerate(plan.levels):
        level = Level(offered, time.monotonic() - start)
        levels.append(level)
        running = asyncio.gather(*(actor.run.remote(i) for actor in actors))
        while not running.done():
            await asyncio.wait([running], timeout=1.0)
            await drain(level)
            at = time.monotonic() - start
            progress.show(level_name(plan, i), at, plan.seconds)
            found = await asyncio.to_thread(replicas, app)
            if found is not None:
                counted.append((round(at, 1), found))
        await running
        await drain(level)
    return levels, counted
