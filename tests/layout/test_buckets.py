"""Buckets and the cuts of long work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flide_engine.device_plan import Capacity
from flide_engine.layout.buckets import ROWS_A_PROMPT, cut_replays, smallest_bucket
from flide_engine.layout.tree import build_forest


def test_smallest_bucket_that_fits() -> None:
    """Exactly full still fits; more than the largest does not."""
    assert [smallest_bucket(n, (64, 128, 512)) for n in (1, 64, 65, 512)] == [64, 64, 128, 512]
    with pytest.raises(ValueError, match="513 tokens exceed the largest bucket 512"):
        smallest_bucket(513, (64, 128, 512))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 700),
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.lists(st.integers(1, 30), max_size=4),
    st.sampled_from([128, 200, 512]),
)
def test_pieces_fit_and_cover_every_prompt_once(
    state: int, questions: list[int], options: list[int], limit: int
) -> None:
    """Each piece fits, resumes where an earlier one stopped, and every prompt is run to its end
    once.
    """
    rng = np.random.default_rng(state)
    trunk = rng.integers(0, 50, state)
    prompts = [
        np.concatenate([trunk, [100 + i], rng.integers(0, 50, n)]).astype(np.int32)
        for i, n in enumerate(questions)
    ]
    prompts += [np.array([200, *rng.integers(0, 50, n)], np.int32) for n in options]
    pieces = cut_replays(prompts, limit)
    ended: list[int] = []
    for i, piece in enumerate(pieces):
        texts = [prompts[p] for p in piece.prompts]
        assert piece.tokens <= limit
        assert piece.start % 64 == 0
        assert -1 <= piece.resumes < i
        assert piece.start == (0 if piece.resumes < 0 else pieces[piece.resumes].stop)
        if piece.resumes >= 0:
            before = pieces[piece.resumes]
            assert all(
                (prompts[before.prompts[0]][: piece.start] == t[: piece.start]).all() for t in texts
            )
        if piece.stop is None:
            rows = build_forest(texts, piece.start).num_tokens
            assert piece.tokens == max(rows, ROWS_A_PROMPT * len(texts))
            ended += piece.prompts
        else:
            assert piece.stop % 64 == 0
            assert piece.start < piece.stop < min(map(len, texts))
    assert sorted(ended) == list(range(len(prompts)))


def test_a_long_state_is_computed_once() -> None:
    """6,200 tokens and 18 questions in pieces of 1,024: no more rows than one piece, but for the
    tails.
    """
    rng = np.random.default_rng(0)
    state = rng.integers(0, 50, 6200)
    prompts = [
        np.concatenate([state, [100 + i], rng.integers(0, 50, 109)]).astype(np.int32)
        for i in range(18)
    ]
    whole = build_forest(prompts).num_tokens
    pieces = cut_replays(prompts, 1024)
    branch_pieces = sum(piece.stop is None for piece in pieces)
    assert sum(piece.tokens for piece in pieces) <= whole + 63 * branch_pieces


def test_pieces_of_many_short_branches_fit_a_bucket_by_their_number() -> None:
    """1,024 questions of four tokens about a long state: the nodes of each piece fit, too."""
    rng = np.random.default_rng(0)
    state = rng.integers(0, 50, 9000)
    prompts = [
        np.concatenate([state, [100 + i], rng.integers(0, 50, 3)]).astype(np.int32)
        for i in range(1024)
    ]
    room = Capacity.of(8192, 32, 8192)
    pieces = cut_replays(prompts, 8192)
    ends = [piece for piece in pieces if piece.stop is None]
    for piece in ends:
        forest = build_forest([prompts[p] for p in piece.prompts], piece.start)
        assert len(forest.nodes) <= room.nodes
        assert forest.num_tokens <= room.rows
    assert sum(len(piece.prompts) for piece in ends) == 1024
    assert len(ends) > 1


def test_a_limit_under_two_grains_is_refused() -> None:
    """Such a limit could cut nothing."""
    with pytest.raises(ValueError, match="under two grains"):
        cut_replays([np.arange(5, dtype=np.int32)], 127)
