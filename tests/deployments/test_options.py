"""Options as words of a command line: what is parsed, what is suggested, and where they stand."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.config import AppArgs
from deployments.local import parse_args
from flide_engine.config import EngineConfig

ROOT = Path(__file__).parents[2]


def refused(*words: str) -> str:
    """What is said of words that are wrong."""
    with pytest.raises(SystemExit) as told:
        parse_args(list(words))
    return str(told.value.code)


def test_a_mapping_is_given_as_json() -> None:
    """As a word of `make serve` or `serve run`, and as a mapping in a config file."""
    words = ['tenant_weights={"acme": 2, "beta": 0.5}']
    expected = {"acme": 2.0, "beta": 0.5}
    assert parse_args(words).args.engine.tenant_weights == expected
    options: list[dict[str, Any]] = [
        {"tenant_weights": expected},
        {"engine": {"tenant_weights": '{"acme": 2, "beta": 0.5}'}},
    ]
    for given in options:
        assert AppArgs.model_validate(given).engine.tenant_weights == expected
    for wrong in ("tenant_weights=acme:2", 'tenant_weights=["acme"]'):
        assert refused(wrong).startswith("engine.tenant_weights: ")
    for weight in ("0", "-1", "1e-300", "1e308", "NaN", "Infinity"):  # turns are divided by them
        wrong = f'tenant_weights={{"acme": {weight}}}'
        assert refused(wrong).startswith("engine.tenant_weights.acme: Input should be")


def test_a_name_that_is_none_is_told_with_the_nearest() -> None:
    """Of the app's and the engine's, among all else that is wrong; a strange one without."""
    told = refused("moddel=x", "num_replica=2", "max_replicas=none", "qqqqqq=1").splitlines()
    assert sorted(told) == [
        "max_replicas: Input should be a valid integer, unable to parse string as an integer",
        "moddel: no such option; did you mean model?",
        "num_replica: no such option; did you mean num_replicas?",
        "qqqqqq: no such option",
    ]
    with pytest.raises(ValidationError, match="no such option; did you mean pool_bytes?"):
        AppArgs.model_validate({"engine": {"pool_byte": 1}})
    assert refused("min_replicas=9", "max_replicas=3") == (
        "arguments: Value error, min_replicas 9 exceeds 3 (max)"
    )


def test_every_option_is_in_the_table() -> None:
    """`python -m deployments.options_page` would change nothing."""
    from deployments.options_page import PAGE, page

    assert page() == PAGE.read_text()
    for name in (*AppArgs.model_fields, *EngineConfig.model_fields, "port", "insecure"):
        assert f"\n| `{name}` | " in PAGE.read_text() or name == "engine"
