"""A fleet that goes to zero in silence, and is woken, over HTTP and by handle."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.app import build
from deployments.client import DecisionClient
from deployments.config import AppArgs
from flide_engine import DecisionRequest
from flide_engine.errors import NotReady
from router import boards
from tests.deployments.conftest import Served, joined, serving
from tests.waiting import until

pytestmark = pytest.mark.ray

COLD_START_S = 60
"""What a start is taken to need: longer than the official clients wait, and than one takes here."""

ASKED: dict[str, Any] = {
    "state": "My card was charged twice.",
    "questions": {"q": {"type": "noul", "instructions": "Is the customer angry?"}},
}


class Fleet:
    """An app of one replica or none, and this process connected to its cluster."""

    def __init__(self, served: Served) -> None:
        self.http = httpx.Client(base_url=served.url, timeout=200)
        found = re.search(r"logs: (\S+)", served.log.read_text())
        assert found
        self._logs = Path(found[1])

    def wait_for(self, replicas: int) -> None:
        """Returns when so many engine replicas run, and none starts or stops."""
        wanted = {"RUNNING": replicas} if replicas else {}

        def engine() -> Any:
            return serve.status().applications["default"].deployments["Engine"]

        until(lambda: engine().replica_states == wanted)

    def wait_for_another(self, before: set[str]) -> None:
        """Returns once a replica has been started beside those of before: it may be gone again, as
        it goes as soon as nothing is asked.
        """
        until(lambda: bool(self.started() - before))

    def started(self) -> set[str]:
        """Engine replicas there have ever been, by their logs."""
        return {path.name for path in self._logs.glob("replica_default_Engine_*.log")}

    def post(self, wait_ms: int | None = None) -> httpx.Response:
        """A decision over HTTP, of a caller that says how long it waits, or not."""
        headers = {} if wait_ms is None else {"x-request-timeout-ms": str(wait_ms)}
        return self.http.post("/v1/systemone", json=ASKED, headers=headers)

    def health(self) -> tuple[int, str]:
        """Status and what it says."""
        answer = self.http.get("/health")
        return answer.status_code, answer.json().get("status", "")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """It starts with one replica, which goes as soon as nothing is asked."""
    words = ("num_replicas=auto", "min_replicas=0", "max_replicas=1", "downscale_delay_s=1")
    more = ("model=nano", "cpus_per_replica=0.1", f"cold_start_s={COLD_START_S}")
    boards._shared.clear()
    with serving(tmp_path / "log", *words, *more) as served, joined(served.address):
        yield Fleet(served)
    boards._shared.clear()


def test_a_fleet_sleeps_and_is_woken_by_every_way(fleet: Fleet) -> None:
    """Who does not wait for a start is told when to come again, at once, and wakes it; who waits is
    answered.
    """
    fleet.wait_for(0)
    assert fleet.health() == (200, "asleep")
    before = fleet.started()
    with ThreadPoolExecutor(2) as pool:
        for refused in pool.map(fleet.post, (None, 10_000)):
            assert refused.status_code == 503, refused.text
            assert refused.json()["detail"]["error_type"] == NotReady("").error_type
            assert 10_000 < int(refused.headers["retry-after-ms"]) <= 1000 * COLD_START_S
    assert fleet.health() in {(200, "starting"), (200, "ok")}
    fleet.wait_for_another(before)  # nobody waits for an answer: the refused have woken it
    until(lambda: fleet.http.get("/v1/models").status_code == 200)
    fleet.wait_for(0)
    assert fleet.http.get("/v1/models").status_code == 200
    assert fleet.health() == (200, "asleep")
    before = fleet.started()
    states = fleet.http.get("/v1/states")  # what is on disk is known once somebody can look
    assert (states.status_code, "retry-after-ms" in states.headers) == (503, True)
    fleet.wait_for_another(before)

    def stays_awake() -> bool:
        """A state that comes again to a replica is an agent's, which keeps it for a minute."""
        answers = [fleet.post(200_000).status_code for _ in range(2)]
        return answers == [200, 200] and fleet.health() == (200, "ok")

    until(stays_awake)
    assert fleet.post().status_code == 200


@pytest.mark.slow
def test_a_fleet_whose_replica_died_does_not_sleep(tmp_path: Path) -> None:
    """Nobody is sent away with the time of a start: who comes while another one starts, waits."""
    words = ("num_replicas=auto", "min_replicas=0", "max_replicas=1", "downscale_delay_s=120")
    more = ("model=nano", "cpus_per_replica=0.1", f"cold_start_s={COLD_START_S}")
    boards._shared.clear()
    with serving(tmp_path / "log", *words, *more) as served, joined(served.address):
        fleet, told = Fleet(served), set[tuple[int, str]]()
        counters = serve.get_deployment_handle("Engine", "default").broadcast("counters")
        os.kill(counters.results(timeout_s=60)[0]["process"], signal.SIGKILL)

        def is_gone() -> bool:
            told.add(fleet.health())
            return boards.shared("default", "Engine").members.count == 0

        until(is_gone)
        told.add(fleet.health())
        assert fleet.post(1000 * COLD_START_S // 2).status_code == 200
        assert fleet.health() == (200, "ok")
        assert told <= {(200, "ok"), (503, "")}
    boards._shared.clear()


@pytest.mark.slow
def test_a_fleet_that_is_updated_does_not_sleep(tmp_path: Path) -> None:
    """Its only replica goes before the new one comes, which callers wait for."""
    options = {"model": "nano", "num_replicas": "auto", "min_replicas": 0, "max_replicas": 1,
               "downscale_delay_s": 300, "cpus_per_replica": 0.1, "gpus_per_replica": 0,
               "cold_start_s": 500}  # fmt: skip
    words = [f"{name}={value}" for name, value in options.items()]
    boards._shared.clear()
    with (
        serving(tmp_path / "log", *words) as served,
        joined(served.address),
        DecisionClient(timeout=200) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        assert client.decide(ASKED).answers
        changed = build(AppArgs.model_validate(options | {"batch_age_s": 7}))
        updated = pool.submit(serve.run, changed, name="default", route_prefix="/")
        until(lambda: boards.shared("default", "Engine").members.count == 0)
        assert client.decide(ASKED).answers
        updated.result(200)
    boards._shared.clear()


@pytest.mark.slow
def test_handles_wake_a_fleet(fleet: Fleet) -> None:
    """A client by what it waits for, in calls that block or not; every way at once is answered."""
    fleet.wait_for(0)
    short, long = DecisionClient(timeout=10), DecisionClient(timeout=200)
    until(lambda: boards.shared("default", "Engine").members.count == 0)
    before = fleet.started()
    with pytest.raises(NotReady) as told:
        short.decide(ASKED)
    assert 10_000 < told.value.retry_after_ms <= 1000 * COLD_START_S
    fleet.wait_for_another(before)
    fleet.wait_for(0)  # nothing was answered, so there is no agent to keep it for
    gateway, typed = serve.get_app_handle("default"), DecisionRequest.model_validate(ASKED)
    ways: list[Callable[[], float]] = [
        lambda: fleet.post(200_000).json()["answers"]["q"]["noul"],
        lambda: long.decide(ASKED).answers["q"].noul,
        lambda: asyncio.run(long.adecide(typed)).answers["q"].noul,
        lambda: gateway.decide.remote(ASKED).result(timeout_s=200)["answers"]["q"]["noul"],
        lambda: (
            serve.get_deployment_handle("Engine", "default")
            .decide.remote(ASKED)
            .result(timeout_s=200)["answers"]["q"]["noul"]
        ),
    ]
    with ThreadPoolExecutor(len(ways)) as pool:
        answers = [asked.result() for asked in [pool.submit(way) for way in ways]]
    assert max(answers) - min(answers) < 1e-5
    assert short.decide(ASKED).answers["q"].noul == pytest.approx(answers[0], abs=1e-5)
    # what tells Serve of the handle's queue ends with the last client, and begins with another one
    telling = short._handle._router._asyncio_router._metrics_manager.metrics_pusher._async_tasks
    short.close()
    assert telling
    long.close()
    assert not telling
    fleet.wait_for(0)
    with DecisionClient(timeout=200) as another:
        assert another.decide(ASKED).answers["q"].noul == pytest.approx(answers[0], abs=1e-5)
