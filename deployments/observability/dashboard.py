"""The Grafana dashboard; `python -m deployments.observability.dashboard` writes grafana.json."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("grafana.json")
SELECT = '{application=~"$application"}'


def rate(metric: str, by: str = "", more: str = "") -> str:
    """A counter's rate over the dashboard's interval."""
    select = SELECT if not more else SELECT[:-1] + f", {more}}}"
    summed = f"sum by ({by})" if by else "sum"
    return f"{summed} (rate({metric}{select}[$__rate_interval]))"


def stage_quantile(quantile: float) -> str:
    """Seconds of each stage at a quantile."""
    series = f"rate(ray_flide_stage_seconds_bucket{SELECT}[$__rate_interval])"
    return f"histogram_quantile({quantile}, sum by (le, stage) ({series}))"


def sums(metric: str, by: str) -> str:
    """A gauge, summed over replicas."""
    return f"sum by ({by}) ({metric}{SELECT})"


def ratio(part: str, whole: str) -> str:
    """One expression over another."""
    return f"{part} / {whole}"


BUSY = f"rate(ray_flide_busy_seconds_total{SELECT}[$__rate_interval])"

PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "Requests at Gateways by outcome",
        "reqps",
        [(rate("ray_flide_gateway_requests_total", "outcome"), "{{outcome}}")],
    ),
    (
        "Requests at Gateways by tenant",
        "reqps",
        [(rate("ray_flide_gateway_requests_total", "tenant, via"), "{{tenant}} {{via}}")],
    ),
    (
        "Requests at engines by outcome",
        "reqps",
        [(rate("ray_flide_requests_total", "outcome"), "{{outcome}}")],
    ),
    ("Questions", "ops", [(rate("ray_flide_questions_total", "tenant"), "{{tenant}}")]),
    (
        "Cancelled and retried",
        "reqps",
        [
            (rate("ray_flide_gateway_requests_total", "", 'outcome="cancelled"'), "cancelled"),
            (rate("ray_flide_retries_total"), "retried"),
        ],
    ),
    ("Routed by reason", "reqps", [(rate("ray_flide_routed_total", "reason"), "{{reason}}")]),
    (
        "Stages, mean",
        "s",
        [
            (
                ratio(
                    rate("ray_flide_stage_spent_seconds_total", "stage"),
                    rate("ray_flide_stage_seconds_count", "stage"),
                ),
                "{{stage}}",
            )
        ],
    ),
    ("Stages, median", "s", [(stage_quantile(0.5), "{{stage}}")]),
    ("Stages, p99", "s", [(stage_quantile(0.99), "{{stage}}")]),
    (
        "Predicted wait",
        "s",
        [(f"max by (replica) (ray_flide_wait_seconds{SELECT})", "{{replica}}")],
    ),
    ("Tokens of rounds", "ops", [(rate("ray_flide_tokens_total", "kind"), "{{kind}}")]),
    (
        "Share of input saved by checkpoints",
        "percentunit",
        [
            (
                ratio(
                    rate("ray_flide_request_reused_tokens_total"),
                    rate("ray_flide_input_tokens_total"),
                ),
                "saved",
            )
        ],
    ),
    ("Requests that resumed", "reqps", [(rate("ray_flide_checkpoint_hits_total"), "resumed")]),
    (
        "Bucket fill",
        "percentunit",
        [
            (
                ratio(
                    rate("ray_flide_tokens_total", "", 'kind="computed"'),
                    rate("ray_flide_tokens_total", "", 'kind=~"computed|padding"'),
                ),
                "tokens / rows",
            )
        ],
    ),
    ("Busy share", "percentunit", [(f"avg by (replica) ({BUSY})", "{{replica}}")]),
    ("Rounds", "ops", [(rate("ray_flide_rounds_total", "replica"), "{{replica}}")]),
    (
        "Pool",
        "bytes",
        [(sums("ray_flide_pool_bytes", "tier, kind, state"), "{{tier}} {{kind}} {{state}}")],
    ),
    ("Checkpoints", "short", [(sums("ray_flide_checkpoints", "tier"), "{{tier}}")]),
    (
        "Distinct tokens of checkpoints",
        "short",
        [(sums("ray_flide_checkpoint_tokens", "tier"), "{{tier}}")],
    ),
    (
        "Checkpoints handed over",
        "ops",
        [(rate("ray_flide_handovers_total", "way, end"), "{{way}} {{end}}")],
    ),
    ("Odd replicas", "short", [(f"max (ray_flide_odd_replicas{SELECT})", "of other bits")]),
    (
        "Replicas needed by reason",
        "short",
        [(sums("ray_flide_autoscaling_need_replicas", "reason"), "{{reason}}")],
    ),
    (
        "Autoscaling decisions",
        "short",
        [
            (
                "sum by (direction, reason)"
                f" (increase(ray_flide_autoscaling_decisions_total{SELECT}[$__rate_interval]))",
                "{{direction}} {{reason}}",
            )
        ],
    ),
]
"""Title, unit, and (expression, legend) of each panel."""


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels = [
        {
            "id": i + 1,
            "title": title,
            "type": "timeseries",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "gridPos": {"h": 8, "w": 8, "x": 8 * (i % 3), "y": 8 * (i // 3)},
            "targets": [
                {"expr": expr, "legendFormat": legend, "refId": chr(65 + n)}
                for n, (expr, legend) in enumerate(targets)
            ],
        }
        for i, (title, unit, targets) in enumerate(PANELS)
    ]
    application = {
        "name": "application",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": "label_values(ray_flide_rounds_total, application)",
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
    }
    return {
        "title": "Decision serving",
        "uid": "flide",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                application,
            ]
        },
        "panels": panels,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
