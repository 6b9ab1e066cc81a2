"""Recomputed tokens against memory: `python -m benchmarks.checkpoints --data DIR`.

Replays agent trajectories step by step through the index, the mark policy and the pool's counts,
with no model: each step's history is tokenized, matched, "computed" from the checkpoint found, and
marked. Steps of different agents are interleaved at random. Compared: our policy, also with a fixed
part of the memory for states, and with the rows past the last grain kept as well; last grain only;
the rule of one mark at floor((P - 32) / 256) * 256 from 2,048 tokens on; and an oracle that never
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
from flide_engine.cache.arena import Counted
from flide_engine.cache.index import SLOT_PAGES, Freed, Match, PrefixIndex, grain_keys
from flide_engine.cache.marks import MarkPolicy
from flide_engine.config import GRAIN
from flide_engine.families.tokenizer import TextTokenizer
from flide_engine.layout.plan import Ints
from flide_engine.resolve import EMBEDDED

Positions = Callable[[int, int, int], list[int]]
PAGE_MB = 0.79
TAIL_PAGES = 13
"""A hot tail of the 0.8B shape: up to 63 rows of keys, values, gates of all layers, 10 MB."""
BUDGETS_GB = (1, 2, 4, 8, 12, 16, 32, 256)


def peer_rule(state: int, resumed: int, agreed: int) -> list[int]:
    """One mark, on a grid of 256 tokens, for states of 2,048 tokens and more."""
    del agreed
    position = (state - 32) // 256 * 256
    return [position] if state >= 2048 and position > resumed else []


def ours(state: int, resumed: int, agreed: int) -> list[int]:
    """The engine's rule."""
    return MarkPolicy().positions(state, resumed, agreed)


def last_grain(state: int, resumed: int, agreed: int) -> list[int]:
    """One mark, as late as can be."""
    return MarkPolicy(spacing=0, divergence=False).positions(state, resumed, agreed)


@dataclass(frozen=True)
class Policy:
    """Where checkpoints are taken, and what memory is kept for: see `Memory`."""

    positions: Positions
    split: float = 0.0
    tails: bool = False


POLICIES = {
    "ours": Policy(ours),
    "ours, a quarter for states only": Policy(ours, split=0.25),
    "ours, with hot tails": Policy(ours, tails=True),
    "last grain only": Policy(last_grain),
    "one mark, grid of 256": Policy(peer_rule),
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
            shared = max(shared, agreement(other, step.tokens))
        computed += len(step.tokens) - shared + step.questions
        if step.agent not in seen:
            first.append(step.tokens)
        seen[step.agent] = step.tokens
    return computed


class Memory:
    """Checkpoints under a budget of pages, by counts alone."""

    def __init__(self, budget: int, split: float, tails: bool) -> None:
        """split: part of the budget that is for states and for nothing else; 0: what is free is for
        either. tails: whether rows past the last grain are kept where nothing else is.
        """
        self.index = PrefixIndex()
        self.pages, self.slots = Counted("pages", 1 << 20), Counted("slots", 1 << 16)
        self._budget, self._split = budget, split
        self._tails: dict[int, Ints] | None = {} if tails else None  # oldest first, by slot

    @property
    def held(self) -> int:
        """Pages' worth in use, tails aside."""
        return self.pages.held + SLOT_PAGES * self.slots.held

    def resume(self, step: Step, now: float) -> tuple[Match, int]:
        """What is known of a step, and where its computation starts."""
        match = self.index.match("", step.tokens, step.keys, step.settled)
        if match.checkpoint is None:
            return match, 0
        match.checkpoint.used, match.checkpoint.hits = now, match.checkpoint.hits + 1
        start = match.checkpoint.position
        if self._tails is not None and (tail := self._tails.get(match.checkpoint.slot)) is not None:
            start += agreement(tail, step.tokens[start : step.settled])
        return match, start

    def keep(self, step: Step, match: Match, position: int, now: float) -> None:
        """A checkpoint of a step."""
        new = self.pages.take(position // GRAIN - len(match.pages))
        slot = self.slots.take(1)
        chain = np.concatenate([match.pages, new]).astype(np.int32)
        _, taken, kept = self.index.insert(
            "", step.tokens, step.keys, chain, int(slot[0]), float(now)
        )
        self.pages.release(np.setdiff1d(new, taken).astype(np.int32))
        if not kept:
            self.slots.release(slot)
        elif self._tails is not None and position == step.settled // GRAIN * GRAIN:
            self._tails[int(slot[0])] = step.tokens[position : step.settled]
            if match.checkpoint is not None:  # what is continued is not turned back to soon
                self._tails.pop(match.checkpoint.slot, None)

    def make_room(self, now: float) -> None:
        """Gives up what does not fit, tails first."""
        victims = self.index.victims(now)
        while self._too_much() and (victim := next(victims, None)) is not None:
            self._free(self.index.remove(victim))
        tails = self._tails or {}
        while tails and self.held + TAIL_PAGES * len(tails) > self._budget:
            del tails[next(iter(tails))]

    def drop_all(self) -> None:
        """Gives up everything; nothing may be left."""
        for victim in self.index.victims(0.0):
            self._free(self.index.remove(victim))
        assert self.held == 0, "the replay's accounting does not balance"

    def _too_much(self) -> bool:
        if not self._split:
            return self.held > self._budget
        states = SLOT_PAGES * self.slots.held
        return states > self._split * self._budget or (
            self.pages.held > (1 - self._split) * self._budget
        )

    def _free(self, freed: Freed) -> None:
        self.pages.release(freed.pages)
        self.slots.release(freed.slots)
        if self._tails is not None:
            self._tails.pop(int(freed.slots[0]), None)


def agreement(a: Ints, b: Ints) -> int:
    """How many tokens two texts begin with in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def replay(steps: list[Step], policy: "Policy", budget_pages: int) -> tuple[int, int]:
    """(tokens computed, most memory held in pages) of a policy under a budget."""
    memory = Memory(budget_pages, policy.split, policy.tails)
    computed, most = 0, 0
    for now, step in enumerate(steps):
        match, start = memory.resume(step, float(now))
        computed += len(step.tokens) - start + step.questions
        resumed = len(match.pages) * GRAIN
        for position in policy.positions(step.settled, resumed, match.agreed):
            memory.keep(step, match, position, float(now))
        memory.make_room(float(now))
        most = max(most, memory.held)
    memory.drop_all()
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
    for name, policy in POLICIES.items():
        for budget in BUDGETS_GB:
            computed, most = replay(steps, policy, int(budget * 1000 / PAGE_MB))
            row: Row = {
                "engine": "ours" if policy.positions is not peer_rule else "emulated rule",
                "work": "agent_trajectories",
                "policy": name,
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
