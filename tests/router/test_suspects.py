"""Suspects take turns under a mark, and a mark blames only with a death; over a stand-in store."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from router import crash, suspects
from router.suspects import REFUSED, STORE, End, Refused, Turns
from tests.waiting import PATIENCE_S


class Cluster:
    """The key-value store, this replica's name, and the actors that live."""

    def __init__(self) -> None:
        self.marks: dict[str, bytes] = {}
        self.live = {"replica"}
        self.refused: set[str] = set()
        self.joined = True

    def _internal_kv_put(self, key: str, value: str, namespace: str) -> None:
        if namespace == REFUSED:
            self.refused.add(key)
            return
        assert namespace == STORE
        self.marks[key] = value.encode()

    def _internal_kv_get(self, key: str, namespace: str) -> bytes | None:
        assert namespace == STORE
        return self.marks.get(key)

    def _internal_kv_del(self, key: str, namespace: str) -> None:
        if namespace == REFUSED:
            self.refused.remove(key)
            return
        assert namespace == STORE
        self.marks.pop(key, None)

    def _internal_kv_list(self, prefix: str, namespace: str) -> list[bytes]:
        assert namespace == REFUSED
        return [key.encode() for key in self.refused]

    def _internal_kv_initialized(self) -> bool:
        return self.joined

    def get_runtime_context(self) -> Any:
        return self

    def get_actor_name(self) -> str:
        return "replica"

    def get_node_id(self) -> str:
        return "here"

    def get_actor(self, name: str, namespace: str) -> None:
        if name not in self.live:
            raise ValueError(name)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(suspects, "internal_kv", made)
    monkeypatch.setattr(suspects, "ray", made)
    monkeypatch.setattr(crash, "ray", made)
    return made


def running(cluster: Cluster) -> dict[str, str]:
    """Who runs where."""
    return {suspect: json.loads(mark)[0] for suspect, mark in cluster.marks.items()}


def test_one_suspect_runs_at_a_time_and_is_marked_meanwhile(cluster: Cluster) -> None:
    """Those that wait have no mark; who is no suspect waits for nobody."""

    async def run() -> None:
        turns, runs, gate = Turns(), {n: asyncio.Event() for n in "ab"}, asyncio.Event()

        async def ask(name: str) -> None:
            async with turns.of(name):
                runs[name].set()
                await gate.wait()

        tasks = [asyncio.create_task(ask(name)) for name in "ab"]
        await runs["a"].wait()
        async with turns.of(""):
            assert running(cluster) == {"a": "replica"}
        assert not runs["b"].is_set()
        gate.set()
        await tasks[0]
        gate.clear()
        await runs["b"].wait()
        assert running(cluster) == {"b": "replica"}
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert not cluster.marks

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_what_is_refused_is_known_to_all(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its time is over; a process of no cluster knows nothing."""
    monkeypatch.setattr("router.suspects.time.time", lambda: 100.0)
    Refused().put(b"one", 90.5)
    Refused().put(b"two", 150.25)
    assert Refused().all() == {b"two": 150.25}
    assert Refused().all().keys() == {b"two"}
    cluster.joined = False
    assert Refused().all() == {}


def test_who_leaves_while_it_is_marked_leaves_no_mark(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the store is, and however often it is told to leave."""
    begun, gate = threading.Event(), threading.Event()
    put = cluster._internal_kv_put

    def slow(*args: Any, **kw: Any) -> None:
        begun.set()
        gate.wait(PATIENCE_S)
        put(*args, **kw)

    monkeypatch.setattr(cluster, "_internal_kv_put", slow)

    async def run() -> None:
        turns = Turns()

        async def ask() -> None:
            async with turns.of("a"):
                raise AssertionError("it has left")

        task = asyncio.create_task(ask())
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with turns.of("b"):
            assert "b" in cluster.marks
        while cluster.marks:  # noqa: ASYNC110 - a moment later, beside what goes on
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_mark_blames_only_where_the_replica_is_dead(cluster: Cluster) -> None:
    """And once; one that lives on could only not be reached."""
    assert suspects.ended_under("x") is End.NONE
    suspects.begin("x")
    assert suspects.ended_under("x", within_s=0.0) is End.NONE
    assert not cluster.marks
    suspects.begin("x")
    cluster.live.clear()
    assert suspects.ended_under("x") is End.GONE
    assert suspects.ended_under("x") is End.NONE


def test_a_death_that_the_cluster_learns_late_counts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica is looked for until it is gone."""
    suspects.begin("x")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            cluster.live.clear()

    monkeypatch.setattr("router.suspects.time.sleep", pause)
    assert suspects.ended_under("x") is End.GONE
    assert len(pauses) == 3


CHILD = """
import os, signal, sys
from router.crash import LastWords
words = LastWords()
print(words.path, flush=True)
if sys.argv[1] == "close":
    words.close()
elif sys.argv[1] == "later":
    words.close()
    os.abort()
else:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("SIGSEGV", End.CRASHED), ("SIGABRT", End.CRASHED), ("SIGBUS", End.CRASHED),
        ("SIGKILL", End.GONE), ("later", End.GONE), ("close", End.GONE),
    ],
)  # fmt: skip
def test_a_fault_of_its_own_is_told_from_a_kill(
    cluster: Cluster, how: str, end: End, caplog: pytest.LogCaptureFixture
) -> None:
    """By what the process has left, which is read once and logged; one that ends when it listens no
    more has left nothing.
    """
    done = subprocess.run(
        [sys.executable, "-c", CHILD, how], capture_output=True, text=True, check=False
    )
    path = Path(done.stdout.strip())
    assert (done.returncode == 0) == (how == "close"), done.stderr
    suspects.begin("x", str(path))
    cluster.live.clear()
    with caplog.at_level("ERROR", "ray.serve"):
        assert suspects.ended_under("x") is end
    assert ("Fatal Python error" in caplog.text) == (end is End.CRASHED)
    assert not path.exists()


def test_while_a_suspect_runs_the_process_is_listened_to(cluster: Cluster) -> None:
    """And no longer: nothing is left of a suspect that did no harm."""
    existed: list[bool] = []

    async def run() -> Path:
        async with Turns().of("a"):
            path = Path(json.loads(cluster.marks["a"])[2])
            existed.append(await asyncio.to_thread(path.exists))
        return path

    path = asyncio.run(run())
    assert existed == [True]
    assert not path.exists()
