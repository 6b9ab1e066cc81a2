"""`python -m deployments.local [port=8000] [insecure=false] [name=value ...]`: the app on this
machine, in a cluster of its own.

Starts Ray here whatever RAY_ADDRESS or a leftover cluster says, serves until Ctrl-C, and leaves no
process.
"""

import errno
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from deployments.config import AppArgs
from deployments.preflight import authentication, has_only_loopback, placement

HOST = "127.0.0.1"

EXAMPLE = (
    '{"state": "My card was charged twice and nobody answers.", "questions": {'
    '"team": {"type": "choice", "instructions": "Who handles it?", "criteria": '
    '{"billing": "payments and refunds", "delivery": "parcels"}}, '
    '"angry": {"type": "noul", "instructions": "Is the customer angry?"}}}'
)


class Words(NamedTuple):
    """What the command line says. insecure: whether a cluster without a token is wanted."""

    port: int
    args: AppArgs
    insecure: bool


def parse_args(words: list[str]) -> Words:
    """What `name=value` words say. Exits with a message if one is wrong."""
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            sys.exit(f"{word!r} is not of the form name=value")
        given[name] = value
    port, insecure = given.pop("port", "8000"), given.pop("insecure", "false")
    if not port.isdigit() or not 0 < int(port) < 65536:
        sys.exit(f"port={port!r} is not a port number")
    if insecure not in ("true", "false"):
        sys.exit(f"insecure={insecure!r} is neither true nor false")
    try:
        return Words(int(port), AppArgs.model_validate(given), insecure == "true")
    except ValidationError as error:
        sys.exit(
            "\n".join(
                f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()
            )
        )


def refuse_busy_port(port: int) -> None:
    """Exits, naming the port, if it cannot be had."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            busy = error.errno == errno.EADDRINUSE
            other = (port + 1 if port < 65535 else port - 1) if busy else 8000
            why = " is busy" if busy else f": {error.strerror}"
            sys.exit(f"port {port}{why}; another one: make serve PORT={other}")


def refuse_open_cluster(insecure: bool) -> None:
    """Exits if whoever reaches this machine could run code in the cluster."""
    found = authentication(os.environ, insecure or has_only_loopback())
    if not found.wrong:
        return
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        sys.exit(f"RAY_AUTH_MODE=disabled: {found.wrong}")
    print(f"{found.what}: {found.found}: {found.wrong}", file=sys.stderr)


def main() -> None:
    """Serves until interrupted."""
    words = parse_args(sys.argv[1:])
    refuse_busy_port(words.port)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    refuse_open_cluster(words.insecure)
    import ray
    from ray import serve

    stop = threading.Event()
    _on_interrupt(_leave)
    try:
        _start(words)
        # from now on in order: the app first, then the cluster
        _on_interrupt(lambda *_: stop.set())
        stop.wait()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _on_interrupt(signal.SIG_IGN)
        print("stopping ...", flush=True)
        if ray.is_initialized():  # or Serve would start a cluster to stop in it
            serve.shutdown()
        ray.shutdown()


def _on_interrupt(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _leave(*_: object) -> None:
    raise KeyboardInterrupt


def _start(words: Words) -> None:
    """Starts the cluster and the app, and says where they are."""
    import ray
    from ray import serve

    from deployments import logs
    from deployments.app import build

    print("starting Ray on this machine ...", flush=True)
    cluster = ray.init(address="local", include_dashboard=False, log_to_driver=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    there = ray.cluster_resources()
    room = placement(words.args, int(there.get("CPU", 0)), int(there.get("GPU", 0)), joins=False)
    if wrong := [finding.wrong for finding in room if finding.wrong]:
        sys.exit("\n".join(wrong))  # Serve would wait for room, and say so in its log alone
    logging_options = logs.options(words.args.log_encoding, words.args.log_level)
    serve.start(http_options={"host": HOST, "port": words.port}, **logging_options)
    print("loading the model ...", flush=True)
    serve.run(build(words.args), name="default", route_prefix="/")
    url = f"http://{HOST}:{words.port}"
    folder = Path(cluster.address_info["session_dir"]) / "logs" / "serve"
    print(
        f"\nserving at {url}\nlogs: {folder}\n"
        f"cluster: {cluster.address_info['address']}\n\n"
        f"curl -s {url}/v1/systemone -H 'content-type: application/json' -d '{EXAMPLE}'\n\n"
        "Ctrl-C stops it.",
        flush=True,
    )


if __name__ == "__main__":
    main()
