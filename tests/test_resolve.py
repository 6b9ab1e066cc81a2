"""Where a model comes from: nothing, a folder, or a hub name with a revision."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flide_engine.errors import ConfigError
from flide_engine.kernels import REFERENCE
from flide_engine.resolve import EMBEDDED, locate, resolve_kernels, stack_of
from tests.checkpoints import save_checkpoint, tiny_config

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache, as a download would have left it, with one model under a branch and a commit."""
    snapshot = tmp_path / "hub" / "models--acme--decider" / "snapshots" / REVISION
    save_checkpoint(snapshot, tiny_config(), {})
    refs = tmp_path / "hub" / "models--acme--decider" / "refs"
    refs.mkdir()
    for name in ("main", "v2"):
        (refs / name).write_text(REVISION)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize("name", ["acme/decider", "acme/decider@v2", f"acme/decider@{REVISION}"])
def test_hub_names_resolve_in_the_cache(hub: Path, name: str) -> None:
    """The default branch, a named one, and a commit."""
    folder, called = locate(name)
    assert folder.resolve() == hub.resolve()
    assert called == name


def test_a_folder_and_nothing(tmp_path: Path) -> None:
    """A folder goes by its own name; nothing means the embedded model."""
    assert locate(str(tmp_path)) == (tmp_path, tmp_path.name)
    assert locate(None)[0] == EMBEDDED


@pytest.mark.parametrize("name", ["acme/unknown", "/no/such/folder", "decider"])
def test_what_is_neither_is_an_error_that_names_it(hub: Path, name: str) -> None:
    """Not there, and not in the cache."""
    with pytest.raises(ConfigError, match=name):
        locate(name)


@pytest.mark.parametrize("wanted", [None, True, False])
def test_gpu_kernels_are_deterministic_unless_told_otherwise(wanted: bool | None) -> None:
    """Products in one order of K by default; the library's own choice where that is asked for."""
    pytest.importorskip("triton")
    from flide_engine.kernels.invariant_matmul import InvariantLinear
    from flide_engine.kernels.pointwise_ref import linear_ref

    kernels = resolve_kernels("auto", torch.device("cuda"), wanted)
    if wanted is False:
        assert kernels.linear is linear_ref
    else:
        assert isinstance(kernels.linear, InvariantLinear)


def test_references_promise_no_bits() -> None:
    """Asked for on a CPU the mode is refused; left open, it is off."""
    cpu = torch.device("cpu")
    assert resolve_kernels("auto", cpu) is REFERENCE
    assert resolve_kernels("auto", cpu, False) is REFERENCE
    with pytest.raises(ConfigError, match="deterministic=True needs the Triton kernels"):
        resolve_kernels("auto", cpu, True)
    with pytest.raises(ConfigError, match="no GPU is visible"):
        resolve_kernels("triton", cpu)


def test_a_stack_tells_what_decides_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions, type, kernels, and whether rows depend on their company."""
    cpu, triton = torch.device("cpu"), replace(REFERENCE)

    def stacks() -> set[str]:
        return {
            stack_of(cpu, torch.float32, REFERENCE, None),
            stack_of(cpu, torch.bfloat16, REFERENCE, None),
            stack_of(cpu, torch.float32, triton, None),
            stack_of(cpu, torch.float32, triton, False),
        }

    known = stacks()
    assert len(known) == 4
    assert stack_of(cpu, torch.float32, triton, True) in known
    assert stack_of(cpu, torch.float32, REFERENCE, False) in known
    monkeypatch.setattr("flide_engine.resolve.version", lambda package: "9.9")
    assert not known & stacks()
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert not known & stacks()
