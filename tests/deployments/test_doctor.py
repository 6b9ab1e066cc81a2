"""`flide-serve doctor`: what it shows, and everything that it should find wrong."""

import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments import doctor, inventory
from deployments.config import AppArgs
from deployments.doctor import callers, engine, examine, proxies
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
        "ray                            2.60.0",
        "cpus_per_replica               0.5 (given)",
        "max_prompt_tokens              32768\n",
        "model                          None: the embedded one\n",
        "dtype                          'auto': float32\n",
        "flide-tiny, weights ",
        "memory: pool ",
        "a first answer",
        "Nothing is wrong.",
    ):
        assert part in done.stdout, part
    assert "WRONG" not in done.stdout
    assert not done.stderr


def test_a_model_that_is_not_here_and_keys_that_cannot_be_read(tmp_path: Path) -> None:
    """What helps, instead of what the hub's library says."""
    done = looked(f"port={free_port()}", "model=a/b@v1", "api_keys=/nowhere", HF_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "WRONG: api_keys /nowhere: " in done.stdout
    assert "`hf download a/b --revision v1`, then look again" in done.stdout
    assert "2 things are wrong" in done.stdout
    assert not done.stderr


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
    doctor.command(["doctor", "--help"])
    assert "flide-serve doctor" in capsys.readouterr().out


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
    assert placed(**shared) == []  # each takes its part, unless told otherwise
    (share,) = placed(**shared, device_share=0.6)
    assert "device_share=0.5" in share


def test_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody, or those of a file; a file that would stop the Gateways is wrong."""
    (none,) = callers(AppArgs())
    assert "no key is asked for" in none.found
    one, other = "a" * 64, "b" * 64
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"tenants": [{"name": "acme", "key_sha256": [one, other]}]}))
    (some,) = callers(AppArgs(api_keys=str(path), api_key_sha256="c" * 64))
    assert (some.found, some.wrong) == ("3 keys of 2 tenants", "")
    path.write_text("{}")
    with pytest.raises(ConfigError, match="tenants"):
        list(callers(AppArgs(api_keys=str(path))))


def found_of(args: AppArgs, gpus: int) -> dict[str, str]:
    """What is said of each option."""
    return {finding.what: finding.found for finding in doctor.options(args, gpus)}


def test_options_come_to_what_a_replica_gets() -> None:
    """What is left open is said, what was given stays; a card is shared by the part."""
    told = found_of(AppArgs(), 0)
    assert (told["gpus_per_replica"], told["device_share"]) == ("None: 0", "1.0")
    assert (told["kernels"], told["deterministic"]) == ("'auto': reference", "None: False")
    told = found_of(AppArgs.model_validate({"gpus_per_replica": 0.25, "dtype": "float32"}), 2)
    assert (told["gpus_per_replica"], told["device_share"]) == ("0.25 (given)", "1.0: 0.25")
    assert told["dtype"] == "'float32' (given)"
    impossible = found_of(AppArgs.model_validate({"kernels": "triton", "device": "cpu"}), 1)
    assert (impossible["dtype"], impossible["gpus_per_replica"]) == ("'auto'", "None: 1")


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each card; driver and compiler once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((20 + i) << 30, 24 << 30))
    card = SimpleNamespace(name="Some card", major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: card)
    told = [(f.what, f.found) for f in inventory.machine()]
    assert ("gpu 1", "Some card, compute capability 8.9, 21.00 GiB of 24.00 GiB free") in told
    names = [what for what, _ in told]
    assert names[-5:] == ["gpu 0", "gpu 1", "driver", "cuda", "triton"]


def test_gpus_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU would serve in silence: that is wrong unless it was asked for, and why it may be so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(inventory, "CARDS", tmp_path / "gpus")
    monkeypatch.setattr(inventory, "DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert wrong(doctor.kernels(AppArgs())) == []
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "version").write_text("470.1\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    (why,) = wrong(doctor.kernels(AppArgs()))
    assert "built without CUDA; if the CPU is meant: device=cpu" in why
    assert wrong(doctor.kernels(AppArgs.model_validate({"device": "cpu"}))) == []
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert "driver 470.1 is too old for CUDA 12.9" in inventory.unseen_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides them" in inventory.unseen_gpus()


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
    *_, few = engine(AppArgs(**small, host_bytes=1 << 60))
    assert "of host_bytes" in few.found
    assert "a smaller model" in few.wrong
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

    asked: list[Any] = []
    monkeypatch.setattr(resolve, "resolve_kernels", lambda *args: asked.append(args) or object())
    verdicts = [parity.Parity("swiglu", 1e-9, 1e-5), parity.Parity("attention", 0.5, 1e-5)]
    monkeypatch.setattr(parity, "probe", lambda *_: iter(verdicts))
    found = list(doctor.kernels(AppArgs.model_validate({"deterministic": False})))
    assert [f.what for f in found if f.wrong] == ["attention"]
    assert [args[2] for args in asked] == [False]  # those that the engine would have

    def broken(*_: Any) -> Any:
        raise RuntimeError("PTX was compiled for another card")

    monkeypatch.setattr(parity, "probe", broken)
    monkeypatch.setattr(doctor, "engine", broken)
    lines: list[str] = []
    verdict = examine([f"port={free_port()}"], lines.append)
    assert "kernels" in {finding.what for finding in verdict}
    # what the engine meets, too, is shown there and counted once
    assert sum("PTX was compiled for another card" in line for line in lines) == 2
    assert sum("PTX was compiled for another card" in finding.wrong for finding in verdict) == 1
