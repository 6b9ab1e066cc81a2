"""Operations on states, on the engine of one replica."""

from typing import TYPE_CHECKING

from router.states import StateCall, Told, grouped

if TYPE_CHECKING:
    from flide_engine.engine import Engine


def perform(engine: "Engine", call: StateCall, replica: str) -> Told:
    """Does it, and says what came of it; blocks until the engine is between two rounds.

    replica: its id. Raises NotReady if the engine is closed, TooMuchPinned, TooManyBranches.
    """
    tenant, name = call.tenant, call.id
    if call.operation == "list":
        states = grouped(engine.states(tenant), replica)
        some = [s for s in states if call.after is None or s.id > call.after]
        return Told(replica, tuple(some[: call.limit]))
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
