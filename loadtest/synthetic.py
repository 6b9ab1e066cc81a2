"""Records in the shapes of the workload files, for machines that do not have the files.

Lengths and counts follow the files; the words say nothing. One word stands for 1.3 tokens.
"""

import random
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]

TOKENS_PER_WORD = 1.3
COMMON = """
the a of and to in that it was for on with as his her they at be this had from not but what all were
when we there can an your which their said if do will each about how up out them then she many some
so these would other into has more two like him see time could no make than first been its who now
people my made over did down only way find use may water long little very after words called just
where most know get through back much before go good new write our used me man too any day same
right look think also around another came come work three must because does part even place well
such here take why things help put years
"""
WORDS = COMMON.split()


@dataclass(frozen=True)
class Shape:
    """What a file's records look like: (least, usual, most) of each, tokens and counts.

    options 0 asks yes/no questions. shared: records that begin with one and the same state, which
    then differ in their last tenth.
    """

    records: int
    state: tuple[int, int, int]
    questions: tuple[int, int, int]
    question: tuple[int, int, int]
    options: int
    shared: int = 1


SHAPES = {
    "race_like": Shape(200, (156, 284, 429), (1, 1, 1), (10, 14, 30), 4),
    "race_all_like": Shape(200, (156, 284, 429), (3, 3, 3), (10, 14, 30), 4),
    "quality_like": Shape(40, (2887, 6687, 9765), (8, 18, 19), (10, 30, 50), 4),
    "multirc_like": Shape(100, (33, 224, 751), (12, 40, 170), (27, 38, 75), 0),
    "intent_routing": Shape(400, (3, 11, 80), (1, 1, 1), (7, 7, 7), 151),
    "response_eval": Shape(50, (4994, 7502, 11007), (7, 7, 7), (15, 23, 30), 5, shared=5),
}
TRAJECTORIES = 75
STEPS = (12, 57, 61)
TASK_TOKENS = (1062, 1289, 2829)
STEP_TOKENS = (20, 243, 900)


def records(file: str, seed: int = 0) -> list[Record]:
    """The records of a file by its name without `.jsonl.gz`. Raises KeyError for unknown names."""
    rng = random.Random(f"{file} {seed}")
    if file == "agent_trajectories":
        return [_trajectory(rng, i) for i in range(TRAJECTORIES)]
    shape = SHAPES[file]
    made: list[Record] = []
    opening = ""
    for i in range(shape.records):
        length = _draw(rng, shape.state)
        if i % shape.shared == 0:
            opening = _text(rng, length)
        rest = "" if shape.shared == 1 else " " + _text(rng, length // 10)
        asked = [_question(rng, shape, j) for j in range(_draw(rng, shape.questions))]
        made.append({"id": f"{file}-{i}", "state": opening + rest, "questions": asked})
    return made


def _trajectory(rng: random.Random, number: int) -> Record:
    steps: list[Record] = []
    yes_no = Shape(0, (0, 0, 0), (7, 7, 7), (8, 12, 20), 0)
    for i in range(_draw(rng, STEPS)):
        text = _text(rng, _draw(rng, STEP_TOKENS if i else TASK_TOKENS))
        asked = [_question(rng, yes_no, j) for j in range(7)]
        steps.append({"append": f"\n\nStep {i}: {text}", "questions": asked})
    return {"id": f"trajectory-{number}", "steps": steps}


def _question(rng: random.Random, shape: Shape, number: int) -> Record:
    text = _text(rng, _draw(rng, shape.question)) + "?"
    if not shape.options:
        return {"id": f"q{number}", "type": "noul", "instructions": text, "criteria": None}
    criteria = {f"o{k}": _text(rng, 6) for k in range(shape.options)}
    return {"id": f"q{number}", "type": "choice", "instructions": text, "criteria": criteria}


def _draw(rng: random.Random, least_usual_most: tuple[int, int, int]) -> int:
    least, usual, most = least_usual_most
    return round(rng.triangular(least, most, usual))


def _text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, round(tokens / TOKENS_PER_WORD))))
