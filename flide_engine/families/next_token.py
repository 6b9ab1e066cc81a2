"""Next-token readout: the checkpoint's chat template asks, probabilities of label tokens answer.

p(o) = softmax over the question's labels of w_o . h, with h at the last token of the generation
prompt and w_o the label's row of the output head. Labels: A, B, .. and then two-letter tokens for
choices, 0 .. 9 for scores, Yes and No for yes/no questions.
"""

import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flide_engine.api import (
    MAX_LEVELS,
    MAX_OPTIONS,
    Answer,
    Choice,
    DecisionRequest,
    Noul,
    Question,
)
from flide_engine.errors import ConfigError, Fault, InvalidRequest
from flide_engine.families.base import (
    Floats,
    ModelCard,
    Read,
    Rendered,
    Tokens,
    choice_answer,
    noul_answer,
    score_answer,
    softmax,
)
from flide_engine.families.growing import GrowingTexts
from flide_engine.families.rendering import entry_text, level_text, option_text, question_text
from flide_engine.families.tokenizer import TextTokenizer

_HERE = "CONTENT-GOES-HERE"
_QUESTION = "Question: "


@dataclass(frozen=True)
class _Labels:
    """Label texts of one kind of question and their token ids."""

    texts: tuple[str, ...]
    ids: Tokens


class NextToken:
    """The family of any chat checkpoint."""

    def __init__(
        self, folder: Path, tokenizer: TextTokenizer, name: str, text_cache_bytes: int = 0
    ) -> None:
        """text_cache_bytes: for texts that were encoded before."""
        self.card = ModelCard(name, f"Next-token decisions by {name}", "1970-01-01")
        self.tokenizer, self._texts = tokenizer, GrowingTexts(tokenizer, text_cache_bytes)
        self._choice = _labels(tokenizer, _letters(), MAX_OPTIONS, least=2)
        self._score = _labels(tokenizer, string.digits, MAX_LEVELS, least=MAX_LEVELS)
        self._noul = _labels(tokenizer, ("Yes", "No"), 2, least=2)
        before, after = _template(folder)
        self._before, self._opening = _encode_but_last_run(tokenizer, before)
        self._closing, self._after = _encode_but_first_run(tokenizer, after)
        self._may_cut = tokenizer.may_cut("\n\n", _QUESTION)

    def render(self, request: DecisionRequest, tenant: str = "") -> Rendered:
        """See Family.render.

        The state is encoded once if the tokenizer always ends a word before a question.
        """
        state = entry_text(request.state).strip()
        opening = self._opening + (state + "\n\n" if state else "")
        # the cut is safe after the blank line only
        cut = self._may_cut and bool(state)
        head, settled = self._before, 0
        if cut:
            ids, settled = self._texts.encode_growing(opening, tenant)
            head = np.concatenate([self._before, ids])
        prompts: list[Tokens] = []
        reads: list[Read] = []
        for name, question in request.questions.items():
            labels = self._labels_of(question, name)
            text = _question(question, labels.texts) + self._closing
            body = self._texts.encode(text if cut else opening + text, tenant)
            reads.append(Read(len(prompts), labels.ids, f"question {name!r}"))
            prompts.append(np.concatenate([head, body, self._after]).astype(np.int32))
        shared = _shared(prompts)
        tokens = shared + sum(len(p) - shared for p in prompts)
        return Rendered(
            tuple(prompts),
            tuple(reads),
            input_tokens=tokens,
            longest_prompt=max(map(len, prompts)),
            state_prompts=len(prompts),
            state_tokens=len(self._before) + settled if cut else 0,
            note=request.questions,
        )

    def finish(self, rendered: Rendered, values: Sequence[Floats]) -> dict[str, Answer]:
        """See Family.finish."""
        answers: dict[str, Answer] = {}
        questions: dict[str, Question] = rendered.note
        for (name, question), logits in zip(questions.items(), values, strict=True):
            p = softmax(logits)
            if isinstance(question, Noul):
                answers[name] = noul_answer(p[0])
            else:
                answers[name] = (
                    choice_answer(question, p)
                    if isinstance(question, Choice)
                    else score_answer(question, p)
                )
        return answers

    def _labels_of(self, question: Question, name: str) -> _Labels:
        if isinstance(question, Noul):
            return self._noul
        labels = self._choice if isinstance(question, Choice) else self._score
        count = len(question.criteria)
        if count > len(labels.texts):
            msg = (
                f"{count} options; this model's tokenizer has labels for {len(labels.texts)}"
                " options per choice"
            )
            raise InvalidRequest((Fault(("body", "questions", name, "criteria"), msg),))
        return _Labels(labels.texts[:count], labels.ids[:count])


def _question(question: Question, labels: tuple[str, ...]) -> str:
    """The question as the user's turn says it, after the state."""
    if isinstance(question, Noul):
        yes, no = (
            (question.criteria.true, question.criteria.false) if question.criteria else (None, None)
        )
        text = question_text(question.instructions, yes, no)
        return f"{_QUESTION}{text}\nReply with Yes or No only."
    if isinstance(question, Choice):
        kind, what = "Options", "letter of one option"
        texts = [option_text(name, text) for name, text in question.criteria.items()]
    else:
        kind, what = "Levels, lowest first", "number of one level"
        texts = [level_text(i, text) for i, text in enumerate(question.criteria)]
    listed = "\n".join(f"{label}. {text}" for label, text in zip(labels, texts, strict=True))
    text = question_text(question.instructions)
    return f"{_QUESTION}{text}\n{kind}:\n{listed}\nReply with the {what} only."


def _shared(prompts: Sequence[Tokens]) -> int:
    """Tokens on which all prompts agree from the start, leaving each at least one of its own."""
    count = min(map(len, prompts)) - 1
    for prompt in prompts[1:]:
        differs = prompts[0][:count] != prompt[:count]
        count = int(differs.argmax()) if differs.any() else count
    return count


def _letters() -> list[str]:
    pairs = itertools.product(string.ascii_uppercase, repeat=2)
    return [*string.ascii_uppercase, *("".join(p) for p in pairs)]


def _labels(tokenizer: TextTokenizer, texts: Sequence[str], most: int, least: int) -> _Labels:
    """The first `most` of `texts` that are one token each, all different.

    Raises ConfigError if there are fewer than `least`.
    """
    found: dict[int, str] = {}
    for text in texts:
        ids = tokenizer.encode(text)
        if len(ids) == 1 and int(ids[0]) not in found and len(found) < most:
            found[int(ids[0])] = text
    if len(found) < least:
        raise ConfigError(
            f"only {len(found)} of the labels {list(texts)[:10]} are single distinct tokens"
        )
    return _Labels(tuple(found.values()), np.array(list(found), np.int32))


def _template(folder: Path) -> tuple[str, str]:
    """The chat template's text before and after the user's content, thinking off."""
    from transformers import AutoTokenizer  # slow to import, and only this family needs it

    chat = AutoTokenizer.from_pretrained(folder)
    if not chat.chat_template:
        raise ConfigError(f"{folder} has no chat template; the next-token family needs one")
    text = chat.apply_chat_template(
        [{"role": "user", "content": _HERE}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    before, found, after = text.partition(_HERE)
    if not found or _HERE in after:
        raise ConfigError(f"the chat template of {folder} does not give the user's content once")
    return before, after


def _encode_but_last_run(tokenizer: TextTokenizer, text: str) -> tuple[Tokens, str]:
    """(ids, the last run of text): the user's content continues that run."""
    pieces = tokenizer.pieces(text)
    last = pieces.pop() if pieces and isinstance(pieces[-1], str) else ""
    return _ids(tokenizer, pieces), str(last)


def _encode_but_first_run(tokenizer: TextTokenizer, text: str) -> tuple[str, Tokens]:
    """(the first run of text, ids): that run continues the user's content."""
    pieces = tokenizer.pieces(text)
    first = pieces.pop(0) if pieces and isinstance(pieces[0], str) else ""
    return str(first), _ids(tokenizer, pieces)


def _ids(tokenizer: TextTokenizer, pieces: list[int | str]) -> Tokens:
    parts = [np.array([p], np.int32) if isinstance(p, int) else tokenizer.encode(p) for p in pieces]
    joined: Tokens = np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
    return joined
