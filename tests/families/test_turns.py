"""Conversations: where their last turn begins is told, and a checkpoint stands there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flide_engine import Engine, EngineConfig
from flide_engine.wire import parse_request

NOUL = {"type": "noul", "instructions": "Is the customer angry?"}


def said(*texts: str) -> dict[str, Any]:
    """A request about a conversation."""
    roles = ("user", "assistant")
    state = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"state": state, "questions": {"q": NOUL}}


LONG = [" ".join(f"I said {i} of {k}, äöü \u4e2d" for i in range(20)) for k in range(3)]


@pytest.fixture(scope="module", params=["option_vectors", "next_token"])
def engines(request: Any, checkpoint: Path) -> Iterator[tuple[Engine, Engine]]:
    """Of each family: one that remembers, and one that does not."""
    options = {} if request.param == "option_vectors" else {"model": str(checkpoint)}
    made = [
        Engine(EngineConfig.model_validate({**options, "keep_checkpoints": keep}))
        for keep in (True, False)
    ]
    yield made[0], made[1]
    for engine in made:
        engine.close()


def test_the_last_turn_begins_where_conversations_part(engines: tuple[Engine, Engine]) -> None:
    """Up to a few tokens that open a message: in what the state settles, and for lists only."""
    family = engines[0]._family
    one, other = (family.render(parse_request(said(*LONG, last)), "t") for last in ("yes", "no!"))
    (turn,) = one.turns
    assert other.turns == (turn,)
    a, b = one.prompts[0], other.prompts[0]
    parted = int((a[: min(len(a), len(b))] != b[: min(len(a), len(b))]).argmax())
    assert parted - 40 <= turn <= min(parted, one.state_tokens)
    assert np.array_equal(a[:turn], b[:turn])
    for state in ("a text, [1, 2]", [], [said(*LONG)], {"a": 1, "b": 2}):
        assert family.render(parse_request({**said(), "state": state}), "t").turns == ()


def test_a_turn_that_is_said_anew_is_all_that_is_computed(engines: tuple[Engine, Engine]) -> None:
    """Of a conversation that was asked about once: it goes on from the turn before."""
    engine, plain = engines
    first = said(*LONG, "This is what I say now. " * 20)
    engine.decide(first)
    anew = said(*LONG, "No, I take that back, and say something else. " * 10)
    got, want = engine.decide(anew), plain.decide(anew)
    assert got.answers["q"].noul == pytest.approx(want.answers["q"].noul, abs=5e-6)  # type: ignore[union-attr]
    (turn,) = engine._family.render(parse_request(anew)).turns
    assert got.usage.x_reused_tokens == turn // 64 * 64 > 64
