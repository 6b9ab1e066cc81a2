"""Decision requests and answers, on the wire and in process (wire contract of `POST
/v1/systemone`).

A request is one state and many typed questions about it; an answer to each question is a
probability distribution over its options. Unknown fields are ignored, as the contract asks;
missing, mistyped and out-of-range ones are refused.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

Entry = str | dict[str, Any] | list[Any] | None
"""A text on the wire: a string, or structured data (an object or an array), or null."""

MAX_OPTIONS = 255
MAX_LEVELS = 10

MAX_LEVEL_DEPTH = 64
"""Objects and arrays within each other in a level, which its answer repeats: pydantic reads JSON
of at most 200, and writes little more.
"""


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class NoulCriteria(_Wire):
    """What yes and no mean; either may be left out."""

    true: Entry = None
    false: Entry = None


class Noul(_Wire):
    """A yes/no question. At least one of the instructions and the outcomes must say something."""

    type: Literal["noul"] = "noul"
    instructions: Entry = None
    criteria: NoulCriteria | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Noul":
        outcomes = self.criteria and (self.criteria.true or self.criteria.false)
        if not self.instructions and not outcomes:
            raise ValueError("a noul needs instructions or a description of an outcome")
        return self


class Choice(_Wire):
    """One of 2 to 255 named options; a null description leaves the option its name."""

    type: Literal["choice"] = "choice"
    instructions: Entry = None
    criteria: Annotated[dict[str, Entry], FailFast()]  # or a body could hold a million faults

    @model_validator(mode="after")
    def _options_in_range(self) -> "Choice":
        if not 2 <= len(self.criteria) <= MAX_OPTIONS:
            raise ValueError(
                f"{len(self.criteria)} options; 2 to {MAX_OPTIONS} options per choice are supported"
            )
        return self


class Score(_Wire):
    """One of 2 to 10 ordered levels, lowest first."""

    type: Literal["score"] = "score"
    instructions: Entry = None
    criteria: Annotated[list[Entry], FailFast()]

    @model_validator(mode="after")
    def _levels_in_range(self) -> "Score":
        if not 2 <= len(self.criteria) <= MAX_LEVELS:
            raise ValueError(
                f"{len(self.criteria)} levels; 2 to {MAX_LEVELS} levels per score are supported"
            )
        for level, entry in enumerate(self.criteria):
            if _is_deeper(entry, MAX_LEVEL_DEPTH):
                raise ValueError(
                    f"level {level} is nested too deeply; {MAX_LEVEL_DEPTH} objects or arrays"
                    " within each other are supported"
                )
        return self


def _is_deeper(entry: Entry, most: int) -> bool:
    """Whether more objects and arrays than that are within each other."""
    layer: list[Any] = [entry]
    for _ in range(most + 1):
        # by identity: what is there twice in memory would double the layer each time
        nested = {id(part): part for part in layer if isinstance(part, (dict, list))}
        if not nested:
            return False
        layer = [
            inner
            for part in nested.values()
            for inner in (part.values() if isinstance(part, dict) else part)
        ]
    return True


Question = Annotated[Noul | Choice | Score, Field(discriminator="type")]


class DecisionRequest(_Wire):
    """One state and the questions about it; `model` None takes whatever is served."""

    state: str | dict[str, Any] | list[Any]
    questions: Annotated[dict[str, Question], FailFast()] = Field(min_length=1)
    model: str | None = None
    assets: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_no_images(self) -> "DecisionRequest":
        if self.assets:
            raise ValueError(f"{len(self.assets)} assets; the models served here take no images")
        return self


class NoulAnswer(_Wire):
    """`noul` is the probability of yes."""

    type: Literal["noul"] = "noul"
    noul: float


class ChoiceAnswer(_Wire):
    """`choice` is the likeliest option; probabilities are in the order of the options and sum to
    1.
    """

    type: Literal["choice"] = "choice"
    choice: str
    probabilities: dict[str, float]
    confidence: float


class ScoreAnswer(_Wire):
    """`score` is the expected level; `legend` names the levels; keys are "0", "1", ..."""

    type: Literal["score"] = "score"
    score: float
    legend: dict[str, str | dict[str, Any] | list[Any]]
    probabilities: dict[str, float]
    confidence: float


Answer = Annotated[NoulAnswer | ChoiceAnswer | ScoreAnswer, Field(discriminator="type")]


class Usage(_Wire):
    """`input_tokens`: the state once and each question once; `output_tokens`: one an answer;
    `x_reused_tokens`: of the input, those that a checkpoint saved.
    """

    input_tokens: int
    output_tokens: int
    x_reused_tokens: int = 0


class DecisionResponse(_Wire):
    """The answers by question id, in the order of the questions; `model` is the resolved name.

    `x_timing`: milliseconds by stage (docs/http.md). `x_fingerprint`: weights and arithmetic that
    answered.
    """

    model: str
    usage: Usage
    answers: dict[str, Answer]
    x_timing: dict[str, float] = Field(default_factory=dict)
    x_fingerprint: str = ""
