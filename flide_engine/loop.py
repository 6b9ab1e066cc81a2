"""The engine's thread: rounds out of the queue, one after the other, and what becomes of their
results.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from flide_engine.admission import Load
from flide_engine.cache.pool import Accounting
from flide_engine.checkpoints import Checkpoints
from flide_engine.errors import (
    DeadlineExceeded,
    EngineError,
    EngineStopped,
    FlideError,
    NotReady,
    PoolExhausted,
    RoundFailed,
    RoundTooLarge,
)
from flide_engine.layout.plan import Anchor
from flide_engine.layout.stream import Job
from flide_engine.pacing import Pacing
from flide_engine.readout import Asked
from flide_engine.rounds import Piece, Place, Round, build_round
from flide_engine.runner import Runner, Started
from flide_engine.scheduler import Scheduler
from flide_engine.work import RequestWork, fail

log = logging.getLogger(__name__)

COPY_BYTES = 64 << 20
"""Bytes of checkpoints whose copy off the device is begun after each round."""


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
        watchdog_s: float = 120.0,
        late: bool = False,
    ) -> None:
        """done: called on the loop's thread with work that has all its values; must not block.
        watchdog_s: seconds after which a round counts as stuck. late: whether a round that runs
        keeps the next one from being put together until it is about to end.
        """
        self._runner, self._scheduler, self._checkpoints = runner, scheduler, checkpoints
        self._round_tokens, self._clock, self._done = round_tokens, clock, done
        self._changed = threading.Condition()
        self._closed = False
        self._told: FlideError = NotReady("the engine is closed")  # for who comes then
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._under_way: Round | None = None
        self._out: dict[RequestWork, bool] = {}  # of the queue, and whether it was begun
        self._watchdog_s, self._late, self._pacing = watchdog_s, late, Pacing()
        self._busy_since: float | None = None
        self._counted_to = 0.0
        self._thread = threading.Thread(target=self._run, name="flide-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether rounds are run: the thread is there, and its present round is not stuck."""
        busy = self._busy_since
        stuck = busy is not None and self._clock() - busy > self._watchdog_s
        return self._thread.is_alive() and not self._closed and not stuck

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._scheduler)

    def check_number(self, tenant: str, rendering: Mapping[str, int], most: int) -> None:
        """Raises Overloaded if one more request of a tenant must not be taken; rendering: those of
        all tenants that are not in the queue yet.
        """
        with self._changed:
            self._scheduler.check_number(tenant, rendering, most, self._clock())

    def load(self) -> Load:
        """What routers and the autoscaler read."""
        with self._changed:
            return self._scheduler.load(self._clock())

    def add(self, work: RequestWork, batch: bool = False) -> None:
        """Queues work. Raises NotReady once closed, EngineStopped after a fault, Overloaded if too
        much waits.

        batch: it may wait for rounds with room to spare.
        """
        with self._changed:
            if self._closed:
                raise self._told.with_traceback(None)
            self._scheduler.add(work, self._clock(), batch)
            if self._under_way is None:  # else the thread does not wait for work
                self._changed.notify_all()

    def call(self, function: Callable[[], Any]) -> Any:
        """What a function returns on the loop's thread between two rounds. Raises as `add` does."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise self._told.with_traceback(None)
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
        error = waits = self._told
        try:
            self._serve()
        except BaseException as fault:
            log.exception("the engine's thread stops")
            cause = f"{type(fault).__name__}: {fault}"
            error, waits = EngineStopped(cause), EngineStopped(cause, running=False)
        with self._changed:
            self._closed, self._told = True, waits
            waiting, calls = self._scheduler.drain(), self._calls
        told = {work: error if begun else waits for work, begun in self._out.items()}
        for work, what in (told | dict.fromkeys(waiting, waits)).items():
            if not work.future.done():
                fail(work.future, what)
        for _, future in calls:
            future.set_exception(error)

    def _serve(self) -> None:
        """Runs rounds until closed.

        Where the executor runs ahead, a round is begun before the one before it is collected: just
        before, so that it holds what has come since then.
        """
        while True:
            self._out = dict.fromkeys(self._under_way.works if self._under_way else (), True)
            with self._changed:
                while not (self._scheduler or self._calls or self._closed or self._under_way):
                    if self._checkpoints.has_copies_to_make:
                        break  # nothing better to do
                    if not self._changed.wait(self._checkpoints.copies_wait_s):
                        break  # to see whether copies have been made
                if self._closed and not self._under_way:
                    return
            if self._late:
                self._await_due()
            self._turn()  # on its own, as a thread that waits must hold no request

    def _await_due(self) -> None:
        """Waits until the next round is due; calls, the end, and a device that is done earlier than
        predicted are not kept waiting.
        """
        with self._changed:
            while True:
                now, running = self._clock(), self._under_way
                if running and running.ended is None and running.started.pending.is_done():
                    running.ended = now
                    self._pacing.ended(now)
                full = self._scheduler.expected_tokens >= self._round_tokens
                wait_s = self._pacing.wait_s(now, full)
                if not wait_s or self._calls or self._closed:
                    return
                self._changed.wait(wait_s)

    def _turn(self) -> None:
        """One round, and what is to be done between two."""
        with self._changed:
            now, form = self._clock(), self._scheduler.next_round
            works, gone = ([], []) if self._closed else form(now, self._plan)
        self._out |= dict.fromkeys(works, False)
        for work in gone:
            self._end(work, DeadlineExceeded(work.timeout or 0.0))
        self._busy_since = self._clock() if works or self._under_way else None
        works = self._planned(works)
        alone = any(work.alone for work in works)
        if alone:  # it may fail with the device: nothing else is under way then
            self._collect_under_way()
        begun = self._begin(works) if works else None
        self._collect_under_way()
        self._under_way = begun
        if alone or not self._runner.executor.runs_ahead:
            self._collect_under_way()
        self._busy_since = None
        self._checkpoints.copy_some(COPY_BYTES)
        for _ in range(len(self._calls)):
            with self._changed:  # one by one: those that are left when the thread ends are told
                function, future = self._calls.pop(0)
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def _plan(self, work: RequestWork) -> None:
        """Plans work; what goes wrong with one is its own."""
        try:
            self._checkpoints.plan(work, self._round_tokens)
        except Exception as error:
            work.log(log.exception, "the request cannot be planned")
            work.fault = RoundFailed(f"{type(error).__name__}: {error}")

    def _planned(self, works: list[RequestWork]) -> list[RequestWork]:
        """The works that could be planned; the others are over."""
        for work in works:
            if work.fault is not None:
                self._end(work, work.fault)
        return [work for work in works if work.fault is None]

    def _begin(self, works: list[RequestWork]) -> Round | None:
        """Begins one round with as much of the work as fits; None if nothing came of it.

        If a round cannot be begun at all, each of its requests runs alone, so that a bad one fails
        alone. Raises what the device does if it can run nothing more: that is no request's fault.
        """
        began = self._clock()
        for work in works:
            work.passed("queue", began)
            self._checkpoints.await_arrival(work)
        pieces = [Piece(work, i) for work in works for i in work.steps[work.at]]
        try:
            jobs, places, asked = build_round(pieces)
            started = self._start_with_room(jobs, asked)
        except (PoolExhausted, RoundTooLarge) as error:
            return self._begin_fewer(works, error)
        except Exception as error:
            self._out |= dict.fromkeys(works, True)
            self._runner.executor.check()
            if len(works) == 1:
                works[0].log(log.exception, "the request's round failed")
                self._end(works[0], RoundFailed(f"{type(error).__name__}: {error}"))
                return None
            self._collect_under_way()
            for work in works:
                message = "a round of %d requests failed, this one runs alone: %s"
                work.log(log.warning, message, len(works), str(error))
                self._collect(self._begin([work]))
            return None
        self._out |= dict.fromkeys(works, True)
        launched = self._clock()
        # where rounds do not run ahead, they are over once they are launched
        stage = "pack" if self._runner.executor.runs_ahead else "device"
        for work in works:
            work.passed(stage, launched)
            work.shared |= len(works) > 1
            if work.at == 0:
                self._checkpoints.began(work)
        tokens = sum(job.forest.num_tokens for job in jobs)
        self._pacing.launched(launched, self._scheduler.round_ms(tokens) / 1000)
        self._checkpoints.counters.computed += tokens
        self._checkpoints.counters.padding += started.pending.rows - tokens
        for piece, place in zip(pieces, places, strict=True):
            self._keep(piece, place, started)
        for anchor in (a for marks in started.checkpoints for a in marks):
            self._runner.drop(anchor)
        return Round(works, pieces, places, started, tokens, began)

    def _start_with_room(self, jobs: Sequence[Job], asked: Asked) -> Started:
        """Starts jobs, giving up checkpoints for room. Raises PoolExhausted if too few can be."""
        while True:
            try:
                return self._runner.start(jobs, asked)
            except PoolExhausted as error:
                if not self._checkpoints.make_room(error):
                    raise

    def _begin_fewer(
        self, works: list[RequestWork], error: PoolExhausted | RoundTooLarge
    ) -> Round | None:
        """A round did not fit: half of it waits; a lone request waits until others have let go of
        memory, leaves no checkpoints, is cut finer, or fails.
        """
        if len(works) > 1:
            half = (len(works) + 1) // 2
            with self._changed:
                self._scheduler.put_back(works[half:], front=True)
            return self._begin(works[:half])
        (work,) = works
        short = isinstance(error, PoolExhausted)
        if short and (self._under_way or self._gave_up_plans()):
            self._collect_under_way()
            return self._begin(works)
        if short:
            with self._changed:
                if holder := self._scheduler.take_begun(self._clock()):
                    self._scheduler.put_back(works, front=True)
            if holder is not None:
                self._out[holder] = False
                self._plan(holder)  # its plan was given up, too, if it holds none
                return self._begin([holder]) if self._planned([holder]) else None
        if work.needs_less(memory=short):
            return self._begin(works)
        self._end(work, error)
        return None

    def _gave_up_plans(self) -> bool:
        """Unlocks the checkpoints that waiting requests meant to resume from. False if none was."""
        with self._changed:
            waiting = list(self._scheduler)
        return self._checkpoints.give_up_plans(waiting)

    def _keep(self, piece: Piece, place: Place, started: Started) -> None:
        """Remembers a piece's checkpoints: no later round runs before this one has made them."""
        work, replay = piece.work, piece.work.replays[piece.index]
        of_state = replay.prompts[0] < work.rendered.state_prompts  # not of the texts of options
        for position, at in place.marks:
            anchor = started.checkpoints[place.job][at]
            if of_state:
                self._checkpoints.keep(work, anchor)
            if position == replay.stop:
                self._runner.hold(anchor)
                work.anchors[piece.index] = anchor

    def _collect_under_way(self) -> None:
        under_way, self._under_way = self._under_way, None
        self._collect(under_way)

    def _collect(self, under_way: Round | None) -> None:
        """Waits for a round and hands out its values."""
        if under_way is None:
            return
        logits, hidden = under_way.started.pending.wait()
        now = self._clock()
        ended = now if under_way.ended is None else under_way.ended
        if under_way.ended is None:
            self._pacing.ended(now)
        counters = self._checkpoints.counters
        counters.rounds += 1
        # rounds overlap where they run ahead: time is counted once
        counters.busy_seconds += ended - max(under_way.began, self._counted_to)
        self._counted_to = ended
        with self._changed:  # before its answers: they bear the load that is left
            self._scheduler.observe(under_way.tokens, ended - under_way.began, ended)
        for work in under_way.works:
            work.passed("device", now)
        faults = under_way.hand_out(logits, hidden)
        for work in under_way.works:
            self._advance(work, faults.get(work))

    def _advance(self, work: RequestWork, fault: EngineError | None) -> None:
        if fault is not None:
            anchors = list(work.anchors.values())
            if not self._checkpoints.distrust(work):
                work.log(log.error, "%s", fault)
                self._end(work, fault)
                return
            work.log(log.warning, "%s; this request is computed once more, alone", fault)
            self._drop(anchors)
        else:
            work.at += 1
            self._drop(work.spent_anchors())
        if not work.is_done:
            with self._changed:
                self._scheduler.put_back([work])
            return
        self._checkpoints.trust(work)
        if log.isEnabledFor(logging.DEBUG):  # each request passes here
            work.log(log.debug, "computed, %d tokens reused; seconds: %s", work.reused, work.times)
        self._end(work, None)
        self._done(work)
        del self._out[work]  # it has all its values, whatever becomes of others

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
