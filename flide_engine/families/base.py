"""What a decision family is: it turns a request into isolated prompts, and what is read into
answers.

The engine knows no family by name. It runs the prompts, and hands back one value for each read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flide_engine.api import (
    Answer,
    Choice,
    ChoiceAnswer,
    DecisionRequest,
    NoulAnswer,
    Score,
    ScoreAnswer,
)
from flide_engine.families.rendering import level_text

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Read:
    """What is read at the last token of a prompt.

    prompt: index of the prompt. head_rows: [k] rows of the output head, read as float32 logits [k];
    None: the hidden vector itself, float32 [H]. about: names the question or option in an error.
    """

    prompt: int
    head_rows: Tokens | None
    about: str


@dataclass(frozen=True)
class Rendered:
    """A request as isolated prompts, each the whole of what its question would be asked with alone.

    prompts: whole prompts, one token list each. reads: what is read of them. input_tokens: the
    state once and each question and option once. longest_prompt: tokens of the longest prompt.
    state_prompts: how many of the first prompts are questions about the state. state_tokens: how
    many tokens they begin with that will still begin them when the state has grown. turns: token
    positions in the state where it may be cut, ascending. note: the family's own, handed back to
    `finish`.
    """

    prompts: tuple[Tokens, ...]
    reads: tuple[Read, ...]
    input_tokens: int
    longest_prompt: int
    state_prompts: int
    state_tokens: int
    note: Any
    turns: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelCard:
    """What `GET /v1/models` says of a model."""

    name: str
    description: str
    release_date: str


class Family(Protocol):
    """Prompts in, answers out. Both methods may run on several threads at once."""

    card: ModelCard

    def render(self, request: DecisionRequest, tenant: str = "") -> Rendered:
        """The request's prompts and reads. Raises InvalidRequest.

        tenant: whose it is; what is kept of texts and options is used again for the same one only.
        """
        ...

    def finish(self, rendered: Rendered, values: Sequence[Floats]) -> dict[str, Answer]:
        """Answers by question id from one value for each read, all finite."""
        ...


def softmax(logits: Floats) -> list[float]:
    """Probabilities of logits [n], in float64; they sum to 1 within rounding."""
    z = logits.astype(np.float64)
    e = np.exp(z - z.max())
    return [float(p) for p in e / e.sum()]


def sigmoid(logit: float) -> float:
    """1 / (1 + e^-logit) without overflow."""
    e = math.exp(-abs(logit))
    return 1 / (1 + e) if logit >= 0 else e / (1 + e)


def noul_answer(yes: float) -> NoulAnswer:
    """An answer to a yes/no question; it has no confidence."""
    return NoulAnswer(noul=yes)


def choice_answer(question: Choice, probabilities: Sequence[float]) -> ChoiceAnswer:
    """Confidence: the top probability, rescaled from uniform to 1 (docs/http.md)."""
    n, top = len(probabilities), max(probabilities)
    names = list(question.criteria)
    return ChoiceAnswer(
        choice=names[max(range(n), key=lambda i: probabilities[i])],
        probabilities=dict(zip(names, probabilities, strict=True)),
        confidence=min(1.0, max(0.0, (top - 1 / n) / (1 - 1 / n))),
    )


def score_answer(question: Score, probabilities: Sequence[float]) -> ScoreAnswer:
    """Confidence: 1 - mean distance from the mode over that of the uniform distribution."""
    n = len(probabilities)
    mode = max(range(n), key=lambda i: probabilities[i])
    spread = sum(p * abs(i - mode) for i, p in enumerate(probabilities))
    uniform = sum(abs(i - (n - 1) / 2) for i in range(n)) / n
    return ScoreAnswer(
        score=sum(i * p for i, p in enumerate(probabilities)),
        legend={
            str(i): text if text else level_text(i, text)
            for i, text in enumerate(question.criteria)
        },
        probabilities={str(i): p for i, p in enumerate(probabilities)},
        confidence=min(1.0, max(0.0, 1 - spread / uniform)),
    )
