"""For whom a checkpoint is kept, against a plain set of names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flide_engine.cache.names import MOST_BRANCHES, Named, names_in, names_text

SOMEBODY = st.sampled_from([("a", "01"), ("b", "02"), ("c", ""), ("", "03")])
MORE = [("a", "01"), ("b", "02"), ("c", ""), ("", "03"), ("", "04"), ("", "05")]
STEPS = st.lists(st.tuples(st.sampled_from(["keep", "leave", "learn"]), SOMEBODY))


@given(SOMEBODY, STEPS)
def test_names_are_a_set_and_the_last_to_leave_is_told(
    first: tuple[str, str], steps: list[tuple[str, tuple[str, str]]]
) -> None:
    """In any order, each with its anchor; written as text and read, they are the same."""
    named, kept = Named(name=first[0], anchor=first[1]), {first}
    for step, (name, anchor) in steps:
        goes_by = name or anchor
        if step == "keep":
            assert named.keep_for(name, anchor)
        elif step == "learn":
            named.learn(Named(name=name, anchor=anchor))
        elif named.goes_by(goes_by):
            assert named.leave(goes_by) == (len(kept) > 1)
        kept = kept - {(name, anchor)} if step == "leave" else kept | {(name, anchor)}
        assert sorted(named.names()) == sorted(kept)
        assert named.goes_by("") == bool(kept)
        assert named.goes_by(goes_by) == (step != "leave")
        assert Named(**names_in(names_text(named))).names() == named.names()
        assert named.known().names() == named.names()
    named.leave("")
    assert not named.names()
    assert not named.pinned


def test_a_nameless_state_goes_by_what_it_was_last_routed_on() -> None:
    """A router that has learned an opening routes on another anchor from then on."""
    named = Named(anchor="01")
    named.keep_for("", "02")
    assert named.names() == [("", "02")]
    named.keep_for("", "")
    assert named.goes_by("02")
    assert not named.goes_by("01")


@given(*[st.lists(st.sampled_from(MORE), min_size=1)] * 2)
def test_what_is_learned_is_all_of_it(
    ours: list[tuple[str, str]], theirs: list[tuple[str, str]]
) -> None:
    """No name is lost or told twice, but for what a state without a name was routed on before."""
    named, other = Named(is_base=True), Named(is_base=True)
    for kept, whom in ((named, ours), (other, theirs)):
        for name, anchor in whom:
            assert kept.keep_for(name, anchor)
    moved = {(named.name, named.anchor)} if not named.name and not other.name else set()
    before, learned = set(named.names()), set(other.names())
    named.learn(other)
    assert sorted(named.names()) == sorted(set(named.names()))
    assert learned | (before - moved) <= set(named.names()) <= learned | before
    told = named.names()
    named.learn(named.known())
    for name, anchor in told:
        named.keep_for(name, anchor)
    assert named.names() == told
    for name, anchor in told:
        named.leave(name or anchor)
        assert (name, anchor) not in named.names()
    assert named.is_base


def test_names_are_bounded_and_copies_are_their_own() -> None:
    """A copy's pin is taken over; further names than may be are not."""
    named = Named(name="run")
    assert all(named.keep_for(f"b{i}", "") for i in range(MOST_BRANCHES))
    assert not named.keep_for("more", "")
    assert named.keep_for("b0", "")
    copy = named.known()
    copy.leave("b0")
    assert named.goes_by("b0")
    named.learn(Named(name="run", pinned=True))
    assert named.pinned


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", json.dumps({**vars(Named()), "name": 1}), json.dumps(vars(Named()) | {"x": 1})]
    + [json.dumps({**vars(Named()), "branches": value}) for value in ([], {"b": 1}, None)],
)
def test_text_that_holds_no_names_is_refused(text: str) -> None:
    """With ValueError, whatever is wrong with it."""
    with pytest.raises(ValueError, match=r"."):
        names_in(text)
