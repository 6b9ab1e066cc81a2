"""Weights files: finding them, reading them, and saying exactly what is wrong with them."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from flide_engine.errors import WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, of a folder with one `model.safetensors` or a sharded index.

    Raises WeightsError if there is neither, if a shard is missing, or if the index names a tensor
    that its shard does not hold.
    """
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        files = {name: folder / shard for name, shard in index.items()}
        missing = sorted({p.name for p in files.values() if not p.is_file()})
        if missing:
            raise WeightsError(str(folder), tuple(f"missing shard {name}" for name in missing))
        held = {name: path for path in set(files.values()) for name in _names(path)}
        absent = [
            f"{n} is in the index but not in {p.name}" for n, p in files.items() if n not in held
        ]
        if absent:
            raise WeightsError(str(folder), tuple(absent))
        return files
    if not (folder / SINGLE).is_file():
        raise WeightsError(str(folder), (f"neither {SINGLE} nor {INDEX} is there",))
    return dict.fromkeys(_names(folder / SINGLE), folder / SINGLE)


def parameter_count(folder: Path) -> int:
    """Numbers in all tensors of a folder, by what the files' headers say. Raises WeightsError."""
    count = 0
    for path in set(weight_files(folder).values()):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in _names(path))
    return count


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def load_tensors(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    rename: Callable[[str], str | None],
    keep_dtype: re.Pattern[str],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """The tensors of a checkpoint by our names, on `device`.

    expected: our name -> shape. rename: a name in the file -> our name, or None for one to ignore.
    keep_dtype: our names whose stored dtype is kept; the others become `dtype`.
    Raises WeightsError naming every missing, unexpected or misshapen tensor.
    """
    loaded: dict[str, Tensor] = {}
    problems: list[str] = []
    by_file: dict[Path, list[str]] = {}
    for name, path in weight_files(folder).items():
        by_file.setdefault(path, []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                ours = rename(name)
                if ours is None:
                    continue
                if ours not in expected:
                    problems.append(f"unexpected tensor {name}")
                    continue
                shape = tuple(file.get_slice(name).get_shape())
                if shape != expected[ours]:
                    problems.append(f"{name} has shape {shape}, expected {expected[ours]}")
                    continue
                tensor = file.get_tensor(name)
                loaded[ours] = tensor.to(device, None if keep_dtype.search(ours) else dtype)
    problems += [f"missing tensor {name}" for name in expected if name not in loaded]
    if problems:
        raise WeightsError(str(folder), tuple(problems))
    return loaded


def weights_hash(folder: Path) -> str:
    """16 hex digits of blake2b over every file of the folder that decides an answer, by name and
    content.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.iterdir()):
        if path.suffix in {".safetensors", ".json", ".jinja"} and path.is_file():
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()
