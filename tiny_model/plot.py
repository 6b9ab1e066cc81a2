"""Draws loss curves from metrics: `python -m tiny_model.plot METRICS... --out PNG`."""

import argparse
import json
from pathlib import Path
from typing import Any

GROUPS = ("banking77/choice", "clinc150/choice", "hwu64/choice", "snips/choice", "dialogue/choice")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of one run."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw(stages: list[Path], out: Path) -> None:
    """Loss and validation accuracy over steps; the stages follow one another."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    start = 0
    for number, path in enumerate(stages, 1):
        rows = read_metrics(path)
        losses = [row for row in rows if "loss" in row]
        steps = [start + row["step"] for row in losses]
        left.plot(steps, [row["loss"] for row in losses], label=f"stage {number}: whole loss")
        left.plot(steps, [row["lm"] for row in losses], ls=":", label=f"stage {number}: next token")
        marks = [row for row in rows if "validation" in row]
        for index, group in enumerate(GROUPS):
            right.plot(
                [start + row["step"] for row in marks],
                [row["validation"][group]["accuracy"] for row in marks],
                "o-",
                color=f"C{index}",
                label=group.split("/", maxsplit=1)[0] if number == 1 else None,
            )
        start += rows[-1]["step"]
    left.set(title="training loss", xlabel="step", ylabel="weighted loss")
    right.set(title="validation accuracy, all options offered", xlabel="step", ylim=(0, 1))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics of each stage, in order")
    parser.add_argument("--out", type=Path, default=Path("tiny_model/loss_curve.png"))
    args = parser.parse_args()
    draw(args.metrics, args.out)


if __name__ == "__main__":
    main()
