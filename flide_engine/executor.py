"""How a plan is run: eagerly on any device, or (`graphs.py`) by replaying a captured graph."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from flide_engine.kernels.stream import StreamTensors
from flide_engine.layout.plan import RoundPlan
from flide_engine.models.base import DecisionModel, StateTensors
from flide_engine.readout import Asked, Floats


class Pending(Protocol):
    """A round on the device.

    rows: of its stream, those that pad it to its bucket included.
    """

    rows: int

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> tuple[Floats, Floats | None]:
        """Blocks until it is done: (logits [K], hidden vectors [R, H] if any were asked for)."""
        ...


class Executor(Protocol):
    """Runs plans in the order in which they come."""

    runs_ahead: bool
    """Whether `start` returns before the round is done."""

    lengths: Sequence[int]
    """Rows that rounds are padded to, ascending; none: to no length."""

    def bucket_of(self, tokens: int) -> int:
        """Rows that a round of so many tokens is padded to."""
        ...

    def start(self, plan: RoundPlan, asked: Asked) -> Pending:
        """Begins a round. Raises RoundTooLarge if it can never be run."""
        ...

    def check(self) -> None:
        """Waits for what was started, and raises what the device does if it can run nothing more.

        A fault on a device is told late, by any call, and if it has broken the process' context by
        every call from then on: what `start` raises says neither whose fault it was nor whether
        there will be other rounds.
        """
        ...


class Done:
    """A round that has been run."""

    def __init__(self, rows: int, logits: Floats, hidden: Floats | None) -> None:
        self.rows, self._found = rows, (logits, hidden)

    def is_done(self) -> bool:
        """See Pending."""
        return True

    def wait(self) -> tuple[Floats, Floats | None]:
        """See Pending."""
        return self._found


class Eager:
    """Runs a plan of any shape at once, with kernels that need no work lists."""

    runs_ahead = False
    lengths: Sequence[int] = ()

    def __init__(self, model: DecisionModel, state: StateTensors, device: torch.device) -> None:
        self._model, self._state, self._device = model, state, device

    def bucket_of(self, tokens: int) -> int:
        """See Executor; nothing is padded."""
        return tokens

    @torch.inference_mode()
    def start(self, plan: RoundPlan, asked: Asked) -> Done:
        """See Executor; every round fits."""
        hidden = self._model.forward(to_device(plan, self._device), self._state)
        reads, rows = (torch.from_numpy(a).to(self._device) for a in (asked.reads, asked.rows))
        logits = self._model.label_logits(hidden, reads, rows)
        vectors = hidden.float().cpu().numpy() if asked.vectors else None
        return Done(len(plan.tokens), logits.cpu().numpy(), vectors)

    def check(self) -> None:
        """See Executor."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def to_device(plan: RoundPlan, device: torch.device) -> StreamTensors:
    """The plan's arrays as tensors on `device`."""
    arrays: dict[str, Any] = {
        name: torch.from_numpy(getattr(plan, name)).to(device)
        for name in StreamTensors.__dataclass_fields__
        if name not in {"level_ends", "tasks"}
    }
    return StreamTensors(level_ends=tuple(plan.level_ends.tolist()), **arrays)
