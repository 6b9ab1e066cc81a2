"""The engine: requests in, futures of answers out; one thread runs the rounds.

submit -> render and tokenize (a few threads) -> queue -> round (the engine's thread: layout, pool,
forward pass, readout) -> finish (a thread of its own) -> the future.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from flide_engine.admission import Load
from flide_engine.api import DecisionRequest, DecisionResponse, Usage
from flide_engine.cache.disk_file import Loaded
from flide_engine.cache.marks import MarkPolicy
from flide_engine.cache.pool import Accounting, Pool
from flide_engine.checkpoints import Checkpoints
from flide_engine.config import EngineConfig
from flide_engine.counters import Counters
from flide_engine.errors import (
    DeadlineExceeded,
    Fault,
    InvalidRequest,
    NotReady,
    UnknownModel,
)
from flide_engine.families.base import ModelCard, Rendered
from flide_engine.families.registry import load_family
from flide_engine.graphs import executor_for
from flide_engine.layout.tree import build_forest
from flide_engine.limits import check_questions, check_tokens, seconds_allowed
from flide_engine.loop import RoundLoop
from flide_engine.measuring import measured
from flide_engine.memory import Card, plan_memory
from flide_engine.models.registry import load_model
from flide_engine.models.weights import weights_hash
from flide_engine.resolve import (
    check_fit,
    locate,
    resolve_device,
    resolve_dtype,
    resolve_kernels,
    resolve_threads,
    stack_of,
)
from flide_engine.runner import Runner
from flide_engine.scheduler import Scheduler
from flide_engine.state_operations import StateOperations
from flide_engine.states import States
from flide_engine.threads import FairThreads
from flide_engine.tiers import Tiers
from flide_engine.wire import parse_request
from flide_engine.work import RequestWork, Submission, fail

log = logging.getLogger(__name__)

ALIASES = ("jev-latest",)
"""Model names that every client sends and that mean whatever is served."""


class Engine(StateOperations):
    """Decisions by one model on one device. Thread-safe."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Loads the model. Raises ConfigError or WeightsError.

        clock: seconds, monotonic; deadlines are read off it.
        """
        self.config, self._clock = config, clock
        folder, name = locate(config.model)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        self.weights_hash = weights_hash(folder)
        kernels = resolve_kernels(config.kernels, device, config.deterministic)
        model = load_model(folder, dtype, device, kernels)
        threads = resolve_threads(config.compute_threads, device, model.hidden_size)
        if threads is not None:
            torch.set_num_threads(threads)
        self._family, vocab = load_family(
            folder, name, self.weights_hash, config.option_cache_entries, config.text_cache_bytes
        )
        check_fit(config, model.vocab_size, vocab, model.max_positions)
        memory = plan_memory(config, model.state_shape, dtype, Card.of(device))
        log.info("memory: %s", memory)
        pool = Pool(model.state_shape, memory.units, dtype, device)
        before = Card.of(device)
        # compiles now what a round would wait for
        build_forest([np.arange(2, dtype=np.int32) for _ in range(2)])
        executor = executor_for(model, pool, kernels, device, config.max_round_tokens)
        self.fingerprint = ""
        """What answers carry as `x_fingerprint`."""
        self.device = device.type
        """"cpu" or "cuda"."""
        self.stack = stack_of(device, dtype, kernels, config.deterministic)
        """What decides its bits beside the weights."""
        self._origin = {"weights": self.weights_hash, "stack": self.stack}
        if before is not None and (after := Card.of(device)) is not None:
            memory.check_work(before, after)
        self._lock = threading.Lock()
        self._closed = False
        self._rendering: Counter[str] = Counter()  # requests by tenant
        self._renderers = FairThreads(config.render_threads, "flide-render")
        self._finisher = ThreadPoolExecutor(1, "flide-finish")
        self._tiers = Tiers.of(config, pool, self._origin, clock)
        self._checkpoints = Checkpoints(
            pool, MarkPolicy(), config.keep_checkpoints, clock, self._tiers
        )
        self._states = States(
            self._checkpoints, pool, self._tiers, clock, config.pin_share, memory.least,
            config.tenant_weights,
        )  # fmt: skip
        runner = Runner(executor, pool, config.fork)
        self._loop = RoundLoop(
            runner,
            _scheduler(config, measured(runner, config, device.type), executor.bucket_of),
            self._checkpoints,
            config.max_round_tokens,
            clock,
            self._hand_over,
            config.watchdog_seconds,
            config.late_rounds and executor.runs_ahead,
        )
        log.info(
            "engine ready: model %s (%s), weights %s, %s on %s",
            self.card.name, folder, self.weights_hash, dtype, device,
        )  # fmt: skip

    @property
    def card(self) -> ModelCard:
        """Name, description and release date of the model."""
        return self._family.card

    def decide(
        self, request: DecisionRequest | dict[str, Any], timeout: float | None = None
    ) -> DecisionResponse:
        """The answers to a request. Raises RequestError, UnavailableError or EngineError.

        timeout: seconds; DeadlineExceeded if the answer is not there by then.
        """
        future = self.submit(request, timeout)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded(timeout or 0.0) from None

    def submit(
        self,
        request: DecisionRequest | dict[str, Any] | bytes,
        timeout: float | None = None,
        tenant: str = "",
        name: str = "",
        batch: bool = False,
        alone: bool = False,
        anchor: str = "",
    ) -> "Future[DecisionResponse]":
        """A future of the answers; cancelling it before its round begins saves the work.

        request: typed, plain, or the bytes of its JSON. timeout: seconds; none: `max_timeout_s`.
        tenant: whose checkpoints it may use and leave. name: what its state goes by (a session, a
        trajectory), to find its checkpoints again. batch: it may wait for rounds with room to
        spare. alone: it shares no round, as others have failed with it. anchor: what it was routed
        on; its checkpoints bear it. Errors of the request come through the future. Raises NotReady
        if the engine is closed, Overloaded if too many requests wait, InvalidRequest for a timeout
        that cannot be.
        """
        future: Future[DecisionResponse] = Future()
        seconds = seconds_allowed(timeout, self.config.max_timeout_s, ("timeout",))
        asked_as = Submission(future, self._clock(), seconds, tenant, name, anchor, batch, alone)
        with self._lock:
            if self._closed:
                raise NotReady("the engine is closed")
            most = self.config.max_waiting_requests
            if self._rendering.total() + self._loop.waiting >= most:  # else it costs no lock
                self._loop.check_number(tenant, self._rendering, most)
            self._rendering[tenant] += 1
        # on, in the caller's context: what is logged of a request says whose it is
        render = partial(copy_context().run, self._render, request, asked_as)
        try:
            self._renderers.submit(tenant, render)
        except NotReady:  # it closed just now
            self._has_rendered(tenant)
            raise
        return future

    @property
    def waiting(self) -> int:
        """Requests that are rendered, or wait for a round."""
        with self._lock:
            return self._rendering.total() + self._loop.waiting

    def load(self) -> Load:
        """Predicted wait, pace, and what was refused, now."""
        return self._loop.load()

    def accounting(self) -> Accounting:
        """Bytes of the pool held and in all."""
        return self._loop.accounting()

    def tier_bytes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Bytes of checkpoints and rounds, (held, total) by tier and kind."""
        return self.accounting().by_kind() | (self._tiers.sizes() if self._tiers else {})

    def distinct_tokens(self) -> dict[str, int]:
        """Tokens that each tier's checkpoints hold, those that several share once."""
        return self._checkpoints.distinct_tokens()

    def counters(self) -> Counters:
        """What has been counted since the start."""
        return replace(self._checkpoints.counters)

    def checkpoint_counts(self) -> dict[str, int]:
        """How many checkpoints each tier holds."""
        return self._checkpoints.counts()

    def drop_checkpoints(self) -> None:
        """Forgets every checkpoint that no request is using."""
        self._loop.call(self._checkpoints.drop_all)

    def is_alive(self) -> bool:
        """Whether the engine's thread runs and its round is not stuck."""
        return self._loop.is_alive

    def close(self) -> None:
        """Stops: work that waits fails with NotReady, a running round finishes."""
        with self._lock:
            self._closed = True
        self._loop.close()
        self._renderers.shutdown()
        self._finisher.shutdown()
        self._checkpoints.close()

    def _render(self, request: DecisionRequest | dict[str, Any] | bytes, asked: Submission) -> None:
        try:
            if not asked.future.cancelled():
                config, began = self.config, self._clock()
                typed = parse_request(request, config.max_decoded_bytes, config.max_questions)
                parsed = self._clock()
                rendered = self._prepare(typed, asked.tenant)
                state = rendered.prompts[0][: rendered.state_tokens]
                keys = self._checkpoints.keys(asked.tenant, state)
                work = RequestWork.of(asked, rendered, keys)
                work.loaded = self._fetch(work)
                work.prepared(began, parsed, self._clock())
                self._loop.add(work, asked.batch)
        except BaseException as error:
            fail(asked.future, error)
        finally:
            self._has_rendered(asked.tenant)

    def _has_rendered(self, tenant: str) -> None:
        with self._lock:
            self._rendering[tenant] -= 1
            if not self._rendering[tenant]:
                del self._rendering[tenant]

    def _fetch(self, work: RequestWork) -> Loaded | None:
        """What only the disk has of a state, read here so that no round waits for it."""
        if self._tiers is None or self._tiers.disk is None:
            return None
        text, limit = work.rendered.prompts[0], work.rendered.state_tokens
        found = self._checkpoints.longest(work.tenant, text, work.keys, limit)
        return self._tiers.fetch(work.tenant, text, work.keys, limit, found)

    def _prepare(self, request: DecisionRequest, tenant: str = "") -> Rendered:
        """A tenant's request as prompts, within the limits. Raises RequestError."""
        if request.model not in (None, self.card.name, *ALIASES):
            raise UnknownModel(request.model, (self.card.name, *ALIASES))
        check_questions(request, self.config)
        try:
            rendered = self._family.render(request, tenant)
        except RecursionError as error:
            raise InvalidRequest((Fault(("body",), "nested too deeply"),)) from error
        check_tokens(rendered, self.config)
        return rendered

    def _hand_over(self, work: RequestWork) -> None:
        self._finisher.submit(self._finish, work)

    def _finish(self, work: RequestWork) -> None:
        try:
            values = [work.values[i] for i in range(len(work.rendered.reads))]
            if work.raw:
                work.future.set_result(values)
                return
            answers = self._family.finish(work.rendered, values)
            usage = Usage(
                input_tokens=work.rendered.input_tokens,
                output_tokens=len(answers),
                x_reused_tokens=work.reused,
            )
            work.passed("finish", self._clock())
            times = {stage: round(1000 * spent, 3) for stage, spent in work.times.items()}
            response = DecisionResponse(
                model=self.card.name, usage=usage, answers=answers, x_timing=times,
                x_fingerprint=self.fingerprint,
            )  # fmt: skip
        except BaseException as error:
            fail(work.future, error)
            return
        if work.future.set_running_or_notify_cancel():
            work.future.set_result(response)


def _scheduler(
    config: EngineConfig, table: Mapping[int, float] | None, bucket_of: Callable[[int], int]
) -> Scheduler[RequestWork]:
    return Scheduler(
        config.max_round_tokens,
        config.max_queued_tokens,
        table,
        bucket_of=bucket_of,
        max_queue_ms=config.max_queue_ms,
        batch_age_s=config.batch_age_s,
        weights=config.tenant_weights,
    )
