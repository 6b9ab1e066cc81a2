"""Accuracy and AUC of a decision model on questions of the shared schema."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tiny_model.batches import Padded, option_sequence, pad, question_sequence
from tiny_model.data import Corpus, LabelSets, Record, read_records, test_corpus
from tiny_model.model import DecisionModel
from tiny_model.tokenizer import UserEncoder

Scores = dict[str, dict[str, float]]
"""Per group: n, accuracy, chance; for yes/no also auc (if both answers occur)."""

WORKLOADS = (
    "intent_routing",
    "dialogue_multi",
    "tool_choice",
    "guard",
    "boolq_like",
    "race_like",
    "race_all_like",
    "article_like",
    "multirc_like",
    "di_like",
    "agent_trajectories",
    "response_eval",
    "quality_like",
)


@dataclass(frozen=True)
class Readings:
    """Per question of a corpus: logits over its options, or one logit of yes."""

    logits: list[np.ndarray]


def token_batches(lengths: list[int], budget: int) -> list[list[int]]:
    """Groups sequences of similar length so that each group, padded, holds at most `budget`
    tokens.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        longest = lengths[index]
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@torch.no_grad()
def read_vectors(
    model: DecisionModel, sequences: list[np.ndarray], device: torch.device, budget: int = 65536
) -> Tensor:
    """The hidden state at the last token of every sequence, [N, hidden] float32."""
    out = torch.empty(len(sequences), model.model.shape.hidden_size, device=device)
    for batch in token_batches([len(each) for each in sequences], budget):
        padded = pad([sequences[i] for i in batch], 8 if len(sequences[batch[-1]]) <= 64 else 64)
        moved = Padded(padded.ids.to(device), padded.rows.to(device))
        out[torch.tensor(batch, device=device)] = model.read(moved.ids, moved.rows)[0]
    return out


@torch.no_grad()
def read_corpus(
    model: DecisionModel, corpus: Corpus, device: torch.device, limit: int = 65536
) -> Readings:
    """Asks every question of an encoded corpus; `limit` is the longest sequence in tokens."""
    training = model.training
    model.eval()
    sequences = [
        question_sequence(corpus.tokens[q.state], q.kind, corpus.tokens[q.instruction], limit)
        for q in corpus.questions
    ]
    h = read_vectors(model, sequences, device)
    texts = [option_sequence(corpus.tokens[option.text]) for option in corpus.options]
    vectors = read_vectors(model, texts, device) if texts else h[:0]
    yes = model.noul_logits(h).cpu().numpy()
    logits: list[np.ndarray] = []
    for row, q in enumerate(corpus.questions):
        if q.kind == "noul":
            logits.append(yes[row : row + 1])
        else:
            chosen = torch.tensor(q.options, device=device)
            logits.append(model.choice_logits(h[row : row + 1], vectors[chosen])[0].cpu().numpy())
    model.train(training)
    return Readings(logits)


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """The chance that a yes scores above a no, ties counted half; both must occur."""
    positives, negatives = int(labels.sum()), int((1 - labels).sum())
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float(
        (ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    )


def score(corpus: Corpus, readings: Readings) -> Scores:
    """Per group of questions: accuracy, the chance level, and AUC for yes/no."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, q in enumerate(corpus.questions):
        groups[q.group].append(index)
    scores: Scores = {}
    for group, members in sorted(groups.items()):
        labels = np.array([corpus.questions[i].label for i in members])
        if group.endswith("/noul"):
            logits = np.array([readings.logits[i][0] for i in members])
            share = float(labels.mean())
            scores[group] = {
                "n": len(members),
                "accuracy": float(((logits > 0) == labels).mean()),
                "chance": max(share, 1 - share),
            }
            if 0 < share < 1:
                scores[group]["auc"] = area_under_curve(logits, labels)
        else:
            best = np.array([readings.logits[i].argmax() for i in members])
            odds = [1 / len(corpus.questions[i].options) for i in members]
            scores[group] = {
                "n": len(members),
                "accuracy": float((best == labels).mean()),
                "chance": float(np.mean(odds)),
            }
    return scores


def at_steps(
    record: Record, count: int, window: int | None, rng: np.random.Generator
) -> list[Record]:
    """A trajectory at `count` of its steps: the history so far, or its last `window` characters."""
    steps = record["steps"]
    picked = sorted(rng.permutation(len(steps))[:count].tolist())
    made = []
    for index in picked:
        history = "".join(step["append"] for step in steps[: index + 1])
        state = history if window is None else history[-window:]
        made.append({**record, "state": state, "questions": steps[index]["questions"]})
    return made


def workload_corpora(
    folder: Path, names: tuple[str, ...], encoder: UserEncoder, cap: int | None
) -> dict[str, Corpus]:
    """Workload files as encoded corpora, at most `cap` questions of each group, drawn with a fixed
    seed.
    """
    corpora: dict[str, Corpus] = {}
    none: LabelSets = {}
    for name in names:
        records = list(read_records(folder / f"{name}.jsonl.gz"))
        if name == "agent_trajectories":
            for label, window, count in (("window", 1800, 8), ("whole", None, 2)):
                rng = np.random.default_rng(0)
                made = [each for r in records for each in at_steps(r, count, window, rng)]
                corpora[f"{name} ({label})"] = test_corpus(made, none)
        else:
            corpora[name] = test_corpus(records, none)
    for corpus in corpora.values():
        if cap is not None:
            keep_some(corpus, cap)
        corpus.encode(encoder)
    return corpora


def keep_some(corpus: Corpus, cap: int) -> None:
    """Keeps a fixed random choice of at most `cap` questions of each group."""
    order = np.random.default_rng(0).permutation(len(corpus.questions))
    seen: dict[str, int] = defaultdict(int)
    kept = []
    for index in order.tolist():
        q = corpus.questions[index]
        if seen[q.group] < cap:
            seen[q.group] += 1
            kept.append(q)
    corpus.questions = kept


def table(scores: dict[str, Scores]) -> str:
    """A fixed-width table of workload scores."""
    lines = [f"{'file':28} {'group':36} {'n':>6} {'acc':>6} {'auc':>6} {'chance':>6}"]
    for name, groups in scores.items():
        for group, s in groups.items():
            auc = f"{s['auc']:6.3f}" if "auc" in s else "     -"
            lines.append(
                f"{name:28} {group:36} {int(s['n']):6d} {s['accuracy']:6.3f} {auc} "
                f"{s['chance']:6.3f}"
            )
    return "\n".join(lines)
