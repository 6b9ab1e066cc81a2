"""An engine's process, as a benchmark sees it."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from benchmarks.engines.protocol import MARK


class Worker:
    """One engine's process; starts at once, so that several start beside each other.

    Once it `rests` it is stopped between commands: what its threads poll for would cost the one
    whose turn it is (0.7 ms a request, measured beside four idle engines).
    """

    def __init__(
        self, name: str, shape: str, path: list[str], mode: str = "default", **options: Any
    ) -> None:
        """name: a file of `benchmarks.engines`. path: folders before everything else on its path.
        mode, options: what its `start` takes.
        """
        self.name, self.mode, self.start_s = name, mode, 0.0
        paths = [*path, *filter(None, [os.environ.get("PYTHONPATH")])]
        options = {"mode": mode, **options}
        self._resting = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engines", name, shape, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """The next answer; an error if the engine has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        return {"error": "the engine has ended"}

    def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """One command's answer."""
        assert self._process.stdin is not None
        rested = self._wake()
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "the engine has ended"}
        found = self.answer()
        if rested:
            self.rest()
        return found

    def rest(self) -> None:
        """Stops the process until its next command, and after every later one."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)
            self._resting = True

    def _wake(self) -> bool:
        rested, self._resting = self._resting, False
        if rested:
            self._process.send_signal(signal.SIGCONT)
        return rested

    def stop(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._wake()
        with suppress(BrokenPipeError):  # it has ended with a command unread
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def started(workers: list[Worker]) -> list[Worker]:
    """Those of the workers that have started, at rest; says so of each."""
    found = []
    for worker in workers:
        answer = worker.answer()
        print(worker.name, worker.mode, answer, flush=True)
        if "error" in answer:
            worker.stop()
        else:
            worker.start_s = float(answer["start_s"])
            found.append(worker)
    for worker in found:  # none before all have started: they start beside each other
        worker.rest()
    return found
