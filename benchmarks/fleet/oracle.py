"""One replica with unlimited memory, undisturbed: what must be computed, and the answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet.callers import Caller
from flide_engine.api import DecisionRequest
from flide_engine.config import EngineConfig
from flide_engine.engine import Engine

Values = dict[str, dict[str, float]]
"""Probabilities by question and option; of a yes/no question the one of yes."""


@dataclass(frozen=True)
class Told:
    """computed: tokens. answers: by caller's name and number of the request."""

    computed: int
    answers: dict[tuple[str, int], Values]


def ask_one_engine(config: EngineConfig, *everyone: Sequence[Caller]) -> list[Told]:
    """Asks one engine all that several fleets' callers ask, one fleet after the other; the callers
    of one in turn, so that histories grow side by side.
    """
    engine = Engine(config)
    try:
        return [_ask(engine, callers) for callers in everyone]
    finally:
        engine.close()


def _ask(engine: Engine, everyone: Sequence[Caller]) -> Told:
    before, answers = engine.counters().computed, {}
    for turn in range(max(len(caller.requests) for caller in everyone)):
        for caller in everyone:
            if turn < len(caller.requests):
                request = DecisionRequest.model_validate(caller.requests[turn])
                answers[caller.name, turn] = values(engine.decide(request).model_dump())
    return Told(engine.counters().computed - before, answers)


def values(response: dict[str, Any]) -> Values:
    """The numbers of a response, as JSON or dumped."""
    found: Values = {}
    for name, answer in response["answers"].items():
        many = answer.get("probabilities") or {"yes": answer["noul"]}
        found[name] = {option: float(p) for option, p in many.items()}
    return found


def distance(one: Values, other: Values) -> float:
    """The largest difference of two answers' probabilities; infinite if they are not alike."""
    if {k: set(v) for k, v in one.items()} != {k: set(v) for k, v in other.items()}:
        return float("inf")
    return max(abs(p - other[name][option]) for name in one for option, p in one[name].items())
