"""Fixtures shared by all tests."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from flide_engine import Engine
    from tests.deployments.conftest import Served

# How long an example takes is the machine's affair, and so is how long it takes to draw.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Tensors here are tiny: one thread is fastest; threads that spin on busy cores are very slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU the kernels run in Triton's interpreter; chosen before Triton is imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
AUTH = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}


def pytest_collection_finish() -> None:
    """Importing the benchmarks of fleets sets these, for clusters of their own processes."""
    for name, value in AUTH.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the random four-layer checkpoint and its tokenizer."""
    from tests.checkpoints import oracle, save_checkpoint, text_tensors, tiny_config

    config = tiny_config()
    folder = tmp_path_factory.mktemp("weights") / "tiny-random"
    return save_checkpoint(folder, config, text_tensors(oracle(config)))


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A checkpoint with a letter that makes everything after it NaN."""
    import torch
    from safetensors.torch import load_file

    from flide_engine.families.tokenizer import TextTokenizer
    from tests.checkpoints import POISON, save_checkpoint, tiny_config

    tensors = load_file(checkpoint / "model.safetensors")
    for token in TextTokenizer(checkpoint).encode(POISON):
        tensors["model.embed_tokens.weight"][int(token)] = torch.nan
    return save_checkpoint(tmp_path_factory.mktemp("nan") / "poisoned", tiny_config(), tensors)


@pytest.fixture
def engine(checkpoint: Path) -> "Iterator[Engine]":
    """The random checkpoint, with short limits."""
    from flide_engine import Engine, EngineConfig
    from tests.engines import assert_balanced

    made = Engine(
        EngineConfig(
            model=str(checkpoint),
            max_prompt_tokens=512,
            max_request_tokens=700,
            max_questions=20,
            max_round_tokens=256,
        )
    )
    yield made
    if made.is_alive():
        assert_balanced(made)
    made.close()  # one whose device failed has threads, too


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Served]":
    """The embedded model, no key: what `make serve` gives, as load tests start it. One for all
    tests, as starting takes long.
    """
    from loadtest.local import serving
    from tests.deployments.conftest import Served

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("OMP_NUM_THREADS")
            # for the test that kills the proxy: it is back after a second, not after ten
            patch.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
            log = tmp_path_factory.mktemp("served") / "log"
            found = stack.enter_context(serving(log))
        yield Served(found.url, found.address, log)
