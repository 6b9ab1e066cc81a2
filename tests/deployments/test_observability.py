"""One running app, watched: its metrics under load, against a report and against the dashboard,
its logs, and its spans as a collector gets them.
"""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from ray import serve
from ray._raylet import Config

from deployments.autoscaling import Needs
from deployments.client import DecisionClient
from deployments.metrics import METRICS
from flide_engine.errors import InvalidRequest
from loadtest.agreement import Scrape, dashboard_names, scrape
from loadtest.handles import metrics_urls
from router.auth import key_hash
from router.policy import REASONS
from tests.deployments.conftest import ROOT, serving
from tests.deployments.test_metrics import ALERTS, USED, declared
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.ray

KEYS = {"acme": "one", "": "two"}
PERIOD_S = 2.0


def question(state: str) -> dict[str, Any]:
    """A question about a state."""
    return {"state": state, "questions": {"q": {"type": "noul", "instructions": "so?"}}}


@dataclass(frozen=True)
class Watched:
    """A running app with up to two replicas, two keys, and metrics every other second."""

    url: str
    cluster: str
    http: httpx.Client
    engine: Any
    logs: Path
    collector: "Collector"

    def post(self, state: str, timeout: float = 60, **headers: str) -> httpx.Response:
        """A response over HTTP. headers: their dashes as underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named.setdefault("authorization", "Bearer one")
        return self.http.post("/v1/systemone", json=question(state), headers=named, timeout=timeout)

    def ask(self, state: str, key: str = "one", session: str = "", timeout: float = 60) -> Any:
        """An answer over HTTP."""
        headers = {"authorization": f"Bearer {key}", "x_session_id": session}
        return self.post(state, timeout, **headers).raise_for_status().json()

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What each replica has counted."""
        found = self.engine.broadcast("counters").results(timeout_s=30)
        return {counted["replica"]: counted for counted in found}

    def scrape_until(self, enough: Callable[[Scrape], bool]) -> Scrape:
        """The first look at the metrics that is enough; the last one if none is in time."""
        for _ in range(int(2 * PATIENCE_S)):
            seen = scrape(metrics_urls())
            if enough(seen):
                break
            time.sleep(0.5)
        return seen


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: list[Span] = []
        super().__init__(("127.0.0.1", 0), _Collecting)

    def traces(self) -> set[str]:
        """Ids of the traces of which a span has come."""
        return {span.trace_id.hex() for span in list(self.spans)}

    def of(self, trace_id: str, names: set[str]) -> list[Span]:
        """The spans of a trace, once those of these names have come."""

        def found() -> list[Span]:
            return [span for span in list(self.spans) if span.trace_id.hex() == trace_id]

        until(lambda: names <= {span.name for span in found()}, f"not all of {sorted(names)}", 0.1)
        return found()


class _Collecting(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """A collector on a port of its own."""
    made = Collector()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture(scope="module")
def watched(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The embedded model."""
    hashes = {name: key_hash(key) for name, key in KEYS.items()}
    words = (
        "num_replicas=auto", "max_replicas=2", "agents_per_replica=1", "cpus_per_replica=0.1",
        "downscale_delay_s=600", "routing_stats_period_s=1", "max_round_tokens=1024",
        f"api_key_sha256={','.join(hashes.values())}",
        f"tenant_names=acme={hashes['acme']}", "log_encoding=JSON", "log_level=DEBUG",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", str(int(1000 * PERIOD_S)))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH", "deployments.tracing:otlp")
        patch.setenv("RAY_SERVE_TRACING_SAMPLING_RATIO", "0")  # but where the caller samples
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with serving(tmp_path_factory.mktemp("watched") / "log", *words) as served:
            Config.initialize("")  # Ray read the mode when it was imported
            ray.init(served.address, log_to_driver=False)
            engine = serve.get_deployment_handle("Engine", "default")
            try:
                with httpx.Client(base_url=served.url, timeout=60) as http:
                    found = re.search(r"logs: (\S+)", served.log.read_text())
                    assert found
                    folder = Path(found[1])
                    yield Watched(served.url, served.address, http, engine, folder, collector)
            finally:
                # its router reports to the controller, and would start a cluster to do so
                engine.shutdown()
                ray.shutdown()


def test_a_report_equals_the_counters(watched: Watched, tmp_path: Path) -> None:
    """`python -m loadtest --check` for seconds, as `make loadtest` runs it for two minutes."""
    done = subprocess.run(
        [
            sys.executable, "-m", "loadtest", "--host", watched.url, "--cluster", watched.cluster,
            "--check", "--metrics-period", str(PERIOD_S), "--out", str(tmp_path), "--key", "two",
            "--workload", "agents", "--rate", "2", "--seconds", "6", "--warmup", "1",
        ],
        cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["totals"]["answered"] >= 3
    rows = {row["what"]: row for row in data["check"]["rows"]}
    assert rows["answered"]["server"] == data["totals"]["answered"]
    assert rows["input tokens"]["server"] == data["totals"]["usage"]["input_tokens"]
    assert {"queue, mean ms", "device, mean ms"} <= set(rows)
    assert data["check"]["agrees"]
    assert "by the server" in (tmp_path / "report.html").read_text()


def lines(watched: Watched, deployment: str) -> list[dict[str, Any]]:
    """The log of a deployment's replicas; each line is an object."""
    found = []
    for path in watched.logs.glob(f"replica_default_{deployment}_*.log"):
        every = path.read_text().splitlines(keepends=True)
        found += [json.loads(line) for line in every if line.endswith("\n")]
    return found


@pytest.mark.parametrize("name", ["x_request_id", "x_typesafe_request_id", ""])
def test_one_request_id_is_in_every_log(watched: Watched, name: str) -> None:
    """The caller's, or the one it is told: Gateway, router, replica and engine name it, in JSON."""
    given = f"mine-{name}"
    answer = watched.post(f"logged {name}", **({name: given} if name else {}))
    served = answer.headers["x-request-id"]
    assert answer.headers["x-typesafe-request-id"] == (given if name else served)
    assert served == given or name != "x_request_id"

    def has(deployment: str, message: str) -> bool:
        every = lines(watched, deployment)
        found = (line["message"] for line in every if line.get("request_id") == served)
        return any(re.match(message, line) for line in found)

    # the last line of a call comes after its answer
    until(lambda: has("Gateway", "POST / 200"), "the call never ends", 0.1)
    assert has("Gateway", rf"to \w+: ({'|'.join(REASONS)})$")
    told = has("Gateway", f"the caller knows this request as {given}")
    assert told == (name == "x_typesafe_request_id")
    assert has("Engine", r"computed, \d+ tokens reused")


def test_a_refusal_is_logged_with_its_id(watched: Watched) -> None:
    """At the Gateway, without what was asked."""
    answer = watched.http.post(
        "/v1/systemone", json={"state": "a secret"}, headers={"x-request-id": "refused-1"}
    )
    assert answer.status_code == 401

    def told() -> list[dict[str, Any]]:
        mine = (x for x in lines(watched, "Gateway") if x.get("request_id") == "refused-1")
        return [line for line in mine if line["message"].startswith("not answered")]

    until(lambda: bool(told()), "it is not logged", 0.1)
    (line,) = told()
    assert line["message"].startswith("not answered: AuthenticationFailed")
    assert line["levelname"] == "INFO"
    assert not any("a secret" in line["message"] for line in lines(watched, "Gateway"))


def test_a_trace_goes_from_the_proxy_to_the_round(watched: Watched) -> None:
    """Below the caller's own span: Serve's in two processes, then ours in the replica; our stages
    below them.
    """
    trace_id, caller = os.urandom(16).hex(), os.urandom(8).hex()
    answer = watched.post("traced", traceparent=f"00-{trace_id}-{caller}-01").json()
    gateway = {f"flide.{stage}" for stage in ("read", "charge", "parse", "call", "respond")}
    engine = {f"flide.{stage}" for stage in answer["x_timing"]}
    path = [
        "flide.replica",
        "replica_handle_request Gateway __call__",
        "route_to_replica Gateway __call__",
        "proxy_http_request Gateway POST /v1/systemone",
    ]
    spans = watched.collector.of(trace_id, {*gateway, *engine, *path})
    by_id = {span.span_id: span for span in spans}
    named = {span.name: span for span in spans}
    for stages, above in ((gateway, path[1]), (engine, path[0])):
        assert {by_id[named[stage].parent_span_id].name for stage in stages} == {above}
    for stage, ms in answer["x_timing"].items():
        span = named[f"flide.{stage}"]
        assert abs((span.end_time_unix_nano - span.start_time_unix_nano) / 1e6 - ms) < 0.01
    span = named["flide.device"]
    for name in path:
        span = by_id[span.parent_span_id]
        assert span.name == name
    assert span.parent_span_id.hex() == caller


def test_who_does_not_sample_makes_no_spans(watched: Watched) -> None:
    """By the caller's flag, and by the configured ratio."""
    trace_id = os.urandom(16).hex()
    watched.post("untraced", traceparent=f"00-{trace_id}-{os.urandom(8).hex()}-00")
    before = watched.collector.traces()
    watched.post("untraced as well")
    time.sleep(1)  # exported every 0.2 s
    assert watched.collector.traces() == before  # a span of those may come late
    assert trace_id not in before


def kill_under(watched: Watched) -> None:
    """Kills the replica that a request is in; the request is answered all the same."""
    while not killed_under(watched, "word " * 4000):
        pass  # it was answered before its replica was stopped


def killed_under(watched: Watched, long: str) -> bool:
    """Whether the replica was killed: it is stopped first, to see that the request is in it."""
    before = watched.replicas()
    watched.ask("short", session="victim")
    after = watched.replicas()
    (owner,) = (r for r in after if after[r]["answered"] > before.get(r, after[r])["answered"])
    process, asked = after[owner]["process"], after[owner]["tokens_asked"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(watched.ask, f"{os.urandom(4)!r} {long}", session="victim")
        until(lambda: watched.replicas()[owner]["tokens_asked"] > asked, "it never begins", 0.05)
        os.kill(process, signal.SIGSTOP)
        in_it = not wait([answer], 1).done
        os.kill(process, signal.SIGKILL if in_it else signal.SIGCONT)
        assert answer.result()
    return in_it


def test_every_metric_is_there_once_everything_has_happened(watched: Watched) -> None:
    """A state again, a refusal, a caller that leaves, a call by handle, a second replica, a death:
    then a scrape has every declared name, those of the dashboard and of the alerts among them.
    """
    state = "a sentence of some words. " * 40
    # one asked at once after another may leave its replica
    reused = (watched.ask(state)["usage"]["x_reused_tokens"] for _ in range(10))
    assert any(reused)
    for _ in range(2):  # a second agent
        watched.ask("of a stranger", key="two")
    with suppress(httpx.HTTPStatusError):
        watched.ask("x", key="wrong")
    serve.get_app_handle("default").decide.remote(question("by handle")).result(timeout_s=60)
    watched.scrape_until(lambda seen: bool(seen.by("autoscaling_decisions_total")))
    until(lambda: len(watched.replicas()) == 2, "the fleet does not grow", 0.2)
    kill_under(watched)
    wanted = declared() - {"ray_flide_handovers_total"}  # nobody left in order
    names: set[str] = set()  # a gauge that nobody sets for a while is gone

    def is_complete(seen: Scrape) -> bool:
        names.update(seen.names)
        outcomes = seen.by("gateway_requests_total", "outcome")
        if not outcomes["cancelled"]:  # the Gateway may not have had it yet when its caller left
            with suppress(httpx.TimeoutException):
                watched.ask("another " * 4000, timeout=0.3)
        return wanted <= names and outcomes["cancelled"] >= 1 <= outcomes["AuthenticationFailed"]

    seen = watched.scrape_until(is_complete)
    assert wanted <= names, wanted - names
    assert dashboard_names() - names <= declared() - wanted
    assert set(USED.findall(ALERTS)) <= names

    outcomes = seen.by("gateway_requests_total", "outcome")
    assert outcomes["AuthenticationFailed"] >= 1
    assert outcomes["cancelled"] >= 1
    assert set(seen.by("gateway_requests_total", "tenant")) == {"acme", "other"}
    assert seen.by("gateway_requests_total", "via")["handle"] == 1
    assert seen.by("retries_total")[""] >= 1
    reasons = seen.by("routed_total", "reason")
    assert set(reasons) <= set(REASONS)
    assert reasons["home"] >= 1
    decided = seen.by("autoscaling_decisions_total", "reason", direction="up")
    assert sum(decided.values()) == 1
    assert set(decided) < set(Needs._fields)
    assert set(seen.by("autoscaling_need_replicas", "reason")) == set(Needs._fields)
    pool = seen.by("pool_bytes", "kind", tier="device")
    assert set(pool) == {"page", "slot", "any"}
    assert min(pool.values()) > 0
    stages = seen.by("stage_seconds_count", "stage")
    at_gateways = {"read", "charge", "parse", "call", "respond"}
    in_engines = {"decode", "render", "tokenize", "queue", "device", "finish"}
    assert at_gateways | in_engines <= set(stages)
    assert seen.by("checkpoint_hits_total")[""] >= 1
    assert seen.by("request_reused_tokens_total")[""] > 0
    text = httpx.get(metrics_urls()[0], timeout=60).text
    for metric in METRICS.values():
        found = re.findall(rf"^{metric.exported}\{{(.*?)\}}", text, re.MULTILINE)
        for labels in found:
            assert set(metric.labels) <= set(re.findall(r'(\w+)="', labels)), metric.name


def test_refusals_by_handle_have_no_traceback(watched: Watched) -> None:
    """A line each in the log of who refused, of our own callers, of the Gateway's and of plain
    ones.
    """
    bad = {"state": "s", "questions": {"q": {"type": "choice", "criteria": {"a": None}}}}
    gateway = serve.get_app_handle("default")
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            DecisionClient().decide(bad)
        for handle in (gateway, watched.engine):
            with pytest.raises(ValueError, match="2 to 255 options"):
                handle.decide.remote(bad).result(timeout_s=60)

    def refused(deployment: str) -> list[dict[str, Any]]:
        return [x for x in lines(watched, deployment) if "InvalidRequest" in x["message"]]

    wanted = {"Engine": 6, "Gateway": 4}
    until(lambda: all(len(refused(d)) >= count for d, count in wanted.items()), "not all", 0.1)
    for deployment, count in wanted.items():
        assert len(refused(deployment)) == count
        for line in refused(deployment):
            assert line["levelname"] == "INFO"
            assert line["message"].startswith("not answered: InvalidRequest")
            assert "exc_text" not in line
    assert not any("Request failed" in x["message"] for x in lines(watched, "Engine"))
