"""What an engine's options come to on this machine: the folder, the device, the dtype."""

import logging
import re
from pathlib import Path

import torch

from flide_engine.config import GRAIN, EngineConfig
from flide_engine.errors import ConfigError
from flide_engine.kernels import REFERENCE, Kernels
from flide_engine.layout.state_shape import StateShape
from flide_engine.models.nano import NAME as NANO
from flide_engine.models.nano import nano_folder

log = logging.getLogger(__name__)

EMBEDDED = Path(__file__).resolve().parent.parent / "tiny_model" / "weights"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]


def locate(model: str | None) -> tuple[Path, str]:
    """(weights folder, model name) of a folder, a hub name with an optional @revision, "nano", or
    none.

    A hub name is fetched into the hub's cache; HF_HOME, HF_TOKEN and HF_HUB_OFFLINE act as usual.
    Raises ConfigError if it is neither, or cannot be had.
    """
    if model is None:
        return EMBEDDED, "embedded"
    if model == NANO:
        return nano_folder(EMBEDDED), NANO
    if (folder := Path(model).expanduser()).is_dir():
        return folder, folder.resolve().name
    if not _HUB_NAME.fullmatch(model):
        raise ConfigError(
            f"model {model!r} is neither a folder, a hub name (owner/name[@revision]) nor {NANO!r}"
        )
    from huggingface_hub import snapshot_download

    name, _, revision = model.partition("@")
    try:
        try:
            found = snapshot_download(name, revision=revision or None, allow_patterns=_WANTED)
        except Exception as error:  # the hub's own errors share no base class with its network's
            log.warning("model %s is looked for in the hub's cache only: %s", model, error)
            found = snapshot_download(name, revision=revision or None, local_files_only=True)
    except Exception as error:
        raise ConfigError(
            f"model {model!r} cannot be had: {type(error).__name__}: {error}"
        ) from error
    return Path(found), model


def resolve_device(device: str) -> torch.device:
    """auto: the GPU if one is visible. Raises ConfigError if a GPU is asked for and none is."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' is asked for and no GPU is visible")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def resolve_kernels(kernels: str, device: torch.device, deterministic: bool = False) -> Kernels:
    """The operations; auto: Triton on a GPU. Raises ConfigError for Triton without one, and for
    deterministic references.
    """
    if kernels == "reference" or (kernels == "auto" and device.type == "cpu"):
        if deterministic:
            raise ConfigError(
                "deterministic=True needs the Triton kernels on a GPU: the references hold a"
                " tolerance, not bits"
            )
        return REFERENCE
    if device.type == "cpu":
        raise ConfigError("kernels 'triton' are asked for and no GPU is visible")
    from flide_engine.kernels.triton_kernels import TRITON, deterministic_kernels

    return deterministic_kernels() if deterministic else TRITON


WORKSPACE_SHARE, LEAST_WORKSPACE, MOST_WORKSPACE = 0.2, 4 << 30, 24 << 30
"""Part of an engine's memory that graphs and activations may take, and its bounds in bytes."""


def device_pool_bytes(free: int, total: int, own: int, share: float) -> int:
    """Bytes for the pool on a card, with the weights in place: what is left of the engine's share
    after room for graphs and activations.

    free, total: bytes of the card; own: those this process holds. Raises ConfigError if nothing is
    left.
    """
    mine = int(share * total)
    workspace = int(min(max(WORKSPACE_SHARE * mine, LEAST_WORKSPACE), MOST_WORKSPACE))
    left = min(free, mine - own) - workspace
    if left <= 0:
        raise ConfigError(
            f"device_share {share} of {total} bytes leaves no memory for the pool: {free} are free,"
            f" {own} are taken by weights, {workspace} are needed for graphs and activations"
        )
    return left


SPARE_STATES = 16
"""Recurrent states of a pool without a byte budget, before those of checkpoints."""

CHECKPOINT_BYTES = 256 << 20
"""Bytes for checkpoints in a pool without a byte budget."""


def least_units(config: EngineConfig, shape: StateShape, dtype: torch.dtype) -> int:
    """Pages' worth of memory without which the longest prompt and one round, with two states, do
    not fit.
    """
    pages = (config.max_prompt_tokens + config.max_round_tokens) // GRAIN + 1
    return pages + 2 * shape.slot_units(dtype.itemsize)


def pool_units(
    config: EngineConfig, shape: StateShape, dtype: torch.dtype, budget: int | None
) -> int:
    """Pages' worth of memory of an engine's pool; budget: bytes, None for as much as it needs.

    Raises ConfigError if the longest prompt and one round, with two states, do not fit.
    """
    unit, slot = shape.unit_bytes(dtype.itemsize), shape.slot_units(dtype.itemsize)
    needed = least_units(config, shape, dtype)
    if budget is None:
        return needed + SPARE_STATES * slot + CHECKPOINT_BYTES // unit
    units = budget // unit
    if needed > units:
        raise ConfigError(
            f"pool_bytes {budget} holds {units} pages of {GRAIN} tokens; max_prompt_tokens"
            f" {config.max_prompt_tokens} with max_round_tokens {config.max_round_tokens} needs"
            f" {needed}, of which two states take {2 * slot}: {needed * unit} bytes"
        )
    return units


SMALL_HIDDEN = 512
"""Width under which one CPU thread is faster than several: handing parts over costs more."""


def resolve_threads(threads: int | None, device: torch.device, hidden: int) -> int | None:
    """Threads of the CPU kernels: as asked; 1 for a small model on a CPU; None: as torch would."""
    if threads is None and device.type == "cpu" and hidden < SMALL_HIDDEN:
        return 1
    return threads


def stack_of(device: torch.device) -> str:
    """What decides bits beside weights and kernels: torch's version, and the device."""
    if device.type == "cuda":
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    return f"torch {torch.__version__}, CPU with {torch.backends.cpu.get_cpu_capability()}"
