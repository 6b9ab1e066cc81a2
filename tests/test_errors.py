"""The error tree: every leaf has a status, survives pickle, and names what is wrong."""

import inspect
import pickle
import re

import pytest

from flide_engine import errors
from flide_engine.errors import Fault, FlideError
from router.http_errors import STATUS, error_body, error_headers

EXAMPLES: dict[type[FlideError], FlideError] = {
    type(e): e
    for e in (
        errors.InvalidRequest((Fault(("body", "questions", "q"), "no such type"),)),
        errors.TooManyTokens("the request", 70000, 65536, "max_request_tokens"),
        errors.BodyTooLarge(100, "max_body_bytes"),
        errors.UnsupportedEncoding("br", "zstd"),
        errors.UnknownModel("gpt", ("jev-latest",)),
        errors.AuthenticationFailed("no key"),
        errors.RequestQuarantined(2, 600),
        errors.UnknownState("agent-7", " with at most 64 tokens"),
        errors.TooMuchPinned("agent-7", 20, "slots", 16, "pin_share"),
        errors.TooManyBranches("agent-7", 64),
        errors.Overloaded(900, "tokens", 800, "max_queued_tokens", 1500),
        errors.QuotaExceeded("requests", 60.0, 700),
        errors.NotReady("starting"),
        errors.DeadlineExceeded(0.5),
        errors.EngineStopped("CUDA error"),
        errors.NonFiniteOutput("question 'q'"),
        errors.RoundFailed("ValueError: x"),
        errors.RoundTooLarge(9000, 3, 8192, 700),
        errors.PoolExhausted("pages", 9, 3, 8),
        errors.CheckpointRefused("it is damaged", "the checksum does not agree"),
        errors.ConfigError("no"),
        errors.WeightsError("folder", tuple(f"missing {i}" for i in range(10))),
    )
}


def leaves() -> list[type[FlideError]]:
    """Classes of the tree without subclasses."""
    every = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, FlideError)]
    return [c for c in every if not c.__subclasses__()]


def test_every_leaf_has_one_status() -> None:
    """No more and no fewer: a new error without a status fails here."""
    assert set(STATUS) == set(leaves()) == set(EXAMPLES)


@pytest.mark.parametrize("error", EXAMPLES.values(), ids=lambda e: type(e).__name__)
def test_errors_survive_pickle_and_say_what_is_wrong(error: FlideError) -> None:
    """With their attributes and their text; the body on the wire has the contract's shape."""
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error) != ""
    assert vars(back) == vars(error)
    detail = error_body(error)["detail"]
    if isinstance(error, errors.InvalidRequest):
        assert detail == [
            {"loc": ["body", "questions", "q"], "msg": "no such type", "type": "value_error"}
        ]
    else:
        assert set(detail) == {"error_type", "message"}


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest((errors.Fault(("body", "questions", "asked"), "asked: wrong"),)),
        errors.UnsupportedEncoding("asked", "zstd"),
        errors.UnknownModel("asked", ("jev-latest",)),
        errors.NonFiniteOutput("question 'asked'"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_logs_hear_nothing_of_what_was_asked(error: FlideError) -> None:
    """Where what the caller hears repeats it."""
    assert "asked" in str(error)
    assert error.for_logs
    assert "asked" not in error.for_logs


def test_a_refusal_says_when_to_come_back() -> None:
    """In milliseconds, and in whole seconds for those who read only that."""
    headers = dict(error_headers(EXAMPLES[errors.Overloaded]))
    assert headers == {b"retry-after": b"2", b"retry-after-ms": b"1500"}


def test_long_lists_of_problems_are_cut() -> None:
    """Eight are shown, the rest counted."""
    assert str(EXAMPLES[errors.WeightsError]).endswith("and 2 more")


def test_the_tree_that_is_told_is_the_tree_of_classes() -> None:
    """Each class once, under its base, and each with what it means."""
    told: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.fullmatch(r"( +)([A-Z][A-Za-z]+)(  +[a-z].*)?", line)
        if found is None:
            continue
        depth, name = len(found[1]), found[2]
        above = [(d, n) for d, n in above if d < depth]
        assert name not in told
        assert found[3] or name == "FlideError"
        told[name] = above[-1][1] if above else ""
        above.append((depth, name))
    classes = [
        c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, FlideError)
    ]
    assert told == {c.__name__: "" if c is FlideError else c.__bases__[0].__name__ for c in classes}
