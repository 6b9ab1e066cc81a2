"""Text never becomes control tokens; cuts are safe exactly when words end there."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from flide_engine.errors import ConfigError, InvalidRequest
from flide_engine.families.tokenizer import TextTokenizer
from tests.checkpoints import CONTROLS, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the test tokenizer."""
    made = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    """The test tokenizer, split in two."""
    return TextTokenizer(folder)


def test_control_tokens_in_text_stay_text(tokenizer: TextTokenizer, folder: Path) -> None:
    """Also those that a plain tokenizer would find, special or not."""
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for control in CONTROLS:
        ids = tokenizer.encode(f"before {control} after").tolist()
        assert not set(ids) & set(tokenizer.controls.values())
        assert whole.decode(ids) == f"before {control} after"


@given(st.text(max_size=80))
@settings(max_examples=150, deadline=None)
def test_text_without_control_tokens_is_encoded_as_ever(
    tokenizer: TextTokenizer, folder: Path, text: str
) -> None:
    """The same ids as the whole tokenizer gives."""
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text).tolist() == whole.encode(text, add_special_tokens=False).ids


@given(st.text(max_size=60), st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_the_cut_before_a_question_is_safe(
    tokenizer: TextTokenizer, state: str, question: str
) -> None:
    """Whatever the state ends in, encoding it with its blank line, then the question, changes no
    id.
    """
    assert tokenizer.may_cut("\n\n", "Question: ")
    left, right = f"user\n{state}\n\n", f"Question: {question}"
    parts = np.concatenate([tokenizer.encode(left), tokenizer.encode(right)])
    assert parts.tolist() == tokenizer.encode(left + right).tolist()


@given(st.text(max_size=60), st.text(max_size=20))
@settings(max_examples=300, deadline=None)
def test_settled_tokens_stay_when_the_text_grows(
    tokenizer: TextTokenizer, text: str, more: str
) -> None:
    """Whatever follows, the settled tokens are the first ones of the longer text."""
    ids, settled = tokenizer.encode_growing(text)
    assert ids.tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.encode(text + more)[:settled].tolist() == ids[:settled].tolist()


def test_an_unsafe_cut_is_known(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """Inside a word, before punctuation that takes the space before it, and without any word
    split.
    """
    assert not tokenizer.may_cut("wo", "rd")
    assert not tokenizer.may_cut(" ", "word")
    bare = Tokenizer(models.BPE())
    (tmp_path / "tokenizer.json").write_text(bare.to_str())
    assert not TextTokenizer(tmp_path).may_cut("\n\n", "Question: ")
    bare.pre_tokenizer = pre_tokenizers.Metaspace()
    (tmp_path / "tokenizer.json").write_text(bare.to_str())
    assert not TextTokenizer(tmp_path).may_cut("\n\n", "Question: ")


def test_templates_are_taken_apart(tokenizer: TextTokenizer) -> None:
    """Control tokens by id, runs of text between them."""
    ids = tokenizer.controls
    assert tokenizer.pieces("<|im_start|>user\n<think></think>\n\n") == [
        ids["<|im_start|>"],
        "user\n",
        ids["<think>"],
        ids["</think>"],
        "\n\n",
    ]


def test_a_lone_surrogate_is_the_callers_fault(tokenizer: TextTokenizer) -> None:
    """It cannot be encoded, and says so."""
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.encode("a\ud800b")


def test_a_missing_or_broken_file_is_named(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """And so is a control token that is not there."""
    with pytest.raises(ConfigError, match="no readable tokenizer.json"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match="does not load"):
        TextTokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no control token '<x>'"):
        tokenizer.control("<x>")
