"""Random questions about a state, of the kinds that take an engine's different paths."""

from typing import Literal

import numpy as np

from benchmarks.bits.first_difference import Tokens
from benchmarks.requests import TokenRequest
from flide_engine.config import GRAIN

Kind = Literal["one", "some", "short", "tree"]
KINDS: tuple[Kind, ...] = ("one", "some", "short", "tree")
PATHS = {"one": "trunk", "some": "branches", "short": "many short branches", "tree": "trees"}
SHORT = 4
"""Most tokens of a short question."""


def questions(
    state: Tokens, kind: Kind, count: int, seed: int, vocabulary: int, most: int
) -> TokenRequest:
    """Questions of random tokens below `vocabulary`, the longest of `most`.

    One; `count` of any length; six times as many of up to four tokens; or two more than `count`,
    in a group that begins alike, with a group in it that goes on alike.
    """
    rng = np.random.default_rng((seed, len(state), KINDS.index(kind)))
    number = {"one": 1, "some": count, "short": 6 * count, "tree": 2 + count}[kind]
    group, inner = (rng.integers(0, vocabulary, GRAIN + i).astype(np.int32) for i in (3, 6))
    longest = SHORT if kind == "short" else most
    prompts = []
    for i in range(number):
        parts = [state]
        if kind == "tree":
            parts += [group] * (i % 4 != 1) + [inner] * (i % 2 == 0)
        parts.append(rng.integers(0, vocabulary, rng.integers(1, longest + 1)).astype(np.int32))
        prompts.append(np.concatenate(parts).astype(np.int32))
    return TokenRequest(len(state), tuple(prompts))
