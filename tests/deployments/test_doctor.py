"""`flide-serve doctor`: what it shows, and everything that it should find wrong."""

import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from deployments import doctor
from deployments.config import AppArgs
from deployments.doctor import engine, examine, proxies
from deployments.preflight import Finding, authentication, placement
from flide_engine import parity
from flide_engine.errors import ConfigError, WeightsError
from loadtest.local import free_port
from tests.deployments.conftest import ROOT

CLEAN = {"PATH": os.environ["PATH"]}


def wrong(findings: Iterable[Finding]) -> list[str]:
    """What is wrong."""
    return [finding.wrong for finding in findings if finding.wrong]


def looked(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command, in an environment with nothing of Ray's."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-m", "deployments.doctor", "doctor", *words],
        cwd=ROOT, env={**given, **env}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_a_healthy_machine(tmp_path: Path) -> None:
    """Versions, the options with what was given, an engine that answers; exit status 0."""
    done = looked(f"port={free_port()}", "cpus_per_replica=0.5", HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (
        "ray                      2.60.0",
        "cpus_per_replica         0.5 (given)",
        "max_prompt_tokens        32768\n",
        "flide-tiny, weights ",
        "a first answer",
        "Nothing is wrong.",
    ):
        assert part in done.stdout, part
    assert "WRONG" not in done.stdout


def test_everything_wrong_at_once_is_listed() -> None:
    """A bad option does not hide a busy port; exit status 1; no traceback."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = looked(f"port={port}", "modell=x", "max_replicas=none", RAY_AUTH_MODE="disabled")
    assert done.returncode == 1
    assert f"WRONG: port {port} is busy" in done.stdout
    assert "WRONG: modell: no such option; did you mean model?" in done.stdout
    assert "WRONG: max_replicas: Input should be a valid integer" in done.stdout
    assert "things are wrong" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_console_script_is_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    """As pyproject.toml has it; without a command it says what there is."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["flide-serve"].partition(":")
    assert getattr(import_module(module), name) is doctor.command
    with pytest.raises(SystemExit, match="flide-serve doctor"):
        doctor.command([])


def test_tokens(tmp_path: Path) -> None:
    """None where one is needed, one that all can read, and auth that is turned off."""
    env = {**CLEAN, "HOME": str(tmp_path)}
    assert authentication(env, False).wrong == ""
    assert "can run code" in authentication({**env, "RAY_AUTH_MODE": "disabled"}, False).wrong
    assert authentication({**env, "RAY_AUTH_MODE": "disabled"}, True).wrong == ""
    joining = {**env, "RAY_ADDRESS": "10.0.0.1:6379"}
    assert "asks for its token" in authentication(joining, False).wrong
    assert authentication({**joining, "RAY_AUTH_TOKEN": "t"}, False).wrong == ""
    lost = authentication({**env, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}, False)
    assert "is not there" in lost.wrong
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("secret")
    path.chmod(0o600)
    found = authentication(joining, False)
    assert found.wrong == ""
    assert "secret" not in found.found
    path.chmod(0o644)
    for folder in (path.parent, tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o011:
            assert authentication(joining, False).wrong == ""  # nobody gets there
            break
    else:
        assert "chmod 600" in authentication(joining, False).wrong


def test_tokens_that_others_can_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the folders above this test's."""
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o644)
    tmp_path.chmod(0o711)
    monkeypatch.setattr(Path, "parents", property(lambda self: [tmp_path]))
    env = {**CLEAN, "RAY_AUTH_TOKEN_PATH": str(path)}
    assert "chmod 600" in authentication(env, False).wrong
    tmp_path.chmod(0o700)
    assert authentication(env, False).wrong == ""


def test_proxies(tmp_path: Path) -> None:
    """HAProxy without a binary, or a retry for a Gateway that dies; one flag for everything."""
    assert wrong(proxies(CLEAN)) == []
    on = {**CLEAN, "RAY_SERVE_ENABLE_HA_PROXY": "1"}
    (lost,) = wrong(proxies(on))
    assert "RAY_SERVE_HAPROXY_RETRY_ON='conn-failure empty-response'" in lost
    on["RAY_SERVE_HAPROXY_RETRY_ON"] = "conn-failure empty-response"
    assert wrong(proxies(on)) == []
    nowhere = {**on, "RAY_SERVE_HAPROXY_BINARY_PATH": str(tmp_path / "none")}
    (none,) = wrong(proxies(nowhere))
    assert "there is none" in none
    (more,) = wrong(proxies({"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}))
    assert "more than HAProxy" in more


def placed(cores: int = 4, gpus: int = 0, joins: bool = False, **options: Any) -> list[str]:
    """What is wrong with where replicas would go."""
    return wrong(placement(AppArgs(**options), cores, gpus, joins))


def test_room() -> None:
    """More replicas than cores or GPUs, more than a GPU in all of those that share it."""
    assert placed(num_replicas=3) == []
    assert len(placed(num_replicas=4)) == 1  # the Gateway takes a tenth
    assert placed(num_replicas=4, joins=True) == []
    assert placed(num_replicas="auto", max_replicas=100) == []
    assert len(placed(num_replicas="auto", min_replicas=4, max_replicas=100)) == 1
    assert placed(gpus=2, num_replicas=2) == []
    (few,) = placed(gpus=2, num_replicas=3)
    assert "gpus_per_replica" in few
    shared = {"gpus": 1, "num_replicas": 2, "gpus_per_replica": 0.5}
    (share,) = placed(**shared)
    assert "device_share=0.5" in share
    assert placed(**shared, device_share=0.5) == []


def test_an_engine_that_cannot_start(checkpoint: Path, tmp_path: Path) -> None:
    """Too little memory for the pool, no weights, no room on disk: what the engine would say."""
    small: dict[str, Any] = {"model": str(checkpoint), "compute_threads": 1}
    with pytest.raises(ConfigError, match="pool_bytes 1000"):
        list(engine(AppArgs(**small, pool_bytes=1000)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="is there"):
        list(engine(AppArgs(model=str(tmp_path))))
    folder = tmp_path / "new" / "disk"
    options = {"host_bytes": 1 << 24, "disk_folder": str(folder)}
    found = list(engine(AppArgs(**small, **options, disk_bytes=1 << 60)))
    assert wrong(found) == ["a smaller disk_bytes"]
    assert {"states, device", "states, host", "states, disk"} <= {finding.what for finding in found}


@pytest.mark.parametrize(("available", "few"), [(1 << 40, 0), (200 << 20, 1), (1000, 1)])
def test_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, available: int, few: int
) -> None:
    """Weights that do not fit are not loaded; pools of all replicas must fit together."""
    monkeypatch.setattr(doctor, "memory_available", lambda: available)
    found = list(engine(AppArgs(model=str(checkpoint), num_replicas=3)))
    assert len(wrong(found)) == few
    assert any(f.what == "a first answer" for f in found) == (available > 1000)
    assert doctor.memory_available() == available


def test_kernels_that_compute_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's verdicts, operation by operation; an exception is a verdict too."""
    from flide_engine import resolve

    monkeypatch.setattr(resolve, "resolve_kernels", lambda *_: object())
    verdicts = [parity.Parity("swiglu", 1e-9, 1e-5), parity.Parity("attention", 0.5, 1e-5)]
    monkeypatch.setattr(parity, "probe", lambda *_: iter(verdicts))
    found = list(doctor.kernels(AppArgs()))
    assert [f.what for f in found if f.wrong] == ["attention"]

    def broken(*_: Any) -> Any:
        raise RuntimeError("PTX was compiled for another card")

    monkeypatch.setattr(parity, "probe", broken)
    monkeypatch.setattr(doctor, "engine", lambda args: [])
    lines: list[str] = []
    verdict = examine([f"port={free_port()}"], lines.append)
    assert "kernels" in {finding.what for finding in verdict}
    assert any("PTX was compiled for another card" in line for line in lines)
