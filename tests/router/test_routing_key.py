"""Keys: what two requests agree on, and how openings are learned from them."""

import json
import random
import subprocess
import sys
from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flide_engine.api import DecisionRequest, Noul
from flide_engine.families.rendering import entry_text
from router.policy import SHIPPED
from router.routing_key import (
    COARSE_BYTES,
    FINE_BYTES,
    FINE_END,
    Openings,
    Recent,
    RouteKey,
    anchor_key,
    anchor_text,
    as_key,
    route_key,
    state_text,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant"]), "content": JSON}
    ),
    min_size=1,
    max_size=6,
)


def text(size: int, seed: int = 0) -> str:
    """`size` letters, of which no two seeds share 20."""
    return "".join(random.Random(seed).choices("abcdefgh", k=size))


@given(JSON | MESSAGES)
def test_the_canonical_text_is_what_a_prompt_holds(state: Any) -> None:
    """As `entry_text` writes a string, an object or an array."""
    if isinstance(state, (str, dict, list)):
        assert state_text(state) == entry_text(state)


@given(MESSAGES)
def test_a_list_of_messages_is_hashed_as_its_text(messages: list[dict[str, Any]]) -> None:
    """Writing messages one by one changes no entry; the head's entry is an additional one."""
    whole = route_key({"state": json.dumps(messages, ensure_ascii=False)})
    key = route_key({"state": messages})
    assert set(whole.entries()) <= set(key.entries())
    first = next((m for m in messages if m["role"] not in ("system", "developer")), None)
    assert (key.head >= 0) == (first is not None)
    if first is not None:
        until = json.dumps(messages[: messages.index(first) + 1], ensure_ascii=False)[:-1]
        assert key.entries()[key.head] == route_key({"state": until}).entries()[-1]


@settings(max_examples=50)
@given(st.integers(0, 40_000), st.integers(0, 9_000))
def test_growth_keeps_every_entry_but_the_last(size: int, grown: int) -> None:
    """And there is one entry every 256 bytes up to 16 KiB, every 4 KiB beyond, one at the end."""
    whole = text(size + grown)
    short, long = route_key({"state": whole[:size]}), route_key({"state": whole})
    assert long.entries()[: len(short.entries()) - 1] == short.entries()[:-1]
    grid = min(size, FINE_END) // FINE_BYTES + max(0, size - FINE_END) // COARSE_BYTES
    fits = size > 0 and (
        size % FINE_BYTES == 0 if size <= FINE_END else (size - FINE_END) % COARSE_BYTES == 0
    )
    assert len(short.entries()) == grid + (not fits)
    assert short.size == size


def test_tenants_share_no_entry() -> None:
    """Nor a session's anchor; the same tenant gets the same key."""
    state = {"state": text(9000)}
    mine, theirs = route_key(state, "acme"), route_key(state, "other")
    assert not set(mine.entries()) & set(theirs.entries())
    assert mine == route_key(state, "acme")
    openings = Openings()
    anchors = [openings.anchor(route_key(state, t, "s-1"), 0.0).entry for t in ("acme", "other")]
    assert anchors[0] != anchors[1]


def test_typed_and_plain_requests_have_one_key() -> None:
    """An agent's dict and a DecisionRequest of the same state go to the same replica."""
    plain = {"state": [{"role": "user", "content": "hello"}], "questions": {}}
    typed = DecisionRequest(state=plain["state"], questions={"q": Noul(instructions="?")})
    assert route_key(plain) == route_key(typed)


def test_a_session_id_replaces_the_chain() -> None:
    """The text is not hashed, and not even written."""
    key = route_key({"state": [{"role": "user", "content": "x" * 5000}]}, "", "s-1")
    assert key.chain == b""
    assert key.session == "s-1"
    assert key.size == 5004


@pytest.mark.parametrize(
    "request_",
    [None, 7, "text", {}, {"state": None}, {"state": 3}, {"state": {"x": object()}},
     {"state": "\ud800"}, {"state": [{"role": "user", "content": {1, 2}}]},
     {"state": reduce(lambda inner, _: [inner], range(2000), [])}],
    ids=("none", "number", "text", "empty", "no state", "state 3", "object", "surrogate", "set",
         "deep"),
)  # fmt: skip
def test_what_is_no_request_gets_a_key_all_the_same(request_: object) -> None:
    """The engine refuses it, the router does not."""
    key = route_key(request_)
    assert as_key(tuple(key)) == key
    assert Openings().anchor(key, 0.0).entry in key.entries()
    named = route_key(request_, "", "session")
    assert as_key(tuple(named)) == named


@given(st.lists(JSON | st.binary(max_size=20), max_size=7) | JSON)
def test_a_strange_key_is_none(value: Any) -> None:
    """What another program passed as `route` is not believed."""
    made = route_key({"state": "abc"})
    assert as_key(value) is None
    assert as_key(list(made)) == made
    assert as_key(made._replace(chain=b"123")) is None
    assert as_key(made._replace(scheme=2)) is None
    assert as_key(made._replace(head=5)) is None


@given(st.lists(st.lists(st.sampled_from(range(4)), min_size=1, max_size=70), max_size=30))
def test_chains_that_are_no_texts_never_raise(chains: list[list[int]]) -> None:
    """Entries that repeat, or come in another order in the next key, teach what they may."""
    openings = Openings(distinct=3)
    for entries in chains:
        chain = b"".join(e.to_bytes(8, "little") for e in entries)
        key = as_key((1, "", "", chain, len(entries) // 3 - 1, 10))
        assert key is not None
        assert openings.anchor(key, 0.0).entry in entries


def keys(opening: str, count: int, own: int = 3000) -> list[RouteKey]:
    """Keys of `count` states behind an opening."""
    return [route_key({"state": opening + text(own, 100 + i)}) for i in range(count)]


@pytest.mark.parametrize(
    ("opening", "own", "learned"),
    [
        (0, 700, True), (1000, 100, True), (1000, 9000, True), (8192, 100, True),
        (8192, 700, True), (8192, 9000, True), (30_000, 9000, True), (30_000, 700, False),
    ],
)  # fmt: skip
def test_a_shared_opening_is_learned(opening: int, own: int, learned: bool) -> None:
    """After a few states of it each has an anchor of its own, also if they are short; but beyond 16
    KiB, what is shorter than a grid step may be a step of one history, and is no continuation.
    """
    openings = Openings()
    for key in keys(text(opening), 12, own):
        openings.anchor(key, 0.0)
    anchors = {openings.anchor(key, 1.0).entry for key in keys(text(opening), 40, own)}
    assert len(anchors) == (40 if learned else 1)


def test_openings_inside_openings_are_learned() -> None:
    """One preamble, three applications, ten states each: branchings below a common branch."""
    openings = Openings()
    found: set[int] = set()
    for round_ in range(4):
        found = set()
        for app in range(3):
            for key in keys(text(600) + text(3000, 7 + app), 10):
                found.add(openings.anchor(key, float(round_)).entry)
    assert len(found) == 30


@pytest.mark.parametrize(("opening", "few"), [(4000, 2), (16_384, 2), (20_480, 7)])
def test_few_states_are_no_opening_and_old_ones_do_not_count(opening: int, few: int) -> None:
    """Two within ten minutes keep the common anchor, and seven of a long history that is tried in
    several ways; not one more. The first one always counts.
    """
    openings = Openings()
    some = keys(text(opening), 30, own=9000)
    for i, key in enumerate(some):
        openings.anchor(key, 620.0 / (few - 1) * i)
    assert openings.known(1e5) == openings.known(0.0) == ()
    for key in some[: few + 1]:
        openings.anchor(key, 1e5)
    assert len(openings.known(1e5)) == 1


@pytest.mark.parametrize("behind", [0, 8192])
def test_small_steps_of_a_history_are_no_continuations(behind: int) -> None:
    """Twenty bytes each, a dozen between two entries."""
    openings, opening, own = Openings(), text(behind, 5), text(6000, 6)
    for key in keys(opening, 4 if behind else 0):
        openings.anchor(key, 0.0)
    before = openings.known(0.0)
    grown = [route_key({"state": opening + own[:size]}) for size in range(1000, 6000, 20)]
    assert len({openings.anchor(key, 0.0).entry for key in grown}) == 1
    assert openings.known(0.0) == before


@pytest.mark.parametrize(("step", "learned"), [(20, False), (0, True), (-20, True)])
def test_a_state_that_is_not_longer_is_another_one(step: int, learned: bool) -> None:
    """Of states that part before the next entry: longer ones may be one that grows."""
    openings = Openings()
    for i in range(4):
        openings.anchor(route_key({"state": text(8192) + text(100 + step * i, 7 + i)}), 0.0)
    assert bool(openings.known(0.0)) == learned


@settings(max_examples=100)
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=30), st.integers(0, 20_000))
def test_a_growing_history_keeps_its_anchor(steps: list[int], opening: int) -> None:
    """Once its opening is known, no step of a history alone moves it."""
    openings = Openings()
    for key in keys(text(opening), 12):
        openings.anchor(key, 0.0)
    whole = text(opening) + text(sum(steps) + 5000, 999)
    size, anchors = opening + 5000, set()
    for step in steps:
        size += step
        anchors.add(openings.anchor(route_key({"state": whole[:size]}), 1.0).entry)
    assert len(anchors) == 1


def test_a_message_list_is_routed_on_its_first_message() -> None:
    """Whatever the system says before, and until eight conversations begin alike."""
    system = {"role": "system", "content": text(5000)}

    def anchor(openings: Openings, first: str, more: str) -> int:
        state = [system, {"role": "user", "content": first}, {"role": "user", "content": more}]
        return openings.anchor(route_key({"state": state}), 0.0).entry

    openings = Openings()
    assert (
        anchor(openings, "a", "x") == anchor(openings, "a", text(900)) != anchor(openings, "b", "")
    )
    alike = {anchor(openings, "hello", text(2000, i)) for i in range(30)}
    assert len(alike) > 20


def test_an_anchor_as_text_is_routed_on_as_the_key_it_came_from() -> None:
    """For states with and without a session id; without a router the key's own first anchor."""
    for session in ("", "agent-7"):
        key = route_key({"state": "word " * 900}, "acme", session)
        anchor = Openings().anchor(key, 0.0).entry
        text = anchor_text(anchor)
        assert Openings().anchor(anchor_key(text, "acme", key.size), 0.0).entry == anchor
        for none in (None, "x", -1, 1 << 64):
            assert anchor_text(none, tuple(key)) == text
    assert anchor_text(None) == anchor_text(None, ("x",)) == ""
    for bad in ("", "12", "g" * 16):
        with pytest.raises(ValueError, match=r"16 hex|invalid literal"):
            anchor_key(bad, "acme", 0)


def test_heard_openings_count_and_the_tables_are_bounded() -> None:
    """A router takes over what replicas learned; 32 are passed on, 512 kept."""
    openings, other = Openings(), Openings()
    some = keys(text(5000), 12)
    for key in some:
        openings.anchor(key, 0.0)
    other.hear(openings.known(0.0), 0.0)
    assert {other.anchor(k, 0.0) for k in some} == {openings.anchor(k, 0.0) for k in some}
    other.hear(range(10_000), 1.0)
    assert len(other.known(1.0)) == 32
    assert other.known(1.0)[0] == 9999
    assert other.known(1000.0) == ()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200), st.integers(1, 8))
def test_recent_keeps_the_last_used(uses: list[tuple[bool, int]], most: int) -> None:
    """At least the `most` last used, at most twice as many."""
    recent: Recent[int, int] = Recent(most)
    order: list[int] = []
    for put, key in uses:
        if put:
            recent.put(key, key)
        if put or recent.get(key) is not None:
            order = [*[k for k in order if k != key], key]
        assert len(recent) <= 2 * most
    for key in order[-most:]:
        assert recent.get(key) == key


def test_what_travels_by_value_needs_the_standard_library_only() -> None:
    """A process that has nothing of this project installed unpickles the policy and chooses."""
    code = f"""
import importlib, pickle, sys
import ray.cloudpickle as cloudpickle
for name in {SHIPPED!r}:
    cloudpickle.register_pickle_by_value(importlib.import_module(name))
from router.policy import Policy
from router.routing_key import route_key
sys.stdout.buffer.write(cloudpickle.dumps((Policy, route_key)))
"""
    packed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    there = """
import pickle, sys
sys.modules["router"] = sys.modules["flide_engine"] = None
sys.path = [p for p in sys.path if "site-packages" in p or "lib" in p]
Policy, route_key = pickle.load(sys.stdin.buffer)
policy = Policy()
policy.set_replicas({"a": None, "b": None}, 0.0)
print(policy.choose(route_key({"state": "x" * 999}), 0.0).replica)
"""
    done = subprocess.run(
        [sys.executable, "-c", there], input=packed, capture_output=True, check=False
    )
    assert done.stdout.decode().strip() in ("a", "b"), done.stderr.decode()
