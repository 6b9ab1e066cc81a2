"""Two Gateways and a ledger in a cluster: quotas, departures, deadlines, bodies that fit no gRPC
message, and keys that are read anew.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.context import _get_global_client

from deployments.client import DecisionClient
from flide_engine.errors import BodyTooLarge, DeadlineExceeded
from flide_engine.wire import to_json
from router.quota import BURST_S
from tests.deployments.conftest import joined, serving
from tests.deployments.test_limits import asking
from tests.deployments.test_tenants import SLOW, A, keys_file
from tests.waiting import until

pytestmark = pytest.mark.ray

QUOTA = 120
"""Requests a minute, which a slow machine must be able to answer, too."""

MOST_BYTES = 6 << 20
LONG = asking("word " * 6_000)
"""30,000 tokens, in rounds of 256: nobody waits for its end, and it must not come by itself."""


@dataclass(frozen=True)
class Two:
    """A server with two Gateways, and this process connected to its cluster."""

    url: str
    model: Path
    keys: Path
    logs: Path

    def post(self, key: str, request: dict[str, Any], **headers: str) -> httpx.Response:
        """One decision over HTTP, on a connection of its own."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        auth = {"authorization": f"Bearer {key}"}
        return httpx.post(
            f"{self.url}/v1/systemone", content=to_json(request), headers=auth | named, timeout=60
        )

    def counted(self, what: str) -> int:
        """A counter of the engine."""
        (found,) = engine().broadcast("counters").results(timeout_s=30)
        return int(found[what])


def engine() -> Any:
    """A plain handle of the engine."""
    return serve.get_deployment_handle("Engine", "default")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Two]:
    """The random four-layer checkpoint."""
    folder = tmp_path_factory.mktemp("two")
    keys = keys_file(folder, slow={"requests_per_minute": QUOTA})
    words = (
        f"model={checkpoint}", "gateway_replicas=2", f"api_keys={keys}", "cpus_per_replica=0.1",
        f"max_body_bytes={MOST_BYTES}", f"max_decoded_bytes={MOST_BYTES}", "max_round_tokens=256",
    )  # fmt: skip
    with serving(folder / "log", *words) as served, joined(served.address):
        found = re.search(r"logs: (\S+)", served.log.read_text())
        assert found
        yield Two(served.url, checkpoint, keys, Path(found[1]))


def test_a_quota_is_the_fleet_s(two: Two) -> None:
    """Asked through both Gateways without a pause, a tenant gets its quota within 10%, beside what
    was saved up.
    """
    answered: list[float] = []
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            answer = two.post(SLOW, asking())
            if answer.status_code == 200:
                answered.append(time.monotonic())
            else:
                assert answer.status_code == 429, answer.text
                stop.wait(min(0.3, int(answer.headers["retry-after-ms"]) / 1000))

    threads = [threading.Thread(target=client) for _ in range(4)]
    began = time.monotonic()
    for thread in threads:
        thread.start()

    def has_its_quota() -> bool:
        """All that was saved up, and from then on what comes in; a stall is made up for."""
        allowed = (BURST_S + time.monotonic() - began) * QUOTA / 60
        return len(answered) >= max((BURST_S + 2) * QUOTA / 60, 0.9 * allowed)

    until(has_its_quota, "it does not get its quota")
    stop.set()
    for thread in threads:
        thread.join()
    # Gateways that waited for their ledger in vain have shared what was saved up once more
    logs = [path.read_text() for path in two.logs.glob("replica_default_Gateway_*.log")]
    saved_up = BURST_S * (2 if any("no ledger" in log for log in logs) else 1)
    spent = answered[-1] - began
    assert len(answered) <= 1.1 * (saved_up + spent) * QUOTA / 60 + 2

    def both_have_leases() -> bool:
        two.post(SLOW, asking())
        told = serve.get_app_handle("default").broadcast("leases").results(timeout_s=60)
        return all("slow" in gateway["held"] and gateway["by_ledger"] for gateway in told)

    until(both_have_leases, "a Gateway does not ask the ledger", 0.1)


def test_those_who_leave_take_their_work_back(two: Two) -> None:
    """Connections that are closed and calls that are cancelled leave nothing in the queue."""
    before = two.counted("answered")
    body = to_json(LONG)
    head = f"POST /v1/systemone HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {A}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = two.url.removeprefix("http://").split(":")
    open_ones = [socket.create_connection((host, int(port))) for _ in range(3)]
    for one in open_ones:
        one.sendall(head.encode() + body)
    calls = [engine().decide.remote(LONG) for _ in range(3)]
    until(lambda: two.counted("waiting") >= 4)
    for one in open_ones:
        one.close()
    for call in calls:
        call.cancel()
    until(lambda: two.counted("waiting") == 0)
    assert two.post(A, asking()).status_code == 200
    assert two.counted("answered") == before + 1


def test_deadlines_through_the_cluster(two: Two) -> None:
    """By header, by client, and by a plain handle."""
    answer = two.post(A, LONG, X_Request_Timeout_Ms="50")
    assert (answer.status_code, answer.json()["detail"]["error_type"]) == (408, "timeout_error")
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        DecisionClient(timeout=0.05).decide(LONG)
    with pytest.raises(RuntimeError, match=r"within 0\.05 s"):
        engine().decide.remote(LONG, timeout_s=0.05).result(timeout_s=60)
    until(lambda: two.counted("waiting") == 0)


def test_bodies_above_a_grpc_message(two: Two) -> None:
    """Up to the limit they are answered, by HTTP and by handle; one byte more is refused, by the
    engine if the caller holds a handle.
    """
    shell = len(to_json(asking("")))
    client = DecisionClient(timeout=60)
    fits, above = (asking(" " * (size - shell)) for size in (MOST_BYTES, MOST_BYTES + 1))
    assert two.post(A, fits).status_code == 200
    assert client.decide(fits).answers
    refused = two.post(A, above)
    assert (refused.status_code, "max_body_bytes" in refused.text) == (413, True)
    with pytest.raises(BodyTooLarge, match=rf"{MOST_BYTES} bytes \(max_decoded_bytes\)"):
        client.decide(above)


def test_they_keep_no_memory_for_each_thread(two: Two) -> None:
    """glibc reads its settings as a process begins, and not again."""
    details = _get_global_client().get_serve_details()["applications"]["default"]
    replicas = details["deployments"]["Gateway"]["replicas"]
    given = [Path(f"/proc/{replica['pid']}/environ").read_bytes() for replica in replicas]
    assert [b"\0MALLOC_ARENA_MAX=1\0" in b"\0" + environ for environ in given] == [True] * 2


@pytest.mark.slow
def test_keys_are_read_anew_in_place(two: Two) -> None:
    """A changed `user_config` of the Gateways, as `serve deploy` would hand it over, reads the file
    again; no replica is replaced for it.
    """
    from ray.serve.schema import ServeDeploySchema

    def deploy(revision: int) -> None:
        app = {
            "name": "default",
            "import_path": "deployments.app:build",
            "args": {
                "model": str(two.model),
                "gateway_replicas": 2,
                "api_keys": str(two.keys),
                "cpus_per_replica": 0.1,
            },
            "deployments": [
                {
                    "name": "Gateway",
                    "user_config": {"api_keys": str(two.keys), "revision": revision},
                }
            ],
        }
        client = _get_global_client()
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}))

    def replicas() -> set[str]:
        details = _get_global_client().get_serve_details()["applications"]["default"]
        return {
            replica["replica_id"]
            for deployment in details["deployments"].values()
            for replica in deployment["replicas"]
            if replica["state"] == "RUNNING"
        }

    def running() -> bool:
        return serve.status().applications["default"].status == "RUNNING"

    before = replicas()
    deploy(1)
    until(lambda: running() and len(replicas()) == 3 and not replicas() & before)
    before = replicas()
    tenants = json.loads(two.keys.read_text())["tenants"]
    two.keys.write_text(json.dumps({"tenants": tenants[1:]}))
    assert two.post(A, asking()).status_code == 200
    deploy(2)
    refused = 0

    def gone() -> bool:
        nonlocal refused
        refused = refused + 1 if two.post(A, asking()).status_code == 401 else 0
        return refused == 20

    until(gone)
    assert replicas() == before
