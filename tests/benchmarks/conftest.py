"""Weights of the test shape, and our engine over them as benchmarks drive it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engines.ours import Ours, start
from benchmarks.weights import weights_folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights of the test shape."""
    return weights_folder("test", tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def ours(weights: Path) -> Iterator[Ours]:
    """In bfloat16, without checkpoints."""
    made = start("test", "default", str(weights), {"dtype": "bfloat16"}, pool_gib=0.25)
    yield made
    made.engine.close()
