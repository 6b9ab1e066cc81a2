"""How a forest grows out of its prompts, in a compiled loop: hundreds of short branches would keep
a round waiting for a millisecond.
"""

import numpy as np

from flide_engine.layout.compiled import compiled
from flide_engine.layout.plan import Ints


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
def _agreed(flat: Ints, firsts: Ints, sizes: Ints, group: Ints, since: int) -> int:
    """Tokens from place `since` on that all prompts of a group have in common, leaving each one of
    its own.
    """
    first = firsts[group[0]]
    stop = sizes[group[0]] - 1
    for i in range(1, len(group)):
        stop = min(stop, sizes[group[i]] - 1)
    for i in range(1, len(group)):
        other = firsts[group[i]]
        at = since
        while at < stop and flat[first + at] == flat[other + at]:
            at += 1
        stop = at
    return int(max(stop - since, 0))


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
        waiting[0] = np.array([0, count, -1, 0, 0], np.int32)
        top = 1
    else:
        ends = _by_token(flat, firsts, perm, 0)
        for g in range(len(ends) - 1, -1, -1):
            low = ends[g - 1] if g else 0
            waiting[top] = np.array([low, ends[g], -1, 0, 0], np.int32)
            top += 1
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
            waiting[top] = np.array([first, low + ends[g], nodes - 1, to, above + 1], np.int32)
            top += 1
    tokens = np.empty(rows, np.int32)
    at = 0
    for n in range(nodes):
        for place in range(shape[1, n] - base, shape[2, n] - base):
            tokens[at] = head[place + len(head)] if place < 0 else flat[firsts[owners[n]] + place]
            at += 1
    return shape[0, :nodes].copy(), shape[1, :nodes].copy(), shape[2, :nodes].copy(), tokens, leaves
