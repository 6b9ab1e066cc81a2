"""The request at hand, as Serve's logs know it: carried to a replica beside a call of ours, as
Serve carries it beside its own.
"""

from ray.serve import context

# Serve 2.60 has no public way to set what its log lines take the request's id from


def request_context() -> dict[str, str]:
    """Of the present task; empty outside a request."""
    at_hand = context._get_serve_request_context()
    return {"request_id": at_hand.request_id, "route": at_hand.route} if at_hand.request_id else {}


def enter(told: dict[str, str]) -> None:
    """From now on the present task is about the request that `request_context` told of."""
    context._unset_request_context()
    context._set_request_context(route=told.get("route", ""), request_id=told.get("request_id", ""))
