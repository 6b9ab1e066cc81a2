"""The engine: requests in, futures of answers out; one thread runs the rounds.

submit -> render and tokenize (a few threads) -> queue -> round (the engine's thread: layout, pool,
forward pass, readout) -> finish (the rendering threads) -> the future.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from flide_engine.admission import Load
from flide_engine.api import DecisionRequest, DecisionResponse, Usage
from flide_engine.cache.disk import Loaded
from flide_engine.cache.index import grain_keys
from flide_engine.cache.marks import MarkPolicy
from flide_engine.cache.pool import Accounting, Pool
from flide_engine.checkpoints import Checkpoints, Counters
from flide_engine.config import EngineConfig
from flide_engine.errors import (
    DeadlineExceeded,
    Fault,
    InvalidRequest,
    NotReady,
    Overloaded,
    TooManyTokens,
    UnknownModel,
    as_faults,
)
from flide_engine.families.base import ModelCard, Rendered
from flide_engine.families.registry import load_family
from flide_engine.graphs import executor_for
from flide_engine.layout.tree import build_forest
from flide_engine.loop import RoundLoop, fail
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
from flide_engine.tiers import Tiers
from flide_engine.work import RequestWork

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
            folder, name, self.weights_hash, config.option_cache_entries
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
        self.stack = f"{stack_of(device)}, {dtype}, {config.kernels} kernels"
        if before is not None and (after := Card.of(device)) is not None:
            memory.check_work(before, after)
        self._lock = threading.Lock()
        self._closed = False
        self._rendering = 0
        self._threads = ThreadPoolExecutor(config.render_threads, "flide-render")
        self._tiers = Tiers.of(config, pool, self.weights_hash, clock)
        self._checkpoints = Checkpoints(
            pool, MarkPolicy(), config.keep_checkpoints, clock, self._tiers
        )
        self._states = States(
            self._checkpoints, pool, self._tiers, clock, config.pin_share, memory.least
        )
        self._loop = RoundLoop(
            Runner(executor, pool, config.fork),
            Scheduler(
                config.max_round_tokens,
                config.max_queued_tokens,
                bucket_of=executor.bucket_of,
                max_queue_ms=config.max_queue_ms,
                batch_age_s=config.batch_age_s,
                weights=config.tenant_weights,
            ),
            self._checkpoints,
            config.max_round_tokens,
            clock,
            self._hand_over,
            config.watchdog_seconds,
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
        request: DecisionRequest | dict[str, Any],
        timeout: float | None = None,
        tenant: str = "",
        name: str = "",
        batch: bool = False,
        alone: bool = False,
        anchor: str = "",
    ) -> "Future[DecisionResponse]":
        """A future of the answers; cancelling it before its round begins saves the work.

        tenant: whose checkpoints it may use and leave. name: what its state goes by (a session, a
        trajectory), to find its checkpoints again. batch: it may wait for rounds with room to
        spare. alone: it shares no round, as others have failed with it. anchor: what it was routed
        on; its checkpoints bear it. Errors of the request come through the future. Raises NotReady
        if the engine is closed, Overloaded if too many requests wait.
        """
        future: Future[DecisionResponse] = Future()
        with self._lock:
            if self._closed:
                raise NotReady("the engine is closed")
            waiting, limit = self._rendering + self._loop.waiting, self.config.max_waiting_requests
            if waiting >= limit:
                retry = self._loop.retry_after_ms()
                raise Overloaded(waiting, "requests", limit, "max_waiting_requests", retry)
            self._rendering += 1
        whose, how = (tenant, name, anchor), (batch, alone)
        self._threads.submit(self._render, request, future, timeout, self._clock(), whose, how)
        return future

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
        """Tokens asked for, found in checkpoints and computed, since the start."""
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
        self._threads.shutdown()
        if self._tiers is not None:
            self._tiers.close()

    def _render(
        self,
        request: DecisionRequest | dict[str, Any],
        future: "Future[DecisionResponse]",
        timeout: float | None,
        asked: float,
        whose: tuple[str, str, str],
        how: tuple[bool, bool],
    ) -> None:
        (tenant, name, anchor), (batch, alone) = whose, how
        try:
            if not future.cancelled():
                rendered = self._prepare(parse_request(request))
                keys = grain_keys(rendered.prompts[0][: rendered.state_tokens])
                deadline = None if timeout is None else asked + timeout
                work = RequestWork(rendered, future, deadline, timeout, tenant, name, keys, anchor)
                work.alone, work.loaded = alone, self._fetch(work)
                work.since = asked
                work.passed("render", self._clock())
                self._loop.add(work, batch)
        except BaseException as error:
            fail(future, error)
        finally:
            with self._lock:
                self._rendering -= 1

    def _fetch(self, work: RequestWork) -> Loaded | None:
        """What only the disk has of a state, read here so that no round waits for it."""
        if self._tiers is None or self._tiers.disk is None:
            return None
        text, limit = work.rendered.prompts[0], work.rendered.state_tokens
        found = self._checkpoints.longest(work.tenant, text, work.keys, limit)
        if self._tiers.disk.longest(work.tenant, work.keys, limit) <= found:
            return None
        return self._tiers.fetch(work.tenant, text, work.keys, limit)

    def _prepare(self, request: DecisionRequest) -> Rendered:
        """The request's prompts, within the limits. Raises RequestError."""
        config = self.config
        if request.model not in (None, self.card.name, *ALIASES):
            raise UnknownModel(request.model, (self.card.name, *ALIASES))
        if len(request.questions) > config.max_questions:
            count, limit = len(request.questions), config.max_questions
            msg = f"{count} questions; the limit is {limit} (max_questions)"
            raise InvalidRequest((Fault(("body", "questions"), msg, "too_long"),))
        try:
            rendered = self._family.render(request)
        except RecursionError as error:
            raise InvalidRequest((Fault(("body",), "nested too deeply"),)) from error
        if rendered.longest_prompt > config.max_prompt_tokens:
            raise TooManyTokens(
                "the state with its longest question",
                rendered.longest_prompt, config.max_prompt_tokens, "max_prompt_tokens",
            )  # fmt: skip
        if rendered.input_tokens > config.max_request_tokens:
            raise TooManyTokens(
                "the request",
                rendered.input_tokens,
                config.max_request_tokens,
                "max_request_tokens",
            )
        return rendered

    def _hand_over(self, work: RequestWork) -> None:
        self._threads.submit(self._finish, work)

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


def parse_request(request: DecisionRequest | dict[str, Any]) -> DecisionRequest:
    """A request from a plain dict, or the request itself. Raises InvalidRequest."""
    if isinstance(request, DecisionRequest):
        return request
    try:
        return DecisionRequest.model_validate(request)
    except ValidationError as error:
        raise InvalidRequest(as_faults(error.errors(), ("body",))) from None
    except RecursionError as error:
        raise InvalidRequest((Fault(("body",), "nested too deeply"),)) from error
