"""Answers are the same from device, host memory and disk, and after a restart."""

from pathlib import Path
from typing import Any

import pytest

from flide_engine.cache.names import MOST_BRANCHES
from flide_engine.config import EngineConfig
from flide_engine.engine import Engine
from flide_engine.errors import CheckpointRefused, TooManyBranches, TooMuchPinned
from tests.cache.late_copies import LateCopies
from tests.engines import submit_together

NOUL = {"type": "noul", "instructions": "Is it so?"}


def ask(agent: int, words: int) -> dict[str, Any]:
    """A state of an agent that has grown to so many words."""
    text = " ".join(f"{agent} says {i}" for i in range(words))
    return {"state": text, "questions": {"q": NOUL}}


def probability(engine: Engine, request: dict[str, Any], name: str = "") -> float:
    """The answer."""
    answer: Any = engine.submit(request, name=name).result(60).answers["q"]
    return float(answer.noul)


def settled(engine: Engine) -> None:
    """Waits until copies and files are made."""
    engine._loop.call(lambda: engine._checkpoints.copy_some(1 << 40))
    engine._loop.call(lambda: engine._tiers and engine._tiers.settle(copies=True, writes=True))


def files_in(folder: Path) -> list[Path]:
    """What engines have written there."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Any:
    """An engine that remembers nothing."""
    engine = Engine(EngineConfig(model=str(checkpoint), keep_checkpoints=False))
    yield engine
    engine.close()


def config(checkpoint: Path, pool_bytes: int = 1_000_000, **more: Any) -> EngineConfig:
    """A device pool that holds one agent's state, not several."""
    return EngineConfig(
        model=str(checkpoint), max_prompt_tokens=768, max_request_tokens=1024, pin_share=0.5,
        max_round_tokens=256, pool_bytes=pool_bytes, host_bytes=8 << 20, **more,
    )  # fmt: skip


def test_what_leaves_the_device_comes_back_from_the_host(checkpoint: Path, plain: Engine) -> None:
    """More agents than the device holds take turns; every answer is the computed one."""
    engine = Engine(config(checkpoint))
    try:
        for words in (30, 36, 42):
            for agent in range(6):
                request = ask(agent, words)
                assert probability(engine, request) == pytest.approx(
                    probability(plain, request), abs=1e-6
                )
        counters = engine.counters()
        assert counters.from_host > 0
        assert counters.reused >= counters.from_host
    finally:
        engine.close()
    held = engine.accounting()
    assert held.slot_bytes_held + held.page_bytes_held <= held.bytes_total


def test_states_of_another_version_are_computed_anew(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bits may be others: its files and what it exports are refused."""
    request = ask(1, 40)
    files = config(checkpoint, disk_folder=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("flide_engine.resolve.version", lambda package: "0.0.9")
        before = Engine(files)
        probability(before, request, "a")
        (data, *_) = before.export_state("a")
        before.close()
    assert files_in(tmp_path)
    engine = Engine(files)
    try:
        with pytest.raises(CheckpointRefused, match="its stack differ"):
            engine.import_state(data)
        assert engine.submit(request).result(60).usage.x_reused_tokens == 0
    finally:
        engine.close()
    again = Engine(files)
    try:
        assert again.submit(request).result(60).usage.x_reused_tokens > 0
    finally:
        again.close()


def only_on_the_host(engine: Engine) -> None:
    """Copies everything there and takes it off the device."""
    settled(engine)

    def drop() -> None:
        for checkpoint in list(engine._checkpoints.index):
            engine._checkpoints.free(engine._checkpoints.index.remove(checkpoint))

    engine._loop.call(drop)


def test_others_run_while_a_state_comes_back(
    checkpoint: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose state is on its way lets the one behind it go first; with nothing else to
    run, its round waits. Answers are those that were computed.
    """
    late = LateCopies(patience=20)
    monkeypatch.setattr("flide_engine.cache.pool.beside_rounds", lambda device: late)
    engine = Engine(config(checkpoint))
    begin, order = engine._loop._begin, list[list[str]]()

    def recorded(works: list[Any]) -> Any:
        order.append([work.name for work in works])
        return begin(works)

    monkeypatch.setattr(engine._loop, "_begin", recorded)
    try:
        probability(engine, ask(1, 40), "first")
        only_on_the_host(engine)
        order.clear()
        requests = {"coming": ask(1, 45), "new": ask(2, 30)}
        # one alone would wait for its state and run first
        futures = submit_together(
            engine, lambda: [engine.submit(r, name=n) for n, r in requests.items()]
        )
        for future, request in zip(futures, requests.values(), strict=True):
            answer = future.result(60).answers["q"]
            assert float(answer.noul) == pytest.approx(probability(plain, request), abs=1e-6)
        assert order[0] == ["new"]
        assert ["coming"] in order
        assert engine.counters().from_host > 0
        only_on_the_host(engine)
        request = ask(1, 48)
        assert probability(engine, request) == pytest.approx(probability(plain, request), abs=1e-6)
    finally:
        engine.close()


def test_a_restart_goes_on_from_disk(checkpoint: Path, plain: Engine, tmp_path: Path) -> None:
    """Another process finds what the first left; a damaged folder costs a computation only."""
    first = Engine(config(checkpoint, disk_folder=tmp_path))
    probability(first, ask(1, 50), name="agent-1")
    settled(first)
    first.close()
    assert files_in(tmp_path)
    request = ask(1, 60)
    second = Engine(config(checkpoint, disk_folder=tmp_path))
    want = probability(plain, request)
    assert probability(second, request) == pytest.approx(want, abs=1e-6)
    assert second.counters().from_disk > 0
    assert second.forget("agent-1") >= 0
    second.close()
    for path in files_in(tmp_path):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    third = Engine(config(checkpoint, disk_folder=tmp_path))
    assert probability(third, request) == pytest.approx(want, abs=1e-6)
    assert third.counters().from_disk == 0
    third.close()


def test_an_anchor_stays_with_its_state(checkpoint: Path, tmp_path: Path) -> None:
    """On every tier, after a restart and in an export; a nameless state is found by it."""
    first = Engine(config(checkpoint, disk_folder=tmp_path))
    for name, agent, anchor in (("", 1, "00ff"), ("run", 2, "11ee")):
        first.submit(ask(agent, 40), tenant="acme", name=name, anchor=anchor).result(60)
    settled(first)
    everyone = first.states(tenant=None)
    assert {(s.tenant, s.name, s.anchor) for s in everyone} == {
        ("acme", "", "00ff"), ("acme", "run", "11ee"),
    }  # fmt: skip
    assert {s.tier for s in everyone} == {"device", "host", "disk"}
    assert {s.anchor for s in first.states("acme", "00ff")} == {"00ff"}
    assert not first.states("acme", "11ee")
    assert not first.states()
    parcels = first.export_state("00ff", "acme")
    first.submit(ask(1, 40), tenant="acme", anchor="22dd").result(60)
    assert "22dd" in {s.anchor for s in first.states("acme")}
    first.close()
    second = Engine(config(checkpoint, disk_folder=tmp_path))
    assert {s.anchor for s in second.states(tenant=None)} == {"00ff", "11ee"}
    assert all(s.tier == "disk" for s in second.states(tenant=None))
    second.forget("00ff", "acme")
    assert {s.name for s in second.states(tenant=None)} == {"run"}
    assert second.import_state(parcels[0]) > 0
    assert [s.anchor for s in second.states("acme", "00ff")] == ["00ff"]
    second.close()


def test_rounded_states_answer_almost_alike_and_keep_to_their_own_files(
    checkpoint: Path, plain: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """bfloat16 beyond the device: off by default, near, not exact; files of one kind are foreign
    to an engine of the other.
    """
    assert EngineConfig().tier_state_dtype == "float32"
    with pytest.raises(ValueError, match="deterministic needs tier_state_dtype float32"):
        EngineConfig(deterministic=True, tier_state_dtype="bfloat16")
    rounded = {"disk_folder": tmp_path, "tier_state_dtype": "bfloat16"}
    first, request = Engine(config(checkpoint, **rounded)), ask(1, 60)
    try:
        probability(first, ask(1, 50), name="agent-1")
        only_on_the_host(first)
        got, want = probability(first, request), probability(plain, request)
        assert first.counters().from_host > 0
        assert got != want
        assert got == pytest.approx(want, abs=0.01)
        settled(first)
    finally:
        first.close()
    caplog.clear()
    exact = Engine(config(checkpoint, disk_folder=tmp_path))
    try:
        assert "its layout differ" in caplog.text
        assert probability(exact, request) == pytest.approx(want, abs=1e-6)
        assert exact.counters().from_disk == 0
        settled(exact)
    finally:
        exact.close()
    again = Engine(config(checkpoint, **rounded))
    try:
        assert again.distinct_tokens()["disk"] > 0
        assert probability(again, ask(1, 65)) == pytest.approx(
            probability(plain, ask(1, 65)), abs=0.01
        )
        assert again.counters().from_disk > 0
    finally:
        again.close()


def test_forgetting_a_state_removes_every_copy(checkpoint: Path, tmp_path: Path) -> None:
    """Device, host and files."""
    engine = Engine(config(checkpoint, disk_folder=tmp_path))
    try:
        probability(engine, ask(3, 50), name="gone")
        settled(engine)
        assert files_in(tmp_path)
        engine.forget("gone")
        assert not files_in(tmp_path)
        assert not engine.states()
        assert engine._tiers is not None
        assert not len(engine._tiers.host.index)
    finally:
        engine.close()


def test_a_trajectory_is_rolled_back_and_branched(checkpoint: Path, plain: Engine) -> None:
    """What comes after a step is forgotten; a branch outlives the trajectory it left."""
    engine = Engine(config(checkpoint, pool_bytes=2_000_000))
    try:
        for words in (20, 40):
            probability(engine, ask(7, words), name="run")
        last = engine.snapshot("run")
        steps = sorted({s.tokens for s in engine.states(name="run") if s.tier == "device"})
        assert steps[-1] == last
        early = engine.branch("run", "other", tokens=steps[-1] - 1)
        assert 0 < early < last
        assert engine.rollback("run", early) >= 1
        assert {s.tokens for s in engine.states(name="run")} <= {t for t in steps if t <= early}
        engine.forget("run")
        assert {s.name for s in engine.states()} == {"other"}
        before = engine.counters().reused
        request = ask(7, 45)
        assert probability(engine, request) == pytest.approx(probability(plain, request), abs=1e-6)
        assert engine.counters().reused - before >= early
        assert engine.branch("nobody", "x") == engine.snapshot("nobody") == 0
        engine.forget("other")
        engine.drop_checkpoints()
        held = engine.accounting()
        assert held.page_bytes_held == held.slot_bytes_held == 0
    finally:
        engine.close()


def test_a_branch_outlives_its_trajectory_on_every_tier(
    checkpoint: Path, plain: Engine, tmp_path: Path
) -> None:
    """Forgetting the first name leaves what the second needs on the host and on disk, restarts
    included; what it does not need goes.
    """
    first = Engine(config(checkpoint, disk_folder=tmp_path))
    for words in (20, 30, 40):
        probability(first, ask(7, words), name="run")
    settled(first)
    tokens = first.branch("run", "other", 200, anchor="00ff")
    assert {s.tier for s in first.states(name="other")} == {"device", "host", "disk"}
    assert {(s.tokens, s.anchor) for s in first.states(name="other")} == {(tokens, "00ff")}
    for words in (31, 34):  # its own way from there
        state = ask(7, 21)["state"] + " no" * words
        probability(first, ask(7, 21) | {"state": state}, name="other")
    settled(first)
    assert first.forget("run") > 0
    assert not first.states(name="run")
    assert {s.name for s in first.states()} == {"other"}
    assert {s.tier for s in first.states() if s.tokens == tokens} == {"device", "host", "disk"}
    first.close()
    second = Engine(config(checkpoint, disk_folder=tmp_path))
    assert {s.name for s in second.states()} == {"other"}
    request = ask(7, 45)
    assert probability(second, request) == pytest.approx(probability(plain, request), abs=1e-6)
    assert second.counters().from_disk == tokens
    assert second.forget("other") > 0
    assert {s.name for s in second.states()} == {""}  # what the nameless request left
    assert tokens not in {s.tokens for s in second.states()}
    second.forget("")
    assert not second.states()
    assert not files_in(tmp_path)
    second.close()


def test_a_state_that_two_sessions_share_belongs_to_both(checkpoint: Path) -> None:
    """Whoever computed it: the other finds it by its name, and keeps it when the first is gone."""
    engine = Engine(config(checkpoint, pool_bytes=2_000_000))
    try:
        for name in ("a", "b"):
            probability(engine, ask(5, 40), name=name)
        last = engine.snapshot("a")
        assert engine.snapshot("b") == last
        engine.forget("a")
        assert not engine.states(name="a")
        assert last in {s.tokens for s in engine.states(name="b")}
    finally:
        engine.close()


def test_pins_hold_on_every_tier_and_are_bounded(checkpoint: Path, tmp_path: Path) -> None:
    """A snapshot is there after other states have filled every tier, and after a restart; what may
    be pinned is a part of each tier.
    """
    small = config(
        checkpoint, pool_bytes=2_000_000, disk_folder=tmp_path, disk_bytes=3 << 20
    ).model_copy(update={"host_bytes": 3 << 20})
    engine = Engine(small)
    probability(engine, ask(1, 40), name="keep")
    settled(engine)
    tokens = engine.snapshot("keep")
    for agent in range(2, 14):
        probability(engine, ask(agent, 40), name=f"n{agent}")
        settled(engine)
    kept = [s for s in engine.states(name="keep") if s.tokens == tokens]
    assert {s.tier for s in kept} == {"device", "host", "disk"}
    assert all(s.pinned for s in kept)
    with pytest.raises(TooMuchPinned, match="pin_share"):
        engine.pin("")
    assert not any(s.pinned for s in engine.states() if s.name != "keep")
    engine.close()
    again = Engine(small)
    assert any(s.pinned for s in again.states(name="keep"))
    for agent in range(14, 26):
        probability(again, ask(agent, 40))
        settled(again)
    assert {s.tokens for s in again.states(name="keep")} >= {tokens}
    again.pin("keep", pinned=False)
    for agent in range(26, 38):
        probability(again, ask(agent, 40))
        settled(again)
    assert not again.states(name="keep")
    again.close()


def test_a_checkpoint_is_kept_for_a_bounded_number_of_names(checkpoint: Path) -> None:
    """The next branch is refused and leaves no trace."""
    engine = Engine(config(checkpoint))
    try:
        probability(engine, ask(1, 40), name="run")
        for i in range(MOST_BRANCHES):
            assert engine.branch("run", f"b{i}")
        with pytest.raises(TooManyBranches, match="64"):
            engine.branch("run", "one more")
        assert not engine.states(name="one more")
        assert len({s.name for s in engine.states()}) == MOST_BRANCHES + 1
    finally:
        engine.close()
