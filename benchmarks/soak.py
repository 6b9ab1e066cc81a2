"""Soaks: `python -m benchmarks.soak nano`; on a GPU, `python -m benchmarks.soak 0.8B --clients 64`.

Random weights (`benchmarks.random_model`), one mix, in this process or through Serve. Fails if any
request ended as it must not, was answered otherwise than alone, or left anything. Writes
benchmarks/results/soak.json.
"""

import argparse
import asyncio
import gc
import json
import logging
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.callers import a_node, engine_handle
from benchmarks.processes import processes, resident_bytes, running_now
from benchmarks.random_model import write as write_model
from benchmarks.results_file import RESULTS, Row, stamp, write
from benchmarks.shapes import SHAPES
from deployments.config import AppArgs
from flide_engine.config import EngineConfig
from flide_engine.engine import Engine
from flide_engine.work import RequestWork
from loadtest.soak import Answers, Report, Soak, Target
from loadtest.soak_mix import TENANTS, Mix, Sizes
from loadtest.soak_targets import ByHandle, InProcess, OverHttp, http_ends
from router.auth import key_hash

SAME = ("engine", "shape", "mode", "clients", "card")
WARM_UP = 0.4
"""Part of the time after which memory should grow no more."""

MOST_GROWTH = 0.05
TOLERANCE = {"cpu": 1e-5, "cuda": 0.05}
"""Largest difference of a probability from that of the same request asked alone: float32 on a CPU,
bfloat16 on a GPU.
"""

QUIET_S = 60.0
"""How long an app may take until nothing waits any more."""


def sizes_of(config: EngineConfig, long_words: int = 1500) -> Sizes:
    """What to ask an engine of these limits."""
    most = (config.max_prompt_tokens, config.max_questions, config.max_decoded_bytes)
    return Sizes(*most, long_words=long_words)


def alone(config: EngineConfig, mix: Mix) -> list[Answers]:
    """The answers of the good requests, each asked alone with nothing kept before it."""
    engine = Engine(config.model_copy(update={"keep_checkpoints": False, "host_bytes": 0}))
    try:
        return [engine.decide(request).model_dump()["answers"] for request in mix.good]
    finally:
        engine.close()


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Whose memory grew too much. before, after: bytes by name."""
    return [
        f"{name} grew from {size >> 20} to {after[name] >> 20} MiB"
        for name, size in before.items()
        if after[name] > (1 + MOST_GROWTH) * size
    ]


def in_process(
    config: EngineConfig, mix: Mix, clients: int, seconds: float, tolerance: float, least: int = 0
) -> tuple[Report, list[str]]:
    """(what came of a soak of an engine in this process, what was left or wrong).

    least: requests that are asked in any case, however long that takes.
    """
    expected = alone(config, mix)
    threads, others = set(threading.enumerate()), _requests()
    engine = Engine(config)
    soak = Soak(mix, InProcess(engine), expected, tolerance)

    def quiet() -> dict[str, int]:
        engine.drop_checkpoints()  # between two rounds: those before it are over
        engine.drop_checkpoints()
        gc.collect()
        return {"this process": resident_bytes()}

    report, problems = asyncio.run(_twice(soak, clients, seconds, quiet, least))
    for _ in range(100):  # a thread may be about to let go of the last request
        left = _left(engine, others)
        if not any(left.values()):
            break
        time.sleep(0.1)
    engine.close()
    problems += [f"left {count} {what}" for what, count in left.items() if count]
    problems += [f"left {t.name}" for t in set(threading.enumerate()) - threads if t.is_alive()]
    return report, problems


def _requests() -> list[RequestWork]:
    """Those in memory."""
    return [o for o in gc.get_objects() if type(o) is RequestWork]


def _left(engine: Engine, others: list[RequestWork]) -> dict[str, int]:
    """What an engine holds that nobody asks any more. others: requests in this process before."""
    held = engine.accounting()
    return {
        "waiting requests": engine.waiting,
        "bytes of pages": held.page_bytes_held,
        "bytes of slots": held.slot_bytes_held,
        "requests in memory": len(set(_requests()) - set(others)),
    }


def through_serve(
    config: EngineConfig, mix: Mix, clients: int, seconds: float, tolerance: float, way: str
) -> tuple[Report, list[str]]:
    """The same through an app in a cluster of its own, with keys. way: "handle" or "http"."""
    from benchmarks.fleet.cluster import running  # reads settings of Ray when it is imported

    expected, others = alone(config, mix), running_now()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        keys = {tenant: f"key of {tenant}" for tenant in TENANTS}
        entries = [{"name": t, "key_sha256": [key_hash(k)]} for t, k in keys.items()]
        file.write_text(json.dumps({"tenants": entries}))
        args = AppArgs(engine=config, api_keys=str(file), gateway_replicas=2)
        with running([a_node()], args) as fleet:
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            started = processes(others)
            ours = {f"{p} {pid}": pid for p in ("engine", "gateway") for pid in started[p]}
            soaked = _served(fleet, mix, clients, seconds, tolerance, expected, way, keys, ours)
            return asyncio.run(soaked)


async def _served(
    fleet: Any, mix: Mix, clients: int, seconds: float, tolerance: float,
    expected: list[Answers], way: str, keys: dict[str, str], ours: dict[str, int],
) -> tuple[Report, list[str]]:  # fmt: skip
    left: list[str] = []

    def quiet() -> dict[str, int]:
        until = time.monotonic() + QUIET_S
        while any(waiting := [counted["waiting"] for counted in fleet.live().values()]):
            if time.monotonic() > until:
                left.append(f"left {sum(waiting)} waiting requests")
                break
            time.sleep(0.1)
        return {name: resident_bytes(pid) for name, pid in ours.items()}

    async with AsyncExitStack() as stack:
        target: Target
        if way == "handle":
            target, may_end = ByHandle(engine_handle()), None
        else:
            target = await stack.enter_async_context(OverHttp(fleet.url, keys))
            may_end = http_ends
        soak = Soak(mix, target, expected, tolerance, may_end)
        report, problems = await _twice(soak, clients, seconds, quiet)
    return report, problems + left


async def _twice(
    soak: Soak, clients: int, seconds: float, quiet: Any, least: int = 0
) -> tuple[Report, list[str]]:
    """A warm-up and the rest; quiet: called on a thread after each, gives memory by name."""
    warm = await soak.run(clients, WARM_UP * seconds, int(WARM_UP * least))
    before = await asyncio.to_thread(quiet)
    report = warm + await soak.run(clients, (1 - WARM_UP) * seconds, int((1 - WARM_UP) * least))
    problems = grown(before, await asyncio.to_thread(quiet))
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    return report, report.told + problems + [f"left a task: {task}" for task in tasks]


def main() -> None:
    """Soaks one shape, in one or several ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help="nano, embedded, or a shape of benchmarks.shapes")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--through", nargs="*", default=["process"],
                        choices=["process", "handle", "http"])  # fmt: skip
    parser.add_argument("--long-words", type=int, default=1500, help="of several rounds")
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--dry", action="store_true", help="writes no results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of soak.json")
    args = parser.parse_args()
    options: dict[str, Any] = {} if args.shape in SHAPES else {"max_round_tokens": 1024}
    options |= dict(pair.split("=", 1) for pair in args.option)
    tolerance = TOLERANCE["cuda" if torch.cuda.is_available() else "cpu"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(args.shape, Path(folder) / Path(args.shape).name)
        config = EngineConfig.model_validate({"model": str(model), **options})
        mix = Mix(sizes_of(config, args.long_words))
        for way in args.through:
            how = (config, mix, args.clients, args.seconds, tolerance)
            report, problems = in_process(*how) if way == "process" else through_serve(*how, way)
            print("\n".join(problems), flush=True)
            row: Row = {"engine": "ours", "shape": args.shape, "mode": way, "clients": args.clients}
            rows.append({**row, **report.row(), "problems": len(problems)})
            print(json.dumps(rows[-1]), flush=True)
            if not args.dry:  # after each, so that a run cut short leaves what it has
                print("written to", write("soak", stamp(rows), SAME, args.out), flush=True)
    sys.exit(any(row["problems"] or row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
