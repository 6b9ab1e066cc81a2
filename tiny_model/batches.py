"""Training steps out of a corpus: which questions, how their texts are varied, how they are
padded.

Variation is what keeps 66,000 records from being learnt by heart: tokens fall out or split into
the two pieces they were merged from, options lose their key or description, instructions are
paraphrased.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tiny_model.data import INTENT_SOURCES, OUT_OF_SCOPE, Corpus, Question
from tiny_model.tokenizer import CONTROL_IDS

IGNORED = -100


@dataclass(frozen=True)
class Variation:
    """Probabilities of the changes made to texts while training."""

    drop_intent: float = 0.10
    drop_other: float = 0.04
    drop_option: float = 0.05
    split: float = 0.10
    shorter_option: float = 0.35
    paraphrase: float = 0.15
    no_speaker: float = 0.10


@dataclass(frozen=True)
class StepPlan:
    """How many questions of each group one optimizer step holds."""

    counts: dict[str, int]
    max_length: int = 1024
    lengths: tuple[int, ...] = (48, 256, 512, 1024)
    lm_rows: int = 4096


DEFAULT_COUNTS = {
    "banking77/choice": 144,
    "clinc150/choice": 184,
    "hwu64/choice": 120,
    "snips/choice": 64,
    "dialogue/choice": 28,
    "dialogue/noul": 96,
    "coding_agent/choice": 7,
    "coding_agent/noul": 7,
    "coding_agent/score": 2,
    "customer_agent/choice": 6,
    "customer_agent/noul": 4,
    "boolq/noul": 6,
    "stories/noul": 16,
    "guard/noul": 8,
    "guard/choice": 8,
    "matching/choice": 12,
}

LOSS_WEIGHTS = {
    "banking77/choice": 0.30,
    "clinc150/choice": 0.35,
    "hwu64/choice": 0.25,
    "snips/choice": 0.10,
    "dialogue/choice": 0.30,
    "dialogue/noul": 0.50,
    "coding_agent/choice": 0.10,
    "coding_agent/noul": 0.10,
    "coding_agent/score": 0.02,
    "customer_agent/choice": 0.08,
    "customer_agent/noul": 0.05,
    "boolq/noul": 0.03,
    "stories/noul": 0.20,
    "guard/noul": 0.12,
    "guard/choice": 0.12,
    "matching/choice": 0.15,
}
"""The weight of a group's mean loss in a step."""


Made = tuple[Question, np.ndarray, int]
"""A question, its varied sequence, and how many of the first tokens have a state token after them.
"""


@dataclass
class Padded:
    """Sequences padded on the right: ids [B, L] int64 and the row of each one's `<|read|>` [B]."""

    ids: Tensor
    rows: Tensor


@dataclass
class QuestionBatch:
    """Questions of similar length.

    seen [B, O] bool marks each choice's options among the step's; label [B] is a column of
    `seen` for a choice and 0 / 1 for a yes/no question; weight [B] sums to the groups' weights
    over a step; lm_rows, lm_targets [P] are flat positions and next tokens inside states.
    """

    sequences: Padded
    seen: Tensor
    label: Tensor
    is_noul: Tensor
    weight: Tensor
    lm_rows: Tensor
    lm_targets: Tensor


@dataclass
class Step:
    """One optimizer step: the distinct options, then the questions in a few batches by length."""

    options: Padded
    batches: list[QuestionBatch] = field(default_factory=list)


def pad(sequences: list[np.ndarray], multiple: int) -> Padded:
    """Right-pads to a multiple; up to 64 tokens stay a single chunk of the delta rule."""
    longest = max(len(each) for each in sequences)
    length = -(-longest // multiple) * multiple
    ids = np.zeros((len(sequences), length), dtype=np.int64)
    for row, each in enumerate(sequences):
        ids[row, : len(each)] = each
    rows = np.array([len(each) - 1 for each in sequences])
    return Padded(torch.from_numpy(ids), torch.from_numpy(rows))


def question_sequence(state: np.ndarray, kind: str, question: np.ndarray, limit: int) -> np.ndarray:
    """`<|state|>` state `<|KIND|>` question `<|read|>`; a state too long loses its beginning."""
    room = limit - len(question) - 3
    state = state[len(state) - room :] if len(state) > room else state
    marks = CONTROL_IDS["state"], CONTROL_IDS[kind], CONTROL_IDS["read"]
    return np.concatenate(([marks[0]], state, [marks[1]], question, [marks[2]])).astype(np.int64)


def option_sequence(text: np.ndarray) -> np.ndarray:
    """`<|option|>` text `<|read|>`."""
    return np.concatenate(([CONTROL_IDS["option"]], text, [CONTROL_IDS["read"]])).astype(np.int64)


def by_length(made: list[Made], bounds: tuple[int, ...]) -> list[list[Made]]:
    """Groups of similar length; none holds a single sequence unless it is the only one."""
    groups: list[list[Made]] = []
    carried: list[Made] = []
    low = 0
    for high in bounds:
        carried += [each for each in made if low < len(each[1]) <= high]
        low = high
        if len(carried) > 1:
            groups.append(carried)
            carried = []
    if carried and groups:
        groups[-1] = groups[-1] + carried
    elif carried:
        groups.append(carried)
    return groups


def group_queue(corpus: Corpus, group: str, oos_repeats: int) -> np.ndarray:
    """Indices of a group's questions; the rare out-of-scope ones stand in it several times."""
    chosen = [i for i, q in enumerate(corpus.questions) if q.group == group]
    if group == "clinc150/choice":
        rare = [i for i in chosen if _is_out_of_scope(corpus, corpus.questions[i])]
        chosen += rare * (oos_repeats - 1)
    return np.array(chosen)


def _is_out_of_scope(corpus: Corpus, question: Question) -> bool:
    option = corpus.options[question.options[question.label]]
    return any(corpus.texts[text] == OUT_OF_SCOPE for text in option.shorter)


class StepStream(IterableDataset[Step]):
    """An endless stream of steps; each loader worker draws its own from the seed and its number."""

    def __init__(
        self, corpus: Corpus, parents: np.ndarray, plan: StepPlan, variation: Variation, seed: int
    ) -> None:
        self.corpus, self.parents, self.plan = corpus, parents, plan
        self.variation, self.seed = variation, seed
        self.queues = {group: group_queue(corpus, group, 3) for group in plan.counts}

    def __iter__(self) -> Iterator[Step]:
        info = get_worker_info()
        rng = np.random.default_rng([self.seed, info.id if info else 0])
        orders = {group: rng.permutation(queue) for group, queue in self.queues.items()}
        at = dict.fromkeys(orders, 0)
        while True:
            drawn: list[Question] = []
            for group, count in self.plan.counts.items():
                if at[group] + count > len(orders[group]):
                    orders[group], at[group] = rng.permutation(self.queues[group]), 0
                picked = orders[group][at[group] : at[group] + count]
                at[group] += count
                drawn += [self.corpus.questions[i] for i in picked.tolist()]
            yield self._step(drawn, rng)

    def _step(self, drawn: list[Question], rng: np.random.Generator) -> Step:
        used = sorted({option for q in drawn for option in q.options})
        column = {option: i for i, option in enumerate(used)}
        texts = [self._option_tokens(option, rng) for option in used]
        step = Step(pad([option_sequence(each) for each in texts], 8))
        counts: dict[str, int] = {}
        for q in drawn:
            counts[q.group] = counts.get(q.group, 0) + 1
        made = [(q, *self._question_tokens(q, rng)) for q in drawn]
        for here in by_length(made, self.plan.lengths):
            step.batches.append(self._batch(here, column, counts, rng))
        return step

    def _batch(
        self,
        made: list[Made],
        column: dict[int, int],
        counts: dict[str, int],
        rng: np.random.Generator,
    ) -> QuestionBatch:
        longest = max(len(sequence) for _, sequence, _ in made)
        sequences = pad([sequence for _, sequence, _ in made], 8 if longest <= 64 else 64)
        seen = np.zeros((len(made), len(column)), dtype=bool)
        label = np.zeros(len(made), dtype=np.int64)
        for row, (q, _, _) in enumerate(made):
            columns = [column[option] for option in q.options]
            seen[row, columns] = True
            label[row] = columns[q.label] if columns else q.label
        weight = np.array([LOSS_WEIGHTS[q.group] / counts[q.group] for q, _, _ in made])
        rows, targets = self._lm_positions(made, sequences.ids, rng)
        return QuestionBatch(
            sequences,
            torch.from_numpy(seen),
            torch.from_numpy(label),
            torch.tensor([q.kind == "noul" for q, _, _ in made]),
            torch.from_numpy(weight).float(),
            rows,
            targets,
        )

    def _lm_positions(
        self, made: list[Made], ids: Tensor, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        length = ids.shape[1]
        flat = np.concatenate([row * length + np.arange(n) for row, (_, _, n) in enumerate(made)])
        flat = rng.permutation(flat)[: self.plan.lm_rows]
        rows = torch.from_numpy(flat)
        return rows, ids.reshape(-1)[rows + 1]

    def _question_tokens(self, q: Question, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """A varied sequence and how many of its first tokens have a state token after them."""
        vary, is_intent = self.variation, q.group.split("/")[0] in INTENT_SOURCES
        state = self.corpus.tokens[q.state]
        if is_intent and rng.random() < vary.no_speaker:
            state = state[2:]
        state = self._varied(state, vary.drop_intent if is_intent else vary.drop_other, rng)
        instruction = q.instruction
        if q.paraphrases and rng.random() < vary.paraphrase:
            instruction = q.paraphrases[rng.integers(len(q.paraphrases))]
        question = self._varied(self.corpus.tokens[instruction], 0.02, rng)
        sequence = question_sequence(state, q.kind, question, self.plan.max_length)
        return sequence, len(sequence) - len(question) - 2

    def _option_tokens(self, option: int, rng: np.random.Generator) -> np.ndarray:
        entry = self.corpus.options[option]
        text = entry.text
        if entry.shorter and rng.random() < self.variation.shorter_option:
            text = entry.shorter[rng.integers(len(entry.shorter))]
        return self._varied(self.corpus.tokens[text], self.variation.drop_option, rng)

    def _varied(self, tokens: np.ndarray, drop: float, rng: np.random.Generator) -> np.ndarray:
        """Drops tokens and splits some of the others into their two pieces, once or twice."""
        keep = rng.random(len(tokens)) >= drop
        if keep.any():
            tokens = tokens[keep]
        for _ in range(2):
            pair = self.parents[tokens]
            cut = (rng.random(len(tokens)) < self.variation.split) & (pair[:, 0] > 0)
            if not cut.any():
                break
            pair[~cut] = np.stack((tokens[~cut], np.zeros_like(tokens[~cut])), 1)
            flat = pair.reshape(-1)
            tokens = flat[flat > 0]
        return tokens
