"""The family of a checkpoint folder: what its decision_config.json names, else next-token."""

import json
from pathlib import Path

from flide_engine.errors import ConfigError
from flide_engine.families.base import Family
from flide_engine.families.next_token import NextToken
from flide_engine.families.option_vectors import OptionVectors
from flide_engine.families.tokenizer import TextTokenizer


def load_family(
    folder: Path, name: str, weights: str, option_cache_entries: int, text_cache_bytes: int = 0
) -> tuple[Family, int]:
    """(the family, its tokenizer's vocabulary size). Raises ConfigError for an unknown family.

    name: what a checkpoint without decision_config.json is called. weights: hash of the weights.
    """
    tokenizer = TextTokenizer(folder)
    if not (folder / "decision_config.json").is_file():
        return NextToken(folder, tokenizer, name, text_cache_bytes), tokenizer.vocab_size
    family = json.loads((folder / "decision_config.json").read_text()).get("family")
    if family != "option_vectors":
        raise ConfigError(f"decision family {family!r} in {folder}; supported: 'option_vectors'")
    made = OptionVectors(folder, tokenizer, weights, option_cache_entries, text_cache_bytes)
    return made, tokenizer.vocab_size
