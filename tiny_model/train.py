"""Training the embedded decision model: `python -m tiny_model.train COMMAND --help`.

tokenizer  trains the vocabulary            train     trains a model, then evaluates it
export     checkpoint -> weights folder     evaluate  weights folder -> table and results.json
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tiny_model.batches import (
    DEFAULT_COUNTS,
    Padded,
    QuestionBatch,
    Step,
    StepPlan,
    StepStream,
    Variation,
)
from tiny_model.data import Corpus, label_sets, read_records, test_corpus, training_corpus
from tiny_model.evaluate import WORKLOADS, Scores, keep_some, read_corpus, score, table, workload_corpora
from tiny_model.export import (
    decision_config,
    export,
    load,
    model_from_checkpoint,
    round_to_stored,
    save_checkpoint,
)
from tiny_model.model import DecisionModel
from tiny_model.shape import ModelShape
from tiny_model.tokenizer import UserEncoder, merge_parents, train_tokenizer, training_texts


def choice_loss(logits: Tensor, batch: QuestionBatch, smoothing: float) -> Tensor:
    """Cross-entropy of each question over its own options [B]; logits [B, O] of all the step's options."""
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
        # the embedding starts at std 0.5, far above what a tied head wants: scaled as attention scores are
        logits = F.linear(rows, model.model.embed_tokens.weight).float() * rows.shape[-1] ** -0.5
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

    def __init__(self, args: argparse.Namespace, model: DecisionModel, device: torch.device) -> None:
        self.args, self.model, self.device = args, model, device
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.optimizers = make_optimizers(model, args)
        self.step_count, self.seconds_before = 0, 0.0
        self.started = time.monotonic()
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

    def progress(self) -> float:
        """0 to 1: by steps or by time, whichever is further."""
        return max(self.step_count / self.args.steps, self.elapsed() / (60 * self.args.minutes))

    def learning_factor(self) -> float:
        """Linear warm-up, then half a cosine down to one per cent."""
        warm = min(1.0, (self.step_count + 1) / self.args.warmup)
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress()))))

    def train_step(self, step: Step) -> dict[str, float]:
        """Forward, backward and update; options are encoded once and get their gradient last."""
        model, args = self.model, self.args
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * self.learning_factor()
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=args.bf16)
        with autocast:
            vectors, _ = model.read(step.options.ids, step.options.rows)
        leaf = vectors.detach().requires_grad_()
        total, lms = 0.0, []
        for batch in step.batches:
            with autocast:
                loss, _, lm = batch_loss(model, batch, leaf, args.smoothing, args.lm_weight)
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() + total
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
        return {"loss": total, "lm": torch.stack(lms).mean(), "grad": norm}

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
    """AdamW on everything, or Muon on the layers' matrices and AdamW on the rest; `peak` is the top rate."""
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
    except Exception as error:  # the compiler's errors have no common base; a run must not die of them
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
    return group.split("/")[0] in ("banking77", "clinc150", "hwu64", "snips", "dialogue")


def forever(loader: "DataLoader[Step]", device: torch.device) -> Iterator[Step]:
    """Steps on the device."""
    for step in loader:
        yield to_device(step, device)


def load_corpora(args: argparse.Namespace, encoder: UserEncoder) -> tuple[Corpus, Corpus]:
    """The encoded training corpus and a validation corpus of at most `valid_cap` questions a group."""
    records = list(read_records(args.data / "train.jsonl.gz"))
    labels = label_sets(records)
    training = training_corpus(records, labels, args.extra_out_of_scope)
    validation = test_corpus(list(read_records(args.data / "validation.jsonl.gz")), labels)
    if args.valid_cap:
        keep_some(validation, args.valid_cap)
    for corpus in (training, validation):
        corpus.encode(encoder)
    return training, validation


def run_train(args: argparse.Namespace) -> None:
    """Trains until the steps or the minutes are over, validating and saving on the way."""
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    encoder = UserEncoder(args.tokenizer)
    training, validation = load_corpora(args, encoder)
    plan = StepPlan({group: max(1, round(n * args.batch)) for group, n in DEFAULT_COUNTS.items()})
    stream = StepStream(training, merge_parents(args.tokenizer), plan, variation(args), args.seed)
    loader = DataLoader(stream, batch_size=None, num_workers=args.workers, prefetch_factor=4 if args.workers else None)
    model = new_model(args, encoder.vocab_size).to(device)
    trainer = Trainer(args, model, device)
    if args.resume:
        trainer.resume(args.resume)
    steps = forever(loader, device)
    if args.compile:
        first = [next(steps) for _ in range(2)]
        trainer.write(compiled=compile_layers(model, lambda: [trainer.train_step(s) for s in first]))
    trainer.started = time.monotonic()
    best, total = -1.0, None
    while trainer.progress() < 1.0:
        model.train()
        total = trainer.train_step(next(steps))
        if trainer.step_count % 20 == 0:
            trainer.write(**{name: round(float(value), 4) for name, value in total.items()})
        if trainer.step_count % args.every == 0 or trainer.progress() >= 1.0:
            scores, mean = validate(trainer, validation)
            trainer.write(validation=scores, mean=round(mean, 4))
            if mean > best:
                best = mean
                trainer.save()
    del loader


def variation(args: argparse.Namespace) -> Variation:
    """The text changes of a run, scaled by one number."""
    base, scale = Variation(), args.vary
    return Variation(
        base.drop_intent * scale,
        base.drop_other * scale,
        base.drop_option * scale,
        base.split * scale,
        base.shorter_option,
        base.paraphrase,
        base.no_speaker,
    )


def new_model(args: argparse.Namespace, vocab_size: int) -> DecisionModel:
    """A fresh model of the asked size, or one warm-started from a weights folder."""
    if args.init:
        source = load(args.init)
        model = DecisionModel(source.model.shape, args.dropout)
        model.load_state_dict(source.state_dict())
        return model
    heads = args.hidden // 64
    kv_heads = 2 if heads % 2 == 0 else 1
    shape = ModelShape(vocab_size, args.hidden, args.intermediate, args.layers, heads, kv_heads, heads)
    return DecisionModel(shape, args.dropout)


def run_tokenizer(args: argparse.Namespace) -> None:
    """Trains the vocabulary on the training records."""
    texts = training_texts(read_records(args.data / "train.jsonl.gz"))
    train_tokenizer(texts, args.vocab).save(str(args.tokenizer))


def run_export(args: argparse.Namespace) -> None:
    """Writes the weights folder of a checkpoint's averaged weights."""
    document = decision_config(args.name, args.version, args.release_date, args.description)
    model = load(args.weights) if args.weights else model_from_checkpoint(args.checkpoint, True)
    export(model, args.out, document)


def run_evaluate(args: argparse.Namespace) -> None:
    """Evaluates a weights folder on validation and workload files; float32 throughout."""
    device = torch.device(args.device)
    model = load(args.weights).to(device).eval()
    encoder = UserEncoder(args.tokenizer)
    results: dict[str, Scores] = {}
    if not args.no_validation:
        labels = label_sets(list(read_records(args.data / "train.jsonl.gz")))
        corpus = test_corpus(list(read_records(args.data / "validation.jsonl.gz")), labels)
        corpus.encode(encoder)
        results["validation"] = score(corpus, read_corpus(model, corpus, device))
    for name, corpus in workload_corpora(args.data, tuple(args.files), encoder, args.cap).items():
        results[name] = score(corpus, read_corpus(model, corpus, device))
        args.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results), flush=True)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    tokenizer, train, exporting, evaluating = (
        commands.add_parser(name) for name in ("tokenizer", "train", "export", "evaluate")
    )
    for each in (tokenizer, train, evaluating):
        each.add_argument("--data", type=Path, required=True, help="folder of the .jsonl.gz files")
        each.add_argument("--tokenizer", type=Path, default=Path("tiny_model/weights/tokenizer.json"))
    for each in (train, evaluating):
        each.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    tokenizer.add_argument("--vocab", type=int, default=8192)
    _train_arguments(train)
    exporting.add_argument("--checkpoint", type=Path)
    exporting.add_argument("--weights", type=Path, help="a weights folder instead of a checkpoint")
    exporting.add_argument("--out", type=Path, required=True)
    for name in ("name", "version", "release-date", "description"):
        exporting.add_argument(f"--{name}", required=True)
    evaluating.add_argument("--weights", type=Path, default=Path("tiny_model/weights"))
    evaluating.add_argument("--results", type=Path, required=True)
    evaluating.add_argument("--files", nargs="*", default=list(WORKLOADS))
    evaluating.add_argument("--cap", type=int, help="at most so many questions of each group")
    evaluating.add_argument("--no-validation", action="store_true")
    return parser.parse_args()


def _train_arguments(train: argparse.ArgumentParser) -> None:
    train.add_argument("--out", type=Path, required=True, help="folder of the run")
    train.add_argument("--init", type=Path, help="weights folder to start from")
    train.add_argument("--resume", type=Path, help="checkpoint to go on from")
    train.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    train.add_argument("--no-bf16", dest="bf16", action="store_false")
    train.add_argument("--compile", action="store_true")
    numbers: dict[str, int | float] = {
        "seed": 1, "steps": 3000, "minutes": 8.0, "warmup": 100, "every": 250, "workers": 3,
        "hidden": 256, "intermediate": 768, "layers": 8, "batch": 1.0, "valid-cap": 1200,
        "extra-out-of-scope": 400, "lr": 2e-3, "muon-lr": 2e-3, "weight-decay": 0.1,
        "dropout": 0.1, "smoothing": 0.05, "lm-weight": 0.2, "vary": 1.0, "average": 0.998,
        "clip": 1.0,
    }  # fmt: skip
    for name, default in numbers.items():
        train.add_argument(f"--{name}", type=type(default), default=default)


def main() -> None:
    """Runs the asked command."""
    args = parse_args()
    {
        "tokenizer": run_tokenizer,
        "train": run_train,
        "export": run_export,
        "evaluate": run_evaluate,
    }[args.command](args)


if __name__ == "__main__":
    main()
