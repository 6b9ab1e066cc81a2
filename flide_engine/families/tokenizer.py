"""Text to token ids: user text never becomes a control token, template text does."""

import json
import re
from pathlib import Path

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
