"""Option vectors: p(o) = softmax(s * cos(h, w_o)), the readout of the embedded model.

`h` is the hidden vector at the end of the question's prompt; `w_o` is the one at the end of the
option's own short sequence, which does not hold the state, so it is computed once and kept. A
yes/no question is read by a scalar head on `h`. The prompts, also used in training:

    <|state|> state <|noul|> or <|choice|> or <|score|> question <|read|>
    <|option|> option <|read|>
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from flide_engine.api import Answer, Choice, DecisionRequest, Noul, Question
from flide_engine.errors import ConfigError
from flide_engine.families.base import (
    Floats,
    ModelCard,
    Read,
    Rendered,
    Tokens,
    choice_answer,
    noul_answer,
    score_answer,
    sigmoid,
    softmax,
)
from flide_engine.families.growing import GrowingTexts
from flide_engine.families.rendering import entry_text, level_text, option_text, question_text
from flide_engine.families.tokenizer import TextTokenizer

STATE, OPTION, READ = "<|state|>", "<|option|>", "<|read|>"
KINDS = {"noul": "<|noul|>", "choice": "<|choice|>", "score": "<|score|>"}


class VectorCache:
    """Option vectors by tenant, weights hash and text, the least recently used dropped first.
    Thread-safe.

    Each tenant has its own: else the time of an answer would tell who has asked about an option.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._held: OrderedDict[tuple[str, str, str], Floats] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, tenant: str, weights: str, text: str) -> Floats | None:
        """The vector [H] of an option's text, or None."""
        with self._lock:
            found = self._held.get((tenant, weights, text))
            if found is not None:
                self._held.move_to_end((tenant, weights, text))
            return found

    def put(self, tenant: str, weights: str, text: str, vector: Floats) -> None:
        """Keeps a vector [H]: a copy, as what it is a view of holds a whole round's."""
        with self._lock:
            self._held[tenant, weights, text] = vector.copy()
            self._held.move_to_end((tenant, weights, text))
            while len(self._held) > self._entries:
                self._held.popitem(last=False)


@dataclass(frozen=True)
class _Note:
    tenant: str
    questions: dict[str, Question]
    options: dict[str, list[str]]  # texts by question id
    known: dict[str, Floats]  # vectors found in the cache
    computed: tuple[str, ...]  # texts whose vectors are read after the questions


class OptionVectors:
    """The family of a folder whose decision_config.json says `"family": "option_vectors"`."""

    def __init__(
        self, folder: Path, tokenizer: TextTokenizer, weights: str, cache_entries: int,
        text_cache_bytes: int = 0,
    ) -> None:  # fmt: skip
        """cache_entries: option vectors. text_cache_bytes: for texts that were encoded before."""
        config = json.loads((folder / "decision_config.json").read_text())
        self.card = ModelCard(config["name"], config["description"], config["release_date"])
        self.tokenizer, self._texts = tokenizer, GrowingTexts(tokenizer, text_cache_bytes)
        self.weights = weights
        self.cache = VectorCache(cache_entries)
        self._state, self._option, self._read = map(tokenizer.control, (STATE, OPTION, READ))
        self._kinds = {kind: tokenizer.control(name) for kind, name in KINDS.items()}
        try:
            head = load_file(folder / config["head"])
            self._noul_weight = head["noul.weight"].astype(np.float64).reshape(-1)
            self._noul_bias = float(head["noul.bias"].reshape(()))
            self._scale = float(head["scale"].reshape(()))
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(f"decision head of {folder}: {error}") from error

    def render(self, request: DecisionRequest, tenant: str = "") -> Rendered:
        """See Family.render. The state is encoded once, each distinct option once."""
        ids, settled = self._texts.encode_growing(entry_text(request.state), tenant)
        state = np.concatenate([[self._state], ids])
        prompts: list[Tokens] = []
        reads: list[Read] = []
        options: dict[str, list[str]] = {}
        for name, question in request.questions.items():
            reads.append(Read(len(prompts), None, f"question {name!r}"))
            prompts.append(self._question(state, question, tenant))
            options[name] = _options(question)
        known, computed = {}, []
        tokens = len(state) + sum(len(p) - len(state) for p in prompts)
        for text in dict.fromkeys(text for texts in options.values() for text in texts):
            ids = self._texts.encode(text, tenant)
            sequence = np.array([self._option, *ids, self._read], np.int32)
            tokens += len(sequence)
            vector = self.cache.get(tenant, self.weights, text)
            if vector is not None:
                known[text] = vector
                continue
            computed.append(text)
            reads.append(Read(len(prompts), None, f"option {text[:80]!r}"))
            prompts.append(sequence)
        note = _Note(tenant, request.questions, options, known, tuple(computed))
        return Rendered(
            tuple(prompts),
            tuple(reads),
            input_tokens=tokens,
            longest_prompt=max(map(len, prompts)),
            state_prompts=len(request.questions),
            state_tokens=1 + settled,
            note=note,
        )

    def finish(self, rendered: Rendered, values: Sequence[Floats]) -> dict[str, Answer]:
        """See Family.finish."""
        note: _Note = rendered.note
        count = len(note.questions)
        vectors = dict(note.known)
        for text, vector in zip(note.computed, values[count:], strict=True):
            vectors[text] = vector
            self.cache.put(note.tenant, self.weights, text, vector)
        answers: dict[str, Answer] = {}
        for (name, question), h in zip(note.questions.items(), values[:count], strict=True):
            if isinstance(question, Noul):
                answers[name] = noul_answer(sigmoid(float(self._noul_weight @ h) + self._noul_bias))
                continue
            rows = np.stack([vectors[text] for text in note.options[name]]).astype(np.float64)
            cosines = rows @ h / (np.linalg.norm(rows, axis=1) * np.linalg.norm(h))
            p = softmax((self._scale * cosines).astype(np.float32))
            answers[name] = (
                choice_answer(question, p)
                if isinstance(question, Choice)
                else score_answer(question, p)
            )
        return answers

    def _question(self, state: Tokens, question: Question, tenant: str) -> Tokens:
        yes, no = None, None
        if isinstance(question, Noul) and question.criteria:
            yes, no = question.criteria.true, question.criteria.false
        text = self._texts.encode(question_text(question.instructions, yes, no), tenant)
        return np.concatenate([state, [self._kinds[question.type]], text, [self._read]]).astype(
            np.int32
        )


def _options(question: Question) -> list[str]:
    """Texts of a question's options or levels, in order; none for a yes/no question."""
    if isinstance(question, Noul):
        return []
    if isinstance(question, Choice):
        return [option_text(name, text) for name, text in question.criteria.items()]
    return [level_text(i, text) for i, text in enumerate(question.criteria)]
