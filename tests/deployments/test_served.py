"""The main job: `make serve`'s server, asked by suites and clients that nobody here wrote."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.conftest import ROOT, Served
from tests.router.test_http_app import FAULTY
from tests.waiting import until

pytestmark = pytest.mark.ray

WORKLOADS = ROOT.parent / "shared" / "workloads"
REQUEST: dict[str, Any] = {
    "state": "User: my card was charged twice and nobody answers the phone",
    "questions": {
        "team": {
            "type": "choice",
            "instructions": "Who handles it?",
            "criteria": {"billing": "payments and refunds", "delivery": "parcels on their way"},
        },
        "angry": {"type": "noul", "instructions": "Is the customer angry?"},
        "urgency": {"type": "score", "criteria": ["can wait", "today", "at once"]},
    },
}


def run(*command: str, timeout: float = 240, **kw: Any) -> subprocess.CompletedProcess[str]:
    """A finished command with its output."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **kw
    )


def test_jevcompat_without_a_key(served: Served) -> None:
    """Every requirement of the wire contract that applies, by its own suite."""
    done = run(str(Path(sys.executable).parent / "jevcompat"), "test", served.url)
    assert done.returncode == 0, done.stdout
    assert "MUST 32/32, SHOULD 13/13" in done.stdout


def test_a_real_answer(client: httpx.Client) -> None:
    """Probabilities that are neither uniform nor the same for another state."""
    first = client.post("/v1/systemone", json=REQUEST).json()["answers"]
    other = {**REQUEST, "state": "User: where is my parcel? it should have come on monday"}
    second = client.post("/v1/systemone", json=other).json()["answers"]
    p, q = (a["team"]["probabilities"]["billing"] for a in (first, second))
    assert p > 0.5 > q
    assert abs(first["angry"]["noul"] - second["angry"]["noul"]) > 1e-4


def test_health_models_and_version(client: httpx.Client) -> None:
    """What operators ask."""
    until(lambda: client.get("/health").status_code == 200, "it is not healthy", 0.5)
    (model,) = client.get("/v1/models").json()["models"]
    assert set(model) == {"name", "description", "release_date"}
    assert client.post("/v1/systemone", json=REQUEST).json()["model"] == model["name"]
    version = client.get("/version").json()
    assert version["ray"] == "2.60.0"
    assert len(version["weights_hash"]) == 16


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_bodies_through_serve(client: httpx.Client, name: str) -> None:
    """The same 4xx as in the app's own tests."""
    answer = client.post("/v1/systemone", content=FAULTY[name])
    assert answer.status_code == 422, answer.text
    # an engine that is held up is not healthy meanwhile
    until(lambda: client.get("/health").status_code == 200, "it is not healthy again", 0.5)


def test_limits_of_the_engine_through_serve(client: httpx.Client) -> None:
    """A state over the limit, an unknown model, too many questions: refused, and it goes on."""
    long = client.post("/v1/systemone", json={**REQUEST, "state": "seven " * 40_000})
    assert long.status_code == 413
    assert "maximum context length is 32768" in long.json()["detail"]["message"]
    unknown = client.post("/v1/systemone", json={**REQUEST, "model": "jev-0"})
    assert unknown.status_code == 400
    assert unknown.json()["detail"]["error_type"] == "api_usage_error"
    many = {f"q{i}": REQUEST["questions"]["angry"] for i in range(1025)}
    assert client.post("/v1/systemone", json={"state": "s", "questions": many}).status_code == 422
    assert client.post("/v1/systemone", json={**REQUEST, "model": "jev-latest"}).status_code == 200
    question = '{"q": {"type": "noul", "instructions": "?"}}'
    deep = f'{{"state": {"[" * 1000}{"]" * 1000}, "questions": {question}}}'
    for named in ({}, {"x-session-id": "deep"}):
        answer = client.post("/v1/systemone", content=deep, headers=named)
        assert answer.status_code == 422, answer.text
        assert answer.json()["detail"][0]["msg"] == "nested too deeply"


def largest_rows() -> list[tuple[str, dict[str, Any]]]:
    """The longest real states and the most questions and options, or rows of the same sizes."""
    wanted = {"multirc_like": "questions", "intent_routing": "options", "quality_like": "state"}
    if not WORKLOADS.is_dir():
        noul = {"type": "noul", "instructions": "Is this said in the text?"}
        wide = {"type": "choice", "criteria": {f"option {i}": None for i in range(151)}}
        return [
            (
                "questions",
                {"state": "A text. " * 100, "questions": {f"q{i}": noul for i in range(170)}},
            ),
            ("options", {"state": "User: hello", "questions": {"q": wide}}),
            ("state", {"state": "It was a long day. " * 1950, "questions": {"q": noul}}),
        ]
    found = []
    for file, what in wanted.items():
        with gzip.open(WORKLOADS / f"{file}.jsonl.gz", "rt") as lines:
            rows = [json.loads(line) for line in lines]
        sizes = {
            "questions": lambda r: len(r["questions"]),
            "options": lambda r: len(r["questions"][0]["criteria"]),
            "state": lambda r: len(r["state"]),
        }
        row = max(rows, key=sizes[what])
        questions = {
            q["id"]: {k: q[k] for k in ("type", "instructions", "criteria")}
            for q in row["questions"]
        }
        found.append((what, {"state": row["state"], "questions": questions}))
    return found


@pytest.mark.parametrize(
    ("what", "row"), largest_rows(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_the_largest_real_rows_answer(client: httpx.Client, what: str, row: dict[str, Any]) -> None:
    """170 questions, 151 options, a 9,765-token state."""
    answer = client.post("/v1/systemone", json=row)
    assert answer.status_code == 200, answer.text
    answers = answer.json()["answers"]
    assert set(answers) == set(row["questions"])
    for one in answers.values():
        if one["type"] != "noul":
            assert abs(sum(one["probabilities"].values()) - 1) < 1e-6
