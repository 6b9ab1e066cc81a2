"""Remembered equals computed: growing histories, shared states, late questions, little memory."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flide_engine import DecisionResponse, Engine, EngineConfig
from flide_engine.cache import transfer
from flide_engine.errors import CheckpointRefused
from tests.engines import submit_together

TOLERANCE = 5e-6
"""Largest difference of a probability of the embedded model, in float32."""

WORKLOADS = Path(__file__).parents[3] / "shared" / "workloads"
NOUL = {"type": "noul", "instructions": "Did the last command fail?"}
KIND = {
    "type": "choice",
    "instructions": "What does the next action do?",
    "criteria": {"read": "reads a file", "write": "writes a file", "test": "runs tests"},
}
LINES = [
    f"\nstep {i}: ran `pytest -k case_{i * 37 % 11}` and saw {i * 13 % 7} failures"
    for i in range(60)
]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    """An engine that remembers nothing."""
    engine = Engine(EngineConfig(keep_checkpoints=False))
    yield engine
    engine.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine that does; afterwards it must hold nothing but its checkpoints."""
    made = Engine(EngineConfig(max_round_tokens=2048))
    yield made
    made.drop_checkpoints()
    held = made.accounting()
    assert held.page_bytes_held == held.slot_bytes_held == 0
    made.close()


def ask(state: str, *questions: dict[str, Any]) -> dict[str, Any]:
    """A request."""
    return {"state": state, "questions": {f"q{i}": q for i, q in enumerate(questions)}}


def same(a: DecisionResponse, b: DecisionResponse) -> None:
    """Equal answers and equal usage."""
    assert a.usage.input_tokens == b.usage.input_tokens
    assert a.usage.output_tokens == b.usage.output_tokens
    for name, answer in a.answers.items():
        for got, want in zip(numbers(answer), numbers(b.answers[name]), strict=True):
            assert abs(got - want) < TOLERANCE


def numbers(answer: Any) -> list[float]:
    """The probabilities of an answer."""
    return [answer.noul] if answer.type == "noul" else list(answer.probabilities.values())


def test_a_growing_history_computes_what_is_new(engine: Engine, plain: Engine) -> None:
    """The answers of an engine without memory, for the tokens of one pass and a bit a step."""
    state = "You fix a bug."
    final = 0
    for i, line in enumerate(LINES):
        state += line
        got = engine.decide(ask(state, NOUL, KIND))
        final = got.usage.input_tokens
        if i % 6 == 5:
            same(got, plain.decide(ask(state, NOUL, KIND)))
    counters = engine.counters()
    assert counters.reused > 0.8 * counters.asked
    # a step computes what is new, its questions, and at most a grain and the unsettled tokens
    assert counters.computed < final + len(LINES) * (64 + 8 + 40)
    assert counters.recomputed == 0
    assert final - 256 < engine.distinct_tokens()["device"] <= final


def test_a_rewritten_tail_resumes_before_it(engine: Engine, plain: Engine) -> None:
    """Steps that replace the last lines fall back to what they have in common with earlier ones."""
    opening = "A report. " + "".join(LINES[:40])
    engine.decide(ask(opening + "draft one, not final", NOUL))
    asked = engine.counters().computed
    for text in ("draft two", "draft three is longer"):
        same(engine.decide(ask(opening + text, NOUL)), plain.decide(ask(opening + text, NOUL)))
    # the second draft finds the divergence the first one showed, the third resumes there
    assert engine.counters().reused > 0
    assert engine.counters().computed - asked < 2 * asked


def test_requests_of_one_round_share_a_state(engine: Engine, plain: Engine) -> None:
    """Eight callers ask about one state at the same time: it is computed about once."""
    state = "A thread. " + "".join(LINES[:30])
    questions = [{**NOUL, "instructions": f"Is case {i} mentioned?"} for i in range(8)]
    futures = submit_together(engine, lambda: [engine.submit(ask(state, q)) for q in questions])
    alone = [plain.decide(ask(state, q)) for q in questions]
    for future, want in zip(futures, alone, strict=True):
        same(future.result(60), want)
    assert engine.counters().computed < 2 * alone[0].usage.input_tokens


def test_late_questions_find_their_state(engine: Engine, plain: Engine) -> None:
    """Asked one by one, each later question costs itself and at most a grain and a few tokens."""
    state = "A story. " + "".join(LINES[:30])
    engine.decide(ask(state, NOUL))
    for i in range(5):
        before = engine.counters().computed
        question = {**NOUL, "instructions": f"Is case {i} mentioned?"}
        same(engine.decide(ask(state, question)), plain.decide(ask(state, question)))
        assert engine.counters().computed - before < 64 + 8 + 20


def test_tenants_share_nothing(engine: Engine, plain: Engine) -> None:
    """Another tenant's identical state is computed afresh, and at the same time as well."""
    state = "A secret. " + "".join(LINES[:20])
    request = ask(state, NOUL)
    engine.submit(request, tenant="a").result(60)
    before = engine.counters()
    same(engine.submit(request, tenant="b").result(60), plain.decide(request))
    after = engine.counters()
    assert after.reused == before.reused
    assert after.computed - before.computed >= after.asked - before.asked
    both = [(f"{state} again", t) for t in "cd"]
    futures = submit_together(
        engine, lambda: [engine.submit(ask(s, NOUL), tenant=t) for s, t in both]
    )
    for future in futures:
        same(future.result(60), plain.decide(ask(f"{state} again", NOUL)))
    last = engine.counters()
    assert last.computed - after.computed >= last.asked - after.asked


def test_a_pool_too_small_for_all_checkpoints(plain: Engine) -> None:
    """Old ones go, answers stay, and the pool balances."""
    config = EngineConfig(
        max_round_tokens=1024, max_prompt_tokens=4096, max_request_tokens=8192,
        pool_bytes=12_000_000,
    )  # fmt: skip
    engine = Engine(config)
    try:
        states = [f"Case {i}. " + "".join(LINES[i : i + 20]) for i in range(12)]
        wanted = [plain.decide(ask(state, NOUL)) for state in states]
        for _ in range(2):
            for state, want in zip(states, wanted, strict=True):
                same(engine.decide(ask(state, NOUL)), want)
        held = engine.accounting()
        assert 0 < held.slot_bytes_held < held.bytes_total
        # with little memory most of a state that comes again is computed again
        counters = engine.counters()
        assert counters.recomputed > 0.3 * counters.computed
        assert counters.recomputed + counters.reused < counters.asked
        engine.drop_checkpoints()
        assert engine.accounting().page_bytes_held == engine.accounting().slot_bytes_held == 0
    finally:
        engine.close()


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="needs the shared workloads beside the project")
def test_real_trajectories(engine: Engine, plain: Engine) -> None:
    """An agent's first steps, as they were: same answers, most tokens reused."""
    with gzip.open(WORKLOADS / "agent_trajectories.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(1), strict=False)]
    for row in rows:
        state = ""
        for step in row["steps"][:7]:
            state += step["append"]
            questions = [
                {k: q[k] for k in ("type", "instructions", "criteria")}
                for q in step["questions"]
                if q["type"] != "score"
            ]
            request = ask(state, *questions)
            same(engine.decide(request), plain.decide(request))
    counters = engine.counters()
    assert counters.reused > 0.5 * counters.asked


def test_another_process_resumes_from_an_export(engine: Engine, plain: Engine) -> None:
    """Exported, imported elsewhere, asked there: the same answer for a grain of computation."""
    state = "A journey. " + "".join(LINES[:30])
    request = ask(state, NOUL, KIND)
    first = engine.submit(request, name="agent-7").result(60)
    parcels = engine.export_state("agent-7")
    assert [info.name for info in engine.states()] == ["agent-7"] * len(parcels)
    other = Engine(EngineConfig())
    try:
        for data in parcels:
            assert other.import_state(data) > 0
            assert other.import_state(data) == 0
        same(other.decide(request), first)
        same(other.decide(ask(state + LINES[30], NOUL)), plain.decide(ask(state + LINES[30], NOUL)))
        assert other.counters().computed < 350
        assert other.states(name="agent-7")[0].hits > 0
        other.drop_checkpoints()
        held = other.accounting()
        assert held.page_bytes_held == held.slot_bytes_held == 0
    finally:
        other.close()


def test_parcels_are_written_beside_the_rounds(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the copy to the host is made between two of them; hashing is the caller's time."""
    engine.submit(ask("A tale. " + "".join(LINES[:20]), NOUL), name="x").result(60)
    threads, checksum = [], transfer._checksum

    def seen(tensors: dict[str, Any]) -> str:
        threads.append(threading.current_thread())
        return checksum(tensors)

    monkeypatch.setattr(transfer, "_checksum", seen)
    parcels = engine.export_state("x")
    (leaf,) = engine.leaves()
    assert engine.export_leaf(leaf)  # not byte for byte: it tells when it was last used
    assert threads == [threading.current_thread()] * (len(parcels) + 1)


def test_foreign_and_damaged_parcels_are_refused(engine: Engine, checkpoint: Path) -> None:
    """Other weights, a flipped bit, a cut end, no parcel at all: refused, and nothing is taken."""
    engine.submit(ask("A tale. " + "".join(LINES[:20]), NOUL), name="x").result(60)
    (data, *_) = engine.export_state("x")
    other = Engine(EngineConfig(model=str(checkpoint)))
    try:
        with pytest.raises(CheckpointRefused, match="its weights differ"):
            other.import_state(data)
    finally:
        other.close()
    engine.drop_checkpoints()
    flipped = bytearray(data)
    flipped[-100] ^= 1
    for bad, reason in (
        (bytes(flipped), "it is damaged"),
        (data[:-5], "it is not a checkpoint"),
        (b"", "it is not a checkpoint"),
        (b"\xff" * 100, "it is not a checkpoint"),
    ):
        with pytest.raises(CheckpointRefused, match=reason):
            engine.import_state(bad)
    held = engine.accounting()
    assert held.page_bytes_held == held.slot_bytes_held == 0
    assert engine.import_state(data) > 0


def test_states_by_name(engine: Engine) -> None:
    """Listed, pinned, forgotten; another tenant sees nothing of them."""
    for name in ("a", "b"):
        text = f"Session {name}. " + "".join(LINES[:20])
        engine.submit(ask(text, NOUL), tenant="t", name=name).result(60)
    assert {info.name for info in engine.states("t")} == {"a", "b"}
    assert engine.states("other") == []
    assert engine.pin("a", "t") == len(engine.states("t", "a"))
    assert all(info.pinned for info in engine.states("t", "a"))
    assert engine.forget("b", "other") == 0
    assert engine.forget("b", "t") > 0
    assert {info.name for info in engine.states("t")} == {"a"}


def test_texts_of_options_are_no_beginning_of_a_state() -> None:
    """Long options run in pieces, which leave nothing that a state could resume from."""
    preamble = "Judged by the report as a whole, with every step of it weighed alike, the work is "
    tails = [" ".join(LINES[3 * i : 3 * i + 3]) for i in range(10)]
    levels = [preamble * 8 + tail for tail in tails]
    score = {"type": "score", "criteria": levels}
    state = "A report. " + "".join(LINES[:20])
    limits = {"max_round_tokens": 512}
    with closing(Engine(EngineConfig(**limits))) as made:
        made.decide(ask(state, score))
        asked = [ask("A report. " + "".join(LINES[:count]), NOUL) for count in (9, 11)]
        got = [made.decide(request) for request in asked]
    with closing(Engine(EngineConfig(keep_checkpoints=False))) as alone:
        for request, answer in zip(asked, got, strict=True):
            same(answer, alone.decide(request))
