"""How busy GPUs are, as nvidia-smi says while something runs."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from typing import Self

from benchmarks.results_file import Row

COMMAND = (
    "nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits",
    "--loop-ms=250",
)  # fmt: skip


class Cards:
    """Looks at the GPUs of this machine during a `with` block, if nvidia-smi is there."""

    def __enter__(self) -> Self:
        self._file = tempfile.TemporaryFile("w+")
        self._process = None
        if shutil.which(COMMAND[0]):
            self._process = subprocess.Popen(COMMAND, stdout=self._file)
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
        self._file.seek(0)
        self._shares = shares_of(self._file)
        self._file.close()

    def row(self, gpus: int) -> Row:
        """Of the first so many GPUs, the mean share of time of the least and the most busy one."""
        used = [self._shares[i] for i in range(gpus) if i in self._shares]
        if not used:
            return {}
        return {"gpu_busy_least": round(min(used), 3), "gpu_busy_most": round(max(used), 3)}


def shares_of(lines: Iterable[str]) -> dict[int, float]:
    """Mean utilization, 0 to 1, by index of the GPU; lines that say none are passed over."""
    found: dict[int, list[float]] = {}
    for line in lines:
        index, _, percent = line.partition(",")
        if index.strip().isdigit() and percent.strip().isdigit():
            found.setdefault(int(index), []).append(int(percent) / 100)
    return {index: sum(shares) / len(shares) for index, shares in found.items()}
