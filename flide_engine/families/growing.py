"""Token ids of texts that were encoded before: of states that grow only the end is encoded again.

Encoding a state of 100,000 characters takes tens of milliseconds, which every step of an agent
would spend on what it has said before.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from flide_engine.families.tokenizer import TextTokenizer, Tokens, Words

CHUNK = 1024
"""Characters between the places at which texts are known again; shorter texts are known whole."""

_Key = tuple[str, Hashable]


@dataclass(eq=False)
class _Kept:
    """A text, its words, and the keys it is found by."""

    text: str
    words: Words
    keys: list[_Key] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """About what it takes."""
        arrays = (self.words.ids, self.words.firsts, self.words.starts)
        return (
            700 + sys.getsizeof(self.text) + sum(map(sys.getsizeof, arrays)) + 100 * len(self.keys)
        )


class GrowingTexts:
    """A tokenizer that remembers what it has encoded, up to a number of bytes, the longest unused
    dropped first. Thread-safe. The ids are those of the whole text, always.

    Tenants share nothing here: how fast a text is encoded would tell one what another has sent.
    """

    def __init__(self, tokenizer: TextTokenizer, most_bytes: int) -> None:
        """most_bytes: 0: nothing is remembered."""
        self._tokenizer, self._most = tokenizer, most_bytes
        self._kept: OrderedDict[_Kept, None] = OrderedDict()
        self._by_key: dict[_Key, _Kept] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """What is kept takes."""
        return self._bytes

    def encode(self, text: str, tenant: str) -> Tokens:
        """See TextTokenizer.encode. For texts that come again as they are, as questions do."""
        if not self._most:
            return self._tokenizer.encode(text)
        return self._words(text, tenant).ids

    def encode_growing(self, text: str, tenant: str) -> tuple[Tokens, int]:
        """See TextTokenizer.encode_growing."""
        if not (self._most and self._tokenizer.can_resume):
            return self._tokenizer.encode_growing(text)
        words = self._words(text, tenant)
        return words.ids, words.settled

    def _words(self, text: str, tenant: str) -> Words:
        keys = _keys(text, tenant)
        found = self._find(keys)
        if found is not None and found.text == text:
            return found.words
        words = None
        if found is not None:
            words = self._tokenizer.resume(found.text, found.words, text)
        if words is None:
            words = self._tokenizer.words(text)
        grown = found if found is not None and text.startswith(found.text[:-CHUNK]) else None
        self._keep(_Kept(text, words, keys), grown)
        return words

    def _find(self, keys: list[_Key]) -> _Kept | None:
        """What begins like a text for longest, as far as keys tell."""
        with self._lock:
            for key in reversed(keys):
                if (kept := self._by_key.get(key)) is not None:
                    self._kept.move_to_end(kept)
                    return kept
        return None

    def _keep(self, new: _Kept, grown: _Kept | None) -> None:
        """Keeps a text. grown: what it is a longer form of, which goes."""
        with self._lock:
            if grown is not None:
                self._drop(grown)
            self._kept[new] = None
            self._bytes += new.bytes
            self._by_key.update(dict.fromkeys(new.keys, new))
            while self._bytes > self._most:
                self._drop(next(iter(self._kept)))

    def _drop(self, kept: _Kept) -> None:
        if kept not in self._kept:
            return  # another thread was faster
        del self._kept[kept]
        self._bytes -= kept.bytes
        for key in kept.keys:
            if self._by_key.get(key) is kept:
                del self._by_key[key]


def _keys(text: str, tenant: str) -> list[_Key]:
    """What a text is found by: its beginnings, or if it is short all of it."""
    if len(text) < CHUNK:
        return [(tenant, text)]
    keys: list[_Key] = []
    chain = 0
    for at in range(0, len(text) - CHUNK + 1, CHUNK):
        chain = hash((chain, text[at : at + CHUNK]))  # texts are compared before they are believed
        keys.append((tenant, chain))
    return keys
