"""The oracle: which rows of a stream a row may attend to, said directly from the forests.

Written without the plan's lookups, so that a test can hold one against the other. Row x sees row y
if both belong to one chain, t_y <= t_x and, in a sliding layer, t_x - t_y < window.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flide_engine.layout.tree import Forest


def visible(forests: Sequence[Forest], window: int | None = None) -> NDArray[np.bool_]:
    """[T, T] bool over rows in forest order (forest by forest, node by node, token by token).

    Entry [x, y] is true if x may attend to y. Tokens before a resumed position are not rows.
    """
    owner: list[tuple[int, int]] = []
    time: list[int] = []
    for f, forest in enumerate(forests):
        for n, node in enumerate(forest.nodes):
            owner += [(f, n)] * len(node.tokens)
            time += range(node.start, node.end)
    on_chain = {
        (f, n): {(f, above) for above in forest.path(n)}
        for f, forest in enumerate(forests)
        for n in range(len(forest.nodes))
    }
    t = np.array(time, np.int64)
    same = np.array([[y in on_chain[x] for y in owner] for x in owner], bool).reshape(
        len(t), len(t)
    )
    age = t[:, None] - t[None, :]
    return same & (age >= 0) & (age < (window or np.iinfo(np.int64).max))
