"""Random requests in random company, forked and resumed anywhere, against each prompt alone.

What both `tests/deterministic` and `benchmarks/deterministic.py` run: every round goes through the
same executor, and the raw label logits of every question are compared bit by bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flide_engine.config import GRAIN
from flide_engine.families.base import Read
from flide_engine.layout.plan import Anchor, Mark
from flide_engine.layout.stream import Job
from flide_engine.layout.tree import build_forest
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
    """A question whose logits depend on its round."""

    prompt: Tokens
    jobs: list[Job]
    largest: float


@dataclass
class Bits:
    """Asks in company, then alone, and compares.

    labels: head rows of every question. vocabulary: token ids are below it.
    """

    runner: Runner
    labels: Tokens
    vocabulary: int
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
        together, anchors = self._run(jobs, len(prompts))
        for document, made in zip(owners, anchors, strict=True):
            for anchor in made:
                if anchor.position in kept[document]:
                    self.runner.drop(anchor)
                else:
                    kept[document][anchor.position] = anchor
        for prompt, logits in zip(prompts, together, strict=True):
            alone, _ = self._run([Job(build_forest([prompt]))], 1)
            self.compared += 1
            if not np.array_equal(logits.view(np.int32), alone[0].view(np.int32)):
                largest = float(np.abs(logits - alone[0]).max())
                self.differing.append(Difference(prompt, jobs, largest))

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

    def _run(self, jobs: list[Job], reads: int) -> tuple[list[Floats], Sequence[Sequence[Anchor]]]:
        asked = Asked.of([Read(i, self.labels, str(i)) for i in range(reads)])
        started = self.runner.start(jobs, asked)
        logits, hidden = started.pending.wait()
        return [asked.value(i, logits, hidden) for i in range(reads)], started.checkpoints
