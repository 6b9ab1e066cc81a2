"""What has been computed before is counted, up to a number of grains."""

import numpy as np

from flide_engine.cache.index import grain_keys
from flide_engine.cache.seen import Seen


def test_grains_count_again_for_their_tenant_only() -> None:
    """Whole grains that agree from the start of the prompt on."""
    seen = Seen()
    text = np.arange(640, dtype=np.int32)
    keys = grain_keys(text)
    assert seen.tokens("a", keys) == 0
    seen.add("a", keys[:4])
    assert seen.tokens("a", keys) == 256
    assert seen.tokens("a", keys[2:]) == 128
    assert seen.tokens("b", keys) == 0
    text[70] = 9
    assert seen.tokens("a", grain_keys(text)) == 64


def test_the_oldest_are_forgotten() -> None:
    """Memory is bounded."""
    seen = Seen(most=10)
    texts = [grain_keys(np.full(256, i, np.int32)) for i in range(5)]
    for keys in texts:
        seen.add("", keys)
    assert [seen.tokens("", keys) for keys in texts] == [0, 0, 128, 256, 256]


def test_a_grain_that_is_told_twice_is_forgotten_once() -> None:
    """Two keys whose numbers are the same stop nothing."""
    seen = Seen(most=2)
    first, *more = grain_keys(np.arange(256, dtype=np.int32))
    seen.add("", [first, first])
    seen.add("", more)
    assert [seen.tokens("", [key]) for key in (first, *more)] == [0, 0, 64, 64]
