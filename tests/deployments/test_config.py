"""Arguments of an app: what belongs together, and what is refused with its reason."""

import hashlib

import pytest
from pydantic import ValidationError

from deployments.config import AppArgs
from flide_engine.config import EngineConfig

KEY = hashlib.sha256(b"k").hexdigest()


def test_engine_options_stand_beside_the_app_s() -> None:
    """As `serve run` passes them."""
    args = AppArgs.model_validate({"max_round_tokens": 512, "num_replicas": "auto"})
    assert args.engine.max_round_tokens == 512
    assert args.stats_period_s == 2.0
    assert AppArgs(max_replicas=1000, num_replicas="auto").stats_period_s == 50.0


def test_tenants_have_names_in_metrics() -> None:
    """By the hash of a key that is configured."""
    args = AppArgs(api_key_sha256=KEY, tenant_names=f" acme={KEY} ")
    assert args.names_by_key == {KEY: "acme"}
    assert AppArgs().names_by_key == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tenant_names": f"acme={KEY}"}, "of a key in api_key_sha256"),
        ({"api_key_sha256": KEY, "tenant_names": "acme"}, "name=hash is expected"),
        ({"api_key_sha256": "secret"}, "takes SHA-256"),
        ({"num_replicas": 0}, "num_replicas 0; at least 1, or auto"),
        ({"min_replicas": 9, "max_replicas": 3}, "min_replicas 9 exceeds 3"),
        (
            {"num_replicas": "auto", "min_replicas": 0, "state_routing": False},
            "min_replicas 0 needs state_routing",
        ),
        ({"unknown": 1}, "no such option"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, object], message: str) -> None:
    """At start, naming the option."""
    with pytest.raises(ValidationError, match=message):
        AppArgs.model_validate(options)


def test_a_replica_takes_its_part_of_a_card() -> None:
    """A fraction of a GPU is as much of its memory, unless the operator says how much."""
    assert AppArgs().engine_options(0.25)["device_share"] == 0.25
    for gpus in (0.0, 1.0, 2.0):
        assert AppArgs().engine_options(gpus)["device_share"] == 1.0
    args = AppArgs.model_validate({"device_share": 0.4, "gpus_per_replica": 0.5})
    assert args.engine_options(0.5)["device_share"] == 0.4
    assert EngineConfig.model_validate(args.engine_options(0.5)) == args.engine
