"""Workloads: the same by seed, in the shapes they claim, and acceptable to the API."""

import itertools
import json
from pathlib import Path

import pytest

from flide_engine.api import DecisionRequest
from loadtest.workloads import DATA, FILES, MIXED, NAMES, Options, Request, load

FOLDERS = [pytest.param(None, id="synthetic")]
if DATA.is_dir():
    FOLDERS.append(pytest.param(DATA, id="files"))


ALL_AT_ONCE = Options()


def opened(
    name: str, seed: int, data: Path | None = None, count: int = 200, options: Options = ALL_AT_ONCE
) -> list[Request]:
    """Requests due ten times a second."""
    stream = load(name, data, options).open_stream(seed)
    return [stream.at(i / 10) for i in range(count)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", FOLDERS)
def test_the_same_seed_asks_the_same(name: str, data: Path | None) -> None:
    """In the open and the closed loop; another seed, or another client, asks something else."""
    first, again, other = (opened(name, seed, data, 60) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    workload = load(name, data)
    takes = [list(itertools.islice(workload.client(s, n), 30)) for s, n in ((1, 0), (1, 0), (1, 1))]
    assert takes[0] == takes[1]
    assert takes[0] != takes[2]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", FOLDERS)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_every_request_is_valid_on_the_wire(name: str, data: Path | None, one_by_one: bool) -> None:
    """By the API's own types; one by one asks exactly one question."""
    for request in opened(name, 0, data, 80, Options(one_by_one)):
        parsed = DecisionRequest.model_validate(json.loads(json.dumps(request.body)))
        assert len(parsed.questions) == request.questions
        assert request.work in FILES
        if one_by_one:
            assert request.questions == 1


@pytest.mark.parametrize("data", FOLDERS)
def test_shapes(data: Path | None) -> None:
    """Questions, options and lengths are what the names say."""
    counts = {name: [r.questions for r in opened(name, 0, data, 100)] for name in FILES}
    assert set(counts["race"]) == set(counts["routing"]) == {1}
    assert set(counts["race_all"]) == {3}
    assert min(counts["multirc"]) >= 12
    assert max(counts["multirc"]) > 40
    assert 8 <= min(counts["quality_all"]) <= max(counts["quality_all"]) <= 19
    for request in opened("routing", 0, data, 50):
        (question,) = request.body["questions"].values()
        assert len(question["criteria"]) >= 150
    states = [r.body["state"] for r in opened("response_eval", 0, data, 25)]
    for i in range(0, 25, 5):
        assert len({s[:5000] for s in states[i : i + 5]}) == 1, "five ask behind one opening"


def test_agents_grow_and_wait_their_think_time() -> None:
    """Each state extends one seen before, or is new; agents number rate x think time at least."""
    stream = load("agents", None, Options(think_s=3.0)).open_stream(0)
    last: list[str] = []
    for i in range(400):
        state = stream.at(i / 10).body["state"]
        before = [s for s in last if state.startswith(s) and state != s]
        if before:
            last.remove(before[0])
        last.append(state)
    assert 30 < len(last) < 90  # ten requests a second, three seconds between two of one agent


def test_the_mix_has_its_shares() -> None:
    """In percent of requests, within what chance allows."""
    works = [r.work for r in opened("mixed", 0, None, 3000)]
    for work, percent in MIXED.items():
        assert works.count(work) / 30 == pytest.approx(percent, abs=3), work


def test_unknown_names_and_missing_files_are_named(tmp_path: Path) -> None:
    """An error, not an empty workload."""
    with pytest.raises(ValueError, match="no workload 'x'; there are race,"):
        load("x")
    with pytest.raises(FileNotFoundError, match="race_like"):
        load("race", tmp_path)
