"""Requests as token ids, the same for every engine: workloads of random ids, and real texts."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.shapes import WORKLOADS, prompts
from benchmarks.weights import tokenizer

TEXT = "text:"
"""Begins the names of workloads that are real texts: `text:race_like`."""


@dataclass(frozen=True)
class TokenRequest:
    """A state's questions as whole prompts, [n] int32 each, that begin with its `state` tokens."""

    state: int
    prompts: tuple[NDArray[np.int32], ...]


def request(
    work: str, seed: int, texts: Path | None = None, most: int | None = None
) -> TokenRequest:
    """The `seed`-th request of a workload.

    texts: folder of workload files, for those that begin with TEXT. most: of its questions only
    the first so many.
    """
    if work.startswith(TEXT):
        if texts is None:
            raise ValueError(f"workload {work} needs a folder of texts")
        records = _records(texts / f"{work.removeprefix(TEXT)}.jsonl.gz")
        state, questions = _texts(records[seed % len(records)])
        head = _encoded(state)
        made = [np.concatenate([head, _encoded(q)]).astype(np.int32) for q in questions[:most]]
        return TokenRequest(len(head), tuple(made))
    return TokenRequest(WORKLOADS[work][0], tuple(prompts(work, seed=seed)[:most]))


def text_works(texts: Path | None) -> list[str]:
    """Names of the workloads of a folder."""
    found = sorted(texts.glob("*.jsonl.gz")) if texts else []
    return [TEXT + path.name.removesuffix(".jsonl.gz") for path in found]


@cache
def _records(path: Path) -> Sequence[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def _texts(record: dict[str, Any]) -> tuple[str, list[str]]:
    """(state, questions) of a record; of a trajectory, as it is halfway."""
    if "steps" in record:
        steps = record["steps"][: (len(record["steps"]) + 1) // 2]
        state, questions = "".join(s["append"] for s in steps), steps[-1]["questions"]
    else:
        state, questions = record["state"], record["questions"]
    asked = []
    for question in questions:
        options = question["criteria"] or {"yes": "", "no": ""}
        listed = "\n".join(f"{key}: {text}" for key, text in options.items())
        asked.append(f"\n\nQuestion: {question['instructions']}\n{listed}\nAnswer:")
    return state, asked


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer()))


def _encoded(text: str) -> NDArray[np.int32]:
    return np.array(_tokenizer().encode(text, add_special_tokens=False).ids, np.int32)
