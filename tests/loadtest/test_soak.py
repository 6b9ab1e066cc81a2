"""Soaks: what counts as wrong; a mix asked of an engine in this process, and of an app."""

import asyncio
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_model import write as write_model
from benchmarks.soak import in_process, sizes_of
from flide_engine.config import EngineConfig
from flide_engine.work import RequestWork
from loadtest.soak import Answers, Soak, difference
from loadtest.soak_mix import ANSWERED, LEFT, SHARES, Ask, Mix, Sizes
from loadtest.soak_targets import http_ends

ROOT = Path(__file__).parents[2]
SIZES = Sizes(prompt_tokens=4096, questions=64, bytes=1 << 17)
CLIENTS = 16
LIMITS: dict[str, Any] = {
    "max_prompt_tokens": 4096,
    "max_request_tokens": 8192,
    "max_questions": 64,
    "max_decoded_bytes": 1 << 17,
    "max_round_tokens": 1024,
    # a third of what the mix would like to keep: rounds have to take checkpoints' room
    "pool_bytes": 4 << 20,
    "host_bytes": 1 << 20,
    # a slow machine refuses nothing
    "max_queue_ms": 10**9,
}


def config_of(folder: Path) -> EngineConfig:
    """An engine of the poisoned nano model, with a small pool."""
    return EngineConfig(model=str(write_model("nano", folder / "nano")), **LIMITS)


@pytest.mark.parametrize(
    "seconds", [10, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_nothing_is_lost_or_wrong(tmp_path: Path, seconds: float) -> None:
    """Sixteen clients, every kind of request: each ends once and as it may, answers are those it
    gets alone, and afterwards nothing is held, waits, runs, or has grown.
    """
    config = config_of(tmp_path)
    mix = Mix(sizes_of(config))
    of_another_test: Any = RequestWork(None, None, None, None, "", "", [])  # type: ignore[arg-type]
    report, problems = in_process(config, mix, CLIENTS, seconds, 1e-5, least=300)
    assert (problems, of_another_test.at) == ([], 0)
    assert report.wrong == 0
    assert sum(report.ends.values()) == report.asked
    assert {kind for kind, _ in report.ends} == set(SHARES)
    assert {end for _, end in report.ends} >= {ANSWERED, LEFT, "DeadlineExceeded"}
    assert 0 < report.worst < 1e-5


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_nothing_is_lost_through_serve() -> None:
    """Ten minutes of HTTP with keys, two Gateways, and the embedded model."""
    command = [
        *(sys.executable, "-m", "benchmarks.soak", "embedded", "--through", "http", "--dry"),
        *("--seconds", "600", "--clients", str(CLIENTS), "--option"),
        *("max_prompt_tokens=4096", "max_request_tokens=8192", "max_decoded_bytes=131072"),
        *("max_questions=64", "max_round_tokens=1024"),
        # full after the warm-up: one that fills later looks like memory that is lost
        "pool_bytes=48000000",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mix_is_the_same_for_the_same_seed() -> None:
    """And another for another client; every kind comes, with its own ends."""
    first, again, other = (list(itertools.islice(Mix(SIZES).client(n), 2000)) for n in (1, 1, 2))
    assert first == again != other
    assert {ask.kind for ask in first} == set(SHARES)
    for ask in first:
        assert (ask.known >= 0) == (ANSWERED in ask.ends)
        assert http_ends(ask) >= ask.ends & {ANSWERED, LEFT}
    poisoned = next(ask for ask in first if ask.kind == "poisoned")
    assert http_ends(poisoned) == {"HTTP 500"}


NOUL: Answers = {"q": {"type": "noul", "noul": 0.25}}
CHOICE: Answers = {"q": {"type": "choice", "probabilities": {"a": 0.5, "b": 0.5}}}


@pytest.mark.parametrize(
    ("got", "expected", "off"),
    [
        (NOUL, NOUL, 0.0),
        ({"q": {"type": "noul", "noul": 0.75}}, NOUL, 0.5),
        ({"r": NOUL["q"]}, NOUL, math.inf),
        (CHOICE, NOUL, math.inf),
        ({"q": {"type": "choice", "probabilities": {"a": 1.0}}}, CHOICE, math.inf),
    ],
)
def test_how_far_answers_are_apart(got: Answers, expected: Answers, off: float) -> None:
    """By their largest number; another question, type or count is infinitely far."""
    assert difference(got, expected) == off


class Faulty:
    """Answers everything alike, or as told."""

    def __init__(self, end: str, answers: Answers, delay_s: float = 0.0) -> None:
        self.end, self.answers, self.delay_s = end, answers, delay_s

    async def ask(self, ask: Ask) -> tuple[str, Answers]:
        await asyncio.sleep(self.delay_s)
        return self.end, self.answers


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (Faulty(ANSWERED, {"q": {"type": "noul", "noul": math.nan}}), "off by nan"),
        (Faulty(ANSWERED, {"q": {"type": "noul", "noul": 0.2501}}), "off by 0.0001"),
        (Faulty("RoundFailed", {}), "RoundFailed, not"),
    ],
)
def test_a_faulty_target_is_told(target: Faulty, told: str) -> None:
    """Wrong numbers, NaN, and ends that must not be; what is answered although it is bad, too."""
    mix = Mix(SIZES)
    soak = Soak(mix, target, [NOUL] * len(mix.good), 1e-5)
    report = asyncio.run(soak.run(4, 0.0, least=100))
    assert report.wrong >= report.asked - sum(
        n for (kind, _), n in report.ends.items() if kind in ("left", "deadline")
    )
    assert any(told in line for line in report.told)


def test_one_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while."""
    monkeypatch.setattr("loadtest.soak.GIVE_UP_S", 0.05)
    mix = Mix(SIZES)
    soak = Soak(mix, Faulty(ANSWERED, NOUL, delay_s=60), [NOUL] * len(mix.good), 1e-5)
    report = asyncio.run(soak.run(2, 0.0, least=8))
    assert {end for _, end in report.ends} <= {"hung", LEFT}
    assert report.wrong > 0
