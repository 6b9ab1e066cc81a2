"""The fleet benchmarks' own parts: who asks, what is counted, what a drain saved; no cluster."""

import asyncio
import gzip
import json
from argparse import Namespace
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import __main__ as command
from benchmarks.fleet import tables
from benchmarks.fleet.__main__ import ask_for, kills
from benchmarks.fleet.callers import CARELESS, OPENING_BYTES, SIZES, Caller, Cutter, callers
from benchmarks.fleet.cards import shares_of
from benchmarks.fleet.choosing import Choosing
from benchmarks.fleet.driver import Seen
from benchmarks.fleet.handing import saved
from benchmarks.fleet.mixed import at_objective, busy, plan_of, row_of
from benchmarks.fleet.oracle import Told, ask_one_engine, distance
from benchmarks.fleet.policies import with_sessions
from benchmarks.fleet.works import Asked, gained, handed_over, overhead_of, work_of
from benchmarks.fleet.works import row_of as work_row
from flide_engine.config import EngineConfig
from loadtest.driver import Reply, Sample

SMALL = SIZES["small"]
ASKED = {"id": "q", "type": "noul", "instructions": "Is it?", "criteria": None}


@pytest.fixture(scope="module")
def everyone() -> list[Caller]:
    """Those of the small size, of synthetic records."""
    return callers(SMALL, None)


def test_callers_are_those_of_the_issue(everyone: list[Caller]) -> None:
    """Agents whose states grow behind one opening up to a limit, half over HTTP, none with a
    session id but the careless one; and a document that two ask about.
    """
    agents, documents = everyone[: SMALL.agents], everyone[SMALL.agents :]
    cut = Cutter()
    opening = agents[0].requests[0]["state"].encode()[:OPENING_BYTES]
    for agent in agents:
        states = [request["state"] for request in agent.requests]
        assert len(states) <= SMALL.steps
        assert all(b.startswith(a) for a, b in pairwise(states))
        assert states[0].encode().startswith(opening)
        behind = states[-1].encode()[OPENING_BYTES:].decode()
        assert cut.count(behind) <= SMALL.history_tokens
    assert [a.session for a in agents] == [CARELESS] + [""] * (SMALL.agents - 1)
    assert {d.requests[0]["state"] for d in documents} == {documents[0].requests[-1]["state"]}
    assert sum(len(d.requests) for d in documents) == SMALL.document_asks
    for group in (agents, documents):
        assert sum(c.way == "http" for c in group) == len(group) / 2


def test_other_variants_share_no_state(everyone: list[Caller]) -> None:
    """Neither an opening nor a document."""
    others = callers(SMALL, None, variant=1)
    beginnings = {c.requests[0]["state"][:64] for c in everyone}
    assert not beginnings & {c.requests[0]["state"][:64] for c in others}
    assert [c.name for c in others] == [c.name for c in everyone]


def test_a_consistent_hash_is_told_who_asks(everyone: list[Caller]) -> None:
    """By a session id each; the careless one keeps its own."""
    told = with_sessions(everyone, "consistent hash")
    assert [c.session for c in told] == [CARELESS] + [c.name for c in everyone[1:]]
    assert with_sessions(everyone, "ours") == everyone


def test_one_engine_computes_what_is_new() -> None:
    """Two fleets' callers: the same as before costs its last grain and the question; another
    variant is new.
    """
    question = {"type": "noul", "instructions": "Is it?"}

    def asks(text: str) -> Caller:
        request = {"state": text, "questions": {"q": question}}
        return Caller("c", "http", "", (request, request))

    config = EngineConfig(model="nano", device="cpu")
    texts = ["word " * 300, "word " * 300, "other " * 300]
    first, again, other = ask_one_engine(config, *([asks(text)] for text in texts))
    assert set(first.answers) == {("c", 0), ("c", 1)}
    assert distance(first.answers["c", 0], again.answers["c", 1]) < 1e-6
    assert again.computed < 0.5 * first.computed < other.computed


def test_answers_that_change_are_told(everyone: list[Caller]) -> None:
    """Any of those to one request counts, and one with other options."""
    at = ("a", 0)
    told = Told(100, {at: {"q": {"yes": 0.5}}})
    asked = Asked("tiny", [Caller("a", "http", "", ({},))], told, {"model": "nano"})
    seen = Seen({at: [{"q": {"yes": 0.5}}, {"q": {"yes": 0.502}}]}, ms=[1.0, 3.0])
    row = work_row("kill", asked, seen, 2)
    assert (row["changed"], row["largest_difference"], row["failed"]) == (1, 0.002, 0)
    seen.answers[at] = [{"q": {"no": 0.5}}]
    assert work_row("kill", asked, seen, 2)["changed"] == 1
    with pytest.raises(RuntimeError, match="fewer were"):
        work_row("kill", asked, Seen(), 2)


def test_parts_of_a_run_add_up() -> None:
    """Answers to the same request beside each other."""
    seen = Seen({("a", 0): [{}]}, [], 10, 4, {("a", 0): 4}, [1.0])
    seen.add(Seen({("a", 0): [{}], ("b", 0): [{}]}, ["x"], 20, 6, {("b", 0): 6}, [2.0, 3.0], [0.1]))
    assert {at: len(answers) for at, answers in seen.answers.items()} == {("a", 0): 2, ("b", 0): 1}
    assert (seen.failed, seen.asked, seen.reused, seen.ms) == (["x"], 30, 10, [1.0, 2.0, 3.0])
    assert (seen.last_reused, seen.hash_ms) == ({("a", 0): 4, ("b", 0): 6}, [0.1])


def test_work_is_what_was_computed_meanwhile() -> None:
    """Of each replica, also of one that came."""
    before: Any = {"a": {"tokens_computed": 100, "checkpoints_taken_over": {"adopted": 1}}}
    after: Any = {
        "a": {"tokens_computed": 400, "checkpoints_taken_over": {"adopted": 3, "known": 1}},
        "b": {"tokens_computed": 100, "checkpoints_taken_over": {}},
    }
    assert gained(before, after) == [300, 100]
    assert work_of(before, after, Told(200, {})) == {
        "computed_over_oracle": 2.0, "max_work_share": 0.75,
    }  # fmt: skip
    assert handed_over(before, after) == 2


@pytest.mark.parametrize(
    ("moved", "share"),
    [
        ({}, None),
        ({"a": (2048, 2048), "b": (1024, 1024)}, 1.0),
        # of 1,536 tokens behind the opening, 64 were computed again
        ({"a": (2048, 1984)}, round(1 - 64 / 1536, 4)),
        # the opening alone, or less: everything was
        ({"a": (2048, 512)}, 0.0),
        ({"a": (2048, 0)}, 0.0),
    ],
)
def test_what_a_drain_saved(moved: dict[str, tuple[int, int]], share: float | None) -> None:
    """Nothing is claimed for the opening, which all replicas have."""
    assert saved(moved, shared=512) == share


def test_what_placing_costs_is_the_median_of_each_part() -> None:
    """And both together; nothing is told where nobody asked by handle."""
    seen = Seen(hash_ms=[0.1, 0.2, 9.0], choose_ms=[0.02, 0.05, 0.01])
    assert overhead_of(seen) == {"hash_p50_ms": 0.2, "choose_p50_ms": 0.02, "router_p50_ms": 0.22}
    assert overhead_of(Seen()) == {}


def test_kills_are_at_chosen_steps() -> None:
    """Of all there is each 300; never beyond the end; of nodes one."""
    assert kills("replica", "ci", 208) == [50, 120]
    assert kills("node", "ci", 208) == [50]
    assert kills("replica", "full", 1000) == [300, 600, 900]
    assert kills("replica", "full", 100, each=40) == [40, 80]
    assert kills("replica", "ci", 100) == [50]


def sample(done: float, ms: float = 10.0, error: str = "") -> Sample:
    usage = {} if error else {"input_tokens": 100, "x_reused_tokens": 75}
    sent = done - ms / 1000
    return Sample("race", 1, sent, sent, done, Reply(error, usage=usage))


def test_a_level_counts_what_is_answered_after_its_warm_up() -> None:
    """And before its end, and times what is asked between them; failures always."""
    samples = [
        sample(0.5, 900),
        sample(2.0, 10),
        sample(3.0, 30),
        sample(1.5, 900),
        sample(9.5, 5000),
        sample(0.1, error="5"),
    ]
    row = row_of(samples, 1.0, 5.0)
    assert (row["requests"], row["failed"], row["requests_per_s"]) == (3, 1, 0.8)
    assert (row["timed"], row["reuse_share"]) == (3, 0.75)
    assert (row["p50_ms"], row["p99_ms"]) == (30.0, 5000.0)
    assert row_of([], 1.0, 5.0)["p99_ms"] is None
    before: Any = {"a": {"busy_seconds": 1.0}}
    after: Any = {"a": {"busy_seconds": 2.0}, "b": {"busy_seconds": 3.0}}
    assert busy(before, after, [sample(4.0)]) == {"busy_least": 0.25, "busy_most": 0.75}
    assert plan_of((4, 8), 5.0, Path("nowhere")).level_s == 5.0


def test_throughput_is_that_of_a_level_within_the_objective() -> None:
    """The fastest one of its way without a failure."""

    def level(rate: float, p99: float | None, failed: int = 0, way: str = "http") -> Any:
        return {"way": way, "requests_per_s": rate, "p99_ms": p99, "failed": failed}

    levels = [level(10, 20), level(18, 90), level(30, 200), level(25, 80, 1), level(50, 10, 0, "x")]
    assert at_objective([*levels, level(99, None)], "http", 100.0) == levels[1]
    assert at_objective(levels, "http", 5.0) is None


def test_nvidia_smi_is_read() -> None:
    """Means by GPU; anything else is passed over."""
    lines = ["0, 50\n", "1, 100\n", "0, 100\n", "[N/A], 3\n", "1, [N/A]\n", "\n"]
    assert shares_of(lines) == {0: 0.75, 1: 1.0}
    assert shares_of(["NVIDIA-SMI has failed"]) == {}


def test_choices_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing and choosing apart, also of a choice that fails."""
    from router import asking

    ticks = iter(range(100))
    monkeypatch.setattr(asking, "route_key", lambda *args: args)
    choosing = Choosing(lambda: next(ticks) / 1000)
    hashed: Any = asking.route_key  # type: ignore[attr-defined]
    assert hashed("state", "tenant") == ("state", "tenant")
    assert choosing.hash_ms == [1.0]

    class Chooser:
        async def choose_replicas(self, *candidates: str) -> list[str]:
            return sorted(candidates)[:1] or [candidates[0]]

    chooser = Chooser()
    choosing.time(chooser)
    assert asyncio.run(chooser.choose_replicas("b", "a")) == ["a"]
    with pytest.raises(IndexError):
        asyncio.run(chooser.choose_replicas())
    assert choosing.choose_ms == [1.0, 1.0]


def test_histories_at_full_length_are_taken(tmp_path: Path) -> None:
    """Longer than what an engine takes unless told otherwise; no caller is refused anything."""
    long = {"id": "t", "steps": [{"append": "many words " * 17_000, "questions": [ASKED]}]}
    documents = [{"id": "d", "state": "word " * 3000, "questions": [ASKED] * 2}] * 2
    for file, rows in (("agent_trajectories", [long]), ("quality_like", documents)):
        with gzip.open(tmp_path / f"{file}.jsonl.gz", "wt") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
    args = Namespace(size="full", agents=1, steps=1, data=tmp_path)
    asked = ask_for(args)
    assert asked.told.computed > EngineConfig().max_prompt_tokens
    assert asked.engine["max_prompt_tokens"] > EngineConfig().max_prompt_tokens


@pytest.mark.parametrize("kind", ["synthetic", "trajectories"])
def test_a_run_cut_short_leaves_the_rows_it_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """With what they were made of; that there are no files of it is said."""

    def run(work: str, *_: object) -> dict[str, Any]:
        if work == "scale":
            raise RuntimeError("cut short")
        return {"work": "trajectory_replay", "size": "ci"}

    out, data = tmp_path / "rows.json", tmp_path / "data"
    if kind == "trajectories":
        data.mkdir()
    asked = Asked("ci", [], Told(0, {}), {})
    monkeypatch.setattr(command, "ask_for", lambda _: asked)
    monkeypatch.setattr(command, "cluster_of", lambda _: nullcontext())
    monkeypatch.setattr(command, "run", run)
    words = ["fleet", "replay", "scale", "--out", str(out), "--data", str(data)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(RuntimeError, match="cut short"):
        command.main()
    (row,) = json.loads(out.read_text())
    assert (row["work"], row["policy"], row["records"]) == ("trajectory_replay", "ours", kind)
    assert ("synthetic records" in capsys.readouterr().err) == (kind == "synthetic")


def test_a_table_tells_synthetic_records() -> None:
    """And leaves the others as they are."""
    row = {"work": "kill", "killed": "node", "shape": "nano", "size": "ci", "policy": "ours"}
    row |= {"replicas": 2, "requests": 9, "failed": 0, "changed": 0, "card": "c"}
    *_, made_up, real = tables.agents([{**row, "records": "synthetic"}, row])
    assert made_up.startswith("| node killed | nano | ci, synthetic | ours | 2 |")
    assert made_up.replace(", synthetic", "") == real
