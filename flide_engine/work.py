"""A request on its way through the engine: the pieces it is run in, and what has been read so
far.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flide_engine.api import DecisionResponse
from flide_engine.families.base import Rendered
from flide_engine.layout.buckets import Replay
from flide_engine.layout.plan import Anchor, Mark
from flide_engine.layout.stream import Job
from flide_engine.layout.tree import build_forest


@dataclass(eq=False)
class RequestWork:
    """One request. Only the engine's thread uses it once it is queued.

    replays: its pieces, `at` the next one. anchors: checkpoints held between pieces, by the piece
    that took them. values: by read. deadline: on the engine's clock; timeout: the seconds it came
    from.
    """

    rendered: Rendered
    future: "Future[DecisionResponse]"
    deadline: float | None
    timeout: float | None
    replays: list[Replay]
    at: int = 0
    anchors: dict[int, Anchor] = field(default_factory=dict)
    values: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # by read

    @property
    def tokens(self) -> int:
        """New tokens of the next piece."""
        return self.replays[self.at].tokens

    @property
    def waiting_tokens(self) -> int:
        """New tokens of all pieces to come."""
        return sum(replay.tokens for replay in self.replays[self.at :])

    @property
    def is_long(self) -> bool:
        """Whether it takes several rounds."""
        return len(self.replays) > 1

    def is_gone(self, now: float) -> bool:
        """Whether its caller has left or its deadline has passed."""
        return self.future.cancelled() or (self.deadline is not None and now > self.deadline)

    def job(self) -> Job:
        """The next piece as a job of a round."""
        replay = self.replays[self.at]
        anchor = self.anchors.get(replay.resumes)
        texts = [self.rendered.prompts[i] for i in replay.prompts]
        if replay.stop is None:
            return Job(build_forest(texts, replay.start), anchor)
        trunk = build_forest([texts[0][: replay.stop]], replay.start)
        return Job(trunk, anchor, (Mark(0, replay.stop),), reads=False)

    def reads(self) -> list[int]:
        """Indices of the reads that the next piece gives, in the order of its prompts."""
        replay = self.replays[self.at]
        if replay.stop is not None:
            return []
        return [
            i
            for p in replay.prompts
            for i, read in enumerate(self.rendered.reads)
            if read.prompt == p
        ]

    def spent_anchors(self) -> list[Anchor]:
        """Checkpoints that no piece to come resumes from; they are the caller's to drop."""
        needed = {replay.resumes for replay in self.replays[self.at :]}
        return [self.anchors.pop(i) for i in list(self.anchors) if i not in needed]
