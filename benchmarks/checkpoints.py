"""Recomputed tokens against memory: `python -m benchmarks.checkpoints --data DIR`.

Replays agent trajectories step by step through the index, the mark policy and the pool's counts,
with no model: each step's history is tokenized, matched, "computed" from the checkpoint found, and
marked. Steps of different agents are interleaved at random. Compared: our policy, the rule of one
mark at floor((P - 32) / 256) * 256 from 2,048 tokens on, last grain only, and an oracle that never
computes a token twice. The budget is swept; memory is counted in pages of the 0.8B shape, a slot
weighing 25.
"""

import argparse
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results_file import RESULTS, Row, stamp, write
from flide_engine.cache.index import SLOT_PAGES, PrefixIndex, grain_keys
from flide_engine.cache.marks import MarkPolicy
from flide_engine.cache.pool import Counted
from flide_engine.families.tokenizer import TextTokenizer
from flide_engine.layout.plan import Ints
from flide_engine.resolve import EMBEDDED

Positions = Callable[[int, int, int], list[int]]
PAGE_MB = 0.79
BUDGETS_GB = (1, 2, 4, 8, 12, 16, 32, 256)


def peer_rule(state: int, resumed: int, agreed: int) -> list[int]:
    """One mark, on a grid of 256 tokens, for states of 2,048 tokens and more."""
    del agreed
    position = (state - 32) // 256 * 256
    return [position] if state >= 2048 and position > resumed else []


POLICIES: dict[str, Positions] = {
    "ours": lambda state, resumed, agreed: MarkPolicy().positions(state, resumed, agreed),
    "last grain only": lambda state, resumed, agreed: MarkPolicy(
        spacing=0, divergence=False
    ).positions(state, resumed, agreed),
    "one mark, grid of 256": peer_rule,
}


@dataclass(frozen=True)
class Step:
    """One step of one agent: its whole history, what of it is settled, its questions' tokens."""

    agent: int
    tokens: Ints
    settled: int
    questions: int
    keys: list[bytes]


def steps_of(path: Path, opening: str, seed: int = 0) -> list[Step]:
    """All steps of all trajectories behind an opening, agents interleaved, each in order."""
    tokenizer = TextTokenizer(EMBEDDED)
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    queues: list[Iterator[Step]] = []
    for agent, row in enumerate(rows):
        queues.append(_agent_steps(agent, row["steps"], opening, tokenizer))
    rng = random.Random(seed)
    found: list[Step] = []
    while queues:
        at = rng.randrange(len(queues))
        step = next(queues[at], None)
        if step is None:
            queues.pop(at)
        else:
            found.append(step)
    return found


def _agent_steps(
    agent: int, steps: list[Any], opening: str, tokenizer: TextTokenizer
) -> Iterator[Step]:
    text = opening
    for step in steps:
        text += step["append"]
        tokens, settled = tokenizer.encode_growing(text)
        asked = sum(len(tokenizer.encode(str(q["instructions"]))) + 2 for q in step["questions"])
        yield Step(agent, tokens, settled, asked, grain_keys(tokens))


def oracle(steps: list[Step]) -> int:
    """What nobody can avoid, at tokens: questions, and what differs from every earlier history."""
    computed = 0
    seen: dict[int, Ints] = {}
    first: list[Ints] = []
    for step in steps:
        before = [seen[step.agent]] if step.agent in seen else first[-64:]
        shared = 0
        for other in before:
            n = min(len(other), len(step.tokens))
            differs = other[:n] != step.tokens[:n]
            shared = max(shared, int(differs.argmax()) if differs.any() else n)
        computed += len(step.tokens) - shared + step.questions
        if step.agent not in seen:
            first.append(step.tokens)
        seen[step.agent] = step.tokens
    return computed


def replay(steps: list[Step], positions: Positions, budget_pages: int) -> tuple[int, int]:
    """(tokens computed, most memory held in pages) of a policy under a budget."""
    index = PrefixIndex()
    pages, slots = Counted("pages", 1 << 20), Counted("slots", 1 << 16)
    computed, most = 0, 0

    def held() -> int:
        return (len(pages.counts) - pages.free) + SLOT_PAGES * (len(slots.counts) - slots.free)

    for now, step in enumerate(steps):
        state = step.settled
        match = index.match("", step.tokens, step.keys, state)
        start = match.checkpoint.position if match.checkpoint else 0
        if match.checkpoint is not None:
            match.checkpoint.used, match.checkpoint.hits = float(now), match.checkpoint.hits + 1
        computed += len(step.tokens) - start + step.questions
        for position in positions(state, start, match.agreed):
            new = pages.take(position // 64 - len(match.pages))
            slot = slots.take(1)
            chain = np.concatenate([match.pages, new]).astype(np.int32)
            _, taken, kept = index.insert(
                "", step.tokens, step.keys, chain, int(slot[0]), float(now)
            )
            pages.release(np.setdiff1d(new, taken))
            if not kept:
                slots.release(slot)
        while held() > budget_pages and (freed := index.evict(float(now))) is not None:
            pages.release(freed.pages)
            slots.release(freed.slots)
        most = max(most, held())
    while (freed := index.evict(0.0)) is not None:
        pages.release(freed.pages)
        slots.release(freed.slots)
    assert held() == 0, "the replay's accounting does not balance"
    return computed, most


def plot(rows: list[Row], path: Path) -> None:
    """Computed tokens over the oracle's against the budget, a line a policy."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for policy in POLICIES:
        mine = [r for r in rows if r["policy"] == policy]
        axes.plot(
            [float(r["budget_gb"] or 0) for r in mine],
            [float(r["computed_over_oracle"] or 0) for r in mine],
            marker="o",
            label=policy,
        )
    axes.axhline(1.0, color="black", linewidth=0.8, label="oracle")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("budget, GB (0.8B shape)")
    axes.set_ylabel("tokens computed / oracle's")
    axes.set_title("75 agents, 3,283 steps, histories to 30,000 tokens, interleaved")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Writes benchmarks/results/checkpoints.json and checkpoints.png."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of workload files")
    args = parser.parse_args()
    steps = steps_of(args.data / "agent_trajectories.jsonl.gz", "")
    best = oracle(steps)
    print(f"{len(steps)} steps, {sum(len(s.tokens) for s in steps)} tokens asked, oracle {best}")
    rows: list[Row] = []
    for policy, positions in POLICIES.items():
        for budget in BUDGETS_GB:
            computed, most = replay(steps, positions, int(budget * 1000 / PAGE_MB))
            row: Row = {
                "engine": "ours" if policy != "one mark, grid of 256" else "emulated rule",
                "work": "agent_trajectories",
                "policy": policy,
                "budget_gb": budget,
                "held_gb": round(most * PAGE_MB / 1000, 2),
                "computed": computed,
                "computed_over_oracle": round(computed / best, 4),
            }
            print(row, flush=True)
            rows.append(row)
    stamped = stamp(rows)
    plot(stamped, RESULTS / "checkpoints.png")
    print("written to", write("checkpoints", stamped, ("work", "policy", "budget_gb")))


if __name__ == "__main__":
    main()
