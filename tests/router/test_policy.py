"""The choice of a replica: what routers agree on without talking, and when a state leaves home."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy import REASONS, Board, Choice, Limits, Load, Policy, Stats, as_load, decode
from router.receiver import Receiver
from router.ring import Ring
from router.routing_key import RouteKey, route_key

IDLE = Load(0.0, 0.0, 3.0, 400.0)
BUSY = Load(5000.0, 5000.0, 3.0, 400.0)
NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)


def text(size: int, seed: int = 0) -> str:
    """`size` letters, of which no two seeds share 20."""
    return "".join(random.Random(seed).choices("abcdefgh", k=size))


def keys(count: int, opening: str = "", size: int = 2000) -> list[RouteKey]:
    """Keys of different states behind an opening."""
    return [route_key({"state": opening + text(size, 1 + i)}) for i in range(count)]


def policy_of(names: list[str], load: Load | None = None, **limits: Any) -> Policy:
    """A router that knows these replicas, and that each has this load."""
    policy = Policy(limits=Limits(**limits))
    stats: dict[str, object] = {n: Stats(load).encode() if load else None for n in names}
    policy.set_replicas(stats, 0.0)
    return policy


def chosen(policy: Policy, key: RouteKey | None, now: float = 0.0) -> Choice:
    """The choice; there is one."""
    choice = policy.choose(key, now)
    assert choice is not None
    return choice


@settings(max_examples=50, deadline=None)
@given(NAMES, st.randoms(use_true_random=False))
def test_routers_agree_without_talking(names: list[str], rng: random.Random) -> None:
    """In whatever order they learned of the replicas, and after others came and went."""
    shuffled = [*names, "gone"]
    rng.shuffle(shuffled)
    one, other = policy_of(names), policy_of(shuffled)
    other.remove("gone")
    for key in keys(20):
        assert chosen(one, key).replica == chosen(other, key).replica in names


def test_a_join_takes_its_share_and_moves_nothing_else() -> None:
    """1/(n+1) of the anchors go to the new replica, none between the old ones; and back."""
    rng, taken = random.Random(0), 0
    anchors = [rng.getrandbits(64) for _ in range(2000)]
    ring = Ring()
    for i in range(12):
        ring.add(f"old#{i}")
    before = [ring.home(a) for a in anchors]
    for joiner in range(30):
        ring.add(f"new#{joiner}")
        after = [ring.home(a) for a in anchors]
        assert all(new in (old, f"new#{joiner}") for old, new in zip(before, after, strict=True))
        taken += sum(new != old for old, new in zip(before, after, strict=True))
        ring.remove(f"new#{joiner}")
        assert [ring.home(a) for a in anchors] == before
    # one joiner's share varies by a few per cent; the mean of thirty by less than one
    assert taken / (30 * len(anchors)) == pytest.approx(1 / 13, rel=0.02)


def test_homes_are_even() -> None:
    """Standard deviation of a replica's share under 5% of it, sampling left out; 2.6% measured."""
    ring, rng, count = Ring(), random.Random(1), 40_000
    for i in range(20):
        ring.add(f"engine#{i}")
    shares = Counter(ring.home(rng.getrandbits(64)) for _ in range(count))
    mean = count / 20
    variance = sum((shares[f"engine#{i}"] - mean) ** 2 for i in range(20)) / 20
    assert (variance - mean) / mean**2 < 0.05**2


def test_growth_keeps_home_and_a_shared_opening_spreads() -> None:
    """Thirty agents behind one opening: all replicas get some, and none moves as it grows."""
    policy = policy_of([f"r{i}" for i in range(4)], IDLE)
    opening = text(8192)
    for key in keys(12, opening):
        chosen(policy, key)
    homes = []
    for now, size in enumerate(range(3000, 40_000, 5000), 1):
        grown = enumerate(keys(30, opening, size))
        homes.append([chosen(policy, k, 100.0 * now + i).replica for i, k in grown])
    assert all(h == homes[0] for h in homes)
    assert len(set(homes[0])) == 4


def test_two_routers_learn_an_opening_from_a_replica() -> None:
    """A router that has seen one state of an opening knows it from the stats of who saw all."""
    receiver, opening = Receiver(), text(8192)
    for key in keys(12, opening):
        receiver.received(key, 0, True, 0.0)
    policy = policy_of([f"r{i}" for i in range(8)])
    policy.hear("r0", receiver.stats(IDLE, 1.0).encode(), 1.0)
    assert len({chosen(policy, key, 1.0).anchor for key in keys(30, opening)}) == 30


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_replica_that_is_gone_or_drains_is_never_chosen(data: st.DataObject) -> None:
    """Whatever happened before: moves, stats, answers, joins; and what is left is always used."""
    policy, live = policy_of(["r0"], IDLE), {"r0"}
    draining: set[str] = set()
    events = st.tuples(
        st.sampled_from(["add", "remove", "drain", "undrain", "busy", "list"]), st.integers(0, 5)
    )
    some = keys(5, size=30_000)
    anchors = [chosen(policy, key).anchor for key in some]
    for now, (event, i) in enumerate(data.draw(st.lists(events, max_size=40))):
        name = f"r{i}"
        if event == "add":
            policy.add(name)
            live.add(name)
        elif event == "remove":
            policy.remove(name)
            live.discard(name)
            draining.discard(name)
        elif name in live:
            foreign = tuple((a, 30_000) for a in anchors) if event == "list" else ()
            load = BUSY if event == "busy" else IDLE
            policy.hear(name, Stats(load, (), foreign, event == "drain").encode(), float(now))
            policy.board.answered(name, load, float(now))
            (draining.add if event == "drain" else draining.discard)(name)
        for key in [*some, None]:
            choice = policy.choose(key, float(now))
            assert (choice is None) == (not live - draining)
            if choice is not None:
                tried = [choice.replica, *policy.fallbacks(choice, 3)]
                assert set(tried) <= live - draining
                assert len(set(tried)) == len(tried)
                assert choice.reason in REASONS


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=99),
    lambda inner: st.lists(inner) | st.dictionaries(st.just("flide") | st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=200)
@given(ANYTHING, st.binary(max_size=60))
def test_garbage_never_raises(value: Any, tail: bytes) -> None:
    """Stats, loads and cut or altered encodings: none raises, none keeps a state from its home."""
    policy, board = policy_of(["a", "b"], IDLE), Board()
    key = route_key({"state": "abc"})
    home = chosen(policy, key).replica
    packed = Stats(IDLE, (1, 2), ((3, 4),)).encode()["flide"]
    for told in (value, {"flide": tail}, {"flide": packed[: len(tail)]}, {"flide": packed + tail}):
        policy.hear("a", told, 1.0)
        policy.set_replicas({"a": told, "b": told}, 1.0)
        assert decode(told) is None or isinstance(decode(told), Stats)
    board.answered("a", value, 0.0)
    assert as_load(value) is None or board.wait("a", 0.0) is not None
    assert chosen(policy, key, 100.0).replica == home or decode(value) is not None


@settings(max_examples=100)
@given(st.lists(st.lists(st.sampled_from([0.0, 1e-9, 1.0, 1e8]), min_size=4, max_size=4)))
def test_odd_loads_never_raise(loads: list[list[float]]) -> None:
    """Engines that claim to be infinitely slow, or to need no time; a state is placed."""
    policy = policy_of(["a", "b", "c"], recompute_share=1.0)
    some = keys(3, size=30_000)
    for now, load in enumerate(loads):
        for name in ("a", "b"):
            policy.board.answered(name, load, float(now))
        for key in some:
            assert chosen(policy, key, now + 0.001).replica in ("a", "b", "c")


LOADS = st.builds(Load, *[st.floats(0, 1e6, width=32)] * 4)
ENTRIES = st.integers(0, 2**64 - 1)
HELD = st.tuples(ENTRIES, st.integers(0, 1 << 26))


@given(LOADS, st.lists(ENTRIES, max_size=40), st.lists(HELD, max_size=80), st.booleans())
def test_stats_are_small_and_come_back(
    load: Load, openings: list[int], foreign: list[tuple[int, int]], draining: bool
) -> None:
    """Under 1 KiB, sizes to the nearest 256 bytes below, and no more than 32 and 64 entries."""
    encoded = Stats(load, tuple(openings), tuple(foreign), draining).encode()
    assert sum(len(k) + len(v) for k, v in encoded.items()) < 1024
    found = decode(encoded)
    assert found is not None
    assert (found.load, found.draining) == (load, draining)
    assert found.openings == tuple(openings[:32])
    assert [a for a, _ in found.foreign] == [a for a, _ in foreign[:64]]
    for (_, size), (_, told) in zip(foreign, found.foreign, strict=False):
        assert told == min(size // 256, 0xFFFF) * 256


def test_a_replica_lists_the_last_it_got_away_from_home() -> None:
    """64 of them, and one that it is the home of no more."""
    receiver = Receiver()
    for i, key in enumerate(keys(70)):
        receiver.received(key, i, False, 0.0)
    receiver.received(keys(1)[0], 69, True, 0.0)
    listed = [a for a, _ in receiver.stats(IDLE, 0.0).foreign]
    assert listed == list(range(68, 5, -1))


def two(load_of_home: Load, size: int = 40_000, **limits: Any) -> tuple[Policy, RouteKey, str]:
    """Two replicas, the home of a state and its load; moves are paid for."""
    policy = policy_of(["a", "b"], IDLE, **limits)
    policy.board.load = IDLE
    for key in keys(300, size=500):
        chosen(policy, key, 0.0)  # what is sent saves up for moves
    key = route_key({"state": text(size)})
    home = chosen(policy, key, 100.0).replica
    policy.board.answered(home, load_of_home, 200.0)
    return policy, key, home


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 300), st.integers(1000, 80_000))
def test_home_is_left_only_when_it_pays(wait: float, size: int) -> None:
    """The wait saved exceeds recompute and margin by what the other waits; else home it is."""
    limits = Limits(recompute_share=1.0)
    policy, key, home = two(Load(wait, 0.0, 3.0, 400.0), size, recompute_share=1.0)
    choice = chosen(policy, key, 200.0)
    recompute = size / limits.bytes_per_token / 400.0
    if wait > recompute + limits.margin_steps * 3.0 + 0.01:
        assert (choice.reason, choice.home) == ("spilled", False)
        assert choice.replica != home
        assert choice.move_ms == pytest.approx(recompute)
    elif wait < recompute + limits.margin_steps * 3.0 - 0.01:
        assert (choice.replica, choice.home, choice.move_ms) == (home, True, 0.0)


def test_a_state_that_moved_stays_until_it_pays_to_return() -> None:
    """It goes where it was sent while home lacks more than it would save; then home again."""
    policy, _, home = two(Load(600.0, 0.0, 3.0, 400.0), recompute_share=1.0)

    def grown(size: int, now: float) -> Choice:
        return chosen(policy, route_key({"state": text(size)}), now)

    assert grown(70_000, 200.0).reason == "spilled"
    policy.board.answered(home, IDLE, 201.0)
    away = grown(72_000, 202.0)
    assert (away.reason, away.home) == ("foreign", False)
    policy.board.answered(away.replica, Load(900.0, 0.0, 3.0, 400.0), 203.0)
    back = grown(74_000, 203.0)
    assert (back.replica, back.reason) == (home, "home")
    assert back.move_ms == pytest.approx(34_000 / Limits().bytes_per_token / 400.0)


def test_a_listed_holder_is_used_before_a_new_one() -> None:
    """What another router moved is found by the stats, and costs nothing there."""
    policy, key, home = two(Load(60.0, 0.0, 3.0, 400.0), size=120_000)
    other = "b" if home == "a" else "a"
    assert chosen(policy, key, 200.0).home
    anchor = chosen(policy, key, 200.0).anchor
    policy.hear(other, Stats(IDLE, (), ((anchor, 120_064),)).encode(), 200.0)
    policy.board.answered(home, Load(60.0, 0.0, 3.0, 400.0), 200.0)
    choice = chosen(policy, key, 200.0)
    assert (choice.replica, choice.reason) == (other, "foreign")
    assert choice.move_ms < 2.0


def test_moves_cost_no_more_than_their_share() -> None:
    """Of all engine time that a router dispatches, whatever waits it is told."""
    policy = policy_of([f"r{i}" for i in range(8)], IDLE)
    spent = dispatched = 0.0
    for turn, key in enumerate(keys(1500, size=20_000)):
        now = float(turn)
        choice = chosen(policy, key, now)
        policy.board.answered(choice.replica, Load(1e6, 0.0, 3.0, 400.0), now)
        spent, dispatched = spent + choice.move_ms, dispatched + 3.0
        assert spent <= Limits().recompute_share * dispatched + 1e-6
    assert spent > 0


def test_a_hot_state_gains_holders() -> None:
    """100 requests a second for one document, and a home whose requests wait on average."""
    policy = policy_of([f"r{i}" for i in range(8)], IDLE)
    key, now = route_key({"state": text(24_000)}), 0.0
    sent: Counter[str] = Counter()
    for _ in range(3000):
        now += 0.01
        choice = chosen(policy, key, now)
        sent[choice.replica] += 1
        busy = 40.0 * sent[choice.replica] / sum(sent.values())
        policy.board.answered(choice.replica, Load(busy, busy, 3.0, 400.0), now)
    assert len(sent) >= 3
    assert max(sent.values()) < 0.6 * sum(sent.values())


def test_a_session_for_everything_is_taken_for_what_it_is() -> None:
    """Its states are not one: what a replica got of one says nothing about the next."""
    policy = policy_of(["a", "b"], IDLE, recompute_share=1.0)
    requests = [{"state": text(size, size)} for size in (50_000, 4000, 30_000)]
    for request in requests:
        chosen(policy, route_key(request, "", "all"), 0.0)
    home = chosen(policy, route_key(requests[0], "", "all"), 1.0).replica
    policy.board.answered(home, Load(20.0, 20.0, 3.0, 400.0), 2.0)
    for request in requests:
        assert chosen(policy, route_key(request, "", "all"), 2.0).home == (
            len(request["state"]) > 5000
        )


def test_without_information_or_key() -> None:
    """Home if no load is known; the idler of two without a key; None without replicas."""
    policy = policy_of(["a", "b"])
    key = route_key({"state": "abc"})
    assert chosen(policy, key).reason == "no information"
    policy.board.answered("a", BUSY, 1.0)
    policy.board.answered("b", IDLE, 1.0)
    found = Counter(chosen(policy, None, 1.0).replica for _ in range(40))
    assert found["b"] > found["a"]
    policy.set_replicas({}, 2.0)
    assert policy.choose(key, 2.0) is None
    assert policy.choose(None, 2.0) is None


def test_the_board_forgets_by_itself() -> None:
    """A wait is worked off a millisecond in a millisecond; then the mean stands for it."""
    board = Board()
    assert board.wait("a", 0.0) is None
    board.sent("a", 50.0, 0.0)
    board.sent("a", 50.0, 0.0)
    assert board.wait("a", 0.04) == pytest.approx(60.0)
    assert board.wait("a", 1.0) == 0.0
    board.answered("a", Load(80.0, 7.0, 3.0, 400.0), 2.0)
    assert board.wait("a", 2.01) == pytest.approx(70.0)
    assert board.wait("a", 9.0) == pytest.approx(7.0)
    board.drop("a")
    assert board.wait("a", 9.0) is None
