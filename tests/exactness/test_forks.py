"""Forked equals isolated: trunks and branches of every length around a grain, any depth, any
company.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from flide_engine.layout.stream import Fork, Job
from flide_engine.layout.tree import Forest, Node, build_forest
from tests.checkpoints import tiny_config
from tests.exactness.harness import Both, Tokens, prompts_on


@pytest.fixture(scope="module", params=["token", "grain"])
def both(request: pytest.FixtureRequest) -> Both:
    """Both ways to start a branch: at its first own token, and at the grain before it."""
    return Both(tiny_config(), request.param)


@pytest.fixture(autouse=True)
def _balanced(both: Both) -> Iterator[None]:
    both.soil()
    yield
    assert both.pool.free == both.pool.units


@pytest.mark.parametrize("trunk", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("company", [False, True], ids=["alone", "in_company"])
def test_branches_equal_their_isolated_prompts(both: Both, trunk: int, company: bool) -> None:
    """Branches of 1 to 70 tokens on trunks of every kind, alone and between two other requests."""
    prompts = prompts_on(both.tokens(trunk), both, [1, 2, 3, 17, 64, 70])
    jobs = [Job(build_forest(prompts))]
    others = [prompts_on(both.tokens(n), both, [5, 40]) for n in (90, 130)] if company else []
    if company:
        jobs = [Job(build_forest(others[0])), *jobs, Job(build_forest(others[1]))]
    got = both.forked(jobs)
    every = [*(others[0] if company else []), *prompts, *(others[1] if company else [])]
    both.assert_equal(got, every)


@pytest.mark.parametrize("past", [0, 1, 2, 3, 63])
def test_branches_end_around_a_grain(both: Both, past: int) -> None:
    """Trunks that end `past` tokens after a grain; branches that end one before, on and after the
    next.
    """
    trunk = 128 + past
    prompts = prompts_on(
        both.tokens(trunk), both, [n - trunk for n in (191, 192, 193) if n > trunk] + [1]
    )
    both.assert_equal(both.forked([Job(build_forest(prompts))]), prompts)


@pytest.mark.parametrize("middle", [5, 130])
def test_three_levels(both: Both, middle: int) -> None:
    """Options below questions below a state: 5 tokens in the middle cross no grain, 130 store a
    state.
    """
    state = both.tokens(70)
    prompts: list[Tokens] = []
    for question in prompts_on(state, both, [middle, middle]):
        prompts += prompts_on(question, both, [1, 9, 66])
    forest = build_forest(prompts, min_saved=1)
    assert max(len(forest.path(leaf)) for leaf in forest.leaves) == 3
    both.assert_equal(both.forked([Job(forest)]), prompts)


def test_equal_prompts_and_prefixes(both: Both) -> None:
    """A prompt asked twice, and one that begins another, each keep a branch of their own."""
    long = both.tokens(150)
    prompts = [long, long[:100], long, long[:101]]
    both.assert_equal(both.forked([Job(build_forest(prompts))]), prompts)


def test_roots_without_a_common_token(both: Both) -> None:
    """Sequences that share nothing, such as option texts, are segments of the same stream."""
    prompts = [both.tokens(n) for n in (3, 1, 140)]
    for i, prompt in enumerate(prompts):
        prompt[0] = 1400 + i
    both.assert_equal(both.forked([Job(build_forest(prompts))]), prompts)


def test_tail_rows_from_two_ancestors(both: Both) -> None:
    """A leaf whose grain begins in its grandparent takes its first chunk's rows from both
    ancestors.
    """
    a, b, c = both.tokens(67), both.tokens(5), both.tokens(4)
    forest = Forest.of(
        (Node(-1, 0, a), Node(0, 67, b), Node(1, 72, c), Node(1, 72, c[::-1].copy())), (2, 3)
    )
    prompts = [np.concatenate([a, b, c]), np.concatenate([a, b, c[::-1]])]
    both.assert_equal(both.forked([Job(forest)]), prompts)


def test_a_poisoned_request_changes_no_other(both: Both) -> None:
    """NaN in one request of a round stays in that request."""
    prompts = prompts_on(both.tokens(100), both, [20, 30])
    poisoned = prompts_on(both.tokens(100), both, [20, 30])
    for prompt in poisoned:
        prompt[50] = 1500
    healthy = both.model.embedding[1500].clone()
    both.model.embedding[1500] = float("nan")
    try:
        got = both.hidden([Job(build_forest(poisoned)), Job(build_forest(prompts))])
    finally:
        both.model.embedding[1500] = healthy
    assert not np.isfinite(got[:2].numpy()).any()
    both.assert_equal(got[2:] @ both.model.output_head.T, prompts)


VARIANTS = {
    "last_layer_is_recurrent": {"num_hidden_layers": 5},
    "untied_head": {"tie_word_embeddings": False},
    "one_key_head_for_all": {"num_key_value_heads": 1, "linear_num_key_heads": 1},
    "odd_sizes": {
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
    "all_attention": {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("fork", ["token", "grain"])
def test_architectures(changes: dict[str, object], fork: Fork) -> None:
    """Head ratios, sizes and layer orders other than the default's."""
    both = Both(tiny_config(**changes), fork, seed=1)
    prompts = prompts_on(both.tokens(150), both, [1, 30, 64])
    both.assert_equal(both.forked([Job(build_forest(prompts))]), prompts)
