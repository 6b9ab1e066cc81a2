"""Our policy behind Ray Serve's request-router API.

Serve makes one `StateRouter` for each handle, in the caller's process, from a pickle of the class.
What it needs of this project travels in that pickle, so that a process without this package can
route, too.
"""

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray import cloudpickle
from ray.serve import metrics
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from router.boards import Reasons, Shared, nothing_shared
from router.fingerprint import decode, odd_ones
from router.policy import SHIPPED, Limits, Policy
from router.routing_key import RouteKey, as_key, route_key

log = logging.getLogger("ray.serve")

# Serve pickles a router's own module by value only. A module that is not there when the class is
# loaded leaves the caller waiting to its timeout, with the ImportError in a log.
for _name in (*SHIPPED, "router.boards"):
    cloudpickle.register_pickle_by_value(importlib.import_module(_name))

KEYED = ("decide", "decide_with_load")
"""Methods of a replica that are about a state, and take `route`, `anchor`, `home`, `reason`."""

OWNERS = ("adopt", "owner")
"""Those that are for whoever a state belongs to, and nobody else: taking it over, and saying so."""

LISTENS = "flide_listens"
"""In a replica's metadata: see `address_of`."""

FALLBACKS = 2
"""Replicas tried in order after the chosen one; then whichever has least to do."""


class StateRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Sends each state to the replica that `Policy` names for it."""

    # A busy host answers a probe late (Serve's 100 ms: 20 of 40 first calls went elsewhere), and
    # going elsewhere costs a recompute; so a probe gets the longest time Serve ever gives one.
    queue_len_response_deadline_s = RequestRouter.max_queue_len_response_deadline_s

    def initialize_state(self, cold_start_s: float | None = None, **limits: Any) -> None:
        """Called by Serve before anything else. limits: fields of `router.policy.Limits`.

        cold_start_s: seconds that a first replica is taken to need where there may be none; None:
        there always is one.
        """
        self._shared = _shared_of(self._deployment_id.app_name, self._deployment_id.name)
        self._shared.members.cold_start_s = cold_start_s
        self._policy = Policy(self._shared.board, Limits(**limits))
        self._by_name: dict[str, RunningReplica] = {}
        self._told: dict[str, object] = {}
        # declared in `deployments.metrics`, which a caller's process may not have
        self._odd_replicas = metrics.Gauge(
            "flide_odd_replicas", "Replicas whose bits are not their fleet's."
        )
        self._compared: set[str] = set()
        self._barred: set[str] = set()
        self._addresses: dict[str, tuple[str, int, str]] = {}
        self._dead: set[ReplicaID] = set()

    @property
    def reasons(self) -> Reasons:
        """Why replicas were chosen, counted."""
        return self._shared.reasons

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with the replicas there are, at every change of any one's stats."""
        # the controller learns of a death after those that met it, and lists the dead until then
        self._dead &= {replica.replica_id for replica in replicas}
        live = [replica for replica in replicas if replica.replica_id not in self._dead]
        live = self._of_the_fleet(live)
        self._by_name = {replica.replica_id.unique_id: replica for replica in live}
        self._shared.members.count = len(live)
        # Stats come unpickled anew each time; the policy reads those that are another object. To
        # hand over the old ones spares it 999 of 1,000.
        told = {name: replica.routing_stats for name, replica in self._by_name.items()}
        self._told = {
            name: old if (old := self._told.get(name)) == new else new for name, new in told.items()
        }
        self._policy.set_replicas(self._told, time.monotonic())
        super().update_replicas(live)
        ways = getattr(self._shared, "ways", None)  # a caller's own modules may be older
        if self._addresses and ways is not None:
            ways.add(self)

    def _of_the_fleet(self, live: list[RunningReplica]) -> list[RunningReplica]:
        """Those whose bits are their fleet's, and those that promise nothing of the kind."""
        odd, names = self._shared.odd, {replica.replica_id.unique_id for replica in live}
        if names != self._compared:  # what a replica tells of itself never changes
            self._compared = names
            told = {r.replica_id.unique_id: decode(r.replica_metadata) for r in live}
            where = {r.replica_id.unique_id: address_of(r.replica_metadata) for r in live}
            self._addresses = {name: found for name, found in where.items() if found is not None}
            fingerprints = {name: found for name, found in told.items() if found is not None}
            found = odd_ones(fingerprints)
            for name in found.keys() - odd:
                log.warning("replica %s computes unlike its fleet: %s", name, found[name])
            odd.clear()
            odd.update(found)
            self._barred = {name for name in odd if fingerprints[name].strict}
        # again at every look: Ray forgets a gauge that is not set for two exports
        self._odd_replicas.set(len(odd))
        return [replica for replica in live if replica.replica_id.unique_id not in self._barred]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve, once for each call that failed by it: nothing goes there any more."""
        super().on_replica_actor_died(replica_id)
        self._dead.add(replica_id)
        self._by_name.pop(replica_id.unique_id, None)
        self._told.pop(replica_id.unique_id, None)
        self._policy.remove(replica_id.unique_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Called by Serve if a replica could not be reached, which is how a death looks over gRPC.

        States go elsewhere until the controller lists the replica again.
        """
        super().on_replica_actor_unavailable(replica_id)
        self.lost(replica_id.unique_id)

    def place(self, route: object) -> tuple[str, tuple[str, int, str], dict[str, object]] | None:
        """For `router.channel`: the replica that a request of this key goes to, which counts as
        sent there, where it listens, and what it is told of why. None: it is to go by handle.
        """
        key = as_key(route)
        if key is None or not self._addresses:
            return None
        try:
            choice = self._policy.choose(key, time.monotonic())
        except Exception:
            log.exception("routing failed; Serve's handle is asked")
            return None
        if choice is None or choice.replica in self._shared.stopped:
            return None
        if (address := self._addresses.get(choice.replica)) is None:
            return None
        self.reasons.count(choice.reason)
        home = choice.replica if choice.home else ""
        more = {"anchor": choice.anchor, "home": home, "reason": choice.reason}
        log.debug("to %s: %s", choice.replica, choice.reason)
        return choice.replica, address, more

    def lost(self, replica: str) -> None:
        """For `router.channel`: a connection broke, so states go elsewhere until the controller
        lists the replica again.
        """
        self._told.pop(replica, None)
        self._policy.remove(replica)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas to try: the policy's choice, its fallbacks, then all there are.

        Tells the replica what it was chosen for, in the call's own arguments. Called again for the
        same request if every rank was full; never raises.
        """
        if pending_request is None:
            return [candidate_replicas]
        # or Serve would ask again at once and without end while all are full
        pending_request.routing_context.should_backoff = True
        try:
            if self._shared.stopped:
                candidate_replicas = self._without_stopped(candidate_replicas)
            return [*self._ranked(pending_request), candidate_replicas]
        except Exception:
            # raised here, it would leave the caller waiting to its timeout
            message = "routing failed; the least loaded replica is used"
            log.exception(message, extra=_about(pending_request))
            return [candidate_replicas]

    def _without_stopped(self, candidates: list[RunningReplica]) -> list[RunningReplica]:
        """Takes those whose engine has ended for dead, though the controller lists them still."""
        live = []
        for replica in candidates:
            if replica.replica_id.unique_id in self._shared.stopped:
                self.on_replica_actor_died(replica.replica_id)
            else:
                live.append(replica)
        return live

    def _ranked(self, request: PendingRequest) -> list[list[RunningReplica]]:
        method, now = request.metadata.call_method, time.monotonic()
        keyed = method in (*KEYED, *OWNERS)
        key = key_of_call(request.args, request.kwargs) if keyed else None
        if key is not None and method in OWNERS:
            choice = self._policy.owner(key, now)
        else:
            choice = self._policy.choose(key, now)
        if choice is None:
            return []
        self.reasons.count(choice.reason)
        if key is not None:
            # by name, as Serve may have to try another replica than the chosen one
            home = choice.replica if choice.home else ""
            request.kwargs.update(route=tuple(key), anchor=choice.anchor, home=home)
            if request.metadata.call_method in KEYED:
                request.kwargs["reason"] = choice.reason
        log.debug("to %s: %s", choice.replica, choice.reason, extra=_about(request))
        chosen = self._by_name[choice.replica]
        ongoing = self.replica_queue_len_cache.get(chosen.replica_id)
        if ongoing is not None and ongoing < chosen.max_ongoing_requests:
            # Serve takes it without a look at other ranks, which cost as much as the choice
            return [[chosen]]
        names = self._policy.fallbacks(choice, FALLBACKS)
        return [[chosen], *([self._by_name[name]] for name in names)]


def address_of(metadata: object) -> tuple[str, int, str] | None:
    """Where a replica with this metadata listens: host, port, and the token that it wants to hear;
    None for one that does not.
    """
    told = metadata.get(LISTENS) if isinstance(metadata, Mapping) else None
    if not isinstance(told, (list, tuple)) or len(told) != 3:
        return None
    host, port, token = told
    if isinstance(host, str) and isinstance(port, int) and isinstance(token, str):
        return host, port, token
    return None


def _about(request: PendingRequest) -> dict[str, object]:
    """What a line about a request says of it; the context here may be another request's."""
    return {"request_id": request.metadata.request_id, "skip_context_filter": True}


def key_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> RouteKey | None:
    """The key that a call carries, or one made of its request; None if it has no state."""
    if (given := as_key(kwargs.get("route"))) is not None:
        return given
    request = args[0] if args else kwargs.get("request")
    tenant, session = kwargs.get("tenant", ""), kwargs.get("session_id", "")
    if not isinstance(tenant, str) or not isinstance(session, str):
        return None  # the replica refuses it
    has_state = hasattr(request, "state") or (isinstance(request, dict) and "state" in request)
    return route_key(request, tenant, session) if has_state else None


def _shared_of(app: str, deployment: str) -> Shared:
    """What this process knows of a deployment already, if it can have been told anything."""
    try:
        from router.boards import shared
    except ImportError:
        return nothing_shared()
    return shared(app, deployment)
