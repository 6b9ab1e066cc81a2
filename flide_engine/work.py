"""A request on its way through the engine: its pieces, and what has been read so far."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flide_engine.cache.disk_file import Loaded
from flide_engine.cache.index import Checkpoint
from flide_engine.config import GRAIN
from flide_engine.errors import EngineError, FlideError
from flide_engine.families.base import Rendered
from flide_engine.layout.buckets import Replay, cut_replays, halved
from flide_engine.layout.plan import Anchor


@dataclass(frozen=True)
class Resume:
    """What a request may start from: a checkpoint of its state, locked for it, and its pool
    numbers.
    """

    checkpoint: Checkpoint
    anchor: Anchor


@dataclass(frozen=True)
class Submission:
    """How a request was asked. asked: when, on the engine's clock. timeout: seconds it has. tenant,
    name, route, alone: as in `RequestWork`. batch: whether it may wait for rounds with room to
    spare.
    """

    future: "Future[Any]"
    asked: float
    timeout: float
    tenant: str
    name: str
    route: str
    batch: bool
    alone: bool


@dataclass(eq=False)
class RequestWork:
    """One request. Only the engine's thread changes it once it is queued.

    tenant: whose checkpoints it may use. name: what its state goes by, or "". route: the anchor
    it was routed on, or "". keys: `grain_keys` of its first prompt. deadline: on the engine's
    clock; timeout: the seconds it came from. resume: the checkpoint it starts from. marks:
    positions in its state where checkpoints are wanted. replays: its pieces; steps: which of
    them go into one round together, `at` the next one; empty until it is planned. anchors:
    checkpoints held between pieces, by the piece that took them. values: by read. seen: version
    of the index it was planned with, limit: tokens of a piece it was planned with. alone: it
    shares no round. shared: one of its rounds held others. again: it had values that
    are not finite, and is done once more. raw: values are wanted of it, not answers. fault: why it
    cannot be planned. loaded: a checkpoint of its state that was found on disk, until it is
    planned. kept: checkpoints it left. reused: tokens that its checkpoint saved. suspect: a
    checkpoint from which it had values that are not finite, so that it is done again without.
    cut: limit and start that its pieces are made for. times: seconds by stage so far; since:
    when the present one began. by_prompt: its reads of each prompt, once they are looked for.
    context: its caller's.
    """

    rendered: Rendered
    future: "Future[Any]"
    deadline: float | None
    timeout: float | None
    tenant: str
    name: str
    keys: list[bytes]
    route: str = ""
    resume: Resume | None = None
    marks: tuple[int, ...] = ()
    replays: list[Replay] = field(default_factory=list)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    at: int = 0
    anchors: dict[int, Anchor] = field(default_factory=dict)
    values: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    seen: int = -1
    limit: int = 0
    alone: bool = False
    shared: bool = False
    again: bool = False
    raw: bool = False
    fault: EngineError | None = None
    loaded: Loaded | None = None
    reused: int = 0
    times: dict[str, float] = field(default_factory=dict)
    since: float = 0.0
    kept: list[Checkpoint] = field(default_factory=list)
    suspect: Checkpoint | None = None
    cut: tuple[int, int] | None = None
    by_prompt: dict[int, list[int]] = field(default_factory=dict, repr=False)
    context: Context = field(default_factory=copy_context, repr=False)

    def log(self, say: Callable[..., None], message: str, *args: object) -> None:
        """Logs in the caller's context, so that a filter can name the request. say: a method of a
        logger. Of an error only what is for logs: it may repeat what was asked, and would keep its
        traceback for as long as a handler keeps the record.
        """
        told = [a.for_logs if isinstance(a, FlideError) else a for a in args]
        self.context.run(say, message, *told)

    @classmethod
    def of(cls, asked: Submission, rendered: Rendered, keys: list[bytes]) -> "RequestWork":
        """Work of a request, once it is rendered."""
        deadline = asked.asked + asked.timeout
        whose = (asked.tenant, asked.name, keys, asked.route)
        made = cls(rendered, asked.future, deadline, asked.timeout, *whose)
        made.alone, made.since = asked.alone, asked.asked
        return made

    def prepared(self, began: float, parsed: float, now: float) -> None:
        """Parsed from `began` to `parsed`, and rendered until `now`; before that it waited."""
        spent = max(0.0, now - parsed)
        tokenize = min(self.rendered.tokenize_s, spent)
        self.times = {
            "decode": max(0.0, parsed - began),
            "render": spent - tokenize,
            "tokenize": tokenize,
            "queue": max(0.0, began - self.since),
        }
        self.since = now

    def passed(self, stage: str, now: float) -> None:
        """A stage ends at `now`, and the next one begins."""
        self.times[stage] = self.times.get(stage, 0.0) + max(0.0, now - self.since)
        self.since = now

    @property
    def tokens(self) -> int:
        """New tokens of the next step; all of them until it is planned."""
        if not self.steps:
            return self.rendered.input_tokens
        step = self.steps[self.at]
        if len(step) == 1:
            return self.replays[step[0]].tokens
        return sum(self.replays[i].tokens for i in step)

    @property
    def waiting_tokens(self) -> int:
        """New tokens of all steps to come."""
        if not self.steps:
            return self.rendered.input_tokens
        if len(self.replays) == 1:
            return 0 if self.at else self.replays[0].tokens
        return sum(self.replays[i].tokens for step in self.steps[self.at :] for i in step)

    @property
    def is_long(self) -> bool:
        """Whether it takes several rounds."""
        return len(self.steps) > 1

    @property
    def is_done(self) -> bool:
        """Whether every piece has run."""
        return bool(self.steps) and self.at == len(self.steps)

    @property
    def had_company(self) -> bool:
        """Whether others may have had to do with its values."""
        return self.shared and not self.alone

    @property
    def is_coming(self) -> bool:
        """Whether the checkpoint it starts from is still on its way to the device."""
        coming = self.resume.checkpoint.coming if self.resume and not self.at else None
        return coming is not None and not coming.is_done()

    def is_gone(self, now: float) -> bool:
        """Whether its caller has left or its deadline has passed."""
        return self.future.cancelled() or (self.deadline is not None and now > self.deadline)

    def plan(self, resume: Resume | None, marks: Sequence[int], limit: int, version: int) -> None:
        """Cuts it into pieces of at most `limit` tokens, questions about the state from `resume`
        on.
        """
        prompts, count = self.rendered.prompts, self.rendered.state_prompts
        start = resume.anchor.position if resume else 0
        self.resume, self.marks, self.seen, self.limit = resume, tuple(marks), version, limit
        if self.cut == (limit, start):
            return
        self.cut = limit, start
        self.replays = cut_replays(prompts[:count], limit, start)
        offset = len(self.replays)
        if count < len(prompts):
            self.replays += [
                replace(
                    piece,
                    prompts=tuple(p + count for p in piece.prompts),
                    resumes=piece.resumes + offset if piece.resumes >= 0 else -1,
                )
                for piece in cut_replays(prompts[count:], limit)
            ]
        self.steps = _steps(self.replays, limit)

    def begin_again(self, suspect: Checkpoint | None) -> None:
        """As if it had not begun, to run alone. suspect: if there is one, it is not to resume from
        anything. Its anchors are the caller's to drop.
        """
        self.suspect, self.at, self.seen, self.cut = suspect, 0, -1, None
        self.alone = self.again = True
        self.anchors.clear()
        self.values.clear()

    def needs_less(self, memory: bool) -> bool:
        """Has its next round need less. False if that cannot be. memory: whether that is what
        lacked: then it first does without the checkpoints that only later requests would use.
        """
        if memory and self.marks:
            self.marks = ()
            return True
        return self.cut_finer()

    def cut_finer(self) -> bool:
        """Cuts what it has yet to do into more, smaller pieces. False if that cannot be."""
        if not self.at and self.limit >= 4 * GRAIN:
            self.plan(self.resume, self.marks, self.limit // 2, self.seen)
            return True
        step = self.steps[self.at]
        if len(step) == 1:
            parts = halved(self.rendered.prompts, self.replays[step[0]])
            if not parts:
                return False
            step = (len(self.replays), len(self.replays) + 1)
            self.replays += parts
        self.cut = None
        half = len(step) // 2
        self.steps[self.at : self.at + 1] = [step[:half], step[half:]]
        return True

    def anchor(self, piece: int) -> Anchor | None:
        """The checkpoint a piece resumes from."""
        replay = self.replays[piece]
        if replay.resumes >= 0:
            return self.anchors[replay.resumes]
        return self.resume.anchor if self.resume and replay.start else None

    def reads(self, piece: int) -> list[int]:
        """Indices of the reads that a piece gives, in the order of its prompts."""
        replay = self.replays[piece]
        if replay.stop is not None:
            return []
        if not self.by_prompt:
            for i, read in enumerate(self.rendered.reads):
                self.by_prompt.setdefault(read.prompt, []).append(i)
        return [i for p in replay.prompts for i in self.by_prompt.get(p, ())]

    def spent_anchors(self) -> list[Anchor]:
        """Checkpoints that no piece to come resumes from; they are the caller's to drop."""
        if not self.anchors:
            return []
        needed = {self.replays[i].resumes for step in self.steps[self.at :] for i in step}
        return [self.anchors.pop(i) for i in list(self.anchors) if i not in needed]


def _steps(replays: list[Replay], limit: int) -> list[tuple[int, ...]]:
    """Pieces in order, as many in a step as fit and do not resume from each other."""
    steps: list[list[int]] = []
    room = 0
    for i, replay in enumerate(replays):
        if steps and replay.tokens <= room and replay.resumes not in steps[-1]:
            steps[-1].append(i)
            room -= replay.tokens
        else:
            steps.append([i])
            room = limit - replay.tokens
    return [tuple(step) for step in steps]


def fail(future: "Future[Any]", error: BaseException) -> None:
    """Hands an error to whoever still waits; one who has left is not told."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
