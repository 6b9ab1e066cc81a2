"""What a run does: its levels of load, one after the other, and who runs which part of a level."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from loadtest.driver import Sample, Seen, Transport, closed_loop, open_loop
from loadtest.schedule import Clock, arrivals
from loadtest.workloads import DATA, Options, load


@dataclass(frozen=True)
class Plan:
    """One run: the same plan sends the same requests at the same times to any server.

    levels: requests/s of an open loop, clients (1 to 256) of a closed one. seconds: of the whole
    run; every level gets an equal part, and the first warmup_s seconds of it are left out of the
    statistics. shape: arrivals of the open loop, see `loadtest.schedule.SHAPES`.
    """

    workload: str = "mixed"
    loop: Literal["open", "closed"] = "open"
    levels: tuple[float, ...] = (1.0,)
    seconds: float = 120.0
    warmup_s: float = 5.0
    shape: str = "poisson"
    seed: int = 0
    data: Path = DATA
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        """Raises ValueError if the plan would measure nothing."""
        if not self.levels or min(self.levels) <= 0:
            raise ValueError(f"levels {self.levels}; each must be above 0")
        if self.level_s <= self.warmup_s:
            raise ValueError(
                f"a level has {self.level_s:g} s, all of it warm-up of {self.warmup_s:g} s"
            )
        if self.loop == "closed" and (
            max(self.levels) > 256 or any(level != int(level) for level in self.levels)
        ):
            raise ValueError(f"{self.levels} clients; a closed loop takes 1 to 256")

    @property
    def level_s(self) -> float:
        """Seconds of one level."""
        return self.seconds / len(self.levels)


@dataclass
class Level:
    """What was seen at one level of load; start_s: seconds from the start of the run."""

    offered: float
    start_s: float
    samples: list[Sample] = field(default_factory=list)


async def run_level(
    plan: Plan, level: int, transport: Transport, clock: Clock, seen: Seen, part: tuple[int, int]
) -> None:
    """Runs a worker's part of a level and returns when its last request is answered.

    level: index into `plan.levels`. part: (this worker, number of workers). Open: every worker
    has an equal share of the rate, and independent Poisson arrivals add up to Poisson arrivals.
    Closed: every worker has an equal share of the clients.
    """
    worker, workers = part
    offered = plan.levels[level]
    workload = load(plan.workload, plan.data, plan.options)
    # levels and workers draw from different seeds, the same ones in every run
    seed = plan.seed + 1000 * level
    if plan.loop == "closed":
        clients = [workload.client(seed, n) for n in range(worker, int(offered), workers)]
        await closed_loop(clients, plan.level_s, transport, clock, seen)
        return
    own = seed + 1_000_000 * worker
    due = arrivals(plan.shape, offered / workers, plan.level_s, own)
    await open_loop(due, workload.open_stream(own), transport, clock, seen)
