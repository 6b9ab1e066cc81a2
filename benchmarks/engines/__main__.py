"""`python -m benchmarks.engines ENGINE SHAPE`: starts an engine and answers commands until told
to stop.

ENGINE: ours, floor, or flide (which needs flide 0.1.4 and fla 0.5.2 first on the path).
"""

import json
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
    name, shape = sys.argv[1:3]
    began = time.monotonic()
    engine = import_module(f"benchmarks.engines.{name}").start(shape)
    say({"start_s": round(time.monotonic() - began, 1)})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            return
        try:
            say(getattr(engine, command.pop("do"))(**command))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"[:300]})


main()
