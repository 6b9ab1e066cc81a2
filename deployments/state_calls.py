"""Operations on states, on the engine of one replica."""

import asyncio
import time
from typing import TYPE_CHECKING

from deployments.drain import BYTES_PER_TOKEN, Pace, give_to, hand_over
from deployments.siblings import Siblings
from flide_engine.errors import Fault, InvalidRequest
from router.asking import unless_cancelled
from router.routing_key import anchor_key
from router.states import StateCall, Told, grouped

if TYPE_CHECKING:
    from flide_engine.engine import Engine

HOME_WITHIN_S = 5.0
"""How long a branch may take to get to the replica that it belongs to."""


def perform(engine: "Engine", call: StateCall, replica: str) -> Told:
    """Does it, and says what came of it; blocks until the engine is between two rounds.

    replica: its id. Raises NotReady if the engine is closed, InvalidRequest for an empty id,
    TooMuchPinned, TooManyBranches.
    """
    tenant, name = call.tenant, call.id
    if call.operation == "list":
        states = grouped(engine.states(tenant), replica)
        some = [s for s in states if call.after is None or s.id > call.after][: call.limit]
        for state in some:  # a long trajectory has hundreds, and a gRPC message 4 MB at most
            state.steps = {max(state.steps): state.whole()}
        return Told(replica, tuple(some))
    if not name:  # to the engine it would be every state of the tenant
        message = f"{call.operation} is of one state; its id is empty"
        raise InvalidRequest((Fault(("path", "id"), message, "session_id_invalid"),))
    copies = engine.states(tenant, name)
    found = len(copies)
    if not copies or call.operation == "inspect":
        return Told(replica, tuple(grouped(copies, replica)), found)
    if call.operation in ("pin", "unpin"):
        changed = engine.pin(name, tenant, call.operation == "pin")
        return Told(replica, found=found, changed=changed)
    if call.operation == "snapshot":
        return Told(replica, found=found, tokens=engine.snapshot(name, tenant))
    if call.operation == "branch":
        tokens = engine.branch(name, call.new, call.tokens, tenant, call.anchor)
        return Told(replica, found=found, tokens=tokens)
    beyond = call.tokens if call.operation == "rollback" else -1
    changed = engine.rollback(name, beyond, tenant)
    rest = engine.states(tenant, name)
    return Told(
        replica,
        found=found,
        changed=changed,
        tokens=max((copy.tokens for copy in rest), default=0),
        left=sum(copy.tokens > beyond for copy in rest),
    )


async def bring_home(
    engine: "Engine", call: StateCall, tokens: int, siblings: Siblings, pace: Pace, replica: str
) -> str:
    """Hands a branch of so many tokens to the replica that will be asked about it: how that ended,
    as in `deployments.drain.hand_over`, or "home" if that is this one.

    replica: this one's id. Raises TimeoutError, and what a handle raises.
    """
    deadline = time.monotonic() + HOME_WITHIN_S
    route = tuple(anchor_key(call.anchor, call.tenant, int(BYTES_PER_TOKEN * tokens)))
    if not await siblings.exist(HOME_WITHIN_S):
        return "failed"
    # not `wait_for`, which for a time that is over would begin nothing, and so not cancel the call
    async with asyncio.timeout(deadline - time.monotonic()):
        owner = await unless_cancelled(siblings.handle.owner.remote(route=route))
    if owner == replica:
        return "home"
    branches = [
        leaf
        for leaf in await asyncio.to_thread(engine.leaves)
        if (leaf.tenant, leaf.name, leaf.tokens) == (call.tenant, call.new, tokens)
    ]
    if not branches:
        return "gone"
    (end,) = await hand_over(engine, branches, give_to(siblings, engine), pace, deadline)
    return end
