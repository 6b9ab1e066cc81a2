"""Whose bits are not their fleet's: most of equal weights are right, the eldest if as many."""

import json
import random
from typing import Any

import pytest

from router.fingerprint import METADATA, Fingerprint, decode, odd_ones


def told(bits: str, since: float = 0.0, weights: str = "w", stack: str = "cpu") -> Fingerprint:
    """What a replica tells."""
    return Fingerprint(weights, bits, stack, strict=True, since=since)


@pytest.mark.parametrize(
    ("replicas", "odd"),
    [
        ({}, set()),
        ({"a": told("x")}, set()),
        ({"a": told("x"), "b": told("x", 5.0)}, set()),
        # the elder is the fleet of two
        ({"a": told("x", 2.0), "b": told("y", 1.0)}, {"a"}),
        ({"a": told("x", 1.0), "b": told("y", 2.0)}, {"b"}),
        # most of three, however old the third
        ({"a": told("x", 1.0), "b": told("y", 2.0), "c": told("y", 3.0)}, {"a"}),
        # other weights are another fleet
        ({"a": told("x", weights="v"), "b": told("y"), "c": told("y")}, set()),
        # every opinion its own: the eldest stays
        ({"a": told("x", 3.0), "b": told("y", 1.0), "c": told("z", 2.0)}, {"a", "c"}),
    ],
)
def test_who_is_odd(replicas: dict[str, Fingerprint], odd: set[str]) -> None:
    """Whatever order they are listed in, as every router has its own."""
    for _ in range(4):
        listed = random.sample(list(replicas.items()), len(replicas))
        assert set(odd_ones(dict(listed))) == odd


def test_the_reason_names_bits_numbers_and_stacks() -> None:
    """What an operator needs to see which machine to look at."""
    replicas = {
        "a": told("x", stack="torch 2.13, H200"),
        "b": told("x", stack="torch 2.13, H200"),
        "c": told("y", stack="torch 2.14, H100"),
    }
    assert odd_ones(replicas) == {
        "c": "the probe gave bits y here and x on 2 of 3 replicas with weights w; here torch 2.14,"
        " H100, there torch 2.13, H200"
    }


def test_a_fingerprint_survives_the_way_through_serve() -> None:
    """As JSON, in which Serve keeps it; anything else is none."""
    mine = told("x", 12.5)
    assert decode(json.loads(json.dumps(mine.encode()))) == mine
    assert mine.text == "w-x"
    good = mine.encode()[METADATA]
    bad: list[Any] = [None, {}, "x", {METADATA: None}, {METADATA: good[:-1]}]
    bad += [
        {METADATA: [*good[:i], value, *good[i + 1 :]]}
        for i, value in enumerate((1, None, 2.0, "yes", "1"))
    ]
    for metadata in bad:
        assert decode(metadata) is None
