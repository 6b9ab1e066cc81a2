"""`python -m benchmarks.engines ENGINE SHAPE OPTIONS`: starts an engine and answers commands until
its input ends.

ENGINE: ours, floor, transformers, or flide (which needs flide 0.1.4 and fla 0.5.2 first on the
path). OPTIONS: what the engine's `start` takes, as a JSON object.
"""

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

from benchmarks.engines.protocol import MARK


def say(answer: dict[str, Any]) -> None:
    """One answer."""
    print(MARK + json.dumps(answer), flush=True)


def main() -> None:
    """Serves commands; an error is an answer too, and the engine goes on."""
    name, shape, options = sys.argv[1:4]
    began = time.monotonic()
    try:
        engine = import_module(f"benchmarks.engines.{name}").start(shape, **json.loads(options))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"[:600]})
        raise
    say({"start_s": round(time.monotonic() - began, 1)})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            say(getattr(engine, command.pop("do"))(**command))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"[:600]})
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind that nobody has to wait for


main()
