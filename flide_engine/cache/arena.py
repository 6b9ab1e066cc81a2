"""One memory for pages and slots, as numbers: which unit of it holds what.

Memory is counted in *units*, as large as a page. A page takes any unit, a slot an aligned run of
them: slot s is units run * s .. run * s + run - 1. Slots are taken from the low end and pages from
the high one; where no run is left for a slot, the pages of the emptiest runs move to free units
elsewhere. So whatever is free serves either kind: pages and slots fit as long as their units do.

A page therefore has a number that it keeps and a place that may change: `places`. Pages and slots
are immutable once written, so their holders share them by count.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flide_engine.errors import PoolExhausted
from flide_engine.layout.compiled import compiled

Ints = NDArray[np.int32]

_FREE, _TAKEN = -1, -2
_NOTHING = np.zeros(0, np.int32)


@compiled
def _give(counts: Ints, numbers: Ints) -> bool:
    """A first holder for each number; False, changing nothing, if one has one."""
    for n in numbers:
        if counts[n] != 0:
            return False
    for n in numbers:
        counts[n] = 1
    return True


@compiled
def _hold(counts: Ints, numbers: Ints) -> bool:
    """One holder more for each number; False, changing nothing, if one had none."""
    for n in numbers:
        if counts[n] <= 0:
            return False
    for n in numbers:
        counts[n] += 1
    return True


@compiled
def _let_go(counts: Ints, numbers: Ints) -> Ints | None:
    """One holder less for each number: those that have none left, or None if one had none."""
    gone = np.empty(len(numbers), np.int32)
    count = 0
    for n in numbers:
        if counts[n] <= 0:
            return None
        counts[n] -= 1
        if counts[n] == 0:
            gone[count] = n
            count += 1
    return gone[:count]


class Held:
    """Numbers 0 .. total-1, each held by nobody or by a number of holders."""

    def __init__(self, kind: str, total: int, vacate: Callable[[Ints], None]) -> None:
        """vacate: told of numbers that have lost their last holder."""
        self.kind, self._vacate = kind, vacate
        self.counts = np.zeros(total, np.int32)
        self.held = 0

    def give(self, numbers: Ints) -> None:
        """A first holder for each number; none may have one."""
        if len(numbers):
            were_free = _give(self.counts, numbers)
            assert were_free, f"gave {self.kind} that are held"
            self.held += len(numbers)

    def retain(self, numbers: Ints) -> None:
        """One more holder for each number; all must be held already."""
        if not len(numbers):
            return
        were_held = _hold(self.counts, numbers)
        assert were_held, f"retained free {self.kind}"

    def retain_one(self, number: int) -> None:
        """As `retain` of one number."""
        assert self.counts[number] > 0, f"retained free {self.kind}"
        self.counts[number] += 1

    def release_one(self, number: int) -> None:
        """As `release` of one number."""
        if self.counts[number] > 1:
            self.counts[number] -= 1
        else:
            self.release(np.array([number], np.int32))

    def release(self, numbers: Ints) -> None:
        """One holder less for each number; those without a holder are free again."""
        if not len(numbers):
            return
        gone = _let_go(self.counts, numbers)
        assert gone is not None, f"released free {self.kind}"
        if len(gone):
            self.held -= len(gone)
            self._vacate(gone)


class Counted(Held):
    """Numbers of equal things, of which any are as good as any others."""

    def __init__(self, kind: str, total: int) -> None:
        super().__init__(kind, total, self._put_back)
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many numbers are free."""
        return len(self._free)

    def take(self, count: int) -> Ints:
        """`count` free numbers, each held once.

        Raises PoolExhausted, taking none, if there are fewer.
        """
        if count > len(self._free):
            raise PoolExhausted(self.kind, count, len(self._free), len(self.counts))
        rest = len(self._free) - count
        taken = np.array(self._free[rest:][::-1], np.int32)
        del self._free[rest:]
        self.give(taken)
        return taken

    def _put_back(self, numbers: Ints) -> None:
        self._free += numbers.tolist()


@compiled
def _settle(pages: Ints, grid: Ints, room: NDArray[np.int64], places: Ints) -> Ints:
    """See `Arena._settle`; a round waits for it."""
    units = np.empty(len(pages), np.int32)
    run, done = grid.shape[1], 0
    for untouched in (False, True):
        for row in range(len(room) - 1, -1, -1):
            if done == len(pages):
                return units
            if room[row] == 0 or (room[row] == run) != untouched:
                continue
            for column in range(run):
                if done < len(pages) and grid[row, column] == _FREE:
                    grid[row, column] = pages[done]
                    units[done] = row * run + column
                    places[pages[done]] = units[done]
                    room[row] -= 1
                    done += 1
    return units


@compiled
def _untouched(count: int, grid: Ints, room: NDArray[np.int64]) -> Ints:
    """Takes the lowest runs that hold nothing: which, `count` of them or all that there are."""
    runs = np.empty(count, np.int32)
    found = 0
    for row in range(len(room)):
        if found == count:
            break
        if room[row] == grid.shape[1]:
            grid[row], room[row] = _TAKEN, 0
            runs[found] = row
            found += 1
    return runs[:found]


@compiled
def _empty(runs: Ints, grid: Ints, room: NDArray[np.int64]) -> None:
    """These hold nothing any more."""
    for row in runs:
        grid[row], room[row] = _FREE, grid.shape[1]


@compiled
def _vacate(pages: Ints, grid: Ints, room: NDArray[np.int64], places: Ints) -> None:
    """Their units are free again."""
    for page in pages:
        unit = places[page]
        grid[unit // grid.shape[1], unit % grid.shape[1]] = _FREE
        room[unit // grid.shape[1]] += 1
        places[page] = -1


class Taken(NamedTuple):
    """What `Arena.take` gives: numbers of pages and of slots, each held once, and moves to make
    before they are used: what is in units `sources` must be copied to `targets`, of which none is
    among the sources.
    """

    pages: Ints
    slots: Ints
    sources: Ints
    targets: Ints


_NONE_TAKEN = Taken(_NOTHING, _NOTHING, _NOTHING, _NOTHING)


class Arena:
    """Pages and slots in `units` units. One thread uses it; nothing here locks."""

    def __init__(self, units: int, run: int) -> None:
        """run: units of a slot."""
        self.units, self.run = units, run
        self.pages = Held("pages", units, self._pages_left)
        self.slots = Held("slots", units // run, self._slots_left)
        self.places = np.full(units, -1, np.int32)  # unit of each held page
        self._names = list(range(units - 1, -1, -1))  # numbers of pages that nobody holds
        rows = -(-units // run)
        # rows of a run each: the page in each unit; the last may be short, and then holds no slot
        self._grid = np.full((rows, run), _FREE, np.int32)
        self._grid.reshape(-1)[units:] = _TAKEN
        self._room = (self._grid == _FREE).sum(1)
        # compiles now what a round would wait for
        _settle(_NOTHING, self._grid, self._room, self.places)
        _untouched(0, self._grid, self._room)
        _empty(_NOTHING, self._grid, self._room)
        _vacate(_NOTHING, self._grid, self._room, self.places)
        for change in (_give, _hold, _let_go):
            change(_NOTHING, _NOTHING)

    @property
    def free(self) -> int:
        """Free units."""
        return self.units - self.pages.held - self.run * self.slots.held

    def units_of(self, pages: int, slots: int) -> int:
        """Units that so many pages and slots take."""
        return pages + self.run * slots

    def take(self, pages: int, slots: int) -> Taken:
        """So many pages and slots.

        Raises PoolExhausted, taking and moving nothing, if they take more units than are free.
        """
        if not pages and not slots:  # most rounds of one question
            return _NONE_TAKEN
        needed = self.units_of(pages, slots)
        if needed > self.free:
            raise PoolExhausted("pages", needed, self.free, self.units)
        runs, moving, sources = self._clear(slots)
        targets = self._settle(moving)
        self.slots.give(runs)
        rest = len(self._names) - pages
        numbers = np.array(self._names[rest:][::-1], np.int32)
        del self._names[rest:]
        self._settle(numbers)
        self.pages.give(numbers)
        return Taken(numbers, runs, sources, targets)

    def _clear(self, count: int) -> tuple[Ints, Ints, Ints]:
        """Runs for slots, lowest first, then those with the fewest pages; the pages that were in
        them, and in which units.
        """
        if not count:
            return _NOTHING, _NOTHING, _NOTHING
        runs = _untouched(count, self._grid, self._room)
        if len(runs) < count:
            # at least as many runs have room as fit into the free units, the short row aside
            some = np.flatnonzero(self._room[: len(self.slots.counts)])
            emptiest = np.argsort(-self._room[some], kind="stable")[: count - len(runs)]
            more = some[emptiest]
            inside = self._grid[more]
            row, column = np.nonzero(inside >= 0)
            moving, sources = inside[row, column], more[row] * self.run + column
            self._grid[more], self._room[more] = _TAKEN, 0
            runs = np.concatenate([runs, more])
            return runs.astype(np.int32), moving, sources.astype(np.int32)
        return runs, _NOTHING, _NOTHING

    def _settle(self, pages: Ints) -> Ints:
        """Gives each page a unit, in order: rows that hold pages already first, and high ones, so
        that whole runs stay free at the low end. The units.
        """
        if not len(pages):
            return _NOTHING
        return _settle(pages, self._grid, self._room, self.places)

    def _pages_left(self, pages: Ints) -> None:
        _vacate(pages, self._grid, self._room, self.places)
        self._names += pages.tolist()

    def _slots_left(self, slots: Ints) -> None:
        _empty(slots, self._grid, self._room)
