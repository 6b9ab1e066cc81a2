"""Whole requests through the engine, against transformers' own template, tokenizer and forward
pass.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flide_engine import DecisionResponse, Engine, EngineConfig
from tests.checkpoints import oracle, tiny_config

TOLERANCE = 2e-6
"""Largest difference of a probability."""

STATES = ["The order arrived broken. " * n for n in (1, 9, 40)]
QUESTIONS = {
    "refund": {
        "type": "noul",
        "instructions": "Is a refund asked for?",
        "criteria": {"true": "asked"},
    },
    "team": {"type": "choice", "criteria": {"billing": "money", "support": None, "C": {"a": [1]}}},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", None, "furious"]},
    "many": {
        "type": "choice",
        "instructions": "Which?",
        "criteria": {f"o{i}": None for i in range(60)},
    },
}


def whole_prompts(folder: Path, state: str) -> list[str]:
    """The prompts as a person would write them for a chat model, one a question."""
    bodies = [
        "Question: Is a refund asked for?\nyes: asked\nReply with Yes or No only.",
        'Question: \nOptions:\nA. billing: money\nB. support\nC. C: {"a": [1]}\n'
        "Reply with the letter of one option only.",
        "Question: How angry?\nLevels, lowest first:\n0. calm\n1. 1\n2. furious\n"
        "Reply with the number of one level only.",
    ]
    return [f"{state.strip()}\n\n{body}" for body in bodies]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> dict[tuple[str, int], list[float]]:
    """Probabilities by (state, question number), each prompt whole, alone and uncached, by
    transformers.
    """
    from transformers import AutoTokenizer

    model, chat = oracle(tiny_config()), AutoTokenizer.from_pretrained(checkpoint)
    labels = [["Yes", "No"], ["A", "B", "C"], ["0", "1", "2"]]
    found = {}
    for state in STATES:
        for i, text in enumerate(whole_prompts(checkpoint, state)):
            ids = chat.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=True,
                enable_thinking=False,
                return_dict=False,
            )
            with torch.inference_mode():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
            rows = [chat.encode(label, add_special_tokens=False) for label in labels[i]]
            assert all(len(r) == 1 for r in rows)
            found[state, i] = logits[[r[0] for r in rows]].softmax(-1).tolist()
    return found


def check(
    answers: DecisionResponse, state: str, reference: dict[tuple[str, int], list[float]]
) -> None:
    """All answers of a request equal the reference."""
    got: list[Any] = [
        [answers.answers["refund"].noul, 1 - answers.answers["refund"].noul],  # type: ignore[union-attr]
        list(answers.answers["team"].probabilities.values()),  # type: ignore[union-attr]
        list(answers.answers["anger"].probabilities.values()),  # type: ignore[union-attr]
    ]
    for i, p in enumerate(got):
        np.testing.assert_allclose(p, reference[state, i], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("fork", ["token", "grain"])
@pytest.mark.parametrize("max_round_tokens", [8192, 128])
def test_requests_equal_transformers(
    checkpoint: Path,
    reference: dict[tuple[str, int], list[float]],
    fork: str,
    max_round_tokens: int,
) -> None:
    """Alone, then all at once; in one round, and cut into pieces of at most 128 tokens."""
    engine = Engine(
        EngineConfig(model=str(checkpoint), fork=fork, max_round_tokens=max_round_tokens)
    )
    try:
        for state in STATES:
            check(engine.decide({"state": state, "questions": QUESTIONS}), state, reference)
        futures: list[tuple[str, Future[DecisionResponse]]] = [
            (state, engine.submit({"state": state, "questions": QUESTIONS})) for state in STATES * 3
        ]
        for state, future in futures:
            check(future.result(60), state, reference)
        engine.drop_checkpoints()
        held = engine.accounting()
        assert held.page_bytes_held == held.slot_bytes_held == 0
    finally:
        engine.close()


def test_twenty_times_the_same(checkpoint: Path) -> None:
    """One request twenty times, alone and in company, gives one answer, and not a uniform one."""
    engine = Engine(EngineConfig(model=str(checkpoint)))
    request = {"state": STATES[1], "questions": QUESTIONS}
    try:
        first = engine.decide(request)
        p = list(first.answers["team"].probabilities.values())  # type: ignore[union-attr]
        assert max(p) > 0.5
        others = [{"state": f"Other {i}. " * i, "questions": QUESTIONS} for i in range(1, 21)]
        futures = [engine.submit(r) for other in others for r in (other, request)][1::2]
        for answer in [
            *(engine.decide(request) for _ in range(20)),
            *(f.result(60) for f in futures),
        ]:
            for name, one in answer.answers.items():
                assert one.model_dump()["type"] == first.answers[name].model_dump()["type"]
                _close(one.model_dump(), first.answers[name].model_dump())
    finally:
        engine.close()


def _close(a: dict[str, Any], b: dict[str, Any]) -> None:
    for key, value in a.items():
        if isinstance(value, float):
            assert abs(value - b[key]) < 10 * TOLERANCE
        elif isinstance(value, dict):
            _close(value, b[key])
        else:
            assert value == b[key]
