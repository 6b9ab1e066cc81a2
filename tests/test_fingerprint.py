"""The probe's bits: the same from engines that compute alike, and from no other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flide_engine.config import EngineConfig
from flide_engine.counters import Counters
from flide_engine.engine import Engine
from flide_engine.fingerprint import PROBE, bits_of


def engine(**options: object) -> Engine:
    return Engine(EngineConfig.model_validate({"model": "nano", "device": "cpu", **options}))


@pytest.fixture(scope="module")
def bits() -> Iterator[str]:
    """Those of an engine without options."""
    made = engine()
    yield bits_of(made)
    made.close()


def test_engines_that_compute_alike_agree_and_keep_nothing(bits: str, tmp_path: Path) -> None:
    """With other budgets and tiers, and asked twice."""
    other = engine(host_bytes=1 << 24, disk_folder=tmp_path, pool_bytes=1 << 28)
    try:
        assert bits_of(other) == bits == bits_of(other)
        assert len(bits) == 16
        assert other.counters() == Counters()
        assert not other.states(tenant=None)
        held = other.accounting()
        assert held.page_bytes_held == held.slot_bytes_held == 0
        assert not list(tmp_path.rglob("*.checkpoint"))
    finally:
        other.close()


def test_one_weight_that_differs_in_its_last_bit_shows(
    bits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a million, and only by one unit in the last place."""
    other = engine()
    try:
        model = other._loop._runner.executor._model
        weight = model.layers[1].down
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
        assert bits_of(other) != bits
    finally:
        other.close()


def test_limits_leave_out_what_they_refuse(bits: str) -> None:
    """An engine for short prompts has a fingerprint, another one."""
    small = engine(max_prompt_tokens=64, max_request_tokens=64, max_round_tokens=128)
    try:
        assert bits_of(small) != bits
    finally:
        small.close()


def test_answers_carry_it(checkpoint: Path) -> None:
    """By whatever name the engine was given."""
    named = engine()
    try:
        named.fingerprint = "weights-bits"
        assert named.decide(PROBE[1]).x_fingerprint == "weights-bits"
    finally:
        named.close()
