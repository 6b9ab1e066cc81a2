"""Lengths of rounds: the captured length a stream is padded to, and the cuts of work that is too
long.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flide_engine.config import GRAIN
from flide_engine.layout.tree import Forest, Tokens, build_forest, common_prefix, group_by_token


def smallest_bucket(tokens: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds `tokens`; ValueError if none does."""
    at = bisect_left(buckets, tokens)
    if at == len(buckets):
        raise ValueError(
            f"{tokens} tokens exceed the largest bucket {buckets[-1] if buckets else 0}"
        )
    return buckets[at]


ROWS_A_PROMPT = 12
"""Rows of a bucket that come with room for one node; shorter branches fill it by their number."""


@dataclass(frozen=True)
class Replay:
    """One piece of a request that goes into one round.

    prompts: which prompts of the request it works on.
    start: position it resumes at, a multiple of the grain; 0 starts afresh.
    resumes: the earlier piece whose checkpoint it resumes from, or -1: then from what was there
        before, or from nothing.
    stop: where its checkpoint is taken, a multiple of the grain, with nothing read; None: it runs
    every
        prompt to its end and reads it.
    tokens: rows it takes in a stream; more where its branches are so short that their number
        counts.
    forest: of its prompts from `start` on; None with a stop.
    """

    prompts: tuple[int, ...]
    start: int
    resumes: int
    stop: int | None
    tokens: int
    forest: Forest | None = None


def cut_replays(prompts: Sequence[Tokens], limit: int, start: int = 0) -> list[Replay]:
    """Pieces of at most `limit` tokens (at least two grains), in an order in which each can be run.

    Positions before `start` are computed already. A request that fits is one piece. Of a longer one
    the common prefix is cut at grains and carried from piece to piece by a checkpoint; questions
    that then still do not fit together are divided, in order.
    """
    if limit < 2 * GRAIN:
        raise ValueError(f"a limit of {limit} tokens is under two grains ({2 * GRAIN})")
    pieces: list[Replay] = []

    def cut(group: list[int], start: int, resumes: int, agreed: int = -1) -> None:
        """agreed: position up to which the prompts are known to agree, if it is after `start`."""
        texts = [prompts[i] for i in group]
        shortest = min(map(len, texts))
        if shortest - start <= limit:  # else no forest of them is small enough
            forest = build_forest(texts, start)
            tokens = max(forest.num_tokens, ROWS_A_PROMPT * len(group))
            if tokens <= limit:
                pieces.append(Replay(tuple(group), start, resumes, None, tokens, forest))
                return
        if agreed <= start:
            roots = group_by_token(prompts, group, start)
            if len(roots) > 1:
                for packed in _pack(prompts, roots, start, limit):
                    cut(packed, start, resumes)
                return
            agreed = start + common_prefix(texts, start, shortest - 1)
        stop = min(agreed, start + limit) // GRAIN * GRAIN
        if stop > start:
            pieces.append(Replay(tuple(group), start, resumes, stop, stop - start))
            cut(group, stop, len(pieces) - 1, agreed)
            return
        half = len(group) // 2
        cut(group[:half], start, resumes)
        cut(group[half:], start, resumes)

    cut(list(range(len(prompts))), start, -1)
    return pieces


def halved(prompts: Sequence[Tokens], replay: Replay) -> list[Replay]:
    """Two pieces that do what one does, each for half of its prompts; none if it cannot be divided:
    it has but one prompt, or takes a checkpoint.
    """
    half = len(replay.prompts) // 2
    if replay.stop is not None or not half:
        return []
    parts = []
    for group in (replay.prompts[:half], replay.prompts[half:]):
        forest = build_forest([prompts[i] for i in group], replay.start)
        tokens = max(forest.num_tokens, ROWS_A_PROMPT * len(group))
        parts.append(replace(replay, prompts=group, tokens=tokens, forest=forest))
    return parts


def _pack(
    prompts: Sequence[Tokens], roots: list[list[int]], start: int, limit: int
) -> list[list[int]]:
    """Groups of prompts without a common token, joined in order while they fit `limit` together."""
    packed: list[list[int]] = []
    room = 0
    for root in roots:
        rows = build_forest([prompts[i] for i in root], start).num_tokens
        tokens = max(rows, ROWS_A_PROMPT * len(root))
        if packed and tokens <= room:
            packed[-1] += root
            room -= tokens
        else:
            packed.append(list(root))
            room = limit - tokens
    return packed
