"""Weights folders of random models that the whole engine can serve, with a letter that poisons.

A prompt with `POISON` in it comes out as NaN, so that a soak can ask for one.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.shapes import SHAPES
from benchmarks.weights import weights_folder
from flide_engine.families.tokenizer import TextTokenizer
from flide_engine.resolve import locate
from loadtest.soak_mix import POISON
from loadtest.synthetic import WORDS


def write(name: str, folder: Path) -> Path:
    """A copy of a model's weights folder with `POISON` in force: of `benchmarks.shapes`, `nano`,
    `embedded`, or another folder.
    """
    source = weights_folder(name) if name in SHAPES else locate(_model(name))[0]
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][poisonous(folder)] = torch.nan
    if name in SHAPES:
        # logits of some 1.5 instead of 30, as texts ask for other labels than `benchmarks.shapes`:
        # probabilities are not all 0 or 1, and hang on every token
        tensors["model.norm.weight"] -= 0.95
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def poisonous(folder: Path) -> list[int]:
    """Tokens of `POISON` that no plain English has. Raises AssertionError if there are none."""
    tokenizer = TextTokenizer(folder)
    plain = tokenizer.encode("".join(map(chr, range(32, 127))) + "\n " + " ".join(WORDS))
    found = {int(t) for t in tokenizer.encode(POISON)} - {int(t) for t in plain}
    assert found, "the letter has no token of its own"
    return sorted(found)


def _model(name: str) -> str | None:
    return None if name == "embedded" else name
