"""`ray up` and `serve deploy`, as an operator types them, on machines that are namespaces."""

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployments.conftest import ROOT
from tests.deployments.machines import (
    Machine,
    can_be_reached,
    laptop_and_machines,
    prepare_environment,
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_be_reached(), reason="needs root, namespaces, rsync and sshd"),
]

SUBNET = "10.77.0"
ASK = {"state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}}


def checkout(folder: Path) -> None:
    """The working tree as a laptop has it, with addresses, user and a model that needs no GPU."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
            (folder / name).chmod((ROOT / name).stat().st_mode)
    cluster = folder / "deployments" / "cluster-local.yaml"
    config: dict[str, Any] = yaml.safe_load(cluster.read_text())
    config["provider"].update(head_ip=f"{SUBNET}.2", worker_ips=[f"{SUBNET}.3"])
    config["auth"]["ssh_user"] = "root"
    cluster.write_text(yaml.safe_dump(config))
    serve = folder / "deployments" / "serve.yaml"
    app: dict[str, Any] = yaml.safe_load(serve.read_text())
    app["applications"][0]["args"] = {
        "num_replicas": 2,
        "gateway_replicas": 2,
        "cpus_per_replica": 0.1,
    }
    serve.write_text(yaml.safe_dump(app))


def ask(laptop: Machine, address: str) -> dict[str, Any]:
    """The answer of a node's HAProxy."""
    body = json.dumps(ASK)
    found: dict[str, Any] = json.loads(
        laptop.run(
            f"curl -sf --retry 20 --retry-all-errors --retry-delay 1 {address}:8000/v1/systemone"
            f" -H 'content-type: application/json' -d '{body}'"
        )
    )
    return found


def wait_for_nodes(laptop: Machine, listing: str, count: int) -> None:
    """Returns when so many live."""
    for _ in range(40):
        if (shown := laptop.run(listing)).count('"state": "ALIVE"') == count:
            return
    raise AssertionError(shown)


@contextmanager
def asking(laptop: Machine, addresses: list[str]) -> Iterator["Asking"]:
    """The official SDK asks the nodes by one name that has all their addresses."""
    hosts = laptop.folder / "home" / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} fleet\n" for a in addresses))
    laptop.run("mount --bind ~/hosts /etc/hosts")
    made = Asking(laptop)
    try:
        yield made
    finally:
        made.stop()


class Asking:
    """The load while it runs."""

    def __init__(self, laptop: Machine) -> None:
        self._home = laptop.folder / "home"
        words = f"{ROOT}/tests/deployments/clients/sdk_load.py http://fleet:8000 count stop"
        self._thread = ThreadPoolExecutor(1)
        self._out = self._thread.submit(laptop.run, f"~/.flide/bin/python {words}")

    def wait_for(self, more: int) -> None:
        """Returns when so many more are answered."""
        wanted = self.count() + more
        for _ in range(1200):
            if self.count() >= wanted:
                return
            time.sleep(0.1)
        raise AssertionError(f"{self.count()} answered, not {wanted}")

    def count(self) -> int:
        """Answered so far."""
        path = self._home / "count"
        return int((path.read_text() if path.exists() else "") or 0)

    def stop(self) -> dict[str, Any]:
        """Ends it: what came of it."""
        (self._home / "stop").touch()
        found: dict[str, Any] = json.loads(self._out.result(60))
        return found


def test_ray_up_then_serve_deploy_is_the_whole_story(tmp_path: Path) -> None:
    """Two machines by SSH from nothing but the files: one token, both answer, strangers do not.

    Then HAProxy of one is killed, and the other loses power, while the official SDK asks: with its
    own retries, and a name with both addresses, it never fails.
    """
    with laptop_and_machines(tmp_path, 2, SUBNET) as (laptop, *machines):
        for one in (laptop, *machines):
            prepare_environment(one)
        checkout(tmp_path / "laptop" / "home" / "flide-serve")
        path = "cd flide-serve && PATH=~/.flide/bin:$PATH"
        on_head = f"{path} ray exec deployments/cluster-local.yaml"
        laptop.run(f"{path} ray get-auth-token --generate")
        laptop.run(f"{path} ray up --yes deployments/cluster-local.yaml")
        # workers come after `ray up`, and HAProxy answers where replicas were placed
        wait_for_nodes(laptop, f"{on_head} 'ray list nodes --format json'", 2)
        laptop.run(f"{on_head} 'serve deploy ~/flide-serve/deployments/serve.yaml'")
        answers = [ask(laptop, f"{SUBNET}.{node}")["answers"] for node in (2, 3)]
        assert answers[0] == answers[1]
        tokens = {(m.folder / "home/.ray/auth_token").read_text() for m in (laptop, *machines)}
        assert len(tokens) == 1
        joining = f"{path} RAY_AUTH_MODE=token ray status --address {SUBNET}.2:6379"
        assert "Resources" in laptop.run(joining)
        (laptop.folder / "home/.ray/auth_token").write_text("another")
        refused = laptop.run(f"{joining} 2>&1 || true")
        assert "Resources" not in refused
        assert "token" in refused.lower(), refused
        with asking(laptop, [f"{SUBNET}.2", f"{SUBNET}.3"]) as load:
            load.wait_for(50)
            machines[0].run("kill -9 $(pgrep -x haproxy)")
            load.wait_for(200)
            machines[1].kill()
            load.wait_for(200)
            told = load.stop()
        assert told["failed"] == []
        assert told["spread"] < 1e-5
