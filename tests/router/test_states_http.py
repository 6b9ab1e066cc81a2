"""`/v1/states` over two engines, as a fleet of two replicas would answer, without Ray."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.state_calls import perform
from flide_engine import DecisionRequest, DecisionResponse
from flide_engine.cache.names import MOST_BRANCHES
from flide_engine.config import EngineConfig
from flide_engine.engine import Engine
from flide_engine.errors import MOST_FAULTS, InvalidRequest, RequestError
from router.auth import Keys, key_hash
from router.http_app import HttpApp
from router.options import CallOptions, HttpLimits
from router.routing_key import Openings, anchor_text, route_key
from router.states import StateCall, Told
from router.states_http import MOST_BODY

KEYS = {"A": key_hash("key-a"), "B": key_hash("key-b")}
NOUL = {"type": "noul", "instructions": "Is it so?"}


def words(agent: object, count: int) -> str:
    """A state of an agent that has grown to so many words."""
    return " ".join(f"{agent} says {i}" for i in range(count))


class Fleet:
    """Two engines; a session goes to the one that its number names. One may be dead."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.engines = [
            Engine(
                EngineConfig(
                    model=str(checkpoint), max_prompt_tokens=2048, max_request_tokens=2048,
                    max_round_tokens=512, pool_bytes=4_000_000, pin_share=0.5,
                    host_bytes=8 << 20, disk_folder=folder / str(i),
                )
            )
            for i in range(2)
        ]  # fmt: skip
        self.dead: set[int] = set()
        self.at = 0
        limits = HttpLimits(1 << 20, 1 << 20, 60.0)
        self.app = HttpApp(self, limits, Keys(KEYS.values()))  # type: ignore[arg-type]

    async def decide(
        self, request: DecisionRequest, body: bytes, options: CallOptions
    ) -> DecisionResponse:
        """As the Gateway and a replica would."""
        tenant, name = options.tenant, options.session_id
        anchor = anchor_text(Openings().anchor(route_key(request, tenant, name), 0.0).entry)
        future = self.engines[self.at].submit(body, tenant=tenant, name=name, anchor=anchor)
        return await asyncio.wrap_future(future)

    async def states(self, call: StateCall) -> tuple[Sequence[Told], int]:
        """As the Gateway's fan-out."""
        told, refused = [], None
        for i, engine in enumerate(self.engines):
            if i not in self.dead:
                try:
                    told.append(perform(engine, call, f"r{i}"))
                except RequestError as error:
                    refused = error
        if refused is not None:
            raise refused
        return told, len(self.engines)

    def http(self, method: str, path: str, who: str = "A", **kw: Any) -> httpx.Response:
        """One request by a tenant."""

        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                headers = {"Authorization": f"Bearer key-{who.lower()}", **kw.pop("headers", {})}
                return await client.request(method, path, headers=headers, **kw)

        return asyncio.run(run())

    def ask(self, state: str, who: str = "A", session: str = "", at: int = 0) -> float:
        """An answer, by one replica; copies and files are made before it returns."""
        self.at = at
        answer = self.http(
            "POST", "/v1/systemone", who, json={"state": state, "questions": {"q": NOUL}},
            headers={"X-Session-Id": session} if session else {},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        engine = self.engines[at]
        engine._loop.call(lambda: engine._checkpoints.copy_some(1 << 40))
        engine._loop.call(lambda: engine._tiers and engine._tiers.settle(copies=True, writes=True))
        return float(answer.json()["answers"]["q"]["noul"])

    def ids(self, who: str = "A") -> list[str]:
        """Ids of a tenant's states."""
        answer = self.http("GET", "/v1/states", who)
        assert answer.status_code == 200
        return [state["id"] for state in answer.json()["states"]]


@pytest.fixture
def fleet(checkpoint: Path, tmp_path: Path) -> Iterator[Fleet]:
    """A fleet that holds nothing but checkpoints when all is forgotten."""
    made = Fleet(checkpoint, tmp_path)
    yield made
    for engine in made.engines:
        engine.drop_checkpoints()
        held = engine.accounting()
        assert held.page_bytes_held == held.slot_bytes_held == 0
        engine.close()


def test_states_are_listed_and_inspected(fleet: Fleet) -> None:
    """With tokens, steps, hits, and bytes by tier; a nameless one by what it is routed on."""
    for count in (20, 40):
        fleet.ask(words("run", count), session="agent/7 a")
    fleet.ask(words("nameless", 40), at=1)
    answer = fleet.http("GET", "/v1/states").json()
    nameless, named = answer.pop("states")
    assert answer == {
        "has_more": False, "partial": False, "replicas_asked": 2, "replicas_answered": 2,
    }  # fmt: skip
    assert named["id"] == "agent/7 a"
    assert named["replicas"] == ["r0"]
    assert nameless["id"] == nameless["anchor"]
    assert len(nameless["id"]) == 16
    assert nameless["replicas"] == ["r1"]
    assert set(named["bytes"]) == {"device", "host", "disk"}
    assert named["hits"] >= 1
    assert not named["pinned"]
    one = fleet.http("GET", "/v1/states/agent%2F7%20a").json()
    steps = one.pop("steps")
    assert one == {**named, "partial": False, "replicas_asked": 2, "replicas_answered": 2}
    assert len(steps) == named["checkpoints"] > 1
    assert [s["tokens"] for s in steps] == sorted(s["tokens"] for s in steps)
    assert steps[-1]["tokens"] == named["tokens"]
    for tier, size in named["bytes"].items():
        assert size == sum(s["bytes"].get(tier, 0) for s in steps) > 0
    assert fleet.http("GET", f"/v1/states/{nameless['id']}").json()["tokens"] == nameless["tokens"]


def test_pages_of_a_listing(fleet: Fleet) -> None:
    """Each state once, in the order of ids, whichever replica has it; some on both."""
    for i in range(5):
        fleet.ask(words(i, 12), session=f"s{i}", at=i % 2)
    fleet.ask(words(2, 12), session="s2", at=1)
    seen, after, pages = [], "", 0
    while True:
        page = fleet.http("GET", "/v1/states", params={"limit": 2, "after": after}).json()
        seen += [state["id"] for state in page["states"]]
        pages += 1
        if not page["has_more"]:
            break
        after = seen[-1]
    assert seen == [f"s{i}" for i in range(5)]
    assert pages == 3
    both = fleet.http("GET", "/v1/states/s2").json()
    assert both["replicas"] == ["r0", "r1"]
    alone = fleet.http("GET", "/v1/states/s3").json()
    assert both["checkpoints"] == 2 * alone["checkpoints"] == 2 * len(both["steps"])
    assert both["bytes"]["device"] == 2 * alone["bytes"]["device"]


def test_a_snapshot_is_rolled_back_to_and_branched_from(fleet: Fleet) -> None:
    """The same answers as before, from the step that was kept; either name outlives the other."""
    text = words("run", 20)
    first = fleet.ask(text, session="run")
    kept = fleet.http("POST", "/v1/states/run/snapshot").json()
    step = kept["tokens"]
    fleet.ask(words("run", 40), session="run")
    fleet.ask(words("run", 60), session="run")
    branched = fleet.http("POST", "/v1/states/run/branch", json={"name": "b 1", "tokens": step})
    assert branched.json() == {
        "id": "b 1", "tokens": step, "partial": False, "replicas_asked": 2, "replicas_answered": 2,
    }  # fmt: skip
    back = fleet.http("POST", "/v1/states/run/rollback", json={"tokens": step}).json()
    assert back["tokens"] == step
    assert back["copies"] > 0
    assert back["in_use"] == 0
    steps = fleet.http("GET", "/v1/states/run").json()["steps"]
    assert max(s["tokens"] for s in steps) == step
    assert [s["pinned"] for s in steps if s["tokens"] == step] == [True]
    before = fleet.engines[0].counters()
    assert fleet.ask(text, session="run") == pytest.approx(first, abs=1e-6)
    assert fleet.engines[0].counters().reused - before.reused >= step
    gone = fleet.http("DELETE", "/v1/states/run").json()
    assert gone["copies"] >= 3  # device, host and disk
    assert gone["in_use"] == 0
    assert fleet.http("GET", "/v1/states/run").status_code == 404
    branch = fleet.http("GET", "/v1/states/b%201").json()
    assert branch["tokens"] == step
    assert set(branch["bytes"]) == {"device", "host", "disk"}
    assert fleet.http("DELETE", "/v1/states/b%201").status_code == 200
    assert fleet.ids() == []
    folder = Path(fleet.engines[0].config.disk_folder or "")
    assert [p.name for p in folder.rglob("*") if p.is_file()] == ["lock"]


def test_pins(fleet: Fleet) -> None:
    """Kept and no longer; more than may be is refused, and says which option bounds it."""
    fleet.ask(words("run", 30), session="run")
    assert fleet.http("POST", "/v1/states/run/pin").json()["copies"] >= 3
    assert all(s["pinned"] for s in fleet.http("GET", "/v1/states/run").json()["steps"])
    assert fleet.http("POST", "/v1/states/run/unpin").json()["copies"] >= 3
    assert not fleet.http("GET", "/v1/states/run").json()["pinned"]
    for i in range(9):
        fleet.ask(words(i, 60), session=f"long{i}")
    answers = [fleet.http("POST", f"/v1/states/long{i}/pin") for i in range(9)]
    refused = [a for a in answers if a.status_code == 409]
    assert refused
    assert "pin_share" in refused[0].json()["detail"]["message"]
    assert fleet.ask(words("x", 150)) > 0  # what is pinned never starves a request


def test_a_tenant_neither_sees_nor_touches_anothers_states(fleet: Fleet) -> None:
    """Neither names nor tokens nor nameless states, by any route, with the same ids or others'."""
    fleet.ask(words("secret", 40), "A", "shared")
    fleet.ask(words("secret", 30), "A")
    before = fleet.http("GET", "/v1/states", "A").json()
    nameless = next(i for i in fleet.ids("A") if i != "shared")
    assert fleet.ids("B") == []
    bodies = {"rollback": {"tokens": 0}, "branch": {"name": "mine"}}
    for state in ("shared", nameless):
        assert fleet.http("GET", f"/v1/states/{state}", "B").status_code == 404
        assert fleet.http("DELETE", f"/v1/states/{state}", "B").status_code == 404
        for action in ("pin", "unpin", "snapshot", "rollback", "branch"):
            answer = fleet.http(
                "POST", f"/v1/states/{state}/{action}", "B", json=bodies.get(action, {})
            )
            assert answer.status_code == 404, action
            assert "secret" not in answer.text
    assert fleet.http("GET", "/v1/states", "A").json() == before
    # the same name, the same text, and a branch onto the other's name: all of B's own
    reused = fleet.engines[0].counters().reused
    fleet.ask(words("secret", 40), "B", "shared")
    assert fleet.engines[0].counters().reused == reused
    fleet.ask(words("other", 40), "B", "own")
    assert fleet.http("POST", "/v1/states/own/branch", "B", json={"name": "x"}).status_code == 200
    assert fleet.http("DELETE", "/v1/states/shared", "B").status_code == 200
    assert fleet.ids("B") == ["own", "x"]
    assert fleet.http("GET", "/v1/states", "A").json() == before
    assert fleet.http("GET", "/v1/states", "C").status_code == 401
    assert fleet.http("DELETE", "/v1/states/shared", "C").status_code == 401


def test_a_replica_that_does_not_answer_is_told(fleet: Fleet) -> None:
    """Half a list, marked; a state that may be on the missing one is not said to be gone."""
    fleet.ask(words(0, 20), session="here", at=0)
    fleet.ask(words(1, 20), session="there", at=1)
    fleet.dead = {1}
    listed = fleet.http("GET", "/v1/states")
    assert listed.status_code == 200
    assert [s["id"] for s in listed.json()["states"]] == ["here"]
    assert listed.json()["partial"]
    assert (listed.json()["replicas_asked"], listed.json()["replicas_answered"]) == (2, 1)
    deleted = fleet.http("DELETE", "/v1/states/here")
    assert deleted.status_code == 200
    assert deleted.json()["partial"]
    missing = fleet.http("GET", "/v1/states/there")
    assert missing.status_code == 404
    assert "1 of 2 replicas did not answer" in missing.json()["detail"]["message"]
    fleet.dead = {0, 1}
    assert fleet.http("GET", "/v1/states").json() == {
        "states": [], "has_more": False, "partial": True,
        "replicas_asked": 2, "replicas_answered": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "content", "loc"),
    [
        ("POST", "run/rollback", b"{}", ["body", "tokens"]),
        ("POST", "run/rollback", b'{"tokens": -1}', ["body", "tokens"]),
        ("POST", "run/rollback", b'{"tokens": "64"}', ["body", "tokens"]),
        ("POST", "run/rollback", b'{"tokens": 64.5}', ["body", "tokens"]),
        ("POST", "run/rollback", b'{"tokens": true}', ["body", "tokens"]),
        ("POST", "run/rollback", b'{"tokens": 64, "step": 1}', ["body", "step"]),
        ("POST", "run/rollback", b"[64]", ["body"]),
        ("POST", "run/rollback", b"", ["body", 0]),
        ("POST", "run/rollback", b'{"tokens"', ["body", 9]),
        ("POST", "run/branch", b"{}", ["body", "name"]),
        ("POST", "run/branch", b'{"name": ""}', ["body", "name"]),
        ("POST", "run/branch", b'{"name": "run"}', ["body", "name"]),
        ("POST", "run/branch", b'{"name": "caf\xc3\xa9"}', ["body", "name"]),
        ("POST", "run/branch", b'{"name": "b", "tokens": 0}', ["body", "tokens"]),
        ("POST", "run/branch", b'{"name": ["b"]}', ["body", "name"]),
        ("GET", "caf%C3%A9", b"", ["path", "id"]),
        ("DELETE", "x" * 257, b"", ["path", "id"]),
        ("GET", "?limit=0", b"", ["query", "limit"]),
        ("GET", "?limit=", b"", ["query", "limit"]),
        ("GET", "?limit=many", b"", ["query", "limit"]),
        ("GET", "?limit=1001", b"", ["query", "limit"]),
    ],
)
def test_what_is_wrong_is_named(
    fleet: Fleet, method: str, path: str, content: bytes, loc: list[Any]
) -> None:
    """A 422 with its place, before any replica is asked."""
    path = f"/v1/states{path}" if path.startswith("?") else f"/v1/states/{path}"
    answer = fleet.http(method, path, content=content)
    assert answer.status_code == 422, answer.text
    assert [d["loc"] for d in answer.json()["detail"]] == [loc]


@pytest.mark.parametrize("path", ["", "/", "/pin", "//", "/rollback", "?x=1"])
def test_an_empty_id_is_no_state(fleet: Fleet, path: str) -> None:
    """A trailing slash is not every state of the tenant, over HTTP or behind it."""
    for session in ("run", "other"):
        fleet.ask(words(session, 20), session=session)
    before = fleet.http("GET", "/v1/states").json()
    for method in ("GET", "DELETE", "POST"):
        answer = fleet.http(method, f"/v1/states/{path}", json={"tokens": 0})
        assert answer.status_code == 404, method
    for call in (StateCall("delete", KEYS["A"]), StateCall("pin", KEYS["A"])):
        with pytest.raises(InvalidRequest, match="id"):
            perform(fleet.engines[0], call, "r0")
    assert fleet.http("GET", "/v1/states").json() == before
    assert len(before["states"]) == 2


def test_unknown_states_paths_and_methods(fleet: Fleet) -> None:
    """404 and 405, and 409 for one branch too many."""
    fleet.ask(words(0, 20), session="run")
    for method, path in (("GET", "no"), ("DELETE", "no"), ("POST", "no/snapshot")):
        answer = fleet.http(method, f"/v1/states/{path}")
        assert answer.status_code == 404
        assert "'no'" in answer.json()["detail"]["message"]
    early = fleet.http("POST", "/v1/states/run/branch", json={"name": "b", "tokens": 63})
    assert early.status_code == 404
    assert "at most 63 tokens" in early.json()["detail"]["message"]
    for path in ("/v1/states/run/fly", "/v1/states/run/pin/now", "/v1/statesmen", "/v1/states/"):
        assert fleet.http("POST", path).status_code in (404, 405), path
    for method, path, allowed in (
        ("POST", "", "GET"),
        ("DELETE", "", "GET"),
        ("POST", "/run", "GET, DELETE"),
        ("GET", "/run/pin", "POST"),
    ):
        answer = fleet.http(method, f"/v1/states{path}")
        assert answer.status_code == 405
        assert answer.headers["allow"] == allowed
    for i in range(MOST_BRANCHES):
        body = {"name": f"b{i}"}
        assert fleet.http("POST", "/v1/states/run/branch", json=body).status_code == 200
    one_more = fleet.http("POST", "/v1/states/run/branch", json={"name": "one more"})
    assert one_more.status_code == 409
    assert one_more.json()["detail"]["error_type"] == "api_usage_error"
    for size in (1 << 21, MOST_BODY + 1):
        large = fleet.http("POST", "/v1/states/run/rollback", content=b" " * size)
        assert large.status_code == 413
    many = {"tokens": 64, **{str(i): i for i in range(1000)}}
    told = fleet.http("POST", "/v1/states/run/rollback", json=many).json()["detail"]
    assert len(told) == MOST_FAULTS + 1
