"""`model=nano`: the same weights everywhere, and answers that hang on the whole state."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flide_engine.api import DecisionResponse
from flide_engine.config import EngineConfig
from flide_engine.engine import Engine
from flide_engine.models.nano import nano_folder
from flide_engine.models.weights import weights_hash
from flide_engine.resolve import EMBEDDED, locate

TEXT = "the build failed because a test of the parser expects 7 tokens and finds 9 in line 41"
QUESTIONS = {
    "done": {"type": "noul", "instructions": "Is the task done?"},
    "next": {"type": "choice", "criteria": {"test": "run tests", "edit": "edit", "ask": "ask"}},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(EngineConfig(model="nano", device="cpu"))
    yield made
    made.close()


def probabilities(answers: DecisionResponse) -> np.ndarray:
    """Every number of the answers to QUESTIONS."""
    noul, choice = answers.answers["done"], answers.answers["next"]
    return np.array([noul.noul, *choice.probabilities.values()])


def test_weights_are_the_same_bits_everywhere(tmp_path: Path) -> None:
    """Values are pinned: replicas of one fleet run on several machines."""
    folder = nano_folder(EMBEDDED, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].astype("<f4").tobytes())
    assert digest.hexdigest() == "f385b10dc153b8d6"
    assert 0.9e6 < sum(t.size for t in tensors.values()) < 1.1e6
    assert weights_hash(folder) == weights_hash(locate("nano")[0])


def test_is_written_once_and_whole_by_many_at_a_time(tmp_path: Path) -> None:
    """Every writer gets the one folder, and no half-written one is left."""
    found: list[Path] = []
    writers = [
        threading.Thread(target=lambda: found.append(nano_folder(EMBEDDED, tmp_path)))
        for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(found) == 4
    assert list(tmp_path.iterdir()) == [found[0]] == list(set(found))


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    """Then the folder is a temporary one."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    folder = nano_folder(EMBEDDED, blocked)
    assert weights_hash(folder) == weights_hash(locate("nano")[0])


@pytest.mark.parametrize("changed", [0, 1, 500, 999])
def test_answers_hang_on_every_word(engine: Engine, changed: int) -> None:
    """One other word in a thousand moves a probability further than rounding does."""
    words = [f"{word}{i % 7}" for i, word in enumerate(TEXT.split() * 63)][:1000]
    before = probabilities(engine.decide({"state": " ".join(words), "questions": QUESTIONS}))
    words[changed] = "otherwise"
    after = probabilities(engine.decide({"state": " ".join(words), "questions": QUESTIONS}))
    assert np.abs(after - before).max() > 1e-4
