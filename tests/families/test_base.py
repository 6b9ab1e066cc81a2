"""Answers from probabilities: the formulas of the contract."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flide_engine.api import Choice, Score
from flide_engine.families.base import choice_answer, score_answer, sigmoid, softmax
from flide_engine.families.rendering import option_text, question_text


def test_choice_confidence_is_rescaled_from_uniform() -> None:
    """0 for uniform, 1 for certain."""
    question = Choice(criteria={"a": None, "b": None, "c": None, "d": None})
    answer = choice_answer(question, [0.1, 0.7, 0.1, 0.1])
    assert (answer.choice, answer.confidence) == ("b", pytest.approx((0.7 - 0.25) / 0.75))
    assert choice_answer(question, [0.25] * 4).confidence == 0.0


def test_score_is_the_expectation_and_confidence_the_spread() -> None:
    """And a null level is named by its number."""
    answer = score_answer(Score(criteria=["calm", None, {"x": 1}]), [0.2, 0.5, 0.3])
    assert answer.score == pytest.approx(1.1)
    assert answer.legend == {"0": "calm", "1": "1", "2": {"x": 1}}
    assert answer.confidence == pytest.approx(1 - 0.5 / (2 / 3))


@given(st.lists(st.floats(-80, 80, width=32), min_size=2, max_size=255))
def test_probabilities_sum_to_one(logits: list[float]) -> None:
    """Whatever the logits."""
    p = softmax(np.array(logits, np.float32))
    assert math.isclose(sum(p), 1.0, abs_tol=1e-9)
    assert all(0 <= x <= 1 for x in p)


@given(st.floats(-1e4, 1e4))
def test_sigmoid_does_not_overflow(x: float) -> None:
    """And sigmoid(x) + sigmoid(-x) is 1."""
    assert math.isclose(sigmoid(x) + sigmoid(-x), 1.0)


def test_texts() -> None:
    """A description that only repeats the name says nothing new."""
    assert option_text("activate_my_card", None) == "activate my card"
    assert option_text("activate_my_card", "Activate my card") == "Activate my card"
    assert option_text("A", "money") == "A: money"
    assert option_text("A", {"k": ["é"]}) == 'A: {"k": ["é"]}'
    assert question_text(None, if_true="asked") == "yes: asked"
    assert question_text("Q?", "a", "b") == "Q?\nyes: a\nno: b"
