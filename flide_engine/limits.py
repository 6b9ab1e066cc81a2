"""What one request may ask for: limits that every way into the engine meets.

How much may wait is `flide_engine.admission`'s; how large a body may be, `flide_engine.wire`'s.
"""

import math
from typing import TYPE_CHECKING

from flide_engine.api import Choice, DecisionRequest
from flide_engine.config import EngineConfig
from flide_engine.errors import Fault, InvalidRequest, TooManyTokens
from flide_engine.wire import check_number

if TYPE_CHECKING:  # a Gateway checks timeouts, and has no use for arrays
    from flide_engine.families.base import Rendered


def seconds_allowed(timeout: float | None, most: float, loc: tuple[str, ...]) -> float:
    """Seconds a request has: what its caller gave, else `most`. loc: where the value stood.

    Raises InvalidRequest for what is no time, or longer than `most` (`max_timeout_s`).
    """
    if timeout is None:
        return most
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not math.isfinite(timeout) or timeout < 0:
        msg = f"a timeout is a number of seconds, not {timeout!r}"
        raise InvalidRequest((Fault(loc, msg, "timeout_invalid"),))
    if timeout > most:
        msg = f"a timeout of {timeout:g} s; the limit is {most:g} s (max_timeout_s)"
        raise InvalidRequest((Fault(loc, msg, "timeout_too_long"),))
    return float(timeout)


def check_questions(request: DecisionRequest, config: EngineConfig) -> None:
    """Raises InvalidRequest for too many questions, or options of one."""
    check_number(len(request.questions), config.max_questions)
    for name, question in request.questions.items():
        if isinstance(question, Choice) and len(question.criteria) > config.max_options:
            msg = (
                f"{len(question.criteria)} options; the limit is {config.max_options} options per"
                " choice (max_options)"
            )
            raise InvalidRequest((Fault(("body", "questions", name, "criteria"), msg, "too_long"),))


def check_tokens(rendered: "Rendered", config: EngineConfig) -> None:
    """Raises TooManyTokens for a prompt, or a request, that is too long."""
    if rendered.longest_prompt > config.max_prompt_tokens:
        raise TooManyTokens(
            "the state with its longest question",
            rendered.longest_prompt, config.max_prompt_tokens, "max_prompt_tokens",
        )  # fmt: skip
    if rendered.input_tokens > config.max_request_tokens:
        raise TooManyTokens(
            "the request", rendered.input_tokens, config.max_request_tokens, "max_request_tokens"
        )
