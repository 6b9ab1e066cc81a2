"""Option vectors: each option computed once, kept across requests, and never a different answer."""

from collections.abc import Iterator

import numpy as np
import pytest

from flide_engine import Engine, EngineConfig
from flide_engine.families.option_vectors import OptionVectors, VectorCache
from flide_engine.families.tokenizer import TextTokenizer
from flide_engine.resolve import EMBEDDED
from flide_engine.wire import parse_request

TEAM = {"type": "choice", "instructions": "Who?", "criteria": {"billing": "money", "support": None}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The embedded model."""
    made = Engine(EngineConfig())
    yield made
    made.close()


@pytest.fixture
def family() -> OptionVectors:
    """The embedded model's family, with an empty cache."""
    return OptionVectors(EMBEDDED, TextTokenizer(EMBEDDED), "hash", 3)


def probabilities(engine: Engine, state: str, **criteria: str | None) -> list[float]:
    """Of one choice."""
    question = {**TEAM, "criteria": criteria}
    answer = engine.decide({"state": state, "questions": {"q": question}}).answers["q"]
    return list(answer.probabilities.values())  # type: ignore[union-attr]


def test_kept_options_change_no_answer_and_no_usage(engine: Engine) -> None:
    """The same request again, its options now known: same probabilities, same token count."""
    request = {"state": "User: the invoice is wrong", "questions": {"q": TEAM}}
    first, again = engine.decide(request), engine.decide(request)
    assert first.usage == again.usage
    for a, b in zip(
        first.answers["q"].probabilities.values(),  # type: ignore[union-attr]
        again.answers["q"].probabilities.values(),  # type: ignore[union-attr]
        strict=True,
    ):
        assert abs(a - b) < 1e-6


def test_the_order_of_options_does_not_matter(engine: Engine) -> None:
    """An option's vector knows nothing of its neighbours."""
    there = probabilities(engine, "hello", a="one thing", b="another", c=None)
    back = probabilities(engine, "hello", c=None, b="another", a="one thing")
    assert there == pytest.approx(back[::-1], abs=1e-6)


def test_known_options_are_not_asked_again(family: OptionVectors) -> None:
    """A rendered request holds prompts only for what the cache does not hold."""
    request = parse_request({"state": "s", "questions": {"a": TEAM, "b": TEAM}})
    rendered = family.render(request)
    assert len(rendered.prompts) == 4  # two questions, two distinct options
    family.finish(rendered, [rendered.prompts[0][:1].astype("float32") + 1.0] * 4)
    known = family.render(request)
    assert len(known.prompts) == 2
    assert known.input_tokens == rendered.input_tokens


def test_prompts_begin_with_the_state_and_end_to_be_read(family: OptionVectors) -> None:
    """Control tokens by kind; a state that spells one holds none."""
    controls = family.tokenizer.controls
    questions = {
        "n": {"type": "noul", "instructions": "?"},
        "c": TEAM,
        "s": {"type": "score", "criteria": ["low", "high"]},
    }
    rendered = family.render(parse_request({"state": "<|read|> x", "questions": questions}))
    kinds = ["<|noul|>", "<|choice|>", "<|score|>"]
    ids = set(controls.values())
    for prompt, kind in zip(rendered.prompts, kinds, strict=False):
        found = [int(t) for t in prompt if int(t) in ids]
        assert found == [controls["<|state|>"], controls[kind], controls["<|read|>"]]
    for prompt in rendered.prompts[3:]:
        assert (prompt[0], prompt[-1]) == (controls["<|option|>"], controls["<|read|>"])


def test_the_cache_drops_the_least_recently_used() -> None:
    """And tells weights and tenants apart."""
    cache = VectorCache(2)
    for number, text in enumerate(("a", "b", "a", "c")):
        cache.put("t", "w", text, np.array([number], np.float32))
    assert cache.get("t", "w", "b") is None
    assert cache.get("t", "w", "a") == np.float32(2)
    assert cache.get("t", "other", "a") is None
    assert cache.get("other", "w", "a") is None


def test_a_kept_vector_keeps_nothing_of_its_round(engine: Engine) -> None:
    """Not the array of all vectors that were read beside it."""
    question = {**TEAM, "criteria": {"only": "here", "more": None}}
    engine.decide({"state": "hello", "questions": {"a": TEAM, "b": question}})
    held = list(engine._family.cache._held.values())  # type: ignore[attr-defined]
    assert len(held) >= 4
    assert all(vector.base is None for vector in held)


def test_a_tenant_does_not_find_what_another_has_had_computed(engine: Engine) -> None:
    """Time would tell that somebody has asked with the same option: each computes its own, once."""
    request = {"state": "hello", "questions": {"q": {**TEAM, "criteria": {"x y": "z", "w": "v"}}}}
    computed = []
    for tenant in ("a", "b", "a", "b"):
        before = engine.counters().computed
        engine.submit(request, tenant=tenant).result(60)
        computed.append(engine.counters().computed - before)
    assert computed[0] == computed[1] > computed[2] == computed[3]
