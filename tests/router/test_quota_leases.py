"""Requests that come while a Gateway asks the ledger, in orders that an event loop may have."""

import asyncio
import itertools
import random

import pytest

from flide_engine.errors import QuotaExceeded
from router.quota import Amounts, Purse
from tests.router.test_quota import REQUESTS, Fleet, run


@pytest.mark.parametrize("seed", range(60))
def test_who_comes_just_as_the_ledger_has_answered(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And finds that others have taken what it gave: the ledger is asked again, and the event loop
    goes on meanwhile.
    """
    tries, take = itertools.count(), Purse.take

    def counted(purse: Purse, needs: Amounts, now: float) -> bool:
        assert next(tries) < 10_000, "one tries for ever"
        return take(purse, needs, now)

    monkeypatch.setattr(Purse, "take", counted)
    rng = random.Random(seed)

    async def work(fleet: Fleet) -> None:
        coming: list[asyncio.Task[None]] = []

        async def come() -> None:
            for _ in range(12):
                for _ in range(rng.randrange(4)):
                    coming.append(asyncio.create_task(fleet.ask(0, REQUESTS, 1)))
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.005)))

        await asyncio.gather(*(come() for _ in range(3)))
        ends = await asyncio.gather(*coming, return_exceptions=True)
        assert {type(end) for end in ends} <= {type(None), QuotaExceeded}

    assert len(run(work).answered) > 20
