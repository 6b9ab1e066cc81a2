"""An engine replica that a test can have killed by a request, as a device fault or a bug would."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from deployments.replica import EngineReplica

KILLS = {
    signal.SIGKILL: "kills its replica, told in ",
    signal.SIGSEGV: "crashes its replica, told in ",
}
"""What a state says that ends its replica: as if from outside, or by a fault in native code."""

DIES_AFTER_S = 0.8
"""While which others come to be in the replica; with one thread that renders, none leaves."""


class Mortal(EngineReplica):
    """Dies while it renders a state that ends with one of `KILLS` and the name of a file, where it
    writes its process first.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        render = self._engine._family.render

        def mortal(request: Any, tenant: str) -> Any:
            for how, words in KILLS.items():
                _, kills, file = str(request.state).rpartition(words)
                if kills:
                    with Path(file).open("a") as deaths:
                        deaths.write(f"{os.getpid()}\n")
                    time.sleep(DIES_AFTER_S)
                    signal.raise_signal(how)  # in this thread, or it would go on to answer
            return render(request, tenant)

        self._engine._family.render = mortal  # type: ignore[method-assign]
