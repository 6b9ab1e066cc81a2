"""Text to token ids: user text never becomes a control token, template text does."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from flide_engine.errors import ConfigError, Fault, InvalidRequest

Tokens = NDArray[np.int32]

UNSETTLED_TOKENS = 8
"""Last tokens of a text that more text may change, where no word boundary bounds them."""

_ENDINGS = (
    "a",
    "Z",
    "7",
    "é",
    "中",
    ".",
    "?!",
    "'",
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\n \n",
    "}",
    "_",
    "🙂",
    "́",
)


_CLASSES = frozenset((
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"\p{N}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip
"""Alternatives of word splits under which a text can be taken up again at the end of a word: each
takes a run of one class of characters, and none looks back. Where a word ends depends on it and on
one character after it.
"""

_OVERLAP = 4  # words that are encoded twice, of which one has to end alike
_LOOK_BACK = 256  # words among which one is looked for that encoding can start from


@dataclass(frozen=True)
class Words:
    """A text's tokens by words, those runs that are encoded each by itself.

    ids [n]: of the tokens. firsts, starts [w]: each word's first token, and first character.
    """

    ids: Tokens
    firsts: Tokens
    starts: Tokens

    @property
    def settled(self) -> int:
        """Tokens that stay when more text follows: the last word can change, and the one before it
        is left out as well.
        """
        return int(self.firsts[-2]) if len(self.firsts) > 1 else 0


class TextTokenizer:
    """A folder's tokenizer.json, split in two: control tokens by name, and everything else as text.

    A tokenizer takes control tokens out of a text first and encodes each run between them by
    itself. `encode` does the second step only, so text that spells a control token stays text;
    `pieces` does the first step, for texts that come from a template.
    """

    def __init__(self, folder: Path) -> None:
        try:
            spec = json.loads((folder / "tokenizer.json").read_text())
            self.controls = {t["content"]: int(t["id"]) for t in spec.get("added_tokens", [])}
            spec |= {
                "added_tokens": [],
                "post_processor": None,
                "truncation": None,
                "padding": None,
            }
            self._text = Tokenizer.from_str(json.dumps(spec))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"no readable tokenizer.json in {folder}: {error}") from error
        except Exception as error:  # the tokenizers package raises bare Exception for a bad file
            raise ConfigError(f"tokenizer.json in {folder} does not load: {error}") from error
        self.can_resume = _is_local(spec)
        """Whether `resume` may find something."""
        names = sorted(self.controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")

    @property
    def vocab_size(self) -> int:
        """One past the largest id of text and control tokens."""
        return max([self._text.get_vocab_size(), *(i + 1 for i in self.controls.values())])

    def encode(self, text: str) -> Tokens:
        """Ids of a run of text, [n] int32. Raises InvalidRequest for text that is not valid
        Unicode.
        """
        try:
            return np.array(self._text.encode(text, add_special_tokens=False).ids, np.int32)
        except (UnicodeError, TypeError) as error:
            raise InvalidRequest((Fault(("body",), "a text holds a lone surrogate"),)) from error

    def encode_growing(self, text: str) -> tuple[Tokens, int]:
        """Ids of a text, and how many of the first will still be its first when more text follows.

        What follows can change the last word of the pre-tokenizer only; the one before it is left
        out as well. Without a pre-tokenizer nothing bounds the change: a fixed number is left out,
        and a prompt that differs earlier is found out when tokens are compared.
        """
        try:
            encoding = self._text.encode(text, add_special_tokens=False)
        except (UnicodeError, TypeError) as error:
            raise InvalidRequest((Fault(("body",), "a text holds a lone surrogate"),)) from error
        ids = np.array(encoding.ids, np.int32)
        if self._text.pre_tokenizer is None or not len(ids):
            return ids, max(0, len(ids) - UNSETTLED_TOKENS)
        words = encoding.word_ids
        settled = len(ids)
        while settled and (words[settled - 1] or 0) >= (words[-1] or 0) - 1:
            settled -= 1
        return ids, settled

    def words(self, text: str) -> Words:
        """A text's tokens by words. Raises InvalidRequest for text that is not valid Unicode."""
        try:
            encoding = self._text.encode(text, add_special_tokens=False)
        except (UnicodeError, TypeError) as error:
            raise InvalidRequest((Fault(("body",), "a text holds a lone surrogate"),)) from error
        ids = np.array(encoding.ids, np.int32)
        if not len(ids) or self._text.pre_tokenizer is None:
            return _frozen(ids, np.zeros(0, np.int32), np.zeros(0, np.int32))
        of = np.array(encoding.word_ids, np.int32)
        firsts = np.flatnonzero(np.diff(of, prepend=-1)).astype(np.int32)
        starts = np.array(encoding.offsets, np.int32)[firsts, 0]
        return _frozen(ids, firsts, starts)

    def resume(self, before: str, words: Words, text: str) -> Words | None:
        """A text's tokens by words, from those of another that begins alike; None if that is not
        sure to give what `words` gives.

        words: of `before`. The words that both texts begin with are kept, but for the last two.
        From a few words before that the text is encoded anew, and taken over where a word starts in
        both: as no word looks back, all that follows is what it is in the whole text. Encoding
        begins, and is taken over, at characters that no normalizer joins with what stands before.
        """
        if not self.can_resume:
            return None
        starts = words.starts
        settled = int(np.searchsorted(starts, _common(before, text), "right")) - 3
        first = settled - _OVERLAP
        least = max(0, first - _LOOK_BACK)
        while first > least and not _stands_alone(text[starts[first]]):
            first -= 1
        if first <= least:
            return None
        offset = int(starts[first])
        tail = self.words(text[offset:])
        begins = tail.starts + offset
        known = starts[first + 1 : settled + 1]
        both = np.flatnonzero(np.isin(begins, known))
        at = next((int(i) for i in both if _stands_alone(text[begins[i]])), None)
        if at is None:
            return None
        kept = int(np.searchsorted(starts, begins[at]))
        ends, new = int(words.firsts[kept]), int(tail.firsts[at])
        return _frozen(
            np.concatenate([words.ids[:ends], tail.ids[new:]]),
            np.concatenate([words.firsts[:kept], tail.firsts[at:] - new + ends]),
            np.concatenate([starts[:kept], begins[at:]]),
        )

    def control(self, name: str) -> int:
        """Id of a control token. Raises ConfigError if the tokenizer has none of that name."""
        if name not in self.controls:
            raise ConfigError(f"the tokenizer has no control token {name!r}")
        return self.controls[name]

    def pieces(self, template: str) -> list[int | str]:
        """A template's text as control token ids and runs of text between them; empty runs left
        out.
        """
        found: list[int | str] = []
        at = 0
        for match in self._control.finditer(template):
            found += [template[at : match.start()], self.controls[match.group()]]
            at = match.end()
        found.append(template[at:])
        return [piece for piece in found if piece != ""]

    def may_cut(self, before: str, after: str) -> bool:
        """Whether any text that ends in `before` and goes on with `after` can be encoded in two
        parts there.

        True if the pre-tokenizer always ends a word at the cut. What it does there depends on the
        few characters around it only, so one ending of each kind of character is tried; without a
        pre-tokenizer nothing ends a word, and the answer is no.
        """
        if self._text.pre_tokenizer is None:
            return False
        for ending in _ENDINGS:
            left = ending + before
            text = left + after
            if self._text.normalizer is not None:
                text = self._text.normalizer.normalize_str(text)
                left = self._text.normalizer.normalize_str(left)
            starts = {span[0] for _, span in self._text.pre_tokenizer.pre_tokenize_str(text)}
            if not text.startswith(left) or len(left) not in starts:
                return False
        return True


def _frozen(*arrays: Tokens) -> Words:
    """Words that several callers may hold."""
    for array in arrays:
        array.flags.writeable = False
    return Words(*arrays)


def _common(first: str, second: str) -> int:
    """Characters on which two texts agree from the start."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _stands_alone(character: str) -> bool:
    """Whether a character is never composed with one before it, and never becomes two: Latin-1, and
    Han characters.
    """
    return character < "\u0100" or "\u3400" <= character <= "\u9fff"


def _is_local(spec: dict[str, Any]) -> bool:
    """Whether a tokenizer.json splits words as `_CLASSES` says, and does nothing to a text that
    reaches further than neighbouring characters.
    """
    kinds = {step["type"] for step in _steps(spec.get("normalizer"), "normalizers")}
    split, *more = _steps(spec.get("pre_tokenizer"), "pretokenizers") or [{"type": None}]
    pattern = split.get("pattern", {}).get("Regex", "") if split["type"] == "Split" else ""
    return (
        kinds <= {"NFC", "Lowercase", "Prepend"}
        and set(_alternatives(pattern)) <= _CLASSES
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
        and all(
            step["type"] == "ByteLevel" and not (step["use_regex"] or step["add_prefix_space"])
            for step in more
        )
        and spec["model"]["type"] == "BPE"
        and not spec["model"].get("dropout")
    )


def _steps(part: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    return list(part[inside]) if part["type"] == "Sequence" else [part]


def _alternatives(pattern: str) -> Iterator[str]:
    """The alternatives of a regular expression, those in brackets not taken apart."""
    depth, first = 0, 0
    for at, character in enumerate(pattern):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if character == "|" and not depth:
            yield pattern[first:at]
            first = at + 1
    yield pattern[first:]
