"""Timing that every engine is timed with."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch


def event_ms(run: Callable[[], Any]) -> float:
    """Milliseconds on the device of what `run` launches; of the run itself on a CPU."""
    if not torch.cuda.is_available():
        return wall_ms(run)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """What replays `run` as one CUDA graph, warm; on a CPU `run` itself."""
    run()
    if not torch.cuda.is_available():
        return run
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def wall_ms(run: Callable[[], Any]) -> float:
    """Milliseconds until `run` returns."""
    began = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - began)


def latencies_ms(
    run: Callable[[Any], Any], requests: Sequence[Any], warm_up_s: float = 0.3
) -> list[float]:
    """Milliseconds of each request, one at a time, on a device that is awake: its clock falls while
    other engines have their turn.
    """
    began = time.perf_counter()
    while time.perf_counter() - began < warm_up_s:
        run(requests[0])
    return [wall_ms(partial(run, request)) for request in requests[1:]]


def closed_loop(
    submit: Callable[[Any], "Future[Any]"], requests: Sequence[Any], clients: int, seconds: float
) -> dict[str, Any]:
    """Clients that ask again as soon as they are answered; the first tenth is warm-up.

    requests: sent in turn, over and over. The rate counts what is answered between warm-up and
    stop. Latencies are of all (`timed`) that is asked between them, whenever it is answered, or the
    longest would be left out; None if nothing is.
    """
    spans: list[tuple[float, float]] = []  # asked, answered
    turn = iter(range(10**9))
    began = time.perf_counter()
    first, stop = began + seconds / 10, began + seconds

    def client() -> None:
        while (asked := time.perf_counter()) < stop:
            submit(requests[next(turn) % len(requests)]).result()
            spans.append((asked, time.perf_counter()))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ms = sorted(1000 * (answered - asked) for asked, answered in spans if asked >= first)
    in_time = sum(first <= answered < stop for _, answered in spans)
    return {
        "rps": round(in_time / (stop - first), 1),
        "timed": len(ms),
        "p50_ms": round(statistics.median(ms), 2) if ms else None,
        "p99_ms": round(ms[int(0.99 * len(ms))], 2) if ms else None,
    }
