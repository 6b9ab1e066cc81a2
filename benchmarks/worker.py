"""An engine's process, as a benchmark sees it."""

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.engines.protocol import MARK


class Worker:
    """One engine's process; starts at once, so that several start beside each other."""

    def __init__(
        self, name: str, shape: str, path: list[str], mode: str = "default", **options: Any
    ) -> None:
        """name: a file of `benchmarks.engines`. path: folders before everything else on its path.
        mode, options: what its `start` takes.
        """
        self.name, self.mode, self.start_s = name, mode, 0.0
        paths = [*path, *filter(None, [os.environ.get("PYTHONPATH")])]
        options = {"mode": mode, **options}
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
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "the engine has ended"}
        return self.answer()

    def stop(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def started(workers: list[Worker]) -> list[Worker]:
    """Those of the workers that have started; says so of each."""
    found = []
    for worker in workers:
        answer = worker.answer()
        print(worker.name, worker.mode, answer, flush=True)
        if "error" in answer:
            worker.stop()
        else:
            worker.start_s = float(answer["start_s"])
            found.append(worker)
    return found
