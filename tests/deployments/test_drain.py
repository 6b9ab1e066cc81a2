"""What a leaving replica hands over: the choice, the order, every end; no cluster."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.drain import Calls, HandOver, Leaving, Pace, hand_over, leave, take_over
from flide_engine.config import EngineConfig
from flide_engine.engine import Engine
from flide_engine.errors import CheckpointRefused, PoolExhausted

ANCHOR = "00000000000000ff"


@dataclass(frozen=True)
class Leaf:
    """A checkpoint of so many tokens and bytes."""

    tokens: int = 640
    bytes: int = 1000
    anchor: str = ANCHOR
    tenant: str = ""


class Fleet:
    """An engine that leaves, a network of so many bytes a second, and who takes over."""

    weights_hash = "w"

    def __init__(self, bytes_per_s: float = 1e6) -> None:
        self.now, self.bytes_per_s = 100.0, bytes_per_s
        self.given: list[Leaf] = []
        self.gone: set[Leaf] = set()
        self.end: str | Exception = "adopted"

    def export_leaf(self, leaf: Leaf) -> bytes | None:
        return None if leaf in self.gone else bytes(leaf.bytes)

    async def give(self, leaf: Leaf, data: bytes) -> str:
        self.now += len(data) / self.bytes_per_s
        self.given.append(leaf)
        if isinstance(self.end, Exception):
            raise self.end
        return self.end

    def run(self, leaves: list[Leaf], how: HandOver = "always", seconds: float = 60.0) -> Any:
        """The ends; computing takes a millisecond a token."""
        engine: Any = self
        pace = Pace(how, tokens_per_ms=1.0)
        given = hand_over(engine, leaves, self.give, pace, self.now + seconds, lambda: self.now)
        return dict(asyncio.run(given))


@pytest.mark.parametrize(
    ("bytes_per_s", "given"),
    # 640 tokens are 640 ms; 64,000 bytes take that long at 100 kB/s
    [(110_000, 3), (90_000, 1)],
)
def test_auto_hands_over_what_moves_faster_than_it_is_computed(
    bytes_per_s: float, given: int
) -> None:
    """By what the first one took; always and never do not look."""
    leaves = [Leaf(bytes=64_000, tenant=str(i)) for i in range(3)]
    fleet = Fleet(bytes_per_s)
    ends = fleet.run(leaves, "auto")
    assert fleet.given == leaves[:given]
    assert ends == {"adopted": given} | ({"kept": 3 - given} if given < 3 else {})
    assert Fleet(bytes_per_s).run(leaves, "always") == {"adopted": 3}
    assert Fleet(bytes_per_s).run(leaves, "never") == {"kept": 3}


def test_auto_weighs_each_checkpoint_by_itself() -> None:
    """A long state in few bytes goes, a short one in many does not."""
    light, heavy = Leaf(tokens=6400, bytes=64_000), Leaf(tokens=64, bytes=64_000)
    fleet = Fleet(100_000)
    assert fleet.run([light, heavy, light], "auto") == {"adopted": 2, "kept": 1}


def test_time_that_overlaps_is_counted_once() -> None:
    """Two on their way at a time do not look half as fast."""
    pace = Pace("auto", 1.0)
    pace.moved(1000, 0.0, 1.0)
    pace.moved(1000, 0.0, 1.0)
    assert pace.pays(tokens=501, size=1000)
    assert not pace.pays(tokens=499, size=1000)


def test_every_end_is_counted() -> None:
    """And none of them keeps the others from going."""
    fleet = Fleet()
    fleet.gone = {Leaf(tokens=1)}
    assert fleet.run([Leaf(), Leaf(tokens=1), Leaf(anchor="")]) == {
        "adopted": 1, "gone": 1, "kept": 1,
    }  # fmt: skip
    for end in ("known", "refused", "full"):
        fleet.end = end
        assert fleet.run([Leaf(), Leaf()]) == {end: 2}
    fleet.end = ConnectionError("the owner died")
    assert fleet.run([Leaf(), Leaf()]) == {"failed": 2}


def test_nothing_is_begun_after_the_deadline() -> None:
    """The rest is late; the replica leaves in time."""
    fleet = Fleet(bytes_per_s=1000)  # a second each
    ends = fleet.run([Leaf(tenant=str(i)) for i in range(9)], seconds=2.5)
    assert ends["adopted"] + ends["late"] == 9
    assert 3 <= ends["adopted"] <= 4
    assert fleet.run([Leaf()], seconds=0.0) == {"late": 1}


def test_an_owner_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    """By the real clock, as the wait is real."""

    async def run() -> Any:
        async def silent(leaf: Any, data: bytes) -> str:
            await asyncio.sleep(60)
            return "adopted"

        engine: Any = Fleet()
        loop = asyncio.get_running_loop()
        pace = Pace("always", 1.0)
        return await hand_over(engine, [Leaf()], silent, pace, loop.time() + 0.05, loop.time)

    assert asyncio.run(asyncio.wait_for(run(), 10)) == {"late": 1}


def test_time_spent_waiting_for_the_last_calls_is_told_at_most() -> None:
    """From when the last one came, and twice Serve's own pause."""
    now = 0.0
    calls = Calls(lambda: now)
    now = 500.0
    assert calls.spent_s() == 4.0
    calls.began()
    now = 507.0
    calls.ended()
    now = 509.0
    assert calls.spent_s() == 11.0


def test_never_asks_nobody() -> None:
    """No router is made, no checkpoint is listed."""
    assert not asyncio.run(leave(None, Leaving("never"), 0.0))  # type: ignore[arg-type]


def test_what_takes_over() -> None:
    """Nothing is copied for other weights or another stack, if that is told; what is refused or
    does not fit is no error.
    """

    class Taker:
        weights_hash, stack = "w", "s"

        def import_state(self, data: bytes) -> int:
            if data == b"bad":
                raise CheckpointRefused("it is damaged", "checksum")
            if data == b"large":
                raise PoolExhausted("pages", 9, 1, 8)
            return len(data)

    async def run(data: bytes, weights: str = "w", stack: str = "s") -> tuple[str, bool]:
        piece: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        piece.set_result(data)
        looked: list[bool] = []

        class Reference:
            def __await__(self) -> Iterator[Any]:
                looked.append(True)
                return piece.__await__()

        return await take_over(Taker(), [Reference()], weights, stack), bool(looked)

    assert asyncio.run(run(b"data")) == ("adopted", True)
    assert asyncio.run(run(b"")) == ("known", True)
    assert asyncio.run(run(b"bad")) == ("refused", True)
    assert asyncio.run(run(b"large")) == ("full", True)
    assert asyncio.run(run(b"data", "other")) == ("refused", False)
    assert asyncio.run(run(b"data", stack="other")) == ("refused", False)
    assert asyncio.run(run(b"data", stack="")) == ("adopted", True)  # an older replica leaves


def ask(state: str) -> dict[str, Any]:
    question = {"type": "choice", "criteria": {"a": "one", "b": "two"}}
    return {"state": state, "questions": {"q": question}}


def test_leaves_are_enough_to_go_on_with_every_state() -> None:
    """Of all tenants, the last used first; another engine computes a grain and the question."""
    states = {f"t{i}": f"Run {i}. " + f"step {i} went well; " * 80 for i in range(3)}
    first, second = (Engine(EngineConfig(model="nano", device="cpu")) for _ in range(2))
    try:
        for tenant, state in states.items():
            for text in (state[:600], state):
                first.submit(ask(text), tenant=tenant, anchor=ANCHOR).result(60)
        leaves = first.leaves()
        assert [leaf.tenant for leaf in leaves] == ["t2", "t1", "t0"]
        assert {leaf.anchor for leaf in leaves} == {ANCHOR}
        assert len(leaves) < len(first.states(tenant=None))
        for leaf in leaves:
            data = first.export_leaf(leaf)
            assert data is not None
            assert leaf.bytes <= len(data) <= 1.05 * leaf.bytes + 4096
            assert second.import_state(data) == leaf.tokens
            assert second.import_state(data) == 0
        for tenant, state in states.items():
            grown = ask(state + " and then more")
            there, here = (
                e.submit(grown, tenant=tenant, anchor=ANCHOR).result(60) for e in (first, second)
            )
            assert here.answers["q"].probabilities == pytest.approx(
                there.answers["q"].probabilities, abs=1e-6
            )
            assert here.usage.x_reused_tokens == there.usage.x_reused_tokens > 200
    finally:
        first.close()
        second.close()


def test_what_is_kept_from_eviction_and_how_long_it_was_unused_go_along() -> None:
    """A pinned step in the middle is a leaf, too; what is evicted is gone."""
    now = 1000.0
    engine = Engine(EngineConfig(model="nano", device="cpu"), clock=lambda: now)
    other = Engine(EngineConfig(model="nano", device="cpu"), clock=lambda: now)
    try:
        text = "A run. " + "it went on and on; " * 60
        engine.submit(ask(text), name="run", anchor=ANCHOR).result(60)
        step = engine.snapshot("run")
        engine.submit(ask(text + "and on; " * 60), name="run", anchor=ANCHOR).result(60)
        pinned, longest = sorted(engine.leaves(), key=lambda leaf: leaf.tokens)
        assert pinned.tokens == step < longest.tokens
        now += 50.0
        for leaf in (longest, pinned):
            data = engine.export_leaf(leaf)
            assert data is not None
            assert other.import_state(data) == leaf.tokens
        kept = {info.tokens: info.pinned for info in other.states()}
        assert kept == {longest.tokens: False, step: True}
        assert {other.leaves()[0].checkpoint.used} == {now - 50.0}
        engine.forget("run")
        assert engine.export_leaf(longest) is None
    finally:
        engine.close()
        other.close()


def test_a_branch_goes_to_its_own_home() -> None:
    """It is a leaf under its own name, also once the first state has outgrown it; whoever has the
    checkpoint already learns the name.
    """
    engine, other = (Engine(EngineConfig(model="nano", device="cpu")) for _ in range(2))
    try:
        text = "A run. " + "it went on and on; " * 60
        engine.submit(ask(text), name="run", anchor=ANCHOR).result(60)
        step = engine.branch("run", "twin", anchor="22" * 8)
        engine.submit(ask(text + "and on; " * 60), name="run", anchor=ANCHOR).result(60)
        leaves = {leaf.name: leaf for leaf in engine.leaves()}
        assert (leaves["twin"].tokens, leaves["twin"].anchor) == (step, "22" * 8)
        assert (leaves["run"].tokens > step, leaves["run"].anchor) == (True, ANCHOR)
        data = engine.export_leaf(leaves["twin"])
        assert data is not None
        assert other.import_state(data) == step
        assert [(s.name, s.anchor) for s in other.states()] == [("twin", "22" * 8)]
        engine.branch("twin", "third", anchor="33" * 8)
        for leaf in engine.leaves():
            data = engine.export_leaf(leaf)
            assert data is not None
            other.import_state(data)
        assert {s.name for s in other.states() if s.tokens == step} == {"twin", "third"}
    finally:
        engine.close()
        other.close()


def test_a_pin_goes_along_as_far_as_there_is_room_for_it() -> None:
    """What callers may pin is a share of the new owner's pool, too: the rest is kept unpinned."""
    engine = Engine(EngineConfig(model="nano", device="cpu"))
    full = Engine(EngineConfig(model="nano", device="cpu", pin_share=0.0))
    try:
        engine.submit(ask("A run. " + "it went on and on; " * 60), name="run").result(60)
        step = engine.snapshot("run")
        (pinned,) = (leaf for leaf in engine.leaves() if leaf.tokens == step)
        data = engine.export_leaf(pinned)
        assert data is not None
        assert full.import_state(data) == step
        assert not any(info.pinned for info in full.states())
    finally:
        engine.close()
        full.close()


def test_what_only_host_memory_has_is_handed_over_too() -> None:
    """After what the device has: there is room for a few states only there."""
    options = {"model": "nano", "device": "cpu", "pool_bytes": 3 << 20, "max_round_tokens": 1024}
    limits = {"max_prompt_tokens": 1024, "max_request_tokens": 1024}
    first = Engine(EngineConfig.model_validate({**options, **limits, "host_bytes": 64 << 20}))
    second = Engine(EngineConfig(model="nano", device="cpu"))
    try:
        states = [f"Run {i}. " + f"step {i} went well; " * 60 for i in range(12)]
        for i, state in enumerate(states):
            first.submit(ask(state), name=str(i), anchor=ANCHOR).result(60)
            first.submit(ask(state + "and well"), name=str(i), anchor=ANCHOR).result(60)
        leaves = first.leaves()
        assert {leaf.name for leaf in leaves} == {str(i) for i in range(12)}
        on_device = {i.name for i in first.states() if i.tier == "device"}
        assert len(on_device) < 12
        assert {leaf.name for leaf in leaves[: len(on_device)]} == on_device
        for leaf in leaves:
            data = first.export_leaf(leaf)
            assert data is not None
            assert second.import_state(data) == leaf.tokens
        fresh = Engine(EngineConfig(model="nano", device="cpu", keep_checkpoints=False))
        for i, state in enumerate(states):
            grown = ask(state + "and well and more")
            answer = second.submit(grown, name=str(i)).result(60)
            assert answer.usage.input_tokens - answer.usage.x_reused_tokens < 64 + 8 + 32
            assert answer.answers["q"].probabilities == pytest.approx(
                fresh.decide(grown).answers["q"].probabilities, abs=1e-6
            )
        fresh.close()
    finally:
        first.close()
        second.close()
