"""The engine around its rounds: limits, departures, closing."""

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flide_engine import Engine, EngineConfig
from flide_engine.errors import (
    ConfigError,
    DeadlineExceeded,
    FlideError,
    InvalidRequest,
    NotReady,
    Overloaded,
    TooManyTokens,
    UnknownModel,
)
from flide_engine.work import RequestWork, Submission
from tests.engines import NOUL, Gate, ask, wait_until_rendered
from tests.waiting import until


def longest_state(engine: Engine, limit: int) -> int:
    """Words of the longest state whose prompt has at most `limit` tokens."""
    words = 1
    while True:
        rendered = engine._family.render(engine_request("x " * (words + 1)))
        if rendered.longest_prompt > limit:
            return words
        words += 1


def engine_request(state: str) -> Any:
    """A typed request."""
    from flide_engine.wire import parse_request

    return parse_request(ask(state))


def test_prompts_at_the_limit_and_one_above(engine: Engine) -> None:
    """Exactly the limit is answered, one token more is refused with all numbers."""
    words = longest_state(engine, 512)
    assert engine.decide(ask("x " * words)).usage.input_tokens <= 512
    with pytest.raises(
        TooManyTokens, match=r"has 51\d tokens; .* 512 tokens \(max_prompt_tokens\)"
    ):
        engine.decide(ask("x " * (words + 1)))


def test_requests_over_the_limit(engine: Engine) -> None:
    """Each prompt fits, all together do not; and too many questions."""
    many = {f"q{i}": {"type": "noul", "instructions": f"{i} word " * 40} for i in range(12)}
    with pytest.raises(TooManyTokens, match="the request has .*max_request_tokens"):
        engine.decide(ask("s", **many))
    assert len(engine.decide(ask("s", **{f"q{i}": NOUL for i in range(20)})).answers) == 20
    with pytest.raises(InvalidRequest, match=r"21 questions; the limit is 20 \(max_questions\)"):
        engine.decide(ask("s", **{f"q{i}": NOUL for i in range(21)}))


def test_handle_callers_meet_the_same_checks(engine: Engine) -> None:
    """Plain dicts are validated here too: shape, model, depth, lone surrogates."""
    with pytest.raises(InvalidRequest, match="questions"):
        engine.decide({"state": "s"})
    with pytest.raises(UnknownModel, match="served here: tiny-random, jev-latest"):
        engine.decide({**ask(), "model": "other"})
    assert engine.decide({**ask(), "model": "jev-latest"}).model == "tiny-random"
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        engine.decide(ask(deep))
    with pytest.raises(InvalidRequest, match="surrogate"):
        engine.decide(ask("a\ud800"))
    assert engine.decide(ask()).answers


def test_those_who_leave_are_not_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled and late requests never reach a round, and cancelling a running one is harmless."""
    gate = Gate(engine, monkeypatch)
    running = engine.submit(ask())
    gate.wait_for_rounds(1)
    cancelled = engine.submit(ask())
    late = engine.submit(ask(), timeout=0.01)
    assert cancelled.cancel()
    assert running.cancel()
    time.sleep(0.05)
    gate.open.set()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        late.result(60)
    assert engine.decide(ask()).answers
    assert sum(gate.rounds) == 2
    assert engine.is_alive()


def test_a_caller_who_waits_too_short(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`decide` gives up at its timeout and takes its work back."""
    gate = Gate(engine, monkeypatch)
    with pytest.raises(DeadlineExceeded):
        engine.decide(ask(), timeout=0.05)
    gate.open.set()
    assert engine.decide(ask()).answers


def test_a_full_queue_refuses(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens, naming the option; what was taken is answered."""
    config = EngineConfig(model=str(checkpoint), max_queued_tokens=100, max_prompt_tokens=512)
    engine = Engine(config)
    gate = Gate(engine, monkeypatch)
    futures = [engine.submit(ask())]
    gate.wait_for_rounds(1)
    for _ in range(8):
        futures.append(engine.submit(ask()))
        wait_until_rendered(engine)
    gate.open.set()
    errors = [error for future in futures if (error := future.exception(60)) is not None]
    assert 0 < len(errors) < 8
    for error in errors:
        assert isinstance(error, Overloaded)
        assert error.option == "max_queued_tokens"
        assert error.retry_after_ms >= 50
    engine.close()


def test_closing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits fails, what runs finishes, and afterwards nothing is taken."""
    gate = Gate(engine, monkeypatch)
    running = engine.submit(ask())
    gate.wait_for_rounds(1)
    waiting = engine.submit(ask())
    closer = threading.Thread(target=engine.close)
    closer.start()
    until(lambda: engine._loop._closed)
    gate.open.set()
    closer.join(60)
    assert running.result(60).answers
    with pytest.raises(NotReady):
        waiting.result(60)
    with pytest.raises(NotReady):
        engine.submit(ask())
    assert not engine.is_alive()


def test_a_request_that_meets_the_closing_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let in just before, and the threads that would render it have ended: it is told so."""
    submit = engine._renderers.submit

    def late(tenant: str, job: Any) -> None:
        engine.close()
        submit(tenant, job)

    monkeypatch.setattr(engine._renderers, "submit", late)
    with pytest.raises(NotReady):
        engine.submit(ask())
    assert engine.waiting == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_bytes": 1_000_000}, "holds .* pages of 64 tokens; max_prompt_tokens 32768"),
        (
            {"max_prompt_tokens": 65537, "max_request_tokens": 70000},
            "max_position_embeddings 65536",
        ),
        ({"device": "cuda"}, "no GPU is visible"),
    ],
)
def test_options_that_cannot_work(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    """Refused at start, with the numbers."""
    if options.get("device") == "cuda":
        import torch

        if torch.cuda.is_available():
            pytest.skip("a GPU is visible")
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(model=str(checkpoint), **options))


def test_the_root_of_the_tree_catches_all(engine: Engine) -> None:
    """Callers may catch one class."""
    with pytest.raises(FlideError):
        engine.decide({})


def test_an_answer_says_where_its_time_went(engine: Engine) -> None:
    """Stages of the second asking, which reuses the state; together no more than the wait."""
    engine.decide(ask("long enough to be remembered " * 8))
    began = time.monotonic()
    response = engine.decide(ask("long enough to be remembered " * 8 + "and more"))
    spent = 1000 * (time.monotonic() - began)
    assert set(response.x_timing) == {
        "decode", "render", "tokenize", "queue", "device", "finish",
    }  # fmt: skip
    assert 0 < sum(response.x_timing.values()) <= spent
    assert response.x_timing["tokenize"] > 0
    assert response.usage.x_reused_tokens % 64 == 0
    assert 0 < response.usage.x_reused_tokens < response.usage.input_tokens


def test_stages_before_the_queue_add_up(engine: Engine) -> None:
    """Waiting for a thread that renders is waiting; token ids are no part of rendering."""
    rendered = replace(engine._prepare(engine_request("s")), tokenize_s=2.0)
    asked = Submission(Future(), 1.0, 60.0, "", "", "", False, False)
    work = RequestWork.of(asked, rendered, [])
    work.prepared(5.0, 6.0, 10.0)
    work.passed("queue", 13.0)
    assert work.times == {"decode": 1.0, "render": 2.0, "tokenize": 2.0, "queue": 4.0 + 3.0}
    late = RequestWork.of(asked, replace(rendered, tokenize_s=9.0), [])
    late.prepared(5.0, 6.0, 10.0)
    assert (late.times["render"], late.times["tokenize"]) == (0.0, 4.0)


def test_texts_are_kept_by_tenant(engine: Engine) -> None:
    """A state that has grown is encoded from where it was; another tenant's, from its beginning."""
    texts = engine._family._texts  # type: ignore[attr-defined]
    state = "long enough to be known again " * 40
    for tenant in ("a", "a", "b"):
        with pytest.raises(TooManyTokens):
            engine.submit(ask(state), tenant=tenant).result(60)
    assert {key[0] for key in texts._by_key} == {"a", "b"}
    assert len(texts._kept) == 4  # the state and the question of each
