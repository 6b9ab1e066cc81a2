"""What giving up checkpoints would free."""

import numpy as np

from flide_engine.cache.index import PrefixIndex
from flide_engine.cache.pool import Pool


def can_free(index: PrefixIndex, pool: Pool, units: int) -> bool:
    """Whether so many units could be freed by giving up checkpoints that are neither locked nor
    pinned. What somebody holds of them besides, as a long request between its pieces does, is not
    counted.
    """
    least = 0
    stay = np.zeros(pool.units, np.bool_)  # pages
    for c in index:
        pages = index.pages_of(c)
        if c.locks or c.pinned:
            stay[pages] = True
        elif pool.slots.counts[c.slot] > 1:
            stay[pages[pool.pages.counts[pages] > 1]] = True
        else:
            least += pool.slot_units
            if least >= units:
                return True  # as nearly always: nobody looks at the others
    return least + index.grains - int(np.count_nonzero(stay)) >= units
