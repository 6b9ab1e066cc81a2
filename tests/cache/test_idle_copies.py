"""The last checkpoints reach the disk, too: of an engine that has nothing to do, and of one that is
closed.
"""

from pathlib import Path
from typing import Any

import pytest

from flide_engine import Engine, EngineConfig
from tests.cache.late_copies import LateCopies
from tests.waiting import until

REQUEST = {
    "state": " ".join(f"it says {i}" for i in range(50)),
    "questions": {"q": {"type": "noul", "instructions": "Is it so?"}},
}


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> EngineConfig:
    """An engine that writes files."""
    return EngineConfig(
        model=str(checkpoint), max_prompt_tokens=768, max_request_tokens=1024,
        max_round_tokens=256, host_bytes=8 << 20, disk_folder=tmp_path,
    )  # fmt: skip


def checkpoints(engine: Engine) -> int:
    """How many the device has."""
    return engine.checkpoint_counts()["device"]


def test_an_idle_engine_writes_what_is_still_being_copied(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies end some time after the last round, and nobody asks for another."""
    late = LateCopies(patience=5)
    monkeypatch.setattr("flide_engine.cache.pool.beside_rounds", lambda device: late)
    engine = Engine(config)
    try:
        engine.decide(REQUEST)
        assert checkpoints(engine) > 0
        until(lambda: len(list(tmp_path.rglob("*.checkpoint"))) == checkpoints(engine))
    finally:
        engine.close()


def test_what_was_not_copied_yet_is_when_an_engine_closes(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another goes on from it."""
    with monkeypatch.context() as patched:
        patched.setattr("flide_engine.loop.COPY_BYTES", 0)
        engine = Engine(config)
        engine.decide(REQUEST)
        assert engine.checkpoint_counts()["host"] == 0
        engine.close()
    again = Engine(config)
    try:
        again.decide(REQUEST)
        assert again.counters().from_disk > 0
    finally:
        again.close()


def test_copies_that_fail_do_not_keep_an_engine_from_closing(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the device is gone: its folder is free for another."""
    monkeypatch.setattr("flide_engine.loop.COPY_BYTES", 0)
    engine = Engine(config)
    engine.decide(REQUEST)

    def broken(*_: Any) -> None:
        raise OSError("injected")

    monkeypatch.setattr(engine._tiers.host, "store", broken)  # type: ignore[union-attr]
    engine.close()
    again = Engine(config)
    assert again._tiers is not None
    assert again._tiers.disk is not None
    assert again._tiers.disk._folder.name == "0"
    again.close()
