"""The engine: requests in, futures of answers out; one thread runs the rounds.

submit -> render and tokenize (a few threads) -> queue -> round (the engine's thread: layout, pool,
forward pass, readout) -> finish (the rendering threads) -> the future.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from pydantic import ValidationError

from flide_engine.api import DecisionRequest, DecisionResponse, Usage
from flide_engine.cache.pool import Accounting, Pool, split_budget
from flide_engine.config import GRAIN, EngineConfig
from flide_engine.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    Fault,
    FlideError,
    InvalidRequest,
    NotReady,
    Overloaded,
    PoolExhausted,
    RoundFailed,
    TooManyTokens,
    UnknownModel,
    as_faults,
)
from flide_engine.families.base import ModelCard, Rendered
from flide_engine.families.registry import load_family
from flide_engine.layout.buckets import cut_replays
from flide_engine.layout.plan import Anchor
from flide_engine.layout.state_shape import StateShape
from flide_engine.models.registry import load_model
from flide_engine.models.weights import weights_hash
from flide_engine.readout import read_values
from flide_engine.resolve import locate, resolve_device, resolve_dtype, resolve_kernels
from flide_engine.runner import Runner
from flide_engine.scheduler import Scheduler
from flide_engine.work import RequestWork

log = logging.getLogger(__name__)

ALIASES = ("jev-latest",)
"""Model names that every client sends and that mean whatever is served."""

MIN_SLOTS = 64
"""Recurrent states of a pool without a byte budget."""


class Engine:
    """Decisions by one model on one device. Thread-safe."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Loads the model. Raises ConfigError or WeightsError.

        clock: seconds, monotonic; deadlines are read off it.
        """
        self.config, self._clock = config, clock
        folder, name = locate(config.model)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        if config.compute_threads is not None:
            torch.set_num_threads(config.compute_threads)
        self.weights_hash = weights_hash(folder)
        kernels, tile = resolve_kernels(config.kernels, device)
        model = load_model(folder, dtype, device, kernels)
        self._family, vocab = load_family(
            folder, name, self.weights_hash, config.option_cache_entries
        )
        self._check(model.vocab_size, vocab, model.max_positions)
        pool = Pool(model.state_shape, *self._pool_size(model.state_shape, dtype), dtype, device)
        self._runner = Runner(model, pool, config.fork, device, tile)
        self._scheduler: Scheduler[RequestWork] = Scheduler(
            config.max_round_tokens, config.max_queued_tokens
        )
        self._changed = threading.Condition()
        self._closed = False
        self._rendering = 0
        self._threads = ThreadPoolExecutor(config.render_threads, "flide-render")
        self._loop = threading.Thread(target=self._run, name="flide-engine", daemon=True)
        self._loop.start()
        log.info(
            "engine ready: model %s (%s), weights %s, %s on %s, pool %s",
            self.card.name, folder, self.weights_hash, dtype, device, pool.accounting(),
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
        self, request: DecisionRequest | dict[str, Any], timeout: float | None = None
    ) -> "Future[DecisionResponse]":
        """A future of the answers; cancelling it before its round begins saves the work.

        Errors of the request come through the future. Raises NotReady if the engine is closed,
        Overloaded if too many requests wait.
        """
        future: Future[DecisionResponse] = Future()
        with self._changed:
            if self._closed:
                raise NotReady("the engine is closed")
            waiting, limit = (
                self._rendering + len(self._scheduler),
                self.config.max_waiting_requests,
            )
            if waiting >= limit:
                retry = self._scheduler.retry_after_ms()
                raise Overloaded(waiting, "requests", limit, "max_waiting_requests", retry)
            self._rendering += 1
            self._threads.submit(self._render, request, future, timeout, self._clock())
        return future

    def accounting(self) -> Accounting:
        """Bytes of the pool held and in all."""
        return self._runner.accounting()

    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._loop.is_alive() and not self._closed

    def close(self) -> None:
        """Stops: work that waits fails with NotReady, a running round finishes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._loop.join()
        self._threads.shutdown()

    def _render(
        self,
        request: DecisionRequest | dict[str, Any],
        future: "Future[DecisionResponse]",
        timeout: float | None,
        asked: float,
    ) -> None:
        try:
            work = None
            if not future.cancelled():
                rendered = self._prepare(parse_request(request))
                replays = cut_replays(rendered.prompts, self.config.max_round_tokens)
                deadline = None if timeout is None else asked + timeout
                work = RequestWork(rendered, future, deadline, timeout, replays)
            with self._changed:
                if work is not None:
                    if self._closed:
                        raise NotReady("the engine is closed")
                    self._scheduler.add(work)
        except BaseException as error:
            _fail(future, error)
        finally:
            with self._changed:
                self._rendering -= 1
                self._changed.notify_all()

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

    def _finish(self, work: RequestWork) -> None:
        try:
            values = [work.values[i] for i in range(len(work.rendered.reads))]
            answers = self._family.finish(work.rendered, values)
            usage = Usage(input_tokens=work.rendered.input_tokens, output_tokens=len(answers))
            response = DecisionResponse(model=self.card.name, usage=usage, answers=answers)
        except BaseException as error:
            _fail(work.future, error)
            return
        if work.future.set_running_or_notify_cancel():
            work.future.set_result(response)

    def _run(self) -> None:
        taken: list[RequestWork] = []
        try:
            self._serve(taken)
        except BaseException as error:
            log.exception("the engine's thread stops")
            with self._changed:
                self._closed = True
                waiting = self._scheduler.drain()
            for work in (*taken, *waiting):
                if not work.future.done():
                    _fail(work.future, RoundFailed(f"{type(error).__name__}: {error}"))

    def _serve(self, taken: list[RequestWork]) -> None:
        """Runs rounds until the engine is closed; `taken` is the work of the round at hand."""
        while True:
            with self._changed:
                while not len(self._scheduler) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    waiting = self._scheduler.drain()
                    break
                taken[:], gone = self._scheduler.next_round(self._clock())
            self._leave(gone, None)
            if taken:
                self._round(taken)
        self._leave(waiting, NotReady("the engine is closed"))

    def _leave(self, works: Sequence[RequestWork], error: FlideError | None) -> None:
        for work in works:
            self._forget(work)
            _fail(work.future, error or DeadlineExceeded(work.timeout or 0.0))

    def _round(self, works: list[RequestWork]) -> None:
        """Runs one round; if it fails, each request alone, so that a bad one fails alone."""
        began = self._clock()
        try:
            result = self._runner.run([work.job() for work in works])
        except PoolExhausted as error:
            self._shrink(works, error)
            return
        except Exception as error:
            if len(works) == 1:
                log.exception("a round of one request failed")
                self._forget(works[0])
                _fail(works[0].future, RoundFailed(f"{type(error).__name__}: {error}"))
                return
            log.warning("a round of %d requests failed, retrying each alone: %s", len(works), error)
            for work in works:
                self._round([work])
            return
        self._scheduler.observe(sum(w.tokens for w in works), self._clock() - began)
        at = 0
        for work, checkpoints in zip(works, result.checkpoints, strict=True):
            reads = work.reads()
            self._advance(work, reads, result.hidden[at : at + len(reads)], checkpoints)
            at += len(reads)

    def _shrink(self, works: list[RequestWork], error: PoolExhausted) -> None:
        """A round did not fit the pool: half of it waits; a lone request fails."""
        if len(works) == 1:
            self._forget(works[0])
            _fail(works[0].future, error)
            return
        half = (len(works) + 1) // 2
        with self._changed:
            self._scheduler.put_back(works[half:], front=True)
        self._round(works[:half])

    def _advance(
        self,
        work: RequestWork,
        reads: list[int],
        hidden: torch.Tensor,
        checkpoints: tuple[Anchor, ...],
    ) -> None:
        for anchor in checkpoints:
            work.anchors[work.at] = anchor
        try:
            asked = [work.rendered.reads[i] for i in reads]
            values = read_values(hidden, asked, self._runner.model.output_head)
        except EngineError as error:
            self._forget(work)
            _fail(work.future, error)
            return
        work.values.update(zip(reads, values, strict=True))
        work.at += 1
        for anchor in work.spent_anchors():
            self._runner.drop(anchor)
        if work.at < len(work.replays):
            with self._changed:
                self._scheduler.put_back([work])
            return
        self._forget(work)
        self._threads.submit(self._finish, work)

    def _forget(self, work: RequestWork) -> None:
        for anchor in work.anchors.values():
            self._runner.drop(anchor)
        work.anchors.clear()
        with self._changed:
            self._scheduler.finished(work)

    def _check(self, rows: int, vocab: int, positions: int) -> None:
        if vocab > rows:
            raise ConfigError(
                f"the tokenizer has ids up to {vocab - 1}, the model {rows} embedding rows"
            )
        if self.config.max_prompt_tokens > positions:
            raise ConfigError(
                f"max_prompt_tokens {self.config.max_prompt_tokens} exceeds the model's"
                f" max_position_embeddings {positions}"
            )

    def _pool_size(self, shape: StateShape, dtype: torch.dtype) -> tuple[int, int]:
        """(pages, slots). Raises ConfigError if the longest prompt and one round do not fit."""
        config = self.config
        needed = (config.max_prompt_tokens + config.max_round_tokens) // GRAIN + 1
        if config.pool_bytes is None:
            return needed, MIN_SLOTS
        pages, slots = split_budget(shape, config.pool_bytes, config.slot_share, dtype)
        if needed > pages:
            raise ConfigError(
                f"pool_bytes {config.pool_bytes} holds {pages} pages of {GRAIN} tokens;"
                f" max_prompt_tokens {config.max_prompt_tokens} with max_round_tokens"
                f" {config.max_round_tokens} needs {needed}"
            )
        return pages, slots


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


def _fail(future: "Future[DecisionResponse]", error: BaseException) -> None:
    """Hands an error to whoever still waits; one who has left is not told."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
