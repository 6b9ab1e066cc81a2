"""Random requests in random company, forked and resumed anywhere, against each prompt alone.

What both `tests/deterministic` and `benchmarks/deterministic.py` run: every round goes through the
same executor, and the raw label logits of every question are compared bit by bit.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flide_engine.cache.pool import Pool
from flide_engine.config import GRAIN
from flide_engine.device_plan import Capacity, Tables
from flide_engine.families.base import Read
from flide_engine.graphs import TILE
from flide_engine.kernels.triton_kernels import TRITON
from flide_engine.layout.plan import Anchor, Mark, RoundPlan
from flide_engine.layout.stream import Job, lay_out
from flide_engine.layout.tree import build_forest
from flide_engine.models.qwen3_5 import Qwen35
from flide_engine.readout import Asked
from flide_engine.runner import Runner

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Sizes:
    """How large requests are: tokens of a document, questions, tokens of a question, requests."""

    document: int
    questions: int
    question: int
    company: int


@dataclass
class Difference:
    """A question whose logits depend on its round: tokens of its prompt, jobs of the round, largest
    difference of a logit, and where it begins, if that was looked for.
    """

    tokens: int
    jobs: int
    largest: float
    where: str


def first_difference(
    model: Qwen35, pool: Pool, jobs: Sequence[Job], read: int, prompt: Tokens
) -> str:
    """Where the residual stream of a prompt in company leaves that of the prompt alone: the half of
    a layer and the chain position. Runs both again, kernel by kernel.

    read: which of the round's reads is the prompt's.
    """
    streams = []
    for round_jobs in (jobs, [Job(build_forest([prompt]))]):
        layout = lay_out(round_jobs)
        pages, slots = pool.take(layout.num_pages, layout.num_slots)
        plan = pool.placed(layout.bind(pages, slots)[0])
        seen: list[Tensor] = []

        def record(
            x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, seen: list[Tensor] = seen
        ) -> tuple[Tensor, Tensor]:
            total, normed = TRITON.add_rms_norm(x, delta, weight, eps)
            seen.append(total)
            return total, normed

        tables = Tables(Capacity.exactly(plan, TILE), pool.device)
        assert tables.fill(plan, Asked.every_vector(len(plan.read_rows)))
        tables.upload()
        twin = copy(model)
        twin.ops = replace(model.ops, add_rms_norm=record)
        twin.forward(tables.stream, pool.tensors)
        pool.pages.release(pages)
        pool.slots.release(slots)
        rows = rows_of(plan, read if round_jobs is jobs else 0)
        streams.append([s[rows] for s in seen if len(s) == len(plan.tokens)])
    for half, (together, alone) in enumerate(zip(*streams, strict=True)):
        differ = (together != alone[len(alone) - len(together) :]).any(1).nonzero()
        if len(differ):
            position = len(alone) - len(together) + int(differ[0])
            return f"layer {half // 2}, {'mixer' if half % 2 else 'input'}, position {position}"
    return "not seen kernel by kernel"


def rows_of(plan: RoundPlan, read: int) -> list[int]:
    """Stream rows of a read's prompt, in order of position, from where its round resumed."""
    node = int(np.searchsorted(plan.cu_seqlens, plan.read_rows[read], side="right")) - 1
    rows: list[int] = []
    while node >= 0:
        rows = [*range(plan.cu_seqlens[node], plan.cu_seqlens[node + 1]), *rows]
        node = int(plan.parents[node])
    return rows


@dataclass
class Bits:
    """Asks in company, then alone, and compares.

    labels: head rows of every question. vocabulary: token ids are below it. model, pool: of the
    runner, to look for where a difference begins.
    """

    runner: Runner
    labels: Tokens
    vocabulary: int
    model: Qwen35 | None = None
    pool: Pool | None = None
    compared: int = 0
    differing: list[Difference] = field(default_factory=list)
    resumed: int = 0

    def check(self, rng: np.random.Generator, sizes: Sizes, rounds: int, documents: int) -> None:
        """Rounds about a few documents: later ones resume from what earlier ones have left."""
        texts = [self._random(rng, sizes.document) for _ in range(documents)]
        kept: list[dict[int, Anchor]] = [{} for _ in texts]
        try:
            for _ in range(rounds):
                self._round(rng, sizes, texts, kept)
        finally:
            for anchors in kept:
                for anchor in anchors.values():
                    self.runner.drop(anchor)

    def _random(self, rng: np.random.Generator, count: int) -> Tokens:
        return rng.integers(0, self.vocabulary, count).astype(np.int32)

    def _round(
        self,
        rng: np.random.Generator,
        sizes: Sizes,
        texts: Sequence[Tokens],
        kept: Sequence[dict[int, Anchor]],
    ) -> None:
        jobs: list[Job] = []
        prompts: list[Tokens] = []
        owners: list[int] = []
        for document in rng.permutation(len(texts))[: rng.integers(1, sizes.company + 1)].tolist():
            state = texts[document][: rng.integers(0, len(texts[document]) + 1)]
            asked = list(self._questions(rng, state, sizes))
            job = self._job(rng, asked, len(state), kept[document])
            jobs.append(job)
            owners.append(document)
            prompts += asked
        together, anchors = self.run(jobs, len(prompts))
        for read, (prompt, logits) in enumerate(zip(prompts, together, strict=True)):
            alone, _ = self.run([Job(build_forest([prompt]))], 1)
            self.compared += 1
            if not np.array_equal(logits.view(np.int32), alone[0].view(np.int32)):
                largest = float(np.abs(logits - alone[0]).max())
                where = ""
                if self.model is not None and self.pool is not None:
                    where = first_difference(self.model, self.pool, jobs, read, prompt)
                self.differing.append(Difference(len(prompt), len(jobs), largest, where))
        for document, made in zip(owners, anchors, strict=True):
            for anchor in made:
                if anchor.position in kept[document]:
                    self.runner.drop(anchor)
                else:
                    kept[document][anchor.position] = anchor

    def _questions(self, rng: np.random.Generator, state: Tokens, sizes: Sizes) -> Iterator[Tokens]:
        """Prompts about a state; some groups of them begin alike."""
        opening = self._random(rng, int(rng.integers(0, 3)) * sizes.question)
        for i in range(int(rng.integers(1, sizes.questions + 1))):
            own = self._random(rng, int(rng.integers(1, sizes.question + 1)))
            parts = [state, opening, own] if i % 2 else [state, own]
            yield np.concatenate(parts).astype(np.int32)

    def _job(
        self,
        rng: np.random.Generator,
        prompts: Sequence[Tokens],
        state: int,
        kept: dict[int, Anchor],
    ) -> Job:
        """Resumed from a checkpoint at random, or from none; leaves one at random."""
        agreed = min(state, min(map(len, prompts)) - 1)
        places = [None, *(p for p in kept if p <= agreed)]
        place = places[rng.integers(len(places))]
        anchor = kept[place] if place is not None else None
        start = anchor.position if anchor else 0
        self.resumed += len(prompts) if anchor else 0
        forest = build_forest(list(prompts), start)
        root = forest.nodes[0]
        grains = range(root.start // GRAIN + 1, min(root.end, state) // GRAIN + 1)
        marks = (Mark(0, GRAIN * int(rng.choice(grains))),) if grains else ()
        return Job(forest, anchor, marks)

    def run(self, jobs: list[Job], reads: int) -> tuple[list[Floats], Sequence[Sequence[Anchor]]]:
        """One round: the logits of its reads, and the checkpoints of its jobs."""
        asked = Asked.of([Read(i, self.labels, str(i)) for i in range(reads)])
        started = self.runner.start(jobs, asked)
        logits, hidden = started.pending.wait()
        return [asked.value(i, logits, hidden) for i in range(reads)], started.checkpoints
