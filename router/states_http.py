"""`/v1/states` over HTTP: what is remembered of a tenant's states, and what is to become of it.

GET    /v1/states?limit=&after=       the states, by id
GET    /v1/states/{id}                one of them, with its steps
DELETE /v1/states/{id}                forgets it
POST   /v1/states/{id}/pin, /unpin    keeps it from eviction, or no longer
POST   /v1/states/{id}/snapshot       keeps its last step from eviction, and says which that is
POST   /v1/states/{id}/rollback       {"tokens": step}: forgets what came after
POST   /v1/states/{id}/branch         {"name": id, "tokens": step}: a second state that begins alike
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, TypeVar
from urllib.parse import parse_qsl, quote, unquote

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flide_engine.errors import DeadlineExceeded, Fault, InvalidRequest, UnknownState, as_faults
from router.body import Receive, decode_body, read_body
from router.routing_key import anchor_text, session_entry
from router.session_id import check_session_id
from router.states import Operation, StateCall, Told, merged

PATH = "/v1/states"
LISTED, MOST_LISTED = 100, 1000
"""States of one page, and how many may be asked for."""

BODY_WITHIN_S = 10.0
"""Seconds in which a body has to arrive."""

MOST_BODY = 16 << 10
"""Bytes of a body: a name of 256 characters and a number, however they are escaped."""

ACTIONS: tuple[Operation, ...] = ("pin", "unpin", "snapshot", "rollback", "branch")

Model = TypeVar("Model", bound=BaseModel)
Answer = tuple[int, Any, list[tuple[bytes, bytes]]]


class Keeper(Protocol):
    """What stands behind the routes."""

    async def states(self, call: StateCall) -> tuple[Sequence[Told], int]:
        """(what the replicas say that answered, how many were asked). Raises a FlideError."""
        ...


class Page(BaseModel):
    """Query of a listing."""

    limit: int = Field(LISTED, ge=1, le=MOST_LISTED)
    after: str | None = None


class Rollback(BaseModel):
    """Body of a rollback. tokens: what came after so many is forgotten."""

    model_config = ConfigDict(extra="forbid")

    tokens: Annotated[int, Field(strict=True, ge=0)]


class Branch(BaseModel):
    """Body of a branch. name: the new state's session id; tokens: the step it leaves at, the last
    one without it.
    """

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(strict=True, min_length=1)]
    tokens: Annotated[int, Field(strict=True, ge=1)] | None = None


def is_ours(path: str) -> bool:
    """Whether these routes answer a path."""
    return path == PATH or path.startswith(f"{PATH}/")


class StateRoutes:
    """The routes over a `Keeper`."""

    def __init__(self, keeper: Keeper, max_body_bytes: int) -> None:
        self._keeper, self._limit = keeper, min(max_body_bytes, MOST_BODY)

    async def __call__(self, scope: dict[str, Any], receive: Receive, tenant: str) -> Answer:
        """(status, body, further headers). Raises a FlideError."""
        method, parts = scope["method"], _parts(scope)
        known = len(parts) < 2 or (len(parts) == 2 and parts[1] in ACTIONS)
        # an empty id is no path, as to an engine it means every state of the tenant
        if not known or (parts and not parts[0]):
            message = f"no such path: {scope['path'][:200]}"
            return 404, {"detail": {"error_type": "not_found", "message": message}}, []
        allowed = ("GET",), ("GET", "DELETE"), ("POST",)
        if method not in allowed[len(parts)]:
            methods = ", ".join(allowed[len(parts)])
            message = f"{scope['path'][:200]} takes {methods}"
            detail = {"error_type": "method_not_allowed", "message": message}
            return 405, {"detail": detail}, [(b"allow", methods.encode())]
        if not parts:
            return 200, await self._list(scope, tenant), []
        state = check_session_id(parts[0], ("path", "id"))
        if len(parts) == 2:
            return 200, await self._act(parts[1], tenant, state, scope, receive), []
        if method == "DELETE":
            return 200, await self._changed(StateCall("delete", tenant, state)), []
        told, asked = await self._keeper.states(StateCall("inspect", tenant, state))
        _check_found(told, asked, state)
        return 200, {**merged(told)[0].details(), **_coverage(told, asked)}, []

    async def _list(self, scope: dict[str, Any], tenant: str) -> dict[str, Any]:
        query = dict(
            parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        )
        page = _validated(Page, query, "query")
        # one more than is shown tells whether there are more
        call = StateCall("list", tenant, after=page.after, limit=page.limit + 1)
        told, asked = await self._keeper.states(call)
        states = merged(told)
        return {
            "states": [state.summary() for state in states[: page.limit]],
            "has_more": len(states) > page.limit,
            **_coverage(told, asked),
        }

    async def _act(
        self, action: str, tenant: str, state: str, scope: dict[str, Any], receive: Receive
    ) -> dict[str, Any]:
        if action == "rollback":
            body = _validated(Rollback, await _json(scope, receive, self._limit), "body")
            return await self._changed(StateCall("rollback", tenant, state, body.tokens))
        if action == "branch":
            branch = _validated(Branch, await _json(scope, receive, self._limit), "body")
            return await self._branch(tenant, state, branch)
        operation = next(o for o in ACTIONS if o == action)
        return await self._changed(StateCall(operation, tenant, state))

    async def _branch(self, tenant: str, state: str, body: Branch) -> dict[str, Any]:
        new = check_session_id(body.name, ("body", "name"))
        if new == state:
            fault = Fault(("body", "name"), f"{new!r} is the state itself", "branch_of_itself")
            raise InvalidRequest((fault,))
        tokens = 1 << 62 if body.tokens is None else body.tokens
        anchor = anchor_text(session_entry(tenant, new))
        call = StateCall("branch", tenant, state, tokens, new, anchor)
        return {**await self._changed(call), "id": new}

    async def _changed(self, call: StateCall) -> dict[str, Any]:
        """Does what changes a state, and says what came of it."""
        told, asked = await self._keeper.states(call)
        _check_found(told, asked, call.id)
        answer: dict[str, Any] = {"id": call.id, **_coverage(told, asked)}
        if call.operation in ("snapshot", "rollback", "branch"):
            answer["tokens"] = max(t.tokens for t in told)
        if call.operation == "branch" and not answer["tokens"]:
            raise UnknownState(call.id, f" with at most {call.tokens} tokens")
        if call.operation not in ("snapshot", "branch"):
            answer["copies"] = sum(t.changed for t in told)
        if call.operation in ("rollback", "delete"):
            answer["in_use"] = sum(t.left for t in told)
        return answer


def _coverage(told: Sequence[Told], asked: int) -> dict[str, Any]:
    """Whether every replica answered."""
    return {"partial": len(told) < asked, "replicas_asked": asked, "replicas_answered": len(told)}


def _check_found(told: Sequence[Told], asked: int, state: str) -> None:
    if not any(t.found for t in told):
        missing = asked - len(told)
        why = f"; {missing} of {asked} replicas did not answer" if missing else ""
        raise UnknownState(state, why)


def _parts(scope: dict[str, Any]) -> list[str]:
    """What follows `PATH`, decoded part by part: an id may hold slashes, as %2F."""
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    path = raw.decode("latin-1").partition("?")[0].removeprefix(scope.get("root_path", ""))
    return [unquote(part, "latin-1") for part in path.removeprefix(PATH).split("/")[1:]]


async def _json(scope: dict[str, Any], receive: Receive, limit: int) -> Any:
    """The body. Raises InvalidRequest if it is no JSON, DeadlineExceeded if it does not come."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    declared = int(length) if length.isdigit() else None
    option = "of an operation on a state"
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            body = await read_body(receive, declared, limit, option)
    except TimeoutError:
        raise DeadlineExceeded(BODY_WITHIN_S) from None
    encoding = headers.get(b"content-encoding", b"").decode("latin-1")
    try:
        return orjson.loads(decode_body(body, encoding, limit, option))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest((Fault(("body", error.pos), error.msg, "json_invalid"),)) from None


def _validated(kind: type[Model], given: Any, where: str) -> Model:
    """Raises InvalidRequest naming every fault."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise InvalidRequest(as_faults([dict(f) for f in found], (where,))) from None
