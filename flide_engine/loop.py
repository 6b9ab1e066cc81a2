"""The engine's thread: rounds out of the queue, one after the other, and what becomes of their
results.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from flide_engine.cache.pool import Accounting
from flide_engine.checkpoints import Checkpoints
from flide_engine.errors import (
    DeadlineExceeded,
    EngineError,
    FlideError,
    NotReady,
    PoolExhausted,
    RoundFailed,
)
from flide_engine.layout.plan import Anchor
from flide_engine.readout import read_values
from flide_engine.rounds import Piece, Place, build_round
from flide_engine.runner import RoundResult, Runner
from flide_engine.scheduler import Scheduler
from flide_engine.work import RequestWork

log = logging.getLogger(__name__)


class RoundLoop:
    """Runs queued work on one thread of its own until it is closed.

    Any thread may call `add`, `close` and the properties; all else happens on the loop's thread.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler[RequestWork],
        checkpoints: Checkpoints,
        round_tokens: int,
        clock: Callable[[], float],
        done: Callable[[RequestWork], None],
    ) -> None:
        """done: called on the loop's thread with work that has all its values; must not block."""
        self._runner, self._scheduler, self._checkpoints = runner, scheduler, checkpoints
        self._round_tokens, self._clock, self._done = round_tokens, clock, done
        self._changed = threading.Condition()
        self._closed = False
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._thread = threading.Thread(target=self._run, name="flide-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether rounds are run."""
        return self._thread.is_alive() and not self._closed

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._scheduler)

    def retry_after_ms(self) -> int:
        """When the queue should be empty."""
        with self._changed:
            return self._scheduler.retry_after_ms()

    def add(self, work: RequestWork) -> None:
        """Queues work. Raises NotReady once closed, Overloaded if too much waits."""
        with self._changed:
            if self._closed:
                raise NotReady("the engine is closed")
            self._scheduler.add(work)
            self._changed.notify_all()

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the loop's thread, between two rounds, and returns its result."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise NotReady("the engine is closed")
            self._calls.append((function, future))
            self._changed.notify_all()
        return future.result()

    def accounting(self) -> Accounting:
        """Bytes of the pool held and in all."""
        return self._runner.accounting()

    def close(self) -> None:
        """Stops: work that waits fails with NotReady, a running round finishes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        taken: list[RequestWork] = []
        error: BaseException = NotReady("the engine is closed")
        try:
            self._serve(taken)
        except BaseException as fault:
            log.exception("the engine's thread stops")
            error = RoundFailed(f"{type(fault).__name__}: {fault}")
        with self._changed:
            self._closed = True
            waiting, calls = self._scheduler.drain(), self._calls
        for work in (*taken, *waiting):
            if not work.future.done():
                fail(work.future, error)
        for _, future in calls:
            future.set_exception(error)

    def _serve(self, taken: list[RequestWork]) -> None:
        """Runs rounds until closed; `taken` is the work of the round at hand."""
        while True:
            taken.clear()
            with self._changed:
                while not (self._scheduler or self._calls or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                calls, self._calls = self._calls, []
                for work in self._scheduler:
                    self._checkpoints.plan(work, self._round_tokens)
                taken[:], gone = self._scheduler.next_round(self._clock())
            for function, future in calls:
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            for work in gone:
                self._end(work, DeadlineExceeded(work.timeout or 0.0))
            for work in taken:
                if work.at == 0:
                    self._checkpoints.began(work)
            if taken:
                self._round(taken)

    def _round(self, works: list[RequestWork]) -> None:
        """Runs one round; if it fails, each request alone, so that a bad one fails alone."""
        began = self._clock()
        pieces = [Piece(work, i) for work in works for i in work.steps[work.at]]
        try:
            jobs, places = build_round(pieces)
            result = self._run_with_room(jobs)
        except PoolExhausted as error:
            self._shrink(works, error)
            return
        except Exception as error:
            if len(works) == 1:
                log.exception("a round of one request failed")
                self._end(works[0], RoundFailed(f"{type(error).__name__}: {error}"))
                return
            log.warning("a round of %d requests failed, retrying each alone: %s", len(works), error)
            for work in works:
                self._round([work])
            return
        tokens = sum(job.forest.num_tokens for job in jobs)
        self._checkpoints.counters.computed += tokens
        self._scheduler.observe(tokens, self._clock() - began)
        faults: dict[RequestWork, EngineError] = {}
        for piece, place in zip(pieces, places, strict=True):
            try:
                self._collect(piece, place, result)
            except EngineError as error:
                faults.setdefault(piece.work, error)
        for anchor in (a for marks in result.checkpoints for a in marks):
            self._runner.drop(anchor)
        for work in works:
            self._advance(work, faults.get(work))

    def _run_with_room(self, jobs: Sequence[Any]) -> RoundResult:
        """Runs jobs, giving up checkpoints if the pool is full. Raises PoolExhausted if it stays
        so.
        """
        while True:
            try:
                return self._runner.run(jobs)
            except PoolExhausted as error:
                if not self._checkpoints.make_room(error):
                    raise

    def _collect(self, piece: Piece, place: Place, result: RoundResult) -> None:
        """Takes a piece's values and checkpoints out of a round. Raises NonFiniteOutput."""
        work, replay = piece.work, piece.work.replays[piece.index]
        reads = work.reads(piece.index)
        hidden = result.hidden[place.first : place.first + place.count]
        asked = [work.rendered.reads[i] for i in reads]
        values = read_values(hidden, asked, self._runner.model.output_head)
        work.values.update(zip(reads, values, strict=True))
        for position, at in place.marks:
            anchor = result.checkpoints[place.job][at]
            self._checkpoints.keep(work, anchor)
            if position == replay.stop:
                self._runner.hold(anchor)
                work.anchors[piece.index] = anchor

    def _advance(self, work: RequestWork, fault: EngineError | None) -> None:
        if fault is not None:
            self._end(work, fault)
            return
        work.at += 1
        self._drop(work.spent_anchors())
        if not work.is_done:
            with self._changed:
                self._scheduler.put_back([work])
            return
        self._end(work, None)
        self._done(work)

    def _shrink(self, works: list[RequestWork], error: PoolExhausted) -> None:
        """A round did not fit the pool: half of it waits; a lone request fails."""
        if len(works) == 1:
            self._end(works[0], error)
            return
        half = (len(works) + 1) // 2
        with self._changed:
            self._scheduler.put_back(works[half:], front=True)
        self._round(works[:half])

    def _end(self, work: RequestWork, error: FlideError | None) -> None:
        """Gives up all that work holds; with an error, tells its caller."""
        self._drop(list(work.anchors.values()))
        work.anchors.clear()
        self._checkpoints.release(work)
        with self._changed:
            self._scheduler.finished(work)
        if error is not None:
            fail(work.future, error)

    def _drop(self, anchors: list[Anchor]) -> None:
        for anchor in anchors:
            self._runner.drop(anchor)


def fail(future: "Future[Any]", error: BaseException) -> None:
    """Hands an error to whoever still waits; one who has left is not told."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
