"""Copies beside the rounds: on a GPU on a stream of their own, elsewhere at once.

A round's own work is on the current stream, in order. Copies come after what it has been given so
far; what must come after them in turn joins.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """The end of some copies."""

    def is_done(self) -> bool:
        """Whether they have been made."""
        ...

    def wait(self) -> None:
        """Blocks until they have been made."""
        ...

    def join(self) -> None:
        """Whatever rounds are given from now on comes after them; does not block."""
        ...


class Beside(Protocol):
    """Where copies are made: one after the other."""

    def run(self, copies: Callable[[], None]) -> Event:
        """Makes copies, after what rounds have been given so far."""
        ...

    def join(self) -> None:
        """As `Event.join`, of all copies so far."""
        ...


class AtOnce:
    """Copies that are made when they are asked for."""

    def run(self, copies: Callable[[], None]) -> "AtOnce":
        """See Beside."""
        copies()
        return self

    def is_done(self) -> bool:
        """See Event."""
        return True

    def wait(self) -> None:
        """See Event."""

    def join(self) -> None:
        """See Beside and Event."""


class _OnStream:
    """An Event on a CUDA stream; `current` is that of the rounds."""

    def __init__(self, event: Any, current: Callable[[], Any]) -> None:
        self._event, self._current = event, current

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def join(self) -> None:
        self._current().wait_event(self._event)


class SideStream:
    """Copies on a CUDA stream of their own."""

    def __init__(self) -> None:
        import torch

        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._current, self._entered = torch.cuda.current_stream, torch.cuda.stream

    def run(self, copies: Callable[[], None]) -> Event:
        """See Beside."""
        self._stream.wait_stream(self._current())
        with self._entered(self._stream):
            copies()
            return _OnStream(self._stream.record_event(), self._current)

    def join(self) -> None:
        """See Beside."""
        self._current().wait_stream(self._stream)


def beside_rounds(device: "torch.device") -> Beside:
    """What fits a device."""
    return SideStream() if device.type == "cuda" else AtOnce()
