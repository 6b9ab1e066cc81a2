"""One training run: losses, optimizers, the moving average of the weights, schedule, log and
checkpoints.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_model.batches import Padded, QuestionBatch, Step
from tiny_model.data import INTENT_SOURCES, Corpus
from tiny_model.evaluate import Scores, read_corpus, score
from tiny_model.export import export, round_to_stored, save_checkpoint
from tiny_model.model import DecisionModel


def choice_loss(logits: Tensor, batch: QuestionBatch, smoothing: float) -> Tensor:
    """Cross-entropy of each question over its own options [B]; logits [B, O] of all the step's
    options.
    """
    seen = batch.seen
    log_p = logits.masked_fill(~seen, -1e4).log_softmax(-1)
    right = log_p.gather(1, batch.label[:, None].clamp(max=log_p.shape[1] - 1))[:, 0]
    even = (log_p * seen).sum(-1) / seen.sum(-1).clamp(min=1)
    return -(1 - smoothing) * right - smoothing * even


def batch_loss(
    model: DecisionModel, batch: QuestionBatch, vectors: Tensor, smoothing: float, lm_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted loss of one batch, its choice or yes/no part [B], and its next-token loss."""
    h, hidden = model.read(batch.sequences.ids, batch.sequences.rows)
    with torch.autocast(h.device.type, enabled=False):
        choice = choice_loss(model.choice_logits(h, vectors), batch, smoothing)
        yes = batch.label.clamp(max=1).float() * (1 - smoothing) + smoothing / 2
        noul = F.binary_cross_entropy_with_logits(model.noul_logits(h), yes, reduction="none")
    each = torch.where(batch.is_noul, noul, choice)
    loss = (each * batch.weight).sum()
    lm = loss.new_zeros(())
    if lm_weight:
        rows = hidden.flatten(0, 1)[batch.lm_rows]
        # the embedding starts at std 0.3, more than a tied head wants
        logits = F.linear(rows, model.model.embed_tokens.weight).float() * 0.25
        lm = F.cross_entropy(logits, batch.lm_targets)
        loss = loss + lm_weight * lm * len(rows) / 8192
    return loss, each.detach(), lm.detach()


def to_device(step: Step, device: torch.device) -> Step:
    """A copy of a step on the device."""

    def moved(padded: Padded) -> Padded:
        return Padded(padded.ids.to(device, non_blocking=True), padded.rows.to(device))

    batches = [
        QuestionBatch(
            moved(b.sequences),
            *(
                t.to(device, non_blocking=True)
                for t in (b.seen, b.label, b.is_noul, b.weight, b.lm_rows, b.lm_targets)
            ),
        )
        for b in step.batches
    ]
    return Step(moved(step.options), batches)


class Trainer:
    """One run: model, optimizers, moving average, schedule and log."""

    def __init__(
        self, args: argparse.Namespace, model: DecisionModel, device: torch.device
    ) -> None:
        self.args, self.model, self.device = args, model, device
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.optimizers = make_optimizers(model, args)
        self.step_count, self.seconds_before = 0, 0.0
        self.start(0.0)
        self.log = (args.out / "metrics.jsonl").open("a", encoding="utf-8")

    def write(self, **fields: Any) -> None:
        """One JSON line in the log and on the screen."""
        line = json.dumps({"step": self.step_count, "seconds": round(self.elapsed(), 1), **fields})
        self.log.write(line + "\n")
        self.log.flush()
        print(self.args.out.name, line, flush=True)

    def elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self.seconds_before + time.monotonic() - self.started

    def start(self, setup_seconds: float) -> None:
        """Starts the clock; the set-up counts as part of the asked minutes."""
        self.started = time.monotonic()
        self.budget = max(1.0, 60 * self.args.minutes - setup_seconds)

    def progress(self) -> float:
        """0 to 1: by steps or by time, whichever is further."""
        by_time: float = self.elapsed() / self.budget
        return max(self.step_count / int(self.args.steps), by_time)

    def learning_factor(self) -> float:
        """Linear warm-up, then half a cosine down to one per cent."""
        warm: float = min(1.0, (self.step_count + 1) / int(self.args.warmup))
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress()))))

    def train_step(self, step: Step) -> dict[str, Tensor]:
        """Forward, backward and update; options are encoded once and get their gradient last."""
        model, args = self.model, self.args
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * self.learning_factor()
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=args.bf16)
        with autocast:
            vectors, _ = model.read(step.options.ids, step.options.rows)
        leaf = vectors.detach().requires_grad_()
        losses, lms = [], []
        for batch in step.batches:
            with autocast:
                loss, _, lm = batch_loss(model, batch, leaf, args.smoothing, args.lm_weight)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            lms.append(lm)
        vectors.backward(leaf.grad)  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        decay = min(args.average, (1 + self.step_count) / (10 + self.step_count))
        with torch.no_grad():
            current = [p.detach() for p in model.parameters()]
            torch._foreach_lerp_(list(self.average.values()), current, 1 - decay)
        self.step_count += 1
        return {"loss": torch.stack(losses).sum(), "lm": torch.stack(lms).mean(), "grad": norm}

    def averaged_model(self) -> DecisionModel:
        """A copy with the averaged weights, rounded as the export will be."""
        copy = DecisionModel(self.model.model.shape).to(self.device)
        copy.load_state_dict(self.average)
        round_to_stored(copy)
        return copy.eval()

    def save(self) -> None:
        """The checkpoint a resumed run starts from, and the averaged weights as a folder."""
        extra = {
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step_count,
            "seconds": self.elapsed(),
        }
        save_checkpoint(self.model, self.args.out / "checkpoint.pt", extra)
        export(self.averaged_model(), self.args.out / "weights")

    def resume(self, path: Path) -> None:
        """Takes up a checkpoint: weights, average, optimizers, step and time."""
        saved = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.average = {name: saved["average"][name] for name in self.average}
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step_count, self.seconds_before = saved["step"], saved["seconds"]


def make_optimizers(model: DecisionModel, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW on everything, or Muon on the layers' matrices and AdamW on the rest; `peak` is the
    top rate.
    """
    matrices, embedding, rest = [], [], []
    for name, p in model.named_parameters():
        if "embed_tokens" in name:
            embedding.append(p)
        elif p.ndim == 2 and "layers" in name:
            matrices.append(p)
        else:
            rest.append(p)
    fused = matrices[0].is_cuda
    groups = [
        {"params": embedding, "weight_decay": args.weight_decay, "peak": 2 * args.lr},
        {"params": rest, "weight_decay": 0.0, "peak": args.lr},
    ]
    if args.optimizer == "adamw":
        groups.append({"params": matrices, "weight_decay": args.weight_decay, "peak": args.lr})
        return [torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=fused)]
    muon = torch.optim.Muon(
        [{"params": matrices, "peak": args.muon_lr}],
        lr=args.muon_lr,
        weight_decay=args.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=fused), muon]


def compile_layers(model: DecisionModel, try_step: Any) -> bool:
    """Compiles the layers for any batch and length; back to plain torch if a first step fails."""
    for layer in model.model.layers:
        layer.compile(dynamic=True)
    try:
        try_step()
    except (
        Exception
    ) as error:  # the compiler's errors have no common base; a run must not die of them
        print(f"compiling failed, going on without: {error!r}"[:2000], flush=True)
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer._compiled_call_impl = None
        return False
    return True


def validate(trainer: Trainer, corpus: Corpus) -> tuple[Scores, float]:
    """Scores of the averaged weights, and their mean over the groups that decide between runs."""
    scores = score(corpus, read_corpus(trainer.averaged_model(), corpus, trainer.device, 1024))
    decisive = [s.get("auc", s["accuracy"]) for g, s in scores.items() if is_decisive(g)]
    return scores, sum(decisive) / max(1, len(decisive))


def is_decisive(group: str) -> bool:
    """Whether a validation group counts when runs are compared: intents and dialogues."""
    return group.split("/", maxsplit=1)[0] in (*INTENT_SOURCES, "dialogue")
