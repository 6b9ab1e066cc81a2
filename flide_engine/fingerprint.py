"""The bits that an engine gives for a fixed few requests: equal on replicas that compute alike."""

import hashlib
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from flide_engine.counters import Counters
from flide_engine.engine import Engine
from flide_engine.errors import RequestError
from flide_engine.families.base import Floats
from flide_engine.wire import parse_request
from flide_engine.work import RequestWork

_STEPS = "".join(
    f"Step {i}: the build of part {i * i % 7} {'failed' if i % 3 else 'passed'} after {i} s. "
    for i in range(24)
)
_TEAM = {"billing": "payments and refunds", "delivery": "parcels", "other": None}
PROBE: tuple[dict[str, Any], ...] = (
    {"state": "", "questions": {"q": {"type": "noul", "instructions": "Is this a test?"}}},
    {
        "state": f"A run of a build. {_STEPS}",
        "questions": {
            "done": {"type": "noul", "instructions": "Did it pass?"},
            "team": {"type": "choice", "instructions": "Who handles it?", "criteria": _TEAM},
            "mood": {"type": "score", "criteria": ["calm", "annoyed", "furious"]},
        },
    },
)
"""Requests of one token row and of several grains that fork, of every kind of question. A change
here changes every fingerprint.
"""


def bits_of(engine: Engine) -> str:
    """16 hex digits of blake2b over the raw float32 values that an engine gives for the probe.

    For an engine that has not been asked yet: nothing of it is kept or counted. A request that the
    engine's limits refuse is left out. Raises EngineError if one cannot be run.
    """
    digest = hashlib.blake2b(digest_size=8)
    for number, request in enumerate(PROBE):
        try:
            values = _raw(engine, request)
        except RequestError:
            continue
        for value in values:
            digest.update(b"%d %d " % (number, value.size))
            digest.update(np.ascontiguousarray(value, "<f4").tobytes())
    engine._loop.call(lambda: setattr(engine._checkpoints, "counters", Counters()))
    return digest.hexdigest()


def _raw(engine: Engine, request: dict[str, Any]) -> list[Floats]:
    """The values behind a request's answers, float32, computed alone and anew."""
    rendered = engine._prepare(parse_request(request))
    future: Future[list[Floats]] = Future()
    # nothing of the state is settled, so no checkpoint is looked for or left
    work = RequestWork(replace(rendered, state_tokens=0), future, None, None, "", "", [])
    work.alone = work.raw = True
    engine._loop.add(work)
    return future.result()
