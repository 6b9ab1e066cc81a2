"""One call to every replica of a deployment, each of which may fail alone."""

import asyncio
import logging
from typing import Any, NamedTuple

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from flide_engine.errors import NotReady, RequestError
from router.asking import own_error

log = logging.getLogger("ray.serve")

REPLICAS_WITHIN_S = 2.0
"""How long a call waits to learn of any replica."""


class FromAll(NamedTuple):
    """answers: of the replicas that gave one. asked: how many replicas there were."""

    answers: list[Any]
    asked: int


async def ask_all(handle: DeploymentHandle, method: str, *args: Any, seconds: float) -> FromAll:
    """What each replica answers within so many seconds.

    One that dies, hangs or cannot be reached is left out. Raises NotReady if there is none at all,
    and a RequestError that any of them raises.
    """
    response = handle.broadcast(method, *args)
    try:
        # `results_async` is all or nothing: one replica that hangs would cost every answer
        calls = await asyncio.wait_for(response._fetch_replica_results_async(), REPLICAS_WITHIN_S)
    except (TimeoutError, DeploymentUnavailableError):
        raise NotReady("no engine replica is ready") from None
    if not calls:
        raise NotReady("no engine replica is ready")
    tasks = [asyncio.ensure_future(call.get_async()) for call in calls]
    try:
        await asyncio.wait(tasks, timeout=seconds)
    finally:
        for call, task in zip(calls, tasks, strict=True):
            if not task.done():
                call.cancel()
                task.cancel()
    answers = []
    for task in tasks:
        if not task.done() or task.cancelled():
            log.warning("a replica did not answer %s within %s s", method, seconds)
        elif (error := task.exception()) is None:
            answers.append(task.result())
        elif isinstance(ours := own_error(error), RequestError):
            raise ours
        else:
            log.warning("a replica failed in %s: %s: %s", method, type(ours).__name__, ours)
    return FromAll(answers, len(tasks))
