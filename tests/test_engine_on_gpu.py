"""The whole engine on a GPU (its kernels, captured graphs, rounds begun ahead) against the
references on the CPU: the embedded model, the same requests, the same answers.
"""

import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import random_model
from flide_engine import Choice, DecisionRequest, DecisionResponse, Engine, EngineConfig, Noul
from flide_engine.errors import NonFiniteOutput
from loadtest.soak_mix import POISON
from tests.engines import submit_together

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_that_left_the_card_come_back(dtype: str) -> None:
    """A pool that holds a few of twelve growing states, all asked at once: copies to and from the
    host run beside the rounds, pages make way for slots, answers are those of the references.
    """
    tight = EngineConfig.model_validate(
        {
            "device": "cuda", "dtype": "float32", "max_prompt_tokens": 4096,
            "max_round_tokens": 1024, "max_request_tokens": 8192, "pool_bytes": 16_000_000,
            "host_bytes": 1 << 30, "tier_state_dtype": dtype,
        }
    )  # fmt: skip
    gpu, cpu = Engine(tight), Engine(EngineConfig(device="cpu"))
    try:
        for step in range(1, 4):
            texts = [f"Case {i}. " + " ".join(WORDS[(i + k) % 9] for k in range(150 * step))
                     for i in range(12)]  # fmt: skip
            asked = [
                DecisionRequest(state=t, questions={"q": Noul(instructions="Is she angry?")})
                for t in texts
            ]
            futures = [gpu.submit(r) for r in asked]
            for one, future in zip(asked, futures, strict=True):
                want = probabilities(cpu.decide(one))
                got = probabilities(future.result())
                np.testing.assert_allclose(got, want, atol=2e-4 if dtype == "float32" else 5e-3)
        assert gpu.counters().from_host > 0
        gpu.drop_checkpoints()
        assert gpu.accounting().bytes_free == gpu.accounting().bytes_total
    finally:
        gpu.close()
        cpu.close()


def test_what_somebody_asks_about_a_state_makes_nobody_elses_answer_nan(tmp_path: Path) -> None:
    """Questions about one state share attention tiles, in a round and in a request; one of them,
    among many, gives NaN. Rounds of all, then of all from the state's checkpoint.
    """
    folder = str(random_model.write("embedded", tmp_path / "weights"))
    gpu = Engine(EngineConfig(model=folder, device="cuda", dtype="float32", pool_bytes=1 << 30))
    cpu = Engine(EngineConfig(model=folder, device="cpu", keep_checkpoints=False))
    state = "My card was charged twice. " * 60
    about = [f"Is it about {word}?" for word in WORDS] + [f"Is it {POISON}?"]
    asked = [
        DecisionRequest(state=state, questions={"q": Noul(instructions=text)}) for text in about
    ]
    try:
        want = [probabilities(cpu.decide(request)) for request in asked[:-1]]
        for _ in range(2):
            *good, bad = submit_together(gpu, lambda: [gpu.submit(request) for request in asked])
            for future, expected in zip(good, want, strict=True):
                np.testing.assert_allclose(probabilities(future.result()), expected, atol=2e-4)
            with pytest.raises(NonFiniteOutput):
                bad.result()
        together = {f"q{i}": Noul(instructions=text) for i, text in enumerate(about)}
        with pytest.raises(NonFiniteOutput, match=f"'q{len(WORDS)}'|of them may have made"):
            gpu.decide(DecisionRequest(state=state, questions=together))
        gpu.drop_checkpoints()
        assert gpu.accounting().bytes_free == gpu.accounting().bytes_total
    finally:
        gpu.close()
        cpu.close()


BROKEN = """
import torch
from flide_engine import Engine, EngineConfig
from flide_engine.errors import EngineStopped

engine = Engine(EngineConfig(device="cuda", pool_bytes=1 << 30))
asked = {"state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}}
engine.decide(asked)
start = engine._loop._runner.executor.start

def faulty(plan, asked):
    far = torch.tensor([1 << 20], device="cuda")
    torch.zeros(1, device="cuda")[far].sum()  # an assertion on the device, told later
    return start(plan, asked)

engine._loop._runner.executor.start = faulty
for _ in range(2):
    try:
        engine.submit(asked).result(60)
    except Exception as error:
        print(type(error).__name__)
print(engine.is_alive())
import os
os._exit(0)  # nothing can be freed on such a device
"""


def test_a_fault_on_the_device_ends_the_engine() -> None:
    """It is nobody's own, and nothing runs there any more."""
    done = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.split() == ["EngineStopped", "EngineStopped", "False"], done.stderr
