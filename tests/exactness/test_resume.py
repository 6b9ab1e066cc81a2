"""Resumed equals fresh: from a checkpoint at every grain, in one step and in many, on a dirty
pool.
"""

import pytest

from flide_engine.layout.plan import Anchor
from flide_engine.layout.stream import Job
from flide_engine.layout.tree import build_forest
from tests.checkpoints import tiny_config
from tests.exactness.harness import Both, prompts_on


@pytest.fixture(scope="module", params=["token", "grain"])
def both(request: pytest.FixtureRequest) -> Both:
    """Both ways to start a branch."""
    return Both(tiny_config(), request.param, seed=2)


@pytest.mark.parametrize("trunk", [192, 193, 195, 255])
def test_resumed_at_every_grain(both: Both, trunk: int) -> None:
    """The state computed up to each grain, then its questions asked from there.

    At trunk 192 and grain 192 nothing of the trunk is left to compute: the branches hang on the
    checkpoint.
    """
    prompts = prompts_on(both.tokens(trunk), both, [1, 3, 66])
    for grain in range(64, trunk + 1, 64):
        both.soil()
        anchor = both.checkpoint(prompts[0], grain)
        assert len(anchor.pages) == grain // 64
        got = both.forked([Job(build_forest(prompts, grain), anchor)])
        both.runner.drop(anchor)
        both.assert_equal(got, prompts)
    assert both.pool.pages.held == 0


def test_a_history_that_grows_step_by_step(both: Both) -> None:
    """Each step resumes from the last one's checkpoint and shares its pages."""
    history = both.tokens(400)
    held: list[Anchor] = []
    for length, grain in ((70, 64), (200, 192), (330, 320), (400, 384)):
        anchor = both.checkpoint(history[:length], grain, held[-1] if held else None)
        held.append(anchor)
        prompts = prompts_on(history[:length], both, [2, 40])
        both.assert_equal(both.forked([Job(build_forest(prompts, grain), anchor)]), prompts)
    # memory is the distinct grains, not a copy a step
    assert both.pool.pages.held == 384 // 64
    for anchor in held:
        both.runner.drop(anchor)
    assert both.pool.pages.held == 0
    assert both.pool.slots.held == 0


def test_two_requests_resume_from_one_checkpoint(both: Both) -> None:
    """A checkpoint is read, never written: several forests of a round may start from it."""
    trunk = both.tokens(130)
    first, second = prompts_on(trunk, both, [7, 50]), prompts_on(trunk, both, [1])
    anchor = both.checkpoint(trunk, 128)
    jobs = [Job(build_forest(p, 128), anchor) for p in (first, second)]
    both.assert_equal(both.forked(jobs), first + second)
    both.assert_equal(both.forked(jobs), first + second)
    both.runner.drop(anchor)
