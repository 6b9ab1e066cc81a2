"""The same prompts in other processes: a replica computes them anew, one that has been restarted
resumes them from files.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.bits.first_difference import Floats, Tokens, same_bits
from benchmarks.bits.watch import Told, Watched
from benchmarks.requests import TokenRequest

ANOTHER, RESTARTED = "another process", "a process restarted from files"


def write(path: Path, asked: Sequence[TokenRequest]) -> None:
    """Requests for another process."""
    prompts = [p for request in asked for p in request.prompts]
    np.savez(
        path,
        states=[request.state for request in asked],
        counts=[len(request.prompts) for request in asked],
        lengths=[len(p) for p in prompts],
        tokens=np.concatenate(prompts),
    )


def read(path: Path) -> list[TokenRequest]:
    """What `write` has written."""
    with np.load(path) as found:
        prompts: list[Tokens] = np.split(found["tokens"], np.cumsum(found["lengths"])[:-1])
        ends = np.cumsum(found["counts"]).tolist()
        return [
            TokenRequest(int(state), tuple(prompts[end - count : end]))
            for state, end, count in zip(found["states"], ends, found["counts"], strict=True)
        ]


def answer(watched: Watched, asked: Sequence[TokenRequest], resume: bool, path: Path) -> None:
    """Writes the logits of every prompt: alone, or of its request, resumed from what files have."""
    if resume:
        found = [row for request in asked for row in watched.values([Told(request, "")])[0]]
    else:
        found = watched.alone([p for request in asked for p in request.prompts])
    np.savez(path, logits=np.stack(found), from_disk=watched.engine.counters().from_disk)


@dataclass
class Elsewhere:
    """A process that answers."""

    name: str
    process: "subprocess.Popen[bytes]"
    answers: Path

    @classmethod
    def begun(cls, name: str, options: Sequence[str], asked: Path, number: int) -> "Elsewhere":
        """Begins one, on the same device. options: of `benchmarks.deterministic`."""
        answers = asked.with_name(f"answers-{number}.npz")
        command = [sys.executable, "-m", "benchmarks.deterministic", *options]
        command += ["--asked", str(asked), "--answers", str(answers)]
        return cls(name, subprocess.Popen(command, stdout=subprocess.DEVNULL), answers)

    def differing(self, want: Sequence[Floats]) -> int:
        """Waits for it, and counts prompts with other bits. Raises RuntimeError if it has failed,
        or has resumed nothing although it was to.
        """
        if code := self.process.wait():
            raise RuntimeError(f"{self.name} ended with {code}")
        with np.load(self.answers) as found:
            if self.name == RESTARTED and not found["from_disk"]:
                raise RuntimeError(f"{self.name} found no file of a state")
            got = found["logits"]
        return sum(not same_bits(g, w) for g, w in zip(got, want, strict=True))
