"""Training the embedded decision model: `python -m tiny_model.train COMMAND --help`.

tokenizer  trains the vocabulary            train     trains a model, then evaluates it
export     checkpoint -> weights folder     evaluate  weights folder -> table and results.json
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from tiny_model.batches import DEFAULT_COUNTS, Step, StepPlan, StepStream, Variation
from tiny_model.data import Corpus, label_sets, read_records, test_corpus, training_corpus
from tiny_model.evaluate import (
    WORKLOADS,
    Scores,
    keep_some,
    read_corpus,
    score,
    table,
    workload_corpora,
)
from tiny_model.export import decision_config, export, load, model_from_checkpoint
from tiny_model.model import DecisionModel
from tiny_model.shape import ModelShape
from tiny_model.tokenizer import UserEncoder, merge_parents, train_tokenizer, training_texts
from tiny_model.trainer import Trainer, compile_layers, to_device, validate


def forever(loader: "DataLoader[Step]", device: torch.device) -> Iterator[Step]:
    """Steps on the device."""
    for step in loader:
        yield to_device(step, device)


def load_corpora(args: argparse.Namespace, encoder: UserEncoder) -> tuple[Corpus, Corpus]:
    """The encoded training corpus and a validation corpus of at most `valid_cap` questions a
    group.
    """
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
    begun = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    encoder = UserEncoder(args.tokenizer)
    training, validation = load_corpora(args, encoder)
    plan = StepPlan({group: max(1, round(n * args.batch)) for group, n in DEFAULT_COUNTS.items()})
    stream = StepStream(training, merge_parents(args.tokenizer), plan, variation(args), args.seed)
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=args.workers,
        prefetch_factor=4 if args.workers else None,
    )
    model = new_model(args, encoder.vocab_size).to(device)
    trainer = Trainer(args, model, device)
    if args.resume:
        trainer.resume(args.resume)
    steps = forever(loader, device)
    if args.compile:
        first = [next(steps) for _ in range(2)]
        trainer.write(
            compiled=compile_layers(model, lambda: [trainer.train_step(s) for s in first])
        )
    trainer.start(time.monotonic() - begun)
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
    shape = ModelShape(
        vocab_size, args.hidden, args.intermediate, args.layers, heads, kv_heads, heads
    )
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tokenizer, train, exporting, evaluating = (
        commands.add_parser(name) for name in ("tokenizer", "train", "export", "evaluate")
    )
    for each in (tokenizer, train, evaluating):
        each.add_argument("--data", type=Path, required=True, help="folder of the .jsonl.gz files")
        each.add_argument(
            "--tokenizer", type=Path, default=Path("tiny_model/weights/tokenizer.json")
        )
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
