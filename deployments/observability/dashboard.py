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


BUSY = f"rate(ray_flide_busy_seconds_total{SELECT}[$__rate_interval])"

PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "Requests by outcome",
        "reqps",
        [(rate("ray_flide_requests_total", "outcome"), "{{outcome}}")],
    ),
    ("Requests by tenant", "reqps", [(rate("ray_flide_requests_total", "tenant"), "{{tenant}}")]),
    ("Questions", "ops", [(rate("ray_flide_questions_total"), "answered")]),
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
                f"{rate('ray_flide_request_reused_tokens_total')}"
                f" / {rate('ray_flide_input_tokens_total')}",
                "saved",
            )
        ],
    ),
    ("Busy share", "percentunit", [(f"avg by (replica) ({BUSY})", "{{replica}}")]),
    ("Rounds", "ops", [(rate("ray_flide_rounds_total", "replica"), "{{replica}}")]),
    (
        "Pool",
        "bytes",
        [
            (
                f"sum by (tier, kind, state) (ray_flide_pool_bytes{SELECT})",
                "{{tier}} {{kind}} {{state}}",
            )
        ],
    ),
    (
        "Distinct tokens of checkpoints",
        "short",
        [(f"sum by (tier) (ray_flide_checkpoint_tokens{SELECT})", "{{tier}}")],
    ),
    ("Checkpoints", "short", [(f"sum by (tier) (ray_flide_checkpoints{SELECT})", "{{tier}}")]),
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
        "query": "label_values(ray_flide_requests_total, application)",
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
