"""The model's own byte-level BPE: training it, and encoding user text so that no control token can
appear.

Text is folded to lower case and given a leading space, so that a word has one spelling in a
state, in a question and as the first word of an option.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CONTROL_TOKENS = {
    "pad": "<|pad|>",
    "state": "<|state|>",
    "noul": "<|noul|>",
    "choice": "<|choice|>",
    "score": "<|score|>",
    "option": "<|option|>",
    "read": "<|read|>",
}
"""What a family writes into a sequence; ids 0 to 6 in this order."""

CONTROL_IDS = {name: index for index, name in enumerate(CONTROL_TOKENS)}

_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` entries, the control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase(), normalizers.Prepend(" ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(CONTROL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class UserEncoder:
    """Encodes user text with a copy of the tokenizer that knows no added tokens."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text(encoding="utf-8"))
        document["added_tokens"] = []
        self._tokenizer = Tokenizer.from_str(json.dumps(document))
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """One uint16 array of ids per text."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint16) for each in encoded]


def merge_parents(path: Path) -> np.ndarray:
    """parents [V, 2] uint16: the two pieces a token was merged from, 0 for a single byte."""
    document = json.loads(path.read_text(encoding="utf-8"))
    vocab: dict[str, int] = document["model"]["vocab"]
    parents = np.zeros((len(vocab), 2), dtype=np.uint16)
    for left, right in document["model"]["merges"]:
        parents[vocab[left + right]] = vocab[left], vocab[right]
    return parents


def training_texts(records: Iterable[dict[str, object]], weight: int = 3) -> Iterator[str]:
    """What the tokenizer is trained on: states (short ones `weight` times), distinct instructions
    and options.
    """
    seen: set[str] = set()
    for record in records:
        state = str(record["state"])
        yield from [state] * (weight if len(state) < 300 else 1)
        questions = record["questions"]
        assert isinstance(questions, list)
        for question in questions:
            criteria = question["criteria"] or {}
            for text in (question["instructions"], *criteria, *criteria.values()):
                if text not in seen:
                    seen.add(text)
                    yield from [text] * weight
