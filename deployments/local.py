"""`python -m deployments.local [port=8000] [name=value ...]`: the app on this machine, in a
cluster of its own.

Starts Ray here whatever RAY_ADDRESS or a leftover cluster says, serves until Ctrl-C, and leaves no
process.
"""

import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deployments.config import AppArgs

HOST = "127.0.0.1"

EXAMPLE = (
    '{"state": "My card was charged twice and nobody answers.", "questions": {'
    '"team": {"type": "choice", "instructions": "Who handles it?", "criteria": '
    '{"billing": "payments and refunds", "delivery": "parcels"}}, '
    '"angry": {"type": "noul", "instructions": "Is the customer angry?"}}}'
)


def parse_args(words: list[str]) -> tuple[int, AppArgs]:
    """(port, arguments of the app) of `name=value` words. Exits with a message if one is wrong."""
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            sys.exit(f"{word!r} is not of the form name=value")
        given[name] = value
    port = given.pop("port", "8000")
    if not port.isdigit() or not 0 < int(port) < 65536:
        sys.exit(f"port={port!r} is not a port number")
    try:
        return int(port), AppArgs.model_validate(given)
    except ValidationError as error:
        sys.exit(
            "\n".join(
                f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()
            )
        )


def refuse_busy_port(port: int) -> None:
    """Exits, naming the port, if something listens on it already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            sys.exit(
                f"port {port} is busy ({error.strerror}); another one: make serve PORT={port + 1}"
            )


def main() -> None:
    """Serves until interrupted."""
    port, args = parse_args(sys.argv[1:])
    refuse_busy_port(port)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # an interrupt is ours to handle, in order: the app first, then the cluster
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    import ray
    from ray import serve

    from deployments import logs
    from deployments.app import build

    print("starting Ray on this machine ...", flush=True)
    cluster = ray.init(address="local", include_dashboard=False, log_to_driver=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        logging_options = logs.options(args.log_encoding, args.log_level)
        serve.start(http_options={"host": HOST, "port": port}, **logging_options)
        serve.run(build(args), name="default", route_prefix="/")
        url = f"http://{HOST}:{port}"
        folder = Path(cluster.address_info["session_dir"]) / "logs" / "serve"
        print(
            f"\nserving at {url}\nlogs: {folder}\n"
            f"cluster: {cluster.address_info['address']}\n\n"
            f"curl -s {url}/v1/systemone -H 'content-type: application/json' -d '{EXAMPLE}'\n\n"
            "Ctrl-C stops it.",
            flush=True,
        )
        stop.wait()
        print("stopping ...", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
