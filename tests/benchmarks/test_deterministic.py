"""Comparisons of bits are counted as they are made."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bits.company import Tally, compare, random_round
from benchmarks.bits.elsewhere import ANOTHER, RESTARTED, Elsewhere, read, write
from benchmarks.bits.first_difference import Floats, same_bits
from benchmarks.bits.histories import Ask, Histories
from benchmarks.bits.random_turns import RandomTurns, Sizes
from benchmarks.requests import TokenRequest
from benchmarks.shapes import LABELS
from benchmarks.tables import deterministic, deterministic_paths
from flide_engine.errors import RoundTooLarge
from tests.deterministic.engines import fixed_order

MANY, TURNS = 20, 35


class StandIn:
    """An engine whose answers to many questions depend on who shares the round, and whose answers
    to a request of several questions are not those of each alone.
    """

    def __init__(self) -> None:
        self.many = self.several = 0

    def __call__(self, requests: Sequence[TokenRequest]) -> list[list[Floats]]:
        return [
            [self._logits(request, p, requests) for p in request.prompts] for request in requests
        ]

    def _logits(
        self, request: TokenRequest, prompt: np.ndarray, requests: Sequence[TokenRequest]
    ) -> Floats:
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
        found = np.frombuffer(digest, np.uint8).astype(np.float32)
        company, questions = len(requests) > 1, len(request.prompts)
        self.many += company and questions >= MANY
        self.several += company and questions > 1
        return found + 2.0 * (questions > 1) + 1.0 * (company and questions >= MANY)


def test_company_is_compared_with_the_request_and_with_the_prompt_alone() -> None:
    """Each question once; in company, the stand-in differs where it is made to."""
    engine = StandIn()
    tally = compare(engine, rounds=12, seed=3, seconds=60)
    assert tally.in_company == engine.many > 0
    assert tally.differing == engine.several > engine.many
    assert tally.largest == 3.0
    assert tally.by_path["in company"] == tally.compared
    assert tally.by_path["trunk"] > 0 == tally.wrong["trunk"]
    assert tally.wrong["many short branches"] > 0
    assert 0 < tally.by_path["beside a long one"] < tally.compared
    both = Tally()
    both.add(tally.told())
    both.add(tally.told())
    assert (both.compared, both.wrong["in company"]) == (2 * tally.compared, 2 * tally.differing)
    assert compare(engine, rounds=12, seed=3, seconds=-1).compared == 0


def test_random_rounds_fit_a_round_of_the_peer() -> None:
    """A prefix each, and no more than its batcher takes at a time."""
    for seed in range(100):
        requests = [request for request, _ in random_round(np.random.default_rng(seed))]
        tokens = sum(r.state + sum(len(p) - r.state for p in r.prompts) for r in requests)
        assert tokens <= 16_384
        assert len(requests) > 1
        assert all(len(p) > r.state > 1 for r in requests for p in r.prompts)


def test_random_turns_take_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of an engine with bits: none differs, wherever the states have been."""
    made = fixed_order(monkeypatch, tmp_path)
    histories = Histories(made, LABELS, 240_000, most=20)
    watched = histories.watched
    turns = RandomTurns(histories, Sizes(150, 1100, 3, (128, 256)), seed=4, marks=True)
    for _ in range(TURNS):
        turns.turn()
    for seen in ("from the device", "from host memory", "from disk"):
        assert watched.wrong[seen] == 0 < watched.by_path[seen]
    # whatever the dice have left out
    for seed, name in enumerate("ab"):
        histories.rewrite(name, 0, 200, seed)
        histories.ask([Ask(name, "one", 1, 1)], every=1)
    histories.hand_over("a")
    histories.roll_back("b", 128)
    fault = RoundTooLarge(0, 0, 0, 0)
    histories.ask([Ask(name, "tree", 2, 2) for name in "abc"], fault=fault, cancelled=2)
    histories.begin_like("d", "e", 0, 130, 5)
    histories.begin_like("e", "d", 130, 9, 6)
    histories.ask([Ask(name, "some", 2, 7) for name in "de"], fault=RuntimeError("a round fails"))
    histories.rewrite("c", 0, 1100, 8)
    histories.ask([Ask(name, "short", 1, 9) for name in "cde"], limit=256)
    histories.restart()
    histories.ask([Ask(name, "one", 1, 0) for name in "abcde"])
    assert not watched.differing, watched.differing[0]
    assert {
        "trunk", "branches", "many short branches", "trees", "three levels and more", "in company",
        "shared trunk", "several replays", "longer than a round", "handed over",
        "rolled back or branched", "halved", "alone after an error", "beside one given up",
        "after a restart",
    } <= set(watched.by_path)  # fmt: skip
    assert watched.by_path["in company"] <= watched.compared
    assert watched.resumed > 100
    histories.close()


def test_other_processes_answers_are_counted(tmp_path: Path) -> None:
    """Requests come back from their file as they were; each prompt with other bits counts."""
    asked = [random_round(np.random.default_rng(seed))[0][0] for seed in range(3)]
    write(tmp_path / "asked.npz", asked)
    for there, here in zip(read(tmp_path / "asked.npz"), asked, strict=True):
        assert there.state == here.state
        assert all(map(np.array_equal, there.prompts, here.prompts))

    class Ended:
        code = 0

        def wait(self) -> int:
            return self.code

    want = [np.zeros(3, np.float32), np.ones(3, np.float32)]
    got = np.stack(want)
    got[0, 1] = -0.0
    np.savez(tmp_path / "answers.npz", logits=got, from_disk=0)
    other = Elsewhere(ANOTHER, Ended(), tmp_path / "answers.npz")  # type: ignore[arg-type]
    assert other.differing(want) == 1
    with pytest.raises(RuntimeError, match="found no file"):
        Elsewhere(RESTARTED, other.process, other.answers).differing(want)
    Ended.code = 3
    with pytest.raises(RuntimeError, match="ended with 3"):
        other.differing(want)


def test_bits_are_more_than_values() -> None:
    """NaN equals itself, zeros of both signs do not."""
    zero, nan = np.zeros(1, np.float32), np.full(1, np.nan, np.float32)
    assert same_bits(nan, nan)
    assert not same_bits(zero, -zero)


def test_tables_tell_every_side() -> None:
    """Rows of before, ours with paths, and the peer's."""
    before = {"shape": "0.8B", "engine": "ours", "mode": "default", "compared": 10, "resumed": 2}
    before |= {"differing": 1, "largest": 0.5, "replicas": 2, "replicas_differing": 0}
    peer = {"shape": "4B", "engine": "flide", "mode": "deterministic", "compared": 2000}
    peer |= {"resumed": 0, "differing": 1500, "in_company": 40, "largest": 0.25}
    peer |= {"by_path": {"trunk": 7}, "wrong": {}}
    assert deterministic([before, peer])[2:] == [
        "| 0.8B | ours, deterministic=false | 10 | 2 | 1 | 0.5 | - | 0 of 2 |",
        "| 4B | flide 0.1.4, batch-invariant | 2,000 | 0 | 1,500 | 0.25 | 40 | - |",
    ]
    ours = before | {"mode": "deterministic", "wrong": {"trunk": 1}}
    ours |= {"by_path": {"trunk": 5, "trees": 2}}
    assert deterministic_paths([before, ours, peer]) == [
        "| path | 0.8B, ours | 4B, flide 0.1.4, batch-invariant |",
        "|---|---:|---:|",
        "| trees | 0 of 2 | - |",
        "| trunk | 1 of 5 | 0 of 7 |",
    ]
