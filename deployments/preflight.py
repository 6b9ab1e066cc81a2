"""What is looked at before anything is started: `deployments.local` refuses to start with what is
wrong, `flide-serve doctor` tells it among the rest.
"""

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deployments.config import AppArgs


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what is wrong with it and helps."""

    what: str
    found: str
    wrong: str = ""


def placement(args: AppArgs, cores: int, gpus: int, joins: bool) -> Iterator[Finding]:
    """Whether Ray finds room for the replicas on this machine.

    joins: it is one of a cluster's, which may have room elsewhere.
    """
    scales = args.num_replicas == "auto"
    # a fleet that scales starts with the fewest, and may be meant for machines that are not there
    least, most = max(1, args.min_replicas) if scales else args.most_replicas, args.most_replicas
    a_replica = args.gpus_here(gpus)
    for kind, each, besides, there in (
        ("cpus", args.cpus_per_replica, 0.1 * args.gateway_replicas, cores),
        ("gpus", a_replica, 0.0, gpus),
    ):
        need = least * each + besides
        short = (
            f"Ray would not place all: {least} of them need {need:g} {kind}, there are {there};"
            f" fewer replicas, or a smaller {kind}_per_replica; or a cluster of more machines"
        )
        told = f"{most * each + besides:g} of {there} for {most} replica{'s' * (most > 1)}"
        yield Finding(kind, told, "" if need <= there or joins else short)
    sharing = int(1 / a_replica) if 0 < a_replica < 1 else 1
    share = args.engine_options(a_replica)["device_share"]
    if gpus and sharing * share > 1:
        yield Finding(
            "device_share",
            f"{sharing} replicas of {share:g} of a GPU's memory each",
            f"at most 1/{sharing} each: device_share={1 / sharing:.3g}",
        )


def has_only_loopback() -> bool:
    """Whether the machine has no network but its own."""
    return {name for _, name in socket.if_nameindex()} <= {"lo"}


def authentication(env: Mapping[str, str], alone: bool) -> Finding:
    """Ray's token: without it whoever reaches a node can run code in the cluster.

    alone: whether nobody can reach this machine, or somebody said that this is so.
    """
    mode, what = env.get("RAY_AUTH_MODE", "").lower(), "ray auth"
    if mode == "disabled":
        risk = (
            "whoever reaches this machine can run code in the cluster: RAY_AUTH_MODE=token, or"
            " insecure=true if nobody does"
        )
        return Finding(what, "disabled", "" if alone else risk)
    if env.get("RAY_AUTH_TOKEN"):
        return Finding(what, "a token, of RAY_AUTH_TOKEN")
    path = Path(env.get("RAY_AUTH_TOKEN_PATH") or Path(env.get("HOME", "~")) / ".ray/auth_token")
    if path.is_file():
        more = f"others may read it: chmod 600 {path}" if _open_to_others(path) else ""
        return Finding(what, f"a token, of {path}", more)
    if env.get("RAY_AUTH_TOKEN_PATH"):
        return Finding(what, "no token", f"RAY_AUTH_TOKEN_PATH={path} is not there")
    if env.get("RAY_ADDRESS"):
        needed = "a cluster that runs asks for its token: RAY_AUTH_TOKEN, or " + str(path)
        return Finding(what, "no token", needed)
    return Finding(
        what, "no token yet; `make serve` makes one, `ray start` needs RAY_AUTH_MODE=token"
    )


def _open_to_others(path: Path) -> bool:
    reached = all(parent.stat().st_mode & 0o011 for parent in path.absolute().parents)
    return reached and bool(path.stat().st_mode & 0o044)
