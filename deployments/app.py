"""The app: deployment `Gateway` (HTTP and handle ingress) over deployment `Engine`.

`serve run deployments.app:build model=... num_replicas=...`
"""
# No `from __future__ import annotations` here: Serve validates the arguments by build's real
# annotation.

import os
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployments.config import AppArgs
from deployments.drain import Leaving
from deployments.replica import EngineReplica
from router.ingress import Gateway

ENGINE, GATEWAY = "Engine", "Gateway"


def build(args: AppArgs) -> Application:
    """The Serve application of these arguments."""
    gpus = args.gpus_per_replica
    if gpus is None:
        gpus = 1.0 if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    engine: Any = serve.deployment(
        name=ENGINE,
        max_ongoing_requests=8 * args.agents_per_replica,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=args.graceful_shutdown_timeout_s,
        ray_actor_options={
            "num_gpus": gpus,
            "num_cpus": args.cpus_per_replica,
            "runtime_env": {"env_vars": _threads(args)},
        },
        **_replicas(args),
        **_routing(args),
    )(EngineReplica)
    gateway: Any = serve.deployment(
        name=GATEWAY,
        num_replicas=args.gateway_replicas,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0.1},
    )(Gateway)
    leaving = Leaving(args.handover, args.graceful_shutdown_timeout_s)
    bound = engine.bind(args.engine_options(gpus), args.names_by_key, leaving)
    app: Application = gateway.bind(bound, args.key_hashes, args.max_body_bytes)
    return app


def _threads(args: AppArgs) -> dict[str, str]:
    """Environment of a replica's CPU kernels: its share of the cores, and no spinning while it
    waits.

    Threads that spin starve everything else on the node: 5 s instead of 0.05 s where two processes
    did so on two cores.
    """
    share = (os.cpu_count() or 1) // (args.num_replicas if args.num_replicas != "auto" else 1)
    return {"OMP_NUM_THREADS": str(max(1, share)), "OMP_WAIT_POLICY": "PASSIVE"}


def _routing(args: AppArgs) -> dict[str, Any]:
    if not args.state_routing:
        return {}
    config = RequestRouterConfig(
        request_router_class="router.request_router.StateRouter",
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
