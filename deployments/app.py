"""The app: deployment `Gateway` (HTTP and handle ingress) over deployment `Engine`.

`serve run deployments.app:build model=... num_replicas=...`
"""
# No `from __future__ import annotations` here: Serve validates the arguments by build's real
# annotation.

from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    DeploymentActorConfig,
    RequestRouterConfig,
)

from deployments import logs
from deployments.config import AppArgs
from deployments.drain import Leaving
from deployments.metrics import GatewayMetrics
from deployments.replica import EngineReplica
from router.ingress import Gateway
from router.ledger import ACTOR as LEDGER
from router.options import HttpLimits
from router.quota import Ledger

ENGINE, GATEWAY = "Engine", "Gateway"

IN_FLIGHT = 6
"""Requests that Serve lets a replica have, over `max_waiting_requests`: of a hundred tenants 5.6
times as many may wait in the engine, which alone refuses. Serve's own queue knows no tenants.
"""

ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""Our code never blocks its event loop, so it runs on Serve's: each request is spared two changes
of thread.
"""

ENGINE_ENV = ONE_LOOP | {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""A replica's handle to its siblings is used on other threads, whatever the node says. Threads that
spin while they wait starve everything else on the node: 5 s instead of 0.05 s where two processes
did so on two cores.
"""

GATEWAY_ENV = ONE_LOOP | {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0", "MALLOC_ARENA_MAX": "1"}
"""Routing on the same loop, too, where `router.channel` may ask it. A Gateway has some 36 threads,
nearly all of them Ray's. With glibc's arenas for them, memory that is free in one is of no use to
another, and a process grows over tens of thousands of requests.
"""


def build(args: AppArgs) -> Application:
    """The Serve application of these arguments."""
    logging_options = logs.options(args.log_encoding, args.log_level)
    there = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0
    gpus = args.gpus_here(there)
    in_flight = IN_FLIGHT * args.engine.max_waiting_requests
    engine: Any = serve.deployment(
        name=ENGINE,
        max_ongoing_requests=in_flight,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=args.graceful_shutdown_timeout_s,
        ray_actor_options={
            "num_gpus": gpus,
            "num_cpus": args.cpus_per_replica,
            "runtime_env": {"env_vars": ENGINE_ENV},
        },
        **_replicas(args),
        **_routing(args),
        **logging_options,
    )(EngineReplica)
    gateway: Any = serve.deployment(
        name=GATEWAY,
        num_replicas=args.gateway_replicas,
        max_ongoing_requests=in_flight * args.most_replicas,
        graceful_shutdown_timeout_s=args.graceful_shutdown_timeout_s,
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": GATEWAY_ENV}},
        **_keys(args),
        **logging_options,
    )(Gateway)
    leaving = Leaving(args.handover, args.graceful_shutdown_timeout_s)
    bound = engine.bind(
        args.engine_options(gpus), args.names_by_key, leaving, args.threads, args.channels
    )
    limits = HttpLimits(
        args.max_body_bytes,
        args.engine.max_decoded_bytes,
        args.engine.max_timeout_s,
        args.engine.max_questions,
    )
    app: Application = gateway.bind(
        bound,
        limits,
        args.key_hashes,
        args.gateway_replicas,
        bool(args.api_keys),
        partial(GatewayMetrics, args.names_by_key),
        args.channels,
    )
    return app


def _keys(args: AppArgs) -> dict[str, Any]:
    """Where the Gateways read API keys, and the actor that holds the fleet to their quotas."""
    if not args.api_keys:
        return {}
    ledger = DeploymentActorConfig(
        name=LEDGER, actor_class=ray.remote(Ledger), actor_options={"num_cpus": 0}
    )
    return {"user_config": {"api_keys": args.api_keys}, "deployment_actors": [ledger]}


def _routing(args: AppArgs) -> dict[str, Any]:
    if not args.state_routing:
        return {}
    config = RequestRouterConfig(
        request_router_class="router.request_router.StateRouter",
        request_router_kwargs={"cold_start_s": args.cold_start_s} if args.may_sleep else {},
        request_routing_stats_period_s=args.stats_period_s,
    )
    return {"request_router_config": config}


def _replicas(args: AppArgs) -> dict[str, Any]:
    if args.num_replicas != "auto":
        return {"num_replicas": args.num_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=args.min_replicas,
            initial_replicas=max(1, args.min_replicas),
            max_replicas=args.max_replicas,
            # deprecated in words, and the only thing that sets how often replicas tell
            metrics_interval_s=2,
            look_back_period_s=5,
            upscale_delay_s=2,
            downscale_delay_s=args.downscale_delay_s,
            policy=AutoscalingPolicy(
                policy_function="deployments.autoscaling.FleetPolicy",
                policy_kwargs={
                    "latency_objective_ms": args.latency_objective_ms,
                    "busy_target": args.busy_target,
                    "agents_per_replica": args.agents_per_replica,
                },
            ),
        )
    }
