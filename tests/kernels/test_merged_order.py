"""Whatever programs run at once, the merged launch of the delta net comes to its end, and nothing
in it is done before what it needs.
"""

import numpy as np
import pytest
import torch

from flide_engine.device_plan import Capacity, Tables
from flide_engine.kernels.stream import CHUNKS, ORDERED, ROOTS, SCANS
from flide_engine.layout.plan import Anchor, Mark
from flide_engine.layout.stream import Job, lay_out
from flide_engine.layout.tree import build_forest
from flide_engine.readout import Asked
from tests.kernels.merged_model import Merged, before, steps

HEADS, PARTS = 2, 2


def random_tables(rng: np.random.Generator) -> Tables:
    """A round of a few requests: trunks of many or no chunks, questions, groups of questions, some
    of them resumed, states kept here and there.
    """
    jobs = []
    for number in range(int(rng.integers(1, 5))):
        trunk = rng.integers(0, 50, int(rng.choice([10, 64, 300, 1500, 64 * 24 + 1])))
        prompts = []
        for group in range(int(rng.integers(1, 5))):
            shared = np.concatenate([trunk, [100 + group], rng.integers(0, 50, 130)])
            for i in range(int(rng.integers(1, 4))):
                own = rng.integers(0, 50, int(rng.integers(1, 150)))
                prompts.append(np.concatenate([shared, [200 + i], own]).astype(np.int32))
        resumed = len(trunk) // 64 * 64 if rng.random() < 0.3 else 0
        grains = {64 * int(g) for g in rng.integers(1, len(trunk) // 64 + 2, 3)}
        marks = tuple(Mark(0, m) for m in sorted(grains) if resumed < m <= len(trunk))
        pages = np.arange(resumed // 64, dtype=np.int32)
        anchor = Anchor(resumed, number, pages) if resumed else None
        jobs.append(Job(build_forest(prompts, resumed), anchor, marks))
    layout = lay_out(jobs)
    pages = np.arange(100, 100 + layout.num_pages, dtype=np.int32)
    slots = np.arange(10, 10 + layout.num_slots, dtype=np.int32)
    plan, _ = layout.bind(pages, slots)
    tables = Tables(Capacity.exactly(plan, 16), torch.device("cpu"))
    assert tables.fill(plan, Asked.every_vector(len(plan.read_rows)))
    return tables


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("programs", "resident"), [(1, 1), (7, 1), (7, 3), (64, 40), (64, 64)])
def test_all_is_done_once_and_after_what_it_needs(seed: int, programs: int, resident: int) -> None:
    """With programs that take any time for anything, and some that begin only when others end."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng).host
    merged = Merged(tables, HEADS, PARTS, programs, lambda what: float(rng.exponential()))
    merged.run(resident)
    place = {done: i for i, done in enumerate(merged.done)}
    chunks = int(tables["counts"][CHUNKS])
    stepped = set(steps(tables, int(tables["counts"][SCANS])).tolist())
    assert len(place) == len(merged.done) == HEADS * (2 * chunks + PARTS * len(stepped))
    for (what, c, head), at in place.items():
        last = before(tables, c)
        needed = [] if what == "chunk" else [("chunk", c, head)]
        if what == "output" and last >= 0:
            needed += [(f"step {part}", last, head) for part in range(PARTS)]
        elif what.startswith("step") and last >= 0:
            needed.append((what, last, head))
        assert all(place[other] < at for other in needed)


def test_a_list_in_another_order_would_stop() -> None:
    """The model tells: outputs before the chain that they wait for, and one program."""
    tables = random_tables(np.random.default_rng(0)).host
    roots = int(tables["counts"][ROOTS])
    entries = tables["order"][roots : roots + int(tables["counts"][ORDERED])]
    entries[:] = entries[np.argsort(entries < 0, kind="stable")]
    with pytest.raises(RuntimeError, match="1 programs wait"):
        Merged(tables, HEADS, PARTS, 1, lambda what: 1.0).run(1)
