"""What the app makes of its arguments for Serve; no cluster."""

from typing import Any

import pytest
from ray.serve.config import RequestRouterConfig

from deployments.app import build
from deployments.config import AppArgs


def router_of(**options: Any) -> RequestRouterConfig:
    """How the app of these options has its engine's requests routed."""
    gateway: Any = build(AppArgs(**options))
    (engine, *_) = gateway._bound_deployment.init_args
    config = engine._bound_deployment._deployment_config.request_router_config
    assert isinstance(config, RequestRouterConfig)
    return config


def test_the_router_is_on_unless_turned_off() -> None:
    """With a stats period that grows with the fleet."""
    ours = "router.request_router.StateRouter"
    assert router_of().request_router_class == ours
    assert router_of().request_routing_stats_period_s == 2.0
    assert router_of(num_replicas=1000).request_routing_stats_period_s == 50.0
    assert router_of(num_replicas="auto", max_replicas=80).request_routing_stats_period_s == 4.0
    assert router_of(routing_stats_period_s="0.5").request_routing_stats_period_s == 0.5
    assert router_of(state_routing="false").is_default_request_router()


def test_routers_are_told_of_cold_starts_where_there_are_any() -> None:
    """Where there may be no replica, and nowhere else."""
    asleep = {"num_replicas": "auto", "min_replicas": 0}
    assert router_of(**asleep).request_router_kwargs == {"cold_start_s": 60.0}
    assert router_of(**asleep, cold_start_s="300").request_router_kwargs == {"cold_start_s": 300.0}
    for awake in ({"num_replicas": "auto"}, {"num_replicas": 2, "min_replicas": 0}):
        assert router_of(**awake).request_router_kwargs == {}


@pytest.mark.parametrize("seconds", [None, 7.5])
def test_gateways_have_as_long_to_leave_as_engines(seconds: float | None) -> None:
    """Their requests are the same."""
    given = {} if seconds is None else {"graceful_shutdown_timeout_s": seconds}
    gateway: Any = build(AppArgs.model_validate(given))
    (engine, *_) = gateway._bound_deployment.init_args
    for made in (gateway, engine):
        config = made._bound_deployment._deployment_config
        assert config.graceful_shutdown_timeout_s == (seconds or 60.0)
