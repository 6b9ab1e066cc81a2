"""Run on a machine of its own (`tests.deployments.machines`): load through HAProxy while Gateways
are killed. Prints one line of JSON.

Environment: that of `deployments/node.sh`.
"""

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray import serve

from deployments.app import build
from deployments.config import AppArgs

URL = "http://127.0.0.1:8000"
BODIES = (400, 60_000, 400_000)
"""Bytes of states: within HAProxy's default buffer, beyond it, and beyond what most agents send."""


def processes(title: str) -> list[int]:
    """Processes of this machine whose command line begins so."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if line.startswith(title):
                found.append(int(entry.name))
    return found


def states() -> list[str]:
    """Three texts of each length; long ones are a short text over and over, to be few tokens."""
    rng = random.Random(0)
    made = []
    for size in BODIES:
        for _ in range(3):
            text = "".join(rng.choices("abcdefgh ", k=300))
            made.append(text + " " * max(0, size - len(text)))
    return made


def body(state: str) -> dict[str, Any]:
    """A request about a state."""
    return {"state": state, "questions": {"q": {"type": "noul", "instructions": "?"}}}


class Load:
    """Clients that ask without a pause, each about one state after the other."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, float]] = []
        self.failed: list[str] = []
        self.enough, self._more = False, asyncio.Event()

    async def plain(self, http: aiohttp.ClientSession, first: int) -> None:
        """Without any retry."""
        turn = first
        while not self.enough:
            number = turn % len(STATES)
            try:
                async with http.post(URL + "/v1/systemone", json=body(STATES[number])) as answer:
                    found = await answer.json() if answer.status == 200 else await answer.text()
                    self.answers.append((number, found["answers"]["q"]["noul"]))
            except Exception as error:
                self.failed.append(f"{len(STATES[number])} bytes: {type(error).__name__} {error}")
                await asyncio.sleep(0.05)
            self._more.set()
            turn += 1

    async def until(self, more: int, within_s: float = 60.0) -> None:
        """Returns when so many more are answered."""
        wanted = len(self.answers) + more
        async with asyncio.timeout(within_s):
            while len(self.answers) < wanted:
                self._more.clear()
                await self._more.wait()


async def kill_gateways(times: int) -> dict[str, Any]:
    """SIGKILL for one Gateway after the other, the next when there are two again."""
    load = Load()
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        expected = []
        for state in STATES:
            async with http.post(URL + "/v1/systemone", json=body(state)) as answer:
                expected.append((await answer.json())["answers"]["q"]["noul"])
        tasks = [asyncio.create_task(load.plain(http, i)) for i in range(6)]
        killed = 0
        for _ in range(times):
            await load.until(60)
            gateways = processes("ray::ServeReplica:default:Gateway")
            os.kill(gateways[0], signal.SIGKILL)
            killed += 1
            for _ in range(600):
                if len(processes("ray::ServeReplica:default:Gateway")) == 2:
                    break
                await asyncio.sleep(0.05)
            await load.until(100)
        load.enough = True
        await asyncio.gather(*tasks)
    far = [n for n, value in load.answers if abs(value - expected[n]) > 1e-5]
    return {
        "killed": killed,
        "answered": len(load.answers),
        "failed": load.failed,
        "changed": len(far),
    }


STATES = states()


def main() -> None:
    """Serves, loads, kills, tells."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "0.0.0.0", "port": 8000})
    args = AppArgs.model_validate(
        {"model": "nano", "num_replicas": 2, "gateway_replicas": 2, "cpus_per_replica": 0.1}
    )
    serve.run(build(args), name="default", route_prefix="/")
    print("TOLD", json.dumps(asyncio.run(kill_gateways(int(sys.argv[1])))), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
