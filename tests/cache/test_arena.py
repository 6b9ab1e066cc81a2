"""The arena: pages and slots never overlap, nothing is lost when pages move, every free unit serves
either kind.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flide_engine.cache.arena import Arena, Counted
from flide_engine.errors import PoolExhausted

Ints = np.ndarray


def units_of(arena: Arena, slot: int) -> range:
    """Units of a slot, in order."""
    return range(slot * arena.run, (slot + 1) * arena.run)


@settings(deadline=None)  # the first example may compile
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "retain", "release", "retain_one", "release_one"]),
            st.integers(1, 5),
        ),
        max_size=40,
    )
)
def test_counts_follow_a_simple_model(steps: list[tuple[str, int]]) -> None:
    """Numbers are free exactly when nobody holds them, and none is handed out twice."""
    counted = Counted("pages", 8)
    held: list[np.ndarray] = []
    for what, n in steps:
        if what == "take":
            if n > counted.free:
                with pytest.raises(
                    PoolExhausted, match=f"{n} pages needed, {counted.free} of 8 free"
                ):
                    counted.take(n)
            else:
                held.append(counted.take(n))
        elif held and what == "retain":
            counted.retain(held[n % len(held)])
            held.append(held[n % len(held)])
        elif held and what == "retain_one":
            counted.retain_one(held[n % len(held)][0])
            held.append(held[n % len(held)][:1])
        elif held and what == "release_one":
            counted.release_one(held[n % len(held)][0])
            held[n % len(held)] = held[n % len(held)][1:]
            held = [numbers for numbers in held if len(numbers)]
        elif held:
            counted.release(held.pop(n % len(held)))
        holders = np.zeros(8, np.int64)
        for numbers in held:
            holders[numbers] += 1
        assert counted.counts.tolist() == holders.tolist()
        assert counted.free == (holders == 0).sum()
        assert counted.held == (holders > 0).sum()


class Memory:
    """An arena with memory: a unit holds whose it is, and which part of it."""

    def __init__(self, units: int, run: int) -> None:
        self.arena = Arena(units, run)
        self.units: list[object] = [None] * units
        self.holders: list[tuple[Ints, Ints]] = []

    def take(self, pages: int, slots: int) -> None:
        """As a round would: what moves is copied, then what was taken is written."""
        taken = self.arena.take(pages, slots)
        assert len(taken.pages) == pages
        assert len(taken.slots) == slots
        assert not set(taken.sources) & set(taken.targets)
        for source, target in zip(taken.sources, taken.targets, strict=True):
            self.units[target] = self.units[source]
            self.units[source] = "left"
        for page in taken.pages:
            self.units[self.arena.places[page]] = ("page", int(page))
        for slot in taken.slots:
            for part, unit in enumerate(units_of(self.arena, slot)):
                self.units[unit] = ("slot", int(slot), part)
        self.holders.append((taken.pages, taken.slots))

    def check(self) -> None:
        """Everything held is where it should be, and the rest is free."""
        arena = self.arena
        pages = {int(p) for held, _ in self.holders for p in held}
        slots = {int(s) for _, held in self.holders for s in held}
        for page in pages:
            assert self.units[arena.places[page]] == ("page", page)
        for slot in slots:
            assert slot * arena.run + arena.run <= arena.units
            for part, unit in enumerate(units_of(arena, slot)):
                assert self.units[unit] == ("slot", slot, part)
        assert arena.free == arena.units - len(pages) - arena.run * len(slots)
        assert (arena.pages.held, arena.slots.held) == (len(pages), len(slots))


@settings(deadline=None)  # the first example may compile
@given(
    st.integers(1, 60),
    st.integers(1, 7),
    st.lists(
        st.tuples(
            st.sampled_from(["take", "take", "retain", "release"]),
            st.integers(0, 12),
            st.integers(0, 4),
        ),
        max_size=60,
    ),
)
def test_nothing_overlaps_nothing_leaks_and_every_free_unit_serves_both(
    units: int, run: int, steps: list[tuple[str, int, int]]
) -> None:
    """A round is refused exactly if its units are more than are free, however they are scattered;
    at the end all of them are free again.
    """
    memory = Memory(units, run)
    arena = memory.arena
    for what, a, b in steps:
        if what == "take":
            if a + run * b > arena.free:
                before = arena.places.copy()
                with pytest.raises(PoolExhausted, match=f"{a + run * b} pages needed"):
                    arena.take(a, b)
                assert (arena.places == before).all()
            else:
                memory.take(a, b)
        elif memory.holders and what == "retain":
            pages, slots = memory.holders[a % len(memory.holders)]
            arena.pages.retain(pages)
            arena.slots.retain(slots)
            memory.holders.append((pages, slots))
        elif memory.holders:
            pages, slots = memory.holders.pop(a % len(memory.holders))
            arena.pages.release(pages)
            arena.slots.release(slots)
        memory.check()
    # what is free serves either kind: all of it as slots but for less than one, all of it as pages
    memory.take(0, arena.free // run)
    memory.check()
    assert arena.free < run
    memory.take(arena.free, 0)
    assert arena.free == 0
    for pages, slots in memory.holders:
        arena.pages.release(pages)
        arena.slots.release(slots)
    assert arena.free == units
    memory.holders.clear()
    memory.take(units, 0)
    memory.check()


def test_pages_scattered_over_every_run_make_way_for_a_slot() -> None:
    """One page in each of ten runs: nine slots fit all the same, and a slot moves one page only."""
    arena = Arena(100, 10)
    pages = arena.take(100, 0).pages
    units = arena.places[pages]
    arena.pages.release(pages[units % 10 != units // 10])
    taken = arena.take(0, 1)
    assert len(taken.sources) == len(taken.targets) == 1
    arena.slots.release(taken.slots)
    assert sorted(arena.take(0, 9).slots) == list(range(9))
    assert arena.free == 0


def test_pages_and_slots_come_from_opposite_ends() -> None:
    """Slots low, pages high, and pages that share a run with others first."""
    arena = Arena(47, 5)
    assert arena.places[arena.take(2, 0).pages].tolist() == [45, 46]  # the end no slot can use
    first = arena.take(3, 2)
    assert first.slots.tolist() == [0, 1]
    assert arena.places[first.pages].tolist() == [40, 41, 42]
    assert arena.places[arena.take(4, 0).pages].tolist() == [43, 44, 35, 36]


def test_what_is_free_has_no_further_holder() -> None:
    """One free number among held ones is refused, and the held ones are held as before."""
    counted = Counted("pages", 8)
    held = counted.take(2)
    with pytest.raises(AssertionError, match="retained free pages"):
        counted.retain(np.append(held, held[-1] + 1).astype(np.int32))
    with pytest.raises(AssertionError, match="retained free pages"):
        counted.retain_one(int(held[-1]) + 1)
    with pytest.raises(AssertionError, match="released free pages"):
        counted.release_one(int(held[-1]) + 1)
    assert counted.counts[held].tolist() == [1, 1]
