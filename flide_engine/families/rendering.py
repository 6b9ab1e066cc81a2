"""Texts that families put into prompts; standard library only, shared by serving and by training.

A text is either *user text* (anything a caller sent) or a *control token* (written by a family).
The two never mix: a family names control tokens by id, and user text that spells one is encoded as
text.
"""

import json
from typing import Any

Entry = str | dict[str, Any] | list[Any] | None
"""A text on the wire: a string, or structured data, or nothing."""


def entry_text(entry: Entry) -> str:
    """The text of a state, an instruction or a description; structured data becomes JSON, null is
    empty.
    """
    if entry is None:
        return ""
    if isinstance(entry, str):
        return entry
    return json.dumps(entry, ensure_ascii=False)


def option_text(name: str, description: Entry) -> str:
    """What an option says: its name and its description, or one of them where the other adds
    nothing.
    """
    text = entry_text(description)
    spoken = name.replace("_", " ")
    if not text or text.casefold() == spoken.casefold():
        return text or spoken
    return f"{name}: {text}"


def level_text(level: int, description: Entry) -> str:
    """What a level of a score says: its description, or its number when it has none."""
    return entry_text(description) or str(level)


def question_text(instructions: Entry, if_true: Entry = None, if_false: Entry = None) -> str:
    """What a question says before its answer is read; the two outcomes are those of a yes/no
    question.
    """
    lines = [entry_text(instructions)]
    lines += [
        f"{word}: {entry_text(text)}" for word, text in (("yes", if_true), ("no", if_false)) if text
    ]
    return "\n".join(line for line in lines if line)
