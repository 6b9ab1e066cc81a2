"""Texts that were encoded before: the ids are always those of the whole text, and of one that has
grown only the end is encoded again.
"""

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from flide_engine.families.growing import CHUNK, GrowingTexts
from flide_engine.families.tokenizer import TextTokenizer, Words
from tests.checkpoints import save_tokenizer
from tests.exactness.test_checkpoints import WORKLOADS

EMBEDDED = Path(__file__).parents[2] / "tiny_model" / "weights"
MOST = 1 << 24


@pytest.fixture(scope="module", params=["test", "embedded"])
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """One that composes characters; and one that also makes them small and begins with a space."""
    if request.param == "embedded":
        return TextTokenizer(EMBEDDED)
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return TextTokenizer(folder)


def same(got: Words, want: Words) -> bool:
    """Whether all of it is equal."""
    pairs = ((got.ids, want.ids), (got.firsts, want.firsts), (got.starts, want.starts))
    return all(np.array_equal(a, b) for a, b in pairs)


AWKWARD = (
    *("a", "word ", "It's", "'LL", "'l", " ", "   ", "\t", "\n", " \n", "\r\n \n", "7", "123456 "),
    *("?!", "..\n", "_", '{"key": [1, null]}', "\u00e9", "e\u0301", "\u0301", "\u0327\u0301"),
    *("\u0130", "\u03a3\u0391\u03a3", "\ufb01", "\u212b", "\u4e2d", "\u6f22\u5b57\u3002"),
    *("\u304b\u3099", "\u1112\u1161\u11ab", "\u1161", "\ud55c", "\U0001f642", "\u0915\u093c"),
    "\U0001f469\u200d\U0001f680",
)
"""Words, contractions, line ends, digits; characters that are composed, or become two."""

TEXT = st.lists(st.sampled_from(AWKWARD), max_size=60).map("".join)


@settings(max_examples=600)
@given(TEXT, TEXT, TEXT)
def test_what_is_resumed_is_what_the_whole_text_gives(
    tokenizer: TextTokenizer, opening: str, first: str, second: str
) -> None:
    """Whatever the texts have in common, and whatever follows it."""
    before, text = opening + first, opening + second
    found = tokenizer.resume(before, tokenizer.words(before), text)
    assert found is None or same(found, tokenizer.words(text))


@settings(max_examples=200)
@given(TEXT)
def test_words_are_the_tokens_of_the_text(tokenizer: TextTokenizer, text: str) -> None:
    """In order, each word from its first token on; what is settled stays."""
    words = tokenizer.words(text)
    ids, settled = tokenizer.encode_growing(text)
    assert words.ids.tolist() == ids.tolist()
    assert words.settled == settled
    for array in (words.firsts, words.starts):
        assert np.all(np.diff(array) >= 0)


class Counted:
    """The characters that a tokenizer was given to encode."""

    def __init__(self, tokenizer: TextTokenizer, patch: pytest.MonkeyPatch) -> None:
        self.spent: list[int] = []
        words = tokenizer.words

        def counted(text: str) -> Words:
            self.spent.append(len(text))
            return words(text)

        patch.setattr(tokenizer, "words", counted)


def agent(step: int, about: str = "parcels") -> str:
    """An agent's history, some 150 characters longer with every step."""
    said = "".join(
        f'{{"tool": "find {i}", "found": "{about} of Zoë’s, no. {i}"}}\n\t' for i in range(3 * step)
    )
    return f"An agent that looks after {about} for us. {said}"


def test_of_a_grown_text_only_the_end_is_encoded(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its last words are others, and where two agents take turns that begin alike."""
    counted, texts = Counted(tokenizer, monkeypatch), GrowingTexts(tokenizer, MOST)
    opening = "What everyone is told first. " * 200
    for step in range(10, 40):
        for about in ("parcels", "letters"):
            text = opening + agent(step, about)
            ids, settled = texts.encode_growing(text + f"\nStep {step}", "t")
            want = tokenizer.encode_growing(text + f"\nStep {step}")
            assert (ids.tolist(), settled) == (want[0].tolist(), want[1])
    assert counted.spent[0] > len(opening)
    assert max(counted.spent[1:]) < 2 * CHUNK + 300
    counted.spent.clear()
    assert texts.encode_growing(opening + agent(39) + "\nStep 39", "t")
    assert counted.spent == []


def test_tenants_share_nothing(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the time."""
    counted, texts = Counted(tokenizer, monkeypatch), GrowingTexts(tokenizer, MOST)
    for tenant in "ab":
        texts.encode_growing(agent(40), tenant)
        texts.encode("Is it late?", tenant)
    assert counted.spent == [len(agent(40)), len("Is it late?")] * 2


def test_questions_come_again(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are; one that goes on differently is another."""
    counted, texts = Counted(tokenizer, monkeypatch), GrowingTexts(tokenizer, MOST)
    for _ in range(3):
        for text in ("Is it late?", "Is it late? Yes", "", "x" * CHUNK):
            assert texts.encode(text, "").tolist() == tokenizer.encode(text).tolist()
    assert len(counted.spent) == 4


def test_memory_is_bounded(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest unused go; an agent's steps take the place of each other; nothing is left of
    either.
    """
    most = 200_000
    texts = GrowingTexts(tokenizer, most)
    for step in range(10, 30):
        texts.encode_growing(agent(step), "")
        assert len(texts._kept) == 1
    for i in range(200):
        texts.encode_growing(f"{i} " + agent(10), "")
        texts.encode(f"question {i}", "")
        assert texts.bytes <= most
    assert texts.bytes == sum(kept.bytes for kept in texts._kept)
    assert set(texts._by_key.values()) <= set(texts._kept)
    counted = Counted(tokenizer, monkeypatch)
    texts.encode("question 199", "")
    texts.encode("question 0", "")
    assert counted.spent == [len("question 0")]
    texts.encode_growing("one that is too large " * 20_000, "")
    assert texts.bytes <= most


def test_nothing_is_kept_where_nothing_may_be(tokenizer: TextTokenizer) -> None:
    """And all is encoded as ever."""
    texts = GrowingTexts(tokenizer, 0)
    assert texts.encode_growing(agent(40), "")[0].tolist() == tokenizer.encode(agent(40)).tolist()
    assert texts.encode("q", "").tolist() == tokenizer.encode("q").tolist()
    assert texts.bytes == 0


def test_threads(tokenizer: TextTokenizer) -> None:
    """Many at once, on the same histories, in little memory."""
    texts, wrong = GrowingTexts(tokenizer, 60_000), list[str]()
    want = {step: tokenizer.encode(agent(step)).tolist() for step in range(20, 30)}

    def ask(first: int) -> None:
        for i in range(60):
            step = 20 + (first + i) % 10
            if texts.encode_growing(agent(step), "")[0].tolist() != want[step]:
                wrong.append(f"{first} {i}")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert texts.bytes == sum(kept.bytes for kept in texts._kept) <= 60_000


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Punctuation", "behavior": "Isolated"}},
        {"normalizer": {"type": "NFKC"}},
        {"split": r"(?<=a)b|\s+"},
        {"split": r"\p{N}|.*x"},
        {"behavior": "MergedWithNext"},
        {"dropout": 0.1},
    ],
    ids=str,
)
def test_splits_that_nothing_is_known_of_are_not_resumed(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """A whole text is encoded then, with the same ids."""
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text())
    assert TextTokenizer(tmp_path).can_resume
    split = spec["pre_tokenizer"]["pretokenizers"][0]
    if "split" in change:
        split["pattern"] = {"Regex": change["split"]}
    elif "behavior" in change:
        split["behavior"] = change["behavior"]
    elif "dropout" in change:
        spec["model"]["dropout"] = change["dropout"]
    else:
        spec |= change
    path.write_text(json.dumps(spec))
    made = TextTokenizer(tmp_path)
    assert not made.can_resume
    assert made.resume(agent(30), made.words(agent(30)), agent(31)) is None


def test_a_tokenizer_without_words(tmp_path: Path) -> None:
    """Has none to start from."""
    bare = Tokenizer(models.BPE())
    (tmp_path / "tokenizer.json").write_text(bare.to_str())
    assert not TextTokenizer(tmp_path).can_resume
    bare.pre_tokenizer = pre_tokenizers.Metaspace()
    (tmp_path / "tokenizer.json").write_text(bare.to_str())
    assert not TextTokenizer(tmp_path).can_resume


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="needs the shared workloads beside the project")
def test_agent_trajectories(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of real agents: the ids of the whole history, for a tenth of the characters."""
    counted, texts = Counted(tokenizer, monkeypatch), GrowingTexts(tokenizer, MOST)
    whole = 0
    with gzip.open(WORKLOADS / "agent_trajectories.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines][::5]
    for row in rows:
        state = ""
        for step in row["steps"][:30]:
            state += step["append"]
            if len(state) > 40_000:
                break
            ids, settled = texts.encode_growing(state, "")
            want = tokenizer.encode_growing(state)
            assert (ids.tolist(), settled) == (want[0].tolist(), want[1])
            whole += len(state)
    assert whole > 500_000
    assert sum(counted.spent) < whole / 4
