"""An engine replica that a test can have killed by a request, as a device fault or a bug would."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from deployments.replica import EngineReplica

KILLS = "kills its replica, told in "
LINGERS = "lingers"

DIES_AFTER_S, LINGERS_S = 0.8, 0.25
"""While which others come to be in the replica; each lingering one keeps one of two threads."""


class Mortal(EngineReplica):
    """Dies by SIGKILL when it begins to render a state of `KILLS` and the name of a file, where it
    writes its process first. A state of `LINGERS` takes long to render.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        render = self._engine._family.render

        def mortal(request: Any) -> Any:
            if isinstance(request.state, str) and request.state.startswith(LINGERS):
                time.sleep(LINGERS_S)
            if isinstance(request.state, str) and request.state.startswith(KILLS):
                with Path(request.state.removeprefix(KILLS)).open("a") as file:
                    file.write(f"{os.getpid()}\n")
                time.sleep(DIES_AFTER_S)
                os.kill(os.getpid(), signal.SIGKILL)
            return render(request)

        self._engine._family.render = mortal  # type: ignore[method-assign]
