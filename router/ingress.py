"""The Gateway: HTTP and plain handle calls in, engine handle calls out. Holds no model and no
state.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from flide_engine.api import DecisionRequest, DecisionResponse
from flide_engine.errors import FlideError, NotReady
from flide_engine.limits import seconds_allowed
from router.asking import ask, own_error, plain_error, unless_cancelled
from router.auth import Keys
from router.boards import shared
from router.channel import Channels
from router.charging import Charges
from router.fan_out import ask_all
from router.http_app import HttpApp
from router.ledger import RemoteLedger
from router.observed import App, Observer, observed, observing
from router.options import CallOptions, HttpLimits
from router.refusals import in_a_line
from router.states import StateCall, Told
from router.waking import cheap_call, waking_of

READY_WITHIN_S = 2.0
"""How long a health or model query waits for a replica."""

STATES_WITHIN_S = 10.0
"""How long operations on states wait for each replica, which may be in a long round."""


@serve.ingress()
class Gateway:
    """Ingress deployment: an HTTP app and a `decide` method over one engine deployment."""

    def __init__(
        self,
        engine: DeploymentHandle,
        limits: HttpLimits,
        key_hashes: tuple[str, ...] = (),
        gateways: int = 1,
        has_ledger: bool = False,
        observer: Callable[[], Observer] | None = None,
        channels: bool = True,
    ) -> None:
        """key_hashes: of keys without quotas. gateways: how many of these there are. has_ledger:
        whether the deployment has keys with quotas, and a ledger of these. observer: makes what is
        told of requests, in this process. channels: whether to talk to replicas over connections of
        its own.
        """
        # gRPC between replicas costs half of an actor call: 1.7 against 3.2 CPU-ms (Ray 2.60)
        self._engine = engine.options(_by_reference=False)
        self._limits, self._keys = limits, Keys(key_hashes, needed=has_ledger)
        self._charges = Charges(RemoteLedger() if has_ledger else None, gateways)
        self._described: dict[str, str] | None = None
        known = shared(engine.app_name, engine.deployment_name)
        self._channels = Channels(known) if channels else None
        in_a_line()
        self._observer = observer() if observer is not None else None

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve at start and when the deployment's `user_config` changes: reads the keys
        of its `api_keys` anew. Raises ConfigError at start.
        """
        self._keys.reload(user_config.get("api_keys"))

    async def leases(self) -> dict[str, Any]:
        """held: what this Gateway has leased of each tenant's quotas and not used, by unit;
        by_ledger: whether the fleet's ledger leased it, or nobody could be asked.
        """
        return {"held": self._charges.held(), "by_ledger": self._charges.by_ledger}

    def __serve_build_asgi_app__(self) -> App:
        """Called by Serve once the replica is constructed."""
        app = HttpApp(_Decider(self), self._limits, self._keys, self._charges)
        return observed(app, self._observer)

    async def decide(
        self,
        request: DecisionRequest | dict[str, Any],
        session_id: str = "",
        timeout_s: float | None = None,
        batch: bool = False,
    ) -> DecisionResponse | dict[str, Any]:
        """Answers a typed request with a typed response, and a plain dict with a plain dict.

        session_id, timeout_s, batch: what `X-Session-Id`, `X-Request-Timeout-Ms` and `X-Priority`
        say over HTTP. A caller of the plain form may not have this package, so it gets ValueError
        for a fault of its own and RuntimeError for the rest; the typed form raises the error tree.
        """
        options = CallOptions("", session_id, timeout_s, batch)
        try:
            with observing(self._observer, "handle") as trip, trip:
                answers = await self.ask(request, None, options)
                trip.passed("call")
        except FlideError as error:
            if isinstance(request, DecisionRequest):
                raise
            raise plain_error(error) from None
        return answers if isinstance(request, DecisionRequest) else answers.model_dump()

    async def ask(
        self,
        request: DecisionRequest | dict[str, Any],
        body: bytes | None,
        options: CallOptions,
    ) -> DecisionResponse:
        """As `decide`, typed and for a tenant."""
        seconds = seconds_allowed(options.timeout_s, self._limits.max_timeout_s, ("timeout_s",))
        options = replace(options, timeout_s=seconds)
        return await ask(self._engine, request, options, body, self._channels)

    async def states(self, call: StateCall) -> tuple[list[Told], int]:
        """(what the replicas say that answered, how many were asked).

        All are asked: a state may be on several, and its files on any that has ever had it. Raises
        NotReady if there is none; a fleet that sleeps is woken, as it may have files.
        """
        await self._check_awake()
        answers, asked = await ask_all(self._engine, "on_states", call, seconds=STATES_WITHIN_S)
        return answers, asked

    async def health(self) -> str:
        """What the fleet is: "ok" if it can answer. Raises NotReady.

        Where it may sleep this is what the router knows, as a call would keep it awake; it is
        healthy, too, if it is "asleep" or "starting", since only requests wake it.
        """
        await self._heard()
        waking = waking_of(self._engine)
        if waking.replaced:
            raise NotReady("the last engine replica failed or is updated; another one is started")
        if waking.asleep:
            return "starting" if waking.starting else "asleep"
        if not waking.may_sleep:
            await self.describe()
        return "ok"

    async def _heard(self) -> None:
        """Returns once this process knows whether there is a replica, or soon."""
        for pause in waking_of(self._engine).pauses(self._engine.running_replicas_populated):
            await asyncio.sleep(pause)

    async def _check_awake(self) -> None:
        """Wakes a fleet that sleeps. Raises NotReady unless it will be there in a moment."""
        await self._heard()
        waking_of(self._engine).check(READY_WITHIN_S, cheap_call(self._engine))

    async def describe(self) -> dict[str, str]:
        """What the engine says of itself, or has said, if the fleet sleeps. Raises NotReady if no
        replica answers in time.
        """
        await self._heard()
        if self._described is not None and waking_of(self._engine).asleep:
            return self._described
        await self._check_awake()
        try:
            response = self._engine.describe.remote()
            waiting = unless_cancelled(response)
            self._described = await asyncio.wait_for(waiting, READY_WITHIN_S)
        except (TimeoutError, RayActorError):
            raise NotReady("no engine replica is ready") from None
        except Exception as error:
            ours = own_error(error)
            if not isinstance(ours, NotReady):
                raise ours from None
            # an engine that ended in one replica is not all there is
            answers, _ = await ask_all(self._engine, "describe", seconds=READY_WITHIN_S)
            if not answers:
                raise ours from None
            self._described = answers[0]
        assert self._described is not None
        return self._described


class _Decider:
    """The gateway as the HTTP app sees it."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway

    async def decide(
        self, request: DecisionRequest, body: bytes, options: CallOptions
    ) -> DecisionResponse:
        answers: DecisionResponse = await self._gateway.ask(request, body, options)
        return answers

    async def states(self, call: StateCall) -> tuple[list[Told], int]:
        told: tuple[list[Told], int] = await self._gateway.states(call)
        return told

    async def health(self) -> str:
        told: str = await self._gateway.health()
        return told

    async def models(self) -> list[dict[str, str]]:
        about = await self._gateway.describe()
        return [{key: about[key] for key in ("name", "description", "release_date")}]

    async def version(self) -> dict[str, str]:
        about = await self._gateway.describe()
        versions = {
            key: about[key] for key in ("version", "name", "weights_hash", "torch", "device")
        }
        return {**versions, "ray": ray.__version__}
