"""Records of the shared schema as token arrays: one corpus of questions over interned texts.

Intent questions are asked against every label of their data set; other questions against their
own options. Texts come from the serving code's rendering, so training and serving say the same.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flide_engine.families.rendering import level_text, option_text, question_text
from tiny_model.paraphrases import PARAPHRASES
from tiny_model.tokenizer import UserEncoder

Record = dict[str, Any]

SOURCES = {
    "PolyAI-LDN/task-specific-datasets": "banking77",
    "clinc/oos-eval": "clinc150",
    "xliuhw/NLU-Evaluation-Data": "hwu64",
    "sonos/nlu-benchmark": "snips",
    "google-research-datasets/dstc8-schema-guided-dialogue": "dialogue",
    "SWE-agent/mini-swe-agent": "coding_agent",
    "SWE-agent/SWE-agent": "coding_agent",
    "sierra-research/tau-bench": "customer_agent",
    "DavidHe137/mice": "boolq",
    "nyu-mll/SQuALITY": "stories",
    "microsoft/BIPIA": "guard",
}
"""Short names of the sources a model is trained on; others keep their own name."""

INTENT_SOURCES = ("banking77", "clinc150", "hwu64", "snips")
INTENT_INSTRUCTION = "Which intent does the user's message express?"
OUT_OF_SCOPE = "oos"
PART_OF_PASSAGE = "Is this sentence part of the passage? "
MATCHING_INSTRUCTIONS = {
    "boolq": "Which question does this text answer?",
    "stories": "Which sentence is part of this text?",
    "dialogue": "What does the user say next?",
}


def read_records(path: Path) -> Iterator[Record]:
    """The records of one gzip JSONL file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def source_name(record: Record) -> str:
    """The short name of a record's source."""
    owner = str(record["source"]).split("@")[0]
    return SOURCES.get(owner, owner.split("/")[-1].lower())


@dataclass(frozen=True, slots=True)
class Option:
    """An option's texts, as ids of interned texts: what serving encodes, then ways to say it
    shorter.
    """

    text: int
    shorter: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a state. `label` is a place in `options`, or 0 / 1 for yes/no."""

    group: str
    kind: str
    state: int
    instruction: int
    paraphrases: tuple[int, ...]
    options: tuple[int, ...]
    label: int


@dataclass
class Corpus:
    """Questions, options and interned texts; `tokens[i]` is text i, once `encode` has run."""

    questions: list[Question] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    _text_ids: dict[str, int] = field(default_factory=dict)
    _option_ids: dict[tuple[str, str | None, str], int] = field(default_factory=dict)

    def intern(self, text: str) -> int:
        """The id of a text, new or known."""
        known = self._text_ids.get(text)
        return self._new(text) if known is None else known

    def _new(self, text: str) -> int:
        self._text_ids[text] = len(self.texts)
        self.texts.append(text)
        return self._text_ids[text]

    def option(self, kind: str, key: str, description: str | None) -> int:
        """The id of an option of a choice, or of a level of a score."""
        known = self._option_ids.get((key, description, kind))
        if known is not None:
            return known
        if kind == "score":
            option = Option(self.intern(level_text(int(key), description)), ())
        else:
            spoken = key.replace("_", " ")
            shorter = [text for text in (description, spoken) if text]
            full = option_text(key, description)
            others = tuple(self.intern(text) for text in shorter if text != full)
            option = Option(self.intern(full), others)
        self._option_ids[key, description, kind] = len(self.options)
        self.options.append(option)
        return len(self.options) - 1

    def add(self, record: Record, state: str, question: Record, labels: "LabelSets") -> None:
        """Takes in one question, unless it has no reliable answer."""
        if question["label"] is None:
            return
        name, kind = source_name(record), str(question["type"])
        group = f"{name}/{kind}"
        if kind == "noul":
            options: tuple[int, ...] = ()
            label = int(bool(question["label"]))
        else:
            criteria = labels.get(name) or question["criteria"]
            keys = list(criteria)
            options = tuple(self.option(kind, key, criteria[key]) for key in keys)
            label = keys.index(str(question["label"]))
        instruction = question_text(question["instructions"])
        paraphrases = tuple(self.intern(text) for text in paraphrased(instruction))
        self.questions.append(
            Question(
                group,
                kind,
                self.intern(state),
                self.intern(instruction),
                paraphrases,
                options,
                label,
            )
        )

    def encode(self, encoder: UserEncoder) -> None:
        """Encodes every interned text."""
        self.tokens = encoder.encode(self.texts)


LabelSets = dict[str, dict[str, str]]
"""Per intent source, every label and its description."""


def label_sets(records: list[Record]) -> LabelSets:
    """The union of the criteria of each intent source."""
    labels: LabelSets = {}
    for record in records:
        name = source_name(record)
        if name in INTENT_SOURCES:
            for question in record["questions"]:
                labels.setdefault(name, {}).update(question["criteria"])
    return {name: dict(sorted(criteria.items())) for name, criteria in labels.items()}


def paraphrased(instruction: str) -> list[str]:
    """Other ways to put an instruction: by the whole text, or by its fixed beginning."""
    for start, others in PARAPHRASES.items():
        if instruction == start:
            return list(others)
        if start.endswith(": ") and instruction.startswith(start):
            rest = instruction.removeprefix(start)
            return [other + rest for other in others]
    return []


def training_corpus(records: list[Record], labels: LabelSets, extra_out_of_scope: int) -> Corpus:
    """The questions to train on; out-of-scope messages are rare, so questions of BoolQ stand in
    for some.
    """
    corpus = Corpus()
    borrowed: list[str] = []
    for record in records:
        for question in record["questions"]:
            corpus.add(record, record["state"], question, labels)
            if source_name(record) == "boolq":
                borrowed.append(str(question["instructions"]))
    clinc = {"source": "clinc/oos-eval"}
    order = np.random.default_rng(0).permutation(len(borrowed))[:extra_out_of_scope]
    for index in order.tolist():
        state = "User: " + borrowed[index].removesuffix("?").lower()
        question = {
            "type": "choice",
            "instructions": INTENT_INSTRUCTION,
            "criteria": labels["clinc150"],
            "label": OUT_OF_SCOPE,
        }
        corpus.add(clinc, state, question, labels)
    add_matching(corpus, records)
    return corpus


def matching_pairs(records: list[Record]) -> dict[str, list[tuple[str, str]]]:
    """Per source, a text and a short piece that belongs to it: its question, a sentence, the next
    message.
    """
    pairs: dict[str, list[tuple[str, str]]] = {"boolq": [], "stories": [], "dialogue": []}
    for record in records:
        name, state = source_name(record), str(record["state"])
        if name == "boolq":
            pairs[name] += [(state, q["instructions"]) for q in record["questions"]]
        elif name == "stories":
            pairs[name] += [
                (state, q["instructions"].removeprefix(PART_OF_PASSAGE))
                for q in record["questions"]
                if q["label"] and q["instructions"].startswith(PART_OF_PASSAGE)
            ]
        elif name == "dialogue":
            history, _, message = state.rpartition("\nUser: ")
            if history and len(message.split()) >= 8:
                pairs[name].append((history, message))
    return pairs


def add_matching(corpus: Corpus, records: list[Record], negatives: int = 9) -> None:
    """Choices made from the texts alone, so that option vectors learn more than the mix's own
    labels.
    """
    rng = np.random.default_rng(1)
    for name, pairs in matching_pairs(records).items():
        pieces = [shortened(piece) for _, piece in pairs]
        for (state, _), piece in zip(pairs, pieces, strict=True):
            others = [pieces[i] for i in rng.integers(len(pieces), size=negatives).tolist()]
            texts = [piece, *dict.fromkeys(text for text in others if text != piece)]
            options = tuple(corpus.option("choice", text, text) for text in texts)
            instruction = corpus.intern(MATCHING_INSTRUCTIONS[name])
            corpus.questions.append(
                Question(
                    "matching/choice", "choice", corpus.intern(state), instruction, (), options, 0
                )
            )


def shortened(text: str, limit: int = 80) -> str:
    """The first words of a text, at most `limit` characters of them."""
    return text if len(text) <= limit else text[:limit].rpartition(" ")[0]


def test_corpus(records: list[Record], labels: LabelSets) -> Corpus:
    """The questions of a validation or workload file; with no labels each is asked as it stands."""
    corpus = Corpus()
    for record in records:
        for question in record["questions"]:
            corpus.add(record, record["state"], question, labels)
    return corpus
