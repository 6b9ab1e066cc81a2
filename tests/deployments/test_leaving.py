"""Replicas that leave or are killed by a request, in a cluster of this process, under load: nobody
else notices.
"""

import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from safetensors.torch import load_file, save_file
from typesafe_sdk import Noul, TypeSafeClient, TypeSafeUnprocessableEntityError

import deployments.app
from deployments.app import ENGINE, build
from deployments.client import DecisionClient
from deployments.config import AppArgs
from flide_engine.errors import RequestQuarantined
from flide_engine.resolve import locate
from loadtest.local import free_port
from router import asking
from tests.deployments.conftest import start_ray
from tests.deployments.mortal import KILLS, Mortal
from tests.waiting import until

pytestmark = pytest.mark.ray

TOLERANCE = 1e-5
GRAIN = 64
UNSETTLED = 8
"""Tokens at the end of a state that more text may change (`TextTokenizer.encode_growing`)."""


class Fleet:
    """Replicas of nano behind a Gateway."""

    def __init__(self, port: int, **options: Any) -> None:
        self.options = {
            "model": "nano",
            "cpus_per_replica": 0.1,
            "routing_stats_period_s": 1,
            "render_threads": 1,
            **options,
        }
        self.deploy()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.client = DecisionClient(timeout=60)
        self.engine = serve.get_deployment_handle(ENGINE, "default")

    def deploy(self, **options: Any) -> None:
        """The app, anew: Serve takes it for other code, and replaces every replica."""
        app = build(AppArgs(**{**self.options, **options}))
        serve.run(app, name="default", external_scaler_enabled=True)

    def counters(self) -> dict[str, dict[str, Any]]:
        """What each replica has counted, by its id; asked again while a dead one is listed, or none
        is.
        """
        found: dict[str, dict[str, Any]] = {}

        def are_told() -> bool:
            try:
                found.update(self._counters())
            except (RayActorError, DeploymentUnavailableError):
                return False
            return True

        until(are_told, "dead replicas stay listed", 0.1)
        return found

    def _counters(self) -> dict[str, dict[str, Any]]:
        found = self.engine.broadcast("counters").results(timeout_s=30)
        return {counted["replica"]: counted for counted in found}

    def scale(self, replicas: int) -> None:
        """Returns when there are so many, and none on its way in or out."""
        controller = serve.context._get_global_client()._controller
        ray.get(controller.update_deployment_replicas.remote(DeploymentID(ENGINE), replicas))
        self.wait_for(replicas)

    def wait_for(self, replicas: int) -> None:
        """Returns when so many run, and none starts or stops."""

        def are_there() -> bool:
            deployment = serve.status().applications["default"].deployments[ENGINE]
            return bool(deployment.replica_states == {"RUNNING": replicas})

        until(are_there, f"there are never {replicas} replicas", 0.1)

    def over_http(self, asked: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post("/v1/systemone", json=asked)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def over_handle(self, asked: dict[str, Any]) -> dict[str, Any]:
        return self.client.decide(asked).model_dump()

    @contextmanager
    def under_load(self, seed: str) -> Iterator[Callable[[int], None]]:
        """Four callers ask about growing states meanwhile, half of them over HTTP: every call must
        be answered, and as before, or as afterwards if the weights are others then. What it yields
        waits for so many more answers.
        """
        asked = [ask(text(f"{seed} {i % 4}", 40 + 10 * i)) for i in range(16)]
        expected = self._expected(asked)
        got: list[tuple[int, dict[str, Any]]] = []
        failed: list[BaseException] = []
        enough = threading.Event()

        def caller(way: Callable[[dict[str, Any]], dict[str, Any]], first: int) -> None:
            turn = first
            while not enough.is_set():
                try:
                    got.append((turn % 16, way(asked[turn % 16])))
                except BaseException as error:
                    failed.append(error)
                turn += 5

        def answers(count: int) -> None:
            wanted = len(got) + count
            until(lambda: len(got) >= wanted or bool(failed), f"{count} answers did not come")

        ways = [self.over_http, self.over_handle] * 2
        threads = [threading.Thread(target=caller, args=(w, i)) for i, w in enumerate(ways)]
        for thread in threads:
            thread.start()
        try:
            answers(12)
            yield answers
            answers(12)
        finally:
            enough.set()
            for thread in threads:
                thread.join()
        assert failed == []
        expected |= self._expected(asked)
        errors = [abs(p(answer) - expected[weights_of(answer)][number]) for number, answer in got]
        assert max(errors) < TOLERANCE

    def _expected(self, asked: list[dict[str, Any]]) -> dict[str, list[float]]:
        """Probabilities, by the weights that gave them."""
        found = [self.over_handle(a) for a in asked]
        (weights,) = {weights_of(answer) for answer in found}
        return {weights: [p(answer) for answer in found]}


def ask(state: str) -> dict[str, Any]:
    """A question about a state."""
    question = {"type": "choice", "criteria": {"a": "one", "b": "two"}}
    return {"state": state, "questions": {"q": question}}


def text(seed: str, words: int) -> str:
    """Words that no other seed has in this order; more of them begin alike."""
    drawn = random.Random(seed)
    return seed + " ".join(drawn.choice(("red", "green", "blue", "grey")) for _ in range(words))


def p(answer: dict[str, Any]) -> float:
    """The probability in an answer."""
    return float(answer["answers"]["q"]["probabilities"]["a"])


def weights_of(answer: dict[str, Any]) -> str:
    """What an answer says of the weights that gave it."""
    return str(answer["x_fingerprint"]).partition("-")[0]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three replicas that a request can kill, and that hand everything over when they leave."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr(deployments.app, "EngineReplica", Mortal)
        start_ray(num_cpus=4)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield Fleet(port, num_replicas=3, handover="always")
        finally:
            ray.shutdown()


@pytest.mark.parametrize(("how", "cost"), [(signal.SIGSEGV, 2), (signal.SIGKILL, 3)])
def test_a_request_that_kills_costs_few_replicas_and_nobody_an_answer(
    fleet: Fleet, tmp_path: Path, how: signal.Signals, cost: int
) -> None:
    """By the official SDK, which asks again where that may help: 422 once the last is dead, and
    from then on, also by another way than that Gateway. Two if their processes crash; where they
    only vanish, something else may have killed the second.
    """
    deaths = tmp_path / "deaths"
    opening = text(f"the same home for all of them, and {how.name}", 80)
    state = f"{opening}{KILLS[how]}{deaths}"
    bystanders = [ask(f"{opening} {i}") for i in range(6)]

    def kill() -> str:
        with TypeSafeClient(base_url=fleet.url, api_key="any", timeout=60) as client:
            try:
                client.system_one(state=state, questions={"q": Noul(instructions="?")})
            except TypeSafeUnprocessableEntityError as error:
                return str(error)
        return "answered"

    with fleet.under_load("kill") as answers, ThreadPoolExecutor(7) as pool:
        killing = pool.submit(kill)
        until(deaths.exists, "nothing is killed")
        # they are where it kills, and some of them again where it kills again
        calls = []
        for asked in bystanders:
            calls.append(pool.submit(fleet.over_handle, asked))
            time.sleep(0.08)  # or they would look like a queue, and go elsewhere
        answered = [call.result(60) for call in calls]
        assert "2 replicas died" in killing.result(60)
        assert "2 replicas died" in kill()
        until(lambda: len(fleet.counters()) == 3, "the dead are not replaced")
        answers(8)
        deadly = {
            "state": state,
            "questions": {"q": {"type": "noul", "instructions": "?"}},
        }

        def have_heard() -> bool:
            """By its own looks, one with a request: it is not the Gateway's process."""
            fleet.over_handle(bystanders[0])
            try:
                asking._quarantine.check(deadly)
            except RequestQuarantined:
                return True
            return False

        until(have_heard, "this process never hears of it", 0.1)
        with pytest.raises(RequestQuarantined):
            fleet.client.decide(deadly)
    dead = {int(process) for process in deaths.read_text().split()}
    assert len(deaths.read_text().split()) == len(dead) == cost
    assert not dead & {counted["process"] for counted in fleet.counters().values()}
    for asked, answer in zip(bystanders, answered, strict=True):
        assert abs(p(answer) - p(fleet.over_handle(asked))) < TOLERANCE


def test_a_replica_that_leaves_hands_its_states_over(fleet: Fleet) -> None:
    """Three to one, under load: nothing fails, and what the others knew is resumed from."""
    states = [text(f"agent {i}", 300) for i in range(12)]
    for state in states:
        fleet.over_handle(ask(state))
    knew = fleet.counters()
    assert sum(counted["answered"] > 0 for counted in knew.values()) == 3
    with fleet.under_load("scale") as answers:
        fleet.scale(1)
        answers(8)
    (left,) = fleet.counters().values()
    assert left["replica"] in knew
    taken = left["checkpoints_taken_over"]
    assert taken["adopted"] >= 1
    assert set(taken) <= {"adopted", "known"}
    for state in states:
        usage = fleet.over_handle(ask(state + " and one more word"))["usage"]
        grown = usage["input_tokens"] - usage["x_reused_tokens"]
        # the question and the new words are 27 tokens; the rest of a grain is computed again
        assert grown < GRAIN + UNSETTLED + 40


def test_checkpoints_of_other_weights_are_refused(fleet: Fleet) -> None:
    """Counted and logged, and not looked at."""
    before = fleet.counters()
    told = fleet.engine.adopt.remote([ray.put(b"junk")], "other weights").result(timeout_s=60)
    assert told == "refused"
    (weights,) = {fleet.engine.describe.remote().result(timeout_s=60)["weights_hash"]}
    told = fleet.engine.adopt.remote([ray.put(b"junk")], weights).result(timeout_s=60)
    assert told == "refused"
    after = fleet.counters()
    refused = [
        after[r]["checkpoints_taken_over"].get("refused", 0)
        - before[r]["checkpoints_taken_over"].get("refused", 0)
        for r in after
    ]
    assert sum(refused) == 2


def test_answers_name_weights_and_arithmetic(fleet: Fleet) -> None:
    """The same on every replica, by HTTP and handle, and as the fleet's description says."""
    about = fleet.engine.broadcast("describe").results(timeout_s=30)
    (told,) = {described["fingerprint"] for described in about}
    weights, bits = told.split("-")
    assert weights == about[0]["weights_hash"]
    assert len(bits) == 16
    for way in (fleet.over_http, fleet.over_handle):
        assert way(ask("which one?"))["x_fingerprint"] == told


@pytest.mark.slow
def test_a_rolling_update_loses_no_request(fleet: Fleet) -> None:
    """Every replica and the Gateway are replaced one after the other."""
    before = set(fleet.counters())
    with fleet.under_load("update") as answers:
        fleet.deploy(max_questions=512)
        answers(8)
        fleet.wait_for(3)
    assert not set(fleet.counters()) & before


@pytest.mark.slow
def test_a_rolling_update_of_weights_mixes_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """Each answer is that of the weights it names, whatever was remembered with the others: their
    checkpoints are refused, and states are computed anew.
    """
    states = [text(f"remembered {i}", 300) for i in range(12)]
    old = {weights_of(fleet.over_handle(ask(state))) for state in states}
    with fleet.under_load("weights") as answers:
        fleet.deploy(model=str(other_weights(tmp_path / "other")))
        answers(8)
        fleet.wait_for(3)
    taken = [Counter(c["checkpoints_taken_over"]) for c in fleet.counters().values()]
    assert set(sum(taken, Counter())) == {"refused"}
    found = [fleet.over_handle(ask(state)) for state in states]
    assert not {weights_of(answer) for answer in found} & old
    assert {answer["usage"]["x_reused_tokens"] for answer in found} == {0}


def other_weights(folder: Path) -> Path:
    """A model like nano that answers otherwise."""
    shutil.copytree(locate("nano")[0], folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = 1.5 * tensors["model.norm.weight"] + 0.5
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
