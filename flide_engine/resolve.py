"""What an engine's options come to on this machine: the folder, the device, the dtype."""

import logging
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from flide_engine.config import EngineConfig
from flide_engine.errors import ConfigError
from flide_engine.kernels import REFERENCE, Kernels
from flide_engine.kernels.hopper.program import has_hopper
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


def resolve_kernels(
    kernels: str, device: torch.device, deterministic: bool | None = None
) -> Kernels:
    """The operations; auto: Triton on a GPU, there deterministic unless told otherwise.

    Raises ConfigError for Triton without a GPU, and for deterministic references.
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

    return TRITON if deterministic is False else deterministic_kernels()


def check_fit(config: EngineConfig, rows: int, vocab: int, positions: int) -> None:
    """Raises ConfigError if a model is too small for its tokenizer of `vocab` ids, or for prompts
    as long as they may be. rows: of its embedding; positions: that it can tell apart.
    """
    if vocab > rows:
        raise ConfigError(
            f"the tokenizer has ids up to {vocab - 1}, the model {rows} embedding rows"
        )
    if config.max_prompt_tokens > positions:
        raise ConfigError(
            f"max_prompt_tokens {config.max_prompt_tokens} exceeds the model's"
            f" max_position_embeddings {positions}"
        )


SMALL_HIDDEN = 512
"""Width under which one CPU thread is faster than several: handing parts over costs more."""


def resolve_threads(threads: int | None, device: torch.device, hidden: int) -> int | None:
    """Threads of the CPU kernels: as asked; 1 for a small model on a CPU; None: as torch would."""
    if threads is None and device.type == "cpu" and hidden < SMALL_HIDDEN:
        return 1
    return threads


def stack_of(
    device: torch.device, dtype: torch.dtype, kernels: Kernels, deterministic: bool | None
) -> str:
    """What decides bits beside the weights: versions, the device, and how it computes.

    deterministic: as configured.
    """
    parts = [f"flide-serve {_version('flide-serve')}", f"torch {torch.__version__}"]
    if device.type == "cuda":
        parts += [f"CUDA {torch.version.cuda}", torch.cuda.get_device_name(device)]
    else:
        parts += [f"CPU with {torch.backends.cpu.get_cpu_capability()}"]
    parts += [str(dtype).removeprefix("torch.")]
    if kernels is REFERENCE:
        parts += ["reference kernels"]
    else:
        parts += [f"triton {_version('triton')}"]
        if has_hopper(device):
            from flide_engine.kernels import attention

            parts += ["delta net for sm_90a"]
            parts += ["attention for sm_90a"] if attention.HOPPER else []
        parts += ["not deterministic" if deterministic is False else "deterministic"]
    return ", ".join(parts)


def _version(package: str) -> str:
    """Of a package; a source tree on the path has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
