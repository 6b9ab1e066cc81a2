"""Starting and stopping: keys, faults of ours, busy ports, wrong arguments, the CLI, Ctrl-C."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtest.local import free_port
from router.auth import key_hash
from tests.checkpoints import POISON
from tests.deployments.conftest import ROOT, Served, Started, serving
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.ray

KEY = "a-key"
ASK = {"state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, poisoned: Path) -> Iterator[Started]:
    """A server with a key, of a checkpoint folder with a poisoned letter."""
    log = tmp_path_factory.mktemp("keyed") / "log"
    with serving(log, f"model={poisoned}", f"api_key_sha256={key_hash(KEY)}") as server:
        yield server


def test_jevcompat_with_a_key(keyed: Started) -> None:
    """The requirements on authentication, by the suite."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "jevcompat"), "test", keyed.url, "--key-env", "OUR_KEY"],
        env=os.environ | {"OUR_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "MUST 32/32" in done.stdout


def test_nan_is_a_typed_error_and_the_server_goes_on(keyed: Started) -> None:
    """A model that gives NaN for one request answers the next one as before."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=keyed.url, headers=headers, timeout=60) as client:
        good = client.post("/v1/systemone", json=ASK).json()["answers"]
        for _ in range(3):
            bad = client.post("/v1/systemone", json={**ASK, "state": f"a {POISON} b"})
            assert bad.status_code == 500
            assert "question 'q' is not finite" in bad.json()["detail"]["message"]
            again = client.post("/v1/systemone", json=ASK).json()["answers"]
            assert abs(again["q"]["noul"] - good["q"]["noul"]) < 1e-6
        until(lambda: client.get("/health").status_code == 200, "it is not healthy again", 0.5)
    assert httpx.post(f"{keyed.url}/v1/systemone", json=ASK, timeout=60).status_code == 401


@pytest.mark.slow
def test_the_cluster_asks_for_its_token(keyed: Started) -> None:
    """Who has none does not get in, on this machine either."""
    join = f"import ray; ray.init({keyed.address!r}); print('joined')"
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-c", join],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "joined" not in done.stdout
    assert "auth" in done.stderr.lower()


def serve_run(*args: str, served: Served) -> subprocess.Popen[str]:
    """`serve run` against a running cluster."""
    return subprocess.Popen(
        [str(Path(sys.executable).parent / "serve"), "run", *args],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": served.address, "RAY_AUTH_MODE": "token"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a test run in the background has interrupts ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def test_serve_run_validates_its_arguments(keyed: Started) -> None:
    """An unknown name is refused by `build`'s model, through the real command line."""
    process = serve_run("deployments.app:build", "modell=x", "--name", "typo", served=keyed)
    out, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "no such option; did you mean model?" in out


def test_serve_run_serves(keyed: Started, checkpoint: Path) -> None:
    """The same builder under another name and prefix, with an engine option by its own name."""
    process = serve_run(
        "deployments.app:build",
        f"model={checkpoint}",
        "max_questions=1",
        "cpus_per_replica=0.1",
        "--name",
        "second",
        "--route-prefix",
        "/second",
        served=keyed,
    )
    try:
        with httpx.Client(base_url=f"{keyed.url}/second", timeout=60) as client:
            until(
                lambda: client.get("/health").status_code == 200 or process.poll() is not None,
                "it does not start",
                0.5,
            )
            assert client.post("/v1/systemone", json=ASK).status_code == 200
            two = {**ASK, "questions": {"a": ASK["questions"]["q"], "b": ASK["questions"]["q"]}}
            assert client.post("/v1/systemone", json=two).status_code == 422
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=120)
        finally:
            process.kill()


def local(*args: str) -> subprocess.CompletedProcess[str]:
    """`python -m deployments.local` with arguments that it must refuse."""
    return subprocess.run(
        [sys.executable, "-m", "deployments.local", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_busy_port_is_named_before_ray_starts() -> None:
    """With what to do about it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = local(f"port={port}")
    assert done.returncode == 1
    assert f"port {port} is busy" in done.stderr
    assert "starting Ray" not in done.stdout


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("modell=x", "modell: no such option; did you mean model?"),
        ("num_replicas=0", "at least 1, or auto"),
        ("api_key_sha256=secret", "hashes of keys"),
        ("max_prompt_tokens=many", "engine.max_prompt_tokens"),
        ("port=99999", "not a port number"),
        ("serve", "not of the form name=value"),
    ],
)
def test_wrong_arguments_are_refused_by_name(word: str, message: str) -> None:
    """Before Ray starts."""
    done = local(word)
    assert done.returncode == 1
    assert message in done.stderr
    assert "starting Ray" not in done.stdout


def processes_of(session: int) -> list[str]:
    """Command lines of the live processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def left_of(session: int) -> list[str]:
    """Those that do not end within a minute."""
    for _ in range(600):
        if not (left := processes_of(session)):
            break
        time.sleep(0.1)
    return left


def test_an_interrupt_leaves_no_process(keyed: Started) -> None:
    """The whole process group gets the interrupt, as from a terminal. The last test of its server,
    which has done and suffered what those before asked of it.
    """
    session = keyed.process.pid
    assert any("raylet" in line for line in processes_of(session))
    os.killpg(session, signal.SIGINT)
    assert keyed.process.wait(PATIENCE_S) == 0
    assert left_of(session) == []


def test_an_interrupt_ends_a_start(tmp_path: Path, checkpoint: Path) -> None:
    """While the model is loaded, which never ends; no process is left, and nothing was served."""
    log, folder = tmp_path / "log", tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # nobody writes into it
    words = [f"port={free_port()}", f"model={folder}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.local", *words],
            cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: "loading the model" in log.read_text() or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130, log.read_text()
        assert "serving at" not in log.read_text()
        assert left_of(process.pid) == []
    finally:
        process.kill()
