"""Three replicas behind the request router, asked over HTTP, by `DecisionClient`, by the Gateway's
handle and from a process that has nothing of this project.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.exceptions import RayActorError

from deployments.client import DecisionClient
from flide_engine.errors import InvalidRequest
from router.ring import Ring
from router.routing_key import session_entry
from tests.deployments.conftest import joined, serving
from tests.waiting import until

pytestmark = pytest.mark.ray

TOLERANCE = 1e-5
STEPS = (300, 700, 1500)
PAUSE_S, LONGEST_PAUSE_S = 0.15, 3.0
"""Between calls whose replica is asserted: at least, and on a machine where calls take long. A
router counts a call as a mean call's work until that time is over; many cheaper ones at once look
like a queue, which short states may leave home for.
"""


def request(state: str) -> dict[str, Any]:
    """A question about a state."""
    question = {"type": "choice", "instructions": "Which?", "criteria": {"a": "one", "b": "two"}}
    return {"state": state, "questions": {"q": question}}


def text(size: int, seed: object) -> str:
    """Letters that no other seed has."""
    return "".join(random.Random(str(seed)).choices("abcdefgh ", k=size))


def p(answer: Any) -> float:
    """The probability in an answer over HTTP or of a client."""
    plain = answer if isinstance(answer, dict) else answer.model_dump()
    return float(plain["answers"]["q"]["probabilities"]["a"])


class Fleet:
    """A server with three engine replicas, and this process connected to its cluster."""

    def __init__(self, url: str, address: str) -> None:
        self.url, self.address = url, address
        self.http = httpx.Client(base_url=url, timeout=60)
        self.client = DecisionClient(timeout=60)
        self.gateway = serve.get_app_handle("default")
        self.engine = serve.get_deployment_handle("Engine", "default")
        self.pause_s = PAUSE_S

    def over_http(self, asked: dict[str, Any], session: str = "") -> Any:
        answer = self.http.post(
            "/v1/systemone", json=asked, headers={"X-Session-Id": session} if session else {}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def over_gateway(self, asked: dict[str, Any], session: str = "") -> Any:
        return self.gateway.decide.remote(asked, session_id=session).result(timeout_s=60)

    def counters(self) -> dict[str, dict[str, Any]]:
        """What each replica has counted, by its id; asked again while a dead one is listed."""
        found: list[dict[str, Any]] = []

        def are_told() -> bool:
            try:
                found[:] = self.engine.broadcast("counters").results(timeout_s=60)
            except RayActorError:
                return False
            return True

        until(are_told, "dead replicas stay listed", 0.1)
        return {counted["replica"]: counted for counted in found}

    def who(self, call: Callable[[], object]) -> str:
        """The replica that answers a call, nothing else being asked."""
        time.sleep(self.pause_s)
        before, began = self.counters(), time.monotonic()
        call()
        self.pause_s = min(max(PAUSE_S, 2 * (time.monotonic() - began)), LONGEST_PAUSE_S)
        after = self.counters()
        (one,) = (r for r in after if after[r]["answered"] > before[r]["answered"])
        return one


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Fleet]:
    """Three replicas of the random four-layer checkpoint."""
    log = tmp_path_factory.mktemp("fleet") / "log"
    words = (f"model={checkpoint}", "num_replicas=3", "cpus_per_replica=0.1")
    with serving(log, *words) as served, joined(served.address):
        yield Fleet(served.url, served.address)


WITHOUT_PACKAGE = """
import json, sys, time

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"flide_engine", "router", "deployments"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
import ray
from ray import serve
from ray.exceptions import RayActorError

ray.init(log_to_driver=False)
engine = serve.get_deployment_handle("Engine", "default").options(_by_reference=False)

pause = float(sys.argv[1])

def counters():
    return {c["replica"]: c["answered"] for c in engine.broadcast("counters").results()}

for state in json.load(sys.stdin):
    time.sleep(pause)
    before, began = counters(), time.monotonic()
    asked = {"state": state, "questions": {"q": {"type": "noul", "instructions": "?"}}}
    assert 0 <= engine.decide.remote(asked).result()["answers"]["q"]["noul"] <= 1
    pause = min(max(float(sys.argv[1]), 2 * (time.monotonic() - began)), float(sys.argv[2]))
    after = counters()
    print(*[replica for replica in after if after[replica] > before[replica]])
try:
    engine.decide.remote({"state": "s", "questions": {}}).result()
except ValueError:
    print("ValueError")
"""


def test_a_growing_state_keeps_its_replica(fleet: Fleet, tmp_path: Path) -> None:
    """By the text alone, through the routers of three processes that do not talk."""
    owners, states = [], []
    for seed in range(2):
        whole = text(STEPS[-1], seed)
        found = set()
        for size in STEPS:
            asked = request(whole[:size])
            for way in (fleet.over_http, fleet.client.decide, fleet.over_gateway):
                found.add(fleet.who(lambda way=way, asked=asked: way(asked)))
        assert len(found) == 1
        owners += [*found] * len(STEPS)
        states += [whole[:size] for size in STEPS]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE, str(PAUSE_S), str(LONGEST_PAUSE_S)],
        input=json.dumps(states),
        cwd=tmp_path,
        env={"RAY_ADDRESS": fleet.address, "RAY_AUTH_MODE": "token", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*owners, "ValueError"]


def test_growth_is_resumed(fleet: Fleet) -> None:
    """The second step of a state computes less than it has tokens: its checkpoint was there."""
    whole = text(3000, "growth")
    fleet.who(lambda: fleet.client.decide(request(whole[:2700])))
    before = fleet.counters()
    owner = fleet.who(lambda: fleet.over_http(request(whole)))
    after = fleet.counters()[owner]
    assert after["tokens_reused"] > before[owner]["tokens_reused"]


def test_a_shared_opening_spreads(fleet: Fleet) -> None:
    """Once eight states have begun alike, further ones go to several replicas."""
    opening = text(1024, "opening")
    before = fleet.counters()
    for seed in range(30):
        fleet.client.decide(request(opening + text(400, f"behind {seed}")))
    after = fleet.counters()
    gained = [after[r]["answered"] - before[r]["answered"] for r in after]
    assert sum(gained) == 30
    assert max(gained) <= 24
    assert sum(count > 0 for count in gained) >= 2


def test_a_session_id_pins(fleet: Fleet) -> None:
    """Whatever the state, over HTTP, by the client and through the Gateway's handle."""
    for session in ("alpha", "beta", "gamma", "delta"):
        asked = [request(text(300, f"{session} {i}")) for i in range(3)]
        found = {
            fleet.who(lambda a=asked[0], s=session: fleet.over_http(a, s)),
            fleet.who(lambda a=asked[1], s=session: fleet.client.decide(a, session_id=s)),
            fleet.who(lambda a=asked[2], s=session: fleet.over_gateway(a, s)),
        }
        assert len(found) == 1, session


def test_bad_session_ids(fleet: Fleet) -> None:
    """A 422 with its place, our error, and ValueError for who may not have it."""
    asked = request("s")
    answer = fleet.http.post("/v1/systemone", json=asked, headers={"X-Session-Id": "x" * 257})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["header", "X-Session-Id"]
    with pytest.raises(InvalidRequest, match="256 printable"):
        fleet.client.decide(asked, session_id="caf\u00e9")
    with pytest.raises(ValueError, match="256 printable"):
        fleet.over_gateway(asked, "x" * 257)
    with pytest.raises(ValueError, match="256 printable"):
        fleet.engine.decide.remote(asked, session_id="a\nb").result(timeout_s=60)


def test_states_of_every_replica(fleet: Fleet) -> None:
    """Listed with those that have them, inspected, kept, branched, rolled back, deleted."""
    names = [f"states {i}" for i in range(12)]
    for i, name in enumerate(names):
        for size in (500, 1000):
            if i == 0:  # its replica is asserted
                time.sleep(fleet.pause_s)
            fleet.over_http(request(text(1000, f"states {i}")[:size]), name)
    page = fleet.http.get("/v1/states", params={"limit": 1000}).json()
    assert not page["partial"]
    assert page["replicas_asked"] == page["replicas_answered"] == 3
    known = {state["id"]: state for state in page["states"]}
    assert set(names) <= set(known)
    replicas = {r for name in names for r in known[name]["replicas"]}
    assert replicas <= set(fleet.counters())
    assert len(replicas) > 1
    at = "/v1/states/states%200"
    step = fleet.http.get(at).json()["steps"][0]["tokens"]
    last = fleet.http.post(f"{at}/snapshot").json()["tokens"]
    assert last == known["states 0"]["tokens"] > step
    # a branch that belongs to another replica than the state it leaves
    (holder,) = known["states 0"]["replicas"]
    twin = next(n for n in (f"twin/{i}" for i in range(99)) if home_of(fleet, n) != holder)
    twin_at = f"/v1/states/{twin.replace('/', '%2F')}"
    branch = fleet.http.post(f"{at}/branch", json={"name": twin, "tokens": step})
    assert branch.json()["tokens"] == step
    home = home_of(fleet, twin)
    assert set(fleet.http.get(twin_at).json()["replicas"]) == {holder, home}
    back = fleet.http.post(f"{at}/rollback", json={"tokens": step}).json()
    assert (back["tokens"], back["in_use"]) == (step, 0)
    assert fleet.http.delete(at).status_code == 200
    assert fleet.http.get(at).status_code == 404
    assert step in {s["tokens"] for s in fleet.http.get(twin_at).json()["steps"]}
    for path in [*(f"/v1/states/{name}" for name in names[1:]), twin_at]:
        deleted = fleet.http.delete(path)
        assert deleted.json()["copies"] > 0
        assert not deleted.json()["partial"]
    left = fleet.http.get("/v1/states", params={"limit": 1000}).json()["states"]
    assert not {state["id"] for state in left} & {*names, twin}


def home_of(fleet: Fleet, session: str) -> str:
    """The replica that a session id belongs to."""
    ring = Ring()
    for replica in fleet.counters():
        ring.add(replica)
    return ring.home(session_entry("", session))


def test_a_killed_replica_loses_nothing(fleet: Fleet) -> None:
    """SIGKILL under load, by every way with a retry: each call is answered, and as before. The next
    step of a state that was there is computed once, and the one after that resumes.
    """
    state = text(2000, "pinned")
    home = fleet.who(lambda: fleet.client.decide(request(state)))
    asked = [request(text(250 + 20 * i, f"kill {i}")) for i in range(24)]
    expected = [p(fleet.client.decide(a)) for a in asked]
    got: list[tuple[int, float]] = []
    failed: list[BaseException] = []
    enough = threading.Event()

    def load(way: Callable[[dict[str, Any]], Any], first: int) -> None:
        turn = first
        while not enough.is_set():
            number = turn % len(asked)
            try:
                got.append((number, p(way(asked[number]))))
            except Exception as error:
                failed.append(error)
            turn += 5

    ways = [fleet.over_http, fleet.client.decide, fleet.over_gateway] * 2
    threads = [threading.Thread(target=load, args=(w, i)) for i, w in enumerate(ways)]
    for thread in threads:
        thread.start()
    try:
        victim = fleet.counters()[home]
        until(lambda: len(got) > 30)
        os.kill(victim["process"], signal.SIGKILL)
        at = len(got)
        until(lambda: len(got) > at + 150)
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    assert failed == []
    assert {number for number, _ in got[at:]} == set(range(len(asked)))
    assert max(abs(value - expected[number]) for number, value in got) < TOLERANCE
    until(lambda: home not in fleet.counters() and len(fleet.counters()) == 3)
    routers = (fleet.client._handle, fleet.engine)  # of this process, and each hears for itself
    until(lambda: all(replicas_of(handle) == set(fleet.counters()) for handle in routers))
    steps = [request(state + " and so on" * i) for i in (20, 40)]
    found: list[Any] = []
    owners = [
        fleet.who(lambda step=step: found.append(fleet.client.decide(step))) for step in steps
    ]  # type: ignore[misc]
    assert owners[0] == owners[1] != home
    reused = [answer.usage.x_reused_tokens for answer in found]
    assert reused[0] == 0 < reused[1]


def test_a_replica_that_dies_under_a_listing_costs_its_part(fleet: Fleet) -> None:
    """It is stopped, so that the call is in it, and then killed: half a list, marked."""
    for _ in range(5):
        until(lambda: len(fleet.counters()) == 3)
        for i in range(6):
            fleet.over_http(request(text(500, f"part {i}")), f"part {i}")
        page = listed_while_one_dies(fleet)
        if page["replicas_asked"] == 3:
            break  # else it died before the Gateway asked it
    assert page["partial"]
    assert page["replicas_answered"] == page["replicas_asked"] - 1 == 2
    assert page["states"]


def listed_while_one_dies(fleet: Fleet) -> dict[str, Any]:
    """What is listed meanwhile."""
    victim = next(iter(fleet.counters().values()))["process"]
    os.kill(victim, signal.SIGSTOP)
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(fleet.http.get("/v1/states?limit=1000")))
    thread.start()
    try:
        time.sleep(1.0)
        assert not found
    finally:
        os.kill(victim, signal.SIGKILL)
        thread.join()
    assert found[0].status_code == 200, found[0].text
    page: dict[str, Any] = found[0].json()
    return page


def replicas_of(handle: Any) -> set[str]:
    """Those that a handle's router in this process knows."""
    known = handle._router._asyncio_router.request_router.curr_replicas
    return {replica.unique_id for replica in known}
