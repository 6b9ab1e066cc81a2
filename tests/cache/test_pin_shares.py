"""Tenants share what may be kept from eviction: none can take all of it."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from flide_engine import Engine, EngineConfig
from flide_engine.errors import TooMuchPinned
from tests.exactness.test_tiers import settled

NOUL = {"type": "noul", "instructions": "Is it so?"}
SMALL, LARGE = 4 << 20, 32 << 20
TIERS: dict[str, tuple[str, dict[str, int]]] = {
    "device": ("pages", {"pool_bytes": SMALL}),
    "host": ("bytes of host memory", {"pool_bytes": LARGE, "host_bytes": SMALL}),
    "disk": (
        "bytes on disk",
        {"pool_bytes": LARGE, "host_bytes": LARGE, "disk_bytes": SMALL},
    ),
}
Made = Callable[[str], Engine]


@pytest.fixture
def made(checkpoint: Path, tmp_path: Path) -> Any:
    """Engines in which one tier is the smallest by far."""
    engines: list[Engine] = []

    def make(tier: str) -> Engine:
        options: dict[str, Any] = dict(TIERS[tier][1])
        if tier == "disk":
            options["disk_folder"] = tmp_path / str(len(engines))
        engines.append(
            Engine(
                EngineConfig(
                    model=str(checkpoint), max_prompt_tokens=768, max_request_tokens=1024,
                    max_round_tokens=256, pin_share=0.5, tenant_weights={"heavy": 3.0}, **options,
                )
            )
        )  # fmt: skip
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def pinned(engine: Engine, tenant: str) -> tuple[int, TooMuchPinned]:
    """States that a tenant pins until it is refused, and the refusal."""
    for i in count():
        state = f"{tenant} {i} " + "it says so " * 60
        request = {"state": state, "questions": {"q": NOUL}}
        engine.submit(request, tenant=tenant, name=str(i)).result(60)
        settled(engine)
        try:
            assert engine.pin(str(i), tenant) > 0
        except TooMuchPinned as refused:
            return i, refused
    raise AssertionError


@pytest.mark.parametrize("tier", TIERS)
def test_who_comes_later_may_pin_too(made: Made, tier: str) -> None:
    """One takes half of what is left, of weight 3 three quarters; without keys there is one, which
    may have all. What is counted is one's own, and what is pinned stays so.
    """
    _, everything = pinned(made(tier), "")
    assert everything.kind == TIERS[tier][0]
    engine = made(tier)
    first, refused = pinned(engine, "a")
    assert (refused.kind, refused.limit) == (everything.kind, everything.limit // 2)
    own = refused.count * first / (first + 1)
    second, refused = pinned(engine, "heavy")
    assert first >= second > 0
    assert refused.kind == everything.kind
    assert refused.limit == pytest.approx(3 / 4 * (everything.limit - own), rel=0.02)
    assert engine.pin("0", "a") > 0
    assert all(s.pinned for s in engine.states("a", "0"))
