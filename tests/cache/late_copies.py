"""Copies that are made late: what a GPU's side stream may do, without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass


class LateCopies:
    """A `Beside` whose copies are made when somebody waits for them, has asked often enough whether
    they are done, or calls `advance`; so whoever does not wait finds what was there before.
    """

    def __init__(self, patience: int = 1 << 30) -> None:
        """patience: how often `is_done` says no before the copies are made."""
        self._waiting: list[Callable[[], None]] = []
        self._patience, self._asked = patience, 0
        self.begun = self.done = 0

    def run(self, copies: Callable[[], None]) -> "_Late":
        self._waiting.append(copies)
        self.begun += 1
        return _Late(self, self.begun)

    def join(self) -> None:
        self.advance(self.begun)

    def advance(self, upto: int) -> None:
        """Makes the first `upto` of all copies, as far as that has not been done."""
        while self.done < upto:
            self._waiting.pop(0)()
            self.done += 1

    def asked(self, number: int) -> bool:
        """Whether a copy is done; the answer may become yes by asking."""
        if self.done < number:
            self._asked += 1
            if self._asked > self._patience:
                self._asked = 0
                self.advance(self.done + 1)
        return self.done >= number


@dataclass(frozen=True)
class _Late:
    copies: LateCopies
    number: int

    def is_done(self) -> bool:
        return self.copies.asked(self.number)

    def wait(self) -> None:
        self.copies.advance(self.number)

    def join(self) -> None:
        self.copies.advance(self.number)
