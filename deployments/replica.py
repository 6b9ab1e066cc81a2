"""One engine as a Serve replica: asyncio around one `Engine`, which runs on threads of its own."""

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from importlib.metadata import version
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from deployments import logs
from deployments.config import Threads
from deployments.demand import Demand
from deployments.drain import Calls, Leaving, Pace, leave, take_over
from deployments.listening import Listener
from deployments.metrics import ReplicaMetrics
from deployments.siblings import Siblings
from deployments.state_calls import bring_home, perform
from flide_engine.api import DecisionRequest, DecisionResponse
from flide_engine.config import EngineConfig
from flide_engine.errors import EngineStopped, FlideError, NotReady
from router.asking import plain_error
from router.fingerprint import Fingerprint
from router.policy import Load
from router.receiver import Receiver
from router.refusals import in_a_line
from router.routing_key import anchor_text, as_key
from router.session_id import check_session_id
from router.states import StateCall, Told
from router.suspects import Turns
from router.tracing import record_stages

log = logging.getLogger("ray.serve")

LEAST_BUSY = 0.01
"""Share of its time that a replica with anything under way tells the autoscaler."""


class EngineReplica:
    """Deployment `Engine`: enqueues, awaits, and never blocks its event loop."""

    def __init__(
        self,
        config: dict[str, Any],
        tenant_names: Mapping[str, str] | None = None,
        leaving: Leaving | None = None,
        threads: Threads | None = None,
        channels: bool = True,
    ) -> None:
        """config: fields of EngineConfig. tenant_names: what tenants are called in metrics.
        leaving: what becomes of its checkpoints when it goes. threads: of its CPU kernels.
        channels: whether Gateways may ask over connections of their own.
        """
        self._id = _own_id()
        if threads is not None and self._id:  # else the process is somebody's
            os.environ["OMP_NUM_THREADS"] = str(threads.here())  # read when torch is loaded
        from flide_engine.engine import Engine  # loads torch, in the replica only

        logs.join()
        in_a_line()
        self._leaving, self._draining = leaving or Leaving(), False
        self._calls, self._taken_over, self._turns = Calls(), Counter[str](), Turns()
        self._engine = Engine(EngineConfig.model_validate(config))
        self._fingerprint = fingerprint_of(self._engine)
        self._engine.fingerprint = self._fingerprint.text
        self._siblings: Siblings | None = None
        self._making = threading.Lock()
        self._pace: Pace | None = None
        self._receiver, self._demand = Receiver(), Demand()
        self._listener = Listener(self.decide_with_load) if channels and self._id else None
        self._metrics = ReplicaMetrics(tenant_names or {})
        self._answered = 0
        log.info("engine %s ready in process %d", self._engine.card.name, os.getpid())
        log.info("fingerprint %s by %s", self._fingerprint.text, self._fingerprint.stack)

    async def decide(
        self,
        request: DecisionRequest | dict[str, Any],
        tenant: str = "",
        session_id: str = "",
        timeout_s: float | None = None,
        batch: bool = False,
        route: object = None,
        anchor: object = None,
        home: str = "",
        reason: str = "",
    ) -> DecisionResponse | dict[str, Any]:
        """Answers a typed request with a typed response, and a plain dict with a plain dict.

        tenant: whose checkpoints may be used. session_id: what the state goes by. timeout_s: as
        long as its caller will wait. batch: it may wait for rounds with room to spare. route,
        anchor, home: the routing key, what of it was routed on, and the replica that this belongs
        to if it was sent there; reason: why it was sent here. The request router adds them.

        The typed form raises the error tree, the plain one ValueError and RuntimeError, as the
        caller may not have this package. A cancelled call drops its work before it is packed.
        """
        how = {"tenant": tenant, "name": session_id, "timeout": timeout_s, "batch": batch}
        self._metrics.routed(reason)
        if isinstance(request, DecisionRequest):
            return await self._decide(request, how, (route, anchor, home))
        try:
            answers = await self._decide(request, how, (route, anchor, home))
        except FlideError as error:
            raise plain_error(error) from None
        return answers.model_dump()

    async def decide_with_load(
        self,
        request: DecisionRequest | dict[str, Any] | bytes,
        tenant: str = "",
        session_id: str = "",
        timeout_s: float | None = None,
        batch: bool = False,
        route: object = None,
        anchor: object = None,
        home: str = "",
        suspect: str = "",
        retry: bool = False,
        reason: str = "",
    ) -> tuple[bytes | FlideError, str, tuple[float, ...]]:
        """As `decide`, for callers with this package: (the response's JSON, this replica's id, its
        load). An error of the tree takes the response's place: raised, it would be pickled with its
        traceback and logged with it, which costs most when there are most of them.

        request: also the bytes of its JSON. suspect: what the request is called if a replica has
        died under it (`router.suspects`); it shares no round then. retry: it was asked before.
        An EngineStopped that it raises names this replica.
        """
        how = {"tenant": tenant, "name": session_id, "timeout": timeout_s, "batch": batch}
        self._metrics.routed(reason, retry)
        how["alone"] = bool(suspect)
        told: bytes | FlideError
        try:
            async with self._turns.of(suspect):
                answers = await self._decide(request, how, (route, anchor, home))
            told = answers.model_dump_json().encode()
        except EngineStopped as error:
            log.error("not answered: %s", str(error))
            told = EngineStopped(error.cause, error.running, self._id)
        except FlideError as error:
            log.info("not answered: %s: %s", type(error).__name__, error.for_logs)
            told = error.with_traceback(None)
        return told, self._id, tuple(self._load())

    async def _decide(
        self,
        request: DecisionRequest | dict[str, Any] | bytes,
        how: dict[str, Any],
        routed: tuple[object, object, str],
    ) -> DecisionResponse:
        """how: arguments of `Engine.submit`; routed: what the router says of the call."""
        tenant, (route, anchor, home) = how["tenant"], routed
        self._calls.began()
        began_ns = time.time_ns()
        try:
            check_session_id(how["name"])
            routed_on = anchor_text(anchor, route)
            future = self._engine.submit(request, **how, anchor=routed_on)
            self._received(route, anchor, home)
            try:
                answers = await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                future.cancel()
                raise
        except BaseException as error:
            self._metrics.failed(error, tenant)
            raise
        finally:
            self._calls.ended()
        self._answered += 1
        _trace(began_ns, answers)
        # once the answer is on its way
        asyncio.get_running_loop().call_soon(self._metrics.answered, answers, tenant)
        return answers

    def _load(self) -> Load:
        told = self._engine.load()
        return Load(told.wait_ms, told.mean_wait_ms, told.step_ms, told.tokens_per_ms)

    def _received(self, route: object, anchor: object, home: str) -> None:
        """Remembers what a router of ours sent here, to tell the others."""
        key = as_key(route)
        if key is not None and isinstance(anchor, int) and 0 <= anchor < 1 << 64:
            self._receiver.received(key, anchor, home == self._id, time.monotonic())
            self._demand.asked(anchor)

    async def record_routing_stats(self) -> dict[str, bytes]:
        """Called by Serve each stats period; every router of the deployment gets the result."""
        load = self._load()
        self._metrics.sample(self._engine, load.wait_ms / 1000)
        leaves = self._draining or not self._engine.is_alive()
        return self._receiver.stats(load, time.monotonic(), leaves).encode()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve where the number of replicas follows the load."""
        load, counters = self._engine.load(), self._engine.counters()
        told = self._demand.told(
            counters.busy_seconds, load.wait_ms, load.refused_tokens, load.tokens_per_ms
        )
        if self._calls.under_way:  # Serve sees none that came over a channel, nor is a round over
            told["busy"] = max(told["busy"], LEAST_BUSY)
        return told

    async def on_states(self, call: StateCall) -> Told:
        """An operation on a tenant's states; every replica is asked."""
        told = await asyncio.to_thread(perform, self._engine, call, self._id)
        if call.operation == "branch" and told.tokens and self._leaving.handover != "never":
            await self._bring_home(call, told.tokens)
        return told

    async def owner(self, route: object = None, anchor: object = None, home: str = "") -> str:
        """The id of this replica: a router of ours calls it on the one that a state belongs to.

        route, anchor, home: as in `decide`.
        """
        return self._id

    async def _bring_home(self, call: StateCall, tokens: int) -> None:
        """A branch may belong to another replica: that one gets its checkpoint."""
        try:
            if self._id:
                siblings = await self._own_siblings()
                self._pace = self._pace or Pace(self._leaving.handover, self._load().tokens_per_ms)
                end = await bring_home(self._engine, call, tokens, siblings, self._pace, self._id)
                self._metrics.handed_over("given", end)
        except Exception:
            log.exception("a branch is not handed to its home, which will compute its state anew")

    async def adopt(
        self,
        pieces: list[Any],
        weights: str,
        route: object = None,
        anchor: object = None,
        home: str = "",
        stack: str = "",
    ) -> str:
        """Takes over a checkpoint from a replica that leaves: how that ended, see
        `deployments.drain.hand_over`.

        pieces: a reference to its bytes. weights: hash of those it was computed with. route,
        anchor, home: as in `decide`. stack: what else decided its bits; "" is not known.
        """
        end = await take_over(self._engine, pieces, weights, stack)
        self._metrics.handed_over("taken", end)
        self._taken_over[end] += 1
        if end == "adopted" and (key := as_key(route)) is not None and home != self._id:
            self._receiver.adopted(key)
        return end

    async def counters(self) -> dict[str, Any]:
        """Since the start: requests answered, tokens asked for, found in checkpoints, computed, and
        seconds in which a round was under way; beside them this replica's id and process, how many
        requests wait now, and how hand-overs to it ended.
        """
        tokens = self._engine.counters()
        return {
            "replica": self._id,
            "process": os.getpid(),
            "answered": self._answered,
            "waiting": self._engine.waiting,
            "tokens_asked": tokens.asked,
            "tokens_reused": tokens.reused,
            "tokens_computed": tokens.computed,
            "busy_seconds": tokens.busy_seconds,
            "checkpoints_taken_over": dict(self._taken_over),
        }

    async def describe(self) -> dict[str, str]:
        """Name, description and release date of the model, weights hash and versions. Raises
        NotReady if nothing can be answered here.
        """
        import torch

        self._check_alive()
        card = self._engine.card
        return {
            "name": card.name,
            "description": card.description,
            "release_date": card.release_date,
            "weights_hash": self._engine.weights_hash,
            "fingerprint": self._fingerprint.text,
            "device": self._engine.device,
            "torch": torch.__version__,
            "version": version("flide-serve"),
        }

    async def record_replica_metadata(self) -> dict[str, list[object]]:
        """Called by Serve once, before this replica is ready; every router gets the result."""
        listens = await self._listener.open() if self._listener is not None else {}
        return self._fingerprint.encode() | listens

    async def check_health(self) -> None:
        """Called by Serve; a replica whose engine thread has stopped is replaced, and one that
        promises its fleet's bits and has others.
        """
        self._check_alive()
        if not self._fingerprint.strict or not self._id:
            return
        if reason := (await self._own_siblings()).against_me():
            raise NotReady(f"deterministic=True, and {reason}")

    def _check_alive(self) -> None:
        if not self._engine.is_alive():
            raise NotReady("the engine's thread has stopped, or its round is stuck")

    async def _own_siblings(self) -> Siblings:
        if self._siblings is not None:
            return self._siblings
        return await asyncio.to_thread(self._made_siblings)

    def _made_siblings(self) -> Siblings:
        with self._making:
            if self._siblings is None:
                self._siblings = Siblings()
            return self._siblings

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Called by Serve, which awaits the result, when this replica is to go and has nothing in
        flight any more; and by Python.
        """
        if (engine := getattr(self, "_engine", None)) is None:
            return None
        if self._id and not self._draining and asyncio._get_running_loop() is not None:
            return self._leave()
        engine.close()
        return None

    async def _leave(self) -> None:
        self._draining = True
        spent_s, began = self._calls.spent_s(), time.monotonic()
        try:
            if self._listener is not None:  # Serve knows nothing of what came that way
                # the other half is for the hand-over
                await self._listener.leave(max(0.0, self._leaving.within_s / 2 - spent_s))
            spent_s += time.monotonic() - began
            ends = await leave(self._engine, self._leaving, spent_s)
            for end, count in ends.items():
                self._metrics.handed_over("given", end, count)
        except Exception:
            log.exception("checkpoints could not be handed over; their states are computed anew")
        finally:
            await asyncio.to_thread(self._engine.close)
            if self._listener is not None:
                await self._listener.close()
            self._metrics.count()


def fingerprint_of(engine: Any) -> Fingerprint:
    """What an engine computes with, and the bits it gives. Raises EngineError if it cannot run."""
    from flide_engine.fingerprint import bits_of

    strict = bool(engine.config.deterministic)
    return Fingerprint(engine.weights_hash, bits_of(engine), engine.stack, strict, time.time())


def _trace(began_ns: int, answers: DecisionResponse) -> None:
    """Spans of what an answer says of its time in the engine."""
    usage = answers.usage
    attributes = {
        "flide.questions": len(answers.answers),
        "flide.input_tokens": usage.input_tokens,
        "flide.reused_tokens": usage.x_reused_tokens,
    }
    stages = {stage: ms / 1000 for stage, ms in answers.x_timing.items()}
    record_stages(began_ns, stages, attributes)


def _own_id() -> str:
    """The replica's id as routers know it; "" outside Serve, where nothing is routed."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return ""
