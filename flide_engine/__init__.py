"""Decision inference with exact state forking on one device: a library without Ray and without
HTTP.

`Engine(EngineConfig(...)).decide(DecisionRequest(...))` answers; see README.md for the words used.
Importing this package loads neither torch nor numpy: `Engine` is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from flide_engine.api import (
    Answer,
    Choice,
    ChoiceAnswer,
    DecisionRequest,
    DecisionResponse,
    Noul,
    NoulAnswer,
    NoulCriteria,
    Score,
    ScoreAnswer,
    Usage,
)
from flide_engine.config import EngineConfig
from flide_engine.errors import FlideError

if TYPE_CHECKING:
    from flide_engine.engine import Engine

__all__ = [
    "Answer",
    "Choice",
    "ChoiceAnswer",
    "DecisionRequest",
    "DecisionResponse",
    "Engine",
    "EngineConfig",
    "FlideError",
    "Noul",
    "NoulAnswer",
    "NoulCriteria",
    "Score",
    "ScoreAnswer",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from flide_engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
