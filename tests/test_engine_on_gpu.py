"""The whole engine on a GPU (its kernels, captured graphs, rounds begun ahead) against the
references on the CPU: the embedded model, the same requests, the same answers.
"""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from flide_engine import Choice, DecisionRequest, DecisionResponse, Engine, EngineConfig, Noul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WORDS = ("card", "charged", "billing", "refund", "parcel", "angry", "customer", "order", "late")


def request(i: int) -> DecisionRequest:
    """States of 20 to 3,000 words, some begun alike; two to fourteen questions."""
    rng = np.random.default_rng(i)
    length = (20, 60, 200, 500, 3000)[i % 5]
    state = " ".join(rng.choice(WORDS, length)) if i % 3 else "My card was charged. " * (40 + i)
    questions: dict[str, Any] = {
        "team": Choice(
            instructions="Who handles it?", criteria={"billing": "payments", "delivery": "parcels"}
        ),
        "angry": Noul(instructions="Is the customer angry?"),
    }
    if i % 4 == 0:
        for k in range(12):
            word = rng.choice(WORDS)
            questions[f"q{k}"] = Noul(instructions=f"Is {word} mentioned? ({k})")
    return DecisionRequest(state=state, questions=questions)


def probabilities(response: DecisionResponse) -> list[float]:
    """Of all options of all questions."""
    found: list[float] = []
    for _, answer in sorted(response.answers.items()):
        fields = answer.model_dump()
        spread = fields.get("probabilities")
        found += list(spread.values()) if isinstance(spread, dict) else [fields["noul"]]
    return found


def test_answers_are_those_of_the_references() -> None:
    """All at once, so that rounds overlap; then one at a time, from checkpoints."""
    requests = [request(i) for i in range(30)]
    gpu = Engine(EngineConfig(device="cuda", dtype="float32", pool_bytes=4 << 30))
    cpu = Engine(EngineConfig(device="cpu"))
    try:
        futures: list[Future[DecisionResponse]] = [gpu.submit(r) for r in requests]
        together = [f.result() for f in futures]
        again = [gpu.decide(r) for r in requests]
        for asked, first, second in zip(requests, together, again, strict=True):
            want = probabilities(cpu.decide(asked))
            assert len(want) >= 3
            np.testing.assert_allclose(probabilities(first), want, atol=2e-4)
            np.testing.assert_allclose(probabilities(second), want, atol=2e-4)
    finally:
        gpu.close()
        cpu.close()
