"""How a forest grows out of its prompts, in a compiled loop: hundreds of short branches would keep
a round waiting for a millisecond.
"""

import numpy as np

from flide_engine.layout.compiled import compiled, copy_into
from flide_engine.layout.plan import Ints

STRIDE = 32
"""Tokens of two prompts that are compared at once."""


@compiled
def _by_token(flat: Ints, firsts: Ints, group: Ints, at: int) -> Ints:
    """Puts prompts with one token at place `at` side by side, in order of first appearance, each
    in its former order; where each such group ends.
    """
    count = len(group)
    tokens = np.empty(count, np.int32)
    for i in range(count):
        tokens[i] = flat[firsts[group[i]] + at]
    order = np.argsort(tokens, kind="mergesort")  # stable: the first of a group appears first
    heads, numbers = np.empty(count, np.int32), np.empty(count, np.int32)
    groups = 0
    for i in range(count):
        if i == 0 or tokens[order[i]] != tokens[order[i - 1]]:
            heads[groups] = order[i]
            groups += 1
        numbers[order[i]] = groups - 1
    rank = np.empty(groups, np.int32)
    rank[np.argsort(heads[:groups])] = np.arange(groups).astype(np.int32)
    ends = np.zeros(groups, np.int32)
    for i in range(count):
        ends[rank[numbers[i]]] += 1
    ends = np.cumsum(ends).astype(np.int32)
    free = ends.copy()
    before = group.copy()
    for i in range(count - 1, -1, -1):
        place = rank[numbers[i]]
        free[place] -= 1
        group[free[place]] = before[i]
    return ends


@compiled
def alike(here: Ints, there: Ints) -> int:
    """Tokens on which two vectors of one length agree from the start."""
    at = 0
    while at + STRIDE <= len(here):  # several at once, as none is looked at by itself
        differ = 0
        for j in range(STRIDE):
            differ |= here[at + j] ^ there[at + j]
        if differ != 0:
            break
        at += STRIDE
    while at < len(here) and here[at] == there[at]:
        at += 1
    return at


@compiled
def _agreed(flat: Ints, firsts: Ints, sizes: Ints, group: Ints, since: int) -> int:
    """Tokens from place `since` on that all prompts of a group have in common, leaving each one of
    its own.
    """
    first = firsts[group[0]]
    stop = sizes[group[0]] - 1
    for i in range(1, len(group)):
        stop = min(stop, sizes[group[i]] - 1)
    for i in range(1, len(group)):
        if stop <= since:
            return 0
        other = firsts[group[i]]
        stop = since + alike(flat[first + since : first + stop], flat[other + since : other + stop])
    return int(max(stop - since, 0))


@compiled
def _wait(waiting: Ints, top: int, low: int, high: int, parent: int, since: int, above: int) -> int:
    """Puts a group on top of those to come; how many there are then."""
    waiting[top, 0], waiting[top, 1], waiting[top, 2] = low, high, parent
    waiting[top, 3], waiting[top, 4] = since, above
    return top + 1


@compiled
def _tokens(
    flat: Ints, firsts: Ints, head: Ints, shape: Ints, owners: Ints, base: int, rows: int
) -> Ints:
    """Tokens of the nodes of `shape` [3, N], one after the other, as many as `rows` in all. owners:
    of each node, a prompt that has them; base: position of the first place.
    """
    tokens = np.empty(rows, np.int32)
    at = 0
    for n in range(shape.shape[1]):
        low, high, first = shape[1, n] - base, shape[2, n] - base, firsts[owners[n]]
        if low < 0:
            copy_into(tokens[at:], head[len(head) + low :])
            at, low = at - low, 0
        copy_into(tokens[at:], flat[first + low : first + high])
        at += high - low
    return tokens


@compiled
def grow(
    flat: Ints, prompt_ends: Ints, start: int, head: Ints, min_saved: int, max_depth: int
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The arrays of a `Forest`; see `build_forest`.

    flat: the prompts from place start + len(head) on, one after the other, prompt i up to
    prompt_ends[i]. head: what all of them have before that, from `start` on.
    """
    count = len(prompt_ends)
    firsts, sizes = np.empty(count, np.int32), np.empty(count, np.int32)
    for i in range(count):
        firsts[i] = prompt_ends[i - 1] if i else 0
        sizes[i] = prompt_ends[i] - firsts[i]
    most = 2 * count + 1
    shape = np.empty((3, most), np.int32)
    owners = np.empty(most, np.int32)
    leaves = np.empty(count, np.int32)
    perm = np.arange(count).astype(np.int32)
    # groups to come, the next one last: perm[low : high], parent, place it begins at, nodes above
    waiting = np.empty((most, 5), np.int32)
    top, nodes, rows = 0, 0, 0
    base = start + len(head)
    if len(head):
        top = _wait(waiting, top, 0, count, -1, 0, 0)
    else:
        ends = _by_token(flat, firsts, perm, 0)
        for g in range(len(ends) - 1, -1, -1):
            low = ends[g - 1] if g else 0
            top = _wait(waiting, top, low, ends[g], -1, 0, 0)
    while top:
        top -= 1
        low, high, parent, since, above = waiting[top]
        group = perm[low:high]
        lead = len(head) if parent < 0 else 0  # what a root begins with
        shared = 0
        if high - low > 1 and above < max_depth - 1:
            shared = lead + _agreed(flat, firsts, sizes, group, since)
        if shared == 0 or (above > 0 and shared * (high - low - 1) < min_saved):
            for i in group:
                leaves[i] = nodes
                shape[0, nodes], shape[1, nodes] = parent, base + since - lead
                shape[2, nodes], owners[nodes] = base + sizes[i], i
                rows += sizes[i] - since + lead
                nodes += 1
            continue
        to = since + shared - lead
        shape[0, nodes], shape[1, nodes] = parent, base + since - lead
        shape[2, nodes], owners[nodes] = base + to, group[0]
        rows += shared
        nodes += 1
        ends = _by_token(flat, firsts, group, to)
        for g in range(len(ends) - 1, -1, -1):
            first = low + (ends[g - 1] if g else 0)
            top = _wait(waiting, top, first, low + ends[g], nodes - 1, to, above + 1)
    tokens = _tokens(flat, firsts, head, shape[:, :nodes], owners, base, rows)
    return shape[0, :nodes].copy(), shape[1, :nodes].copy(), shape[2, :nodes].copy(), tokens, leaves
