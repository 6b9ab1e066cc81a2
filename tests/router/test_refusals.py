"""Refusals are one line in Serve's log; faults that nobody foresaw keep their traceback."""

import logging
from collections.abc import Iterator

import pytest

from flide_engine.errors import (
    Fault,
    FlideError,
    InvalidRequest,
    NonFiniteOutput,
    NotReady,
    TooManyTokens,
)
from router.asking import plain_error
from router.refusals import SERVE, in_a_line


@pytest.fixture
def serves() -> Iterator[logging.Logger]:
    """Serve's logger with the filter, which this process would not have otherwise."""
    before, level = list(SERVE.filters), SERVE.level
    SERVE.setLevel(logging.INFO)
    in_a_line()
    in_a_line()
    assert len(SERVE.filters) - len(before) <= 1
    yield SERVE
    SERVE.filters[:] = before
    SERVE.setLevel(level)


def failed(error: Exception) -> None:
    """Logs as Serve does when a call has raised."""
    try:
        raise error
    except Exception:
        SERVE.exception("Request failed.")


@pytest.mark.parametrize(
    "error",
    [
        TooManyTokens("the request", 9, 8, "limit"),
        NonFiniteOutput("question 'q'"),
        NotReady("x"),
        InvalidRequest((Fault(("body", "questions", "q"), "q: wrong"),)),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("plain", [False, True])
def test_an_error_of_the_tree_is_one_line(
    serves: logging.Logger, caplog: pytest.LogCaptureFixture, error: FlideError, plain: bool
) -> None:
    """Also where it was raised as a plain one."""

    def call() -> None:
        try:
            raise error
        except FlideError as ours:
            raise plain_error(ours) from None

    with caplog.at_level(logging.INFO, "ray.serve"):
        if plain:
            try:
                call()
            except Exception:
                SERVE.exception("Request failed.")
        else:
            failed(error)
    (record,) = caplog.records
    assert record.args == (type(error).__name__, error.for_logs)
    assert record.getMessage() == f"not answered: {type(error).__name__}: {error.for_logs}"
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert "Traceback" not in caplog.text


def test_other_faults_are_logged_in_full(
    serves: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """With where they come from."""
    with caplog.at_level(logging.INFO, "ray.serve"):
        failed(ZeroDivisionError("ours"))
        SERVE.error("a line without one")
        try:
            raise NotReady("the engine is closed")
        except NotReady:
            SERVE.exception("checkpoints could not be handed over")
    first, second, third = caplog.records
    assert (first.getMessage(), first.levelname) == ("Request failed.", "ERROR")
    assert "ZeroDivisionError: ours" in caplog.text
    assert second.getMessage() == "a line without one"
    assert (third.getMessage(), third.levelname) == (
        "checkpoints could not be handed over",
        "ERROR",
    )
    assert third.exc_info


def test_refusals_are_not_logged_where_only_warnings_are(
    serves: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """They are lines of level INFO."""
    with caplog.at_level(logging.WARNING, "ray.serve"):
        failed(NotReady("x"))
    assert caplog.records == []
