"""The official Python SDK against TYPESAFE_BASE_URL; prints what came back as one JSON line."""

import asyncio
import json
from typing import Any

from typesafe_sdk import (
    AsyncTypeSafeClient,
    Choice,
    Noul,
    Score,
    TypeSafeClient,
    TypeSafeUnprocessableEntityError,
)

STATE = "User: my card was charged twice and nobody answers the phone. "
QUESTIONS: dict[str, Any] = {
    "team": Choice(
        instructions="Who handles it?", criteria={"billing": "payments", "delivery": None}
    ),
    "angry": Noul(instructions="Is the customer angry?"),
    "urgency": Score(instructions="How urgent?", criteria=["can wait", "today", "at once"]),
}


async def many() -> list[float]:
    """Twenty calls at once."""
    async with AsyncTypeSafeClient() as client:
        calls = [client.system_one(state=STATE, questions=QUESTIONS) for _ in range(20)]
        return [got.nouls["angry"].noul for got in await asyncio.gather(*calls)]


def main() -> None:
    """Sync, zstd, the model list, an error, async."""
    with TypeSafeClient() as client:
        small = client.system_one(state=STATE, questions=QUESTIONS)
        big = client.system_one(state=STATE * 60, questions=QUESTIONS)
        models = [m.name for m in client.models.list().models]
        try:
            client.system_one(state=STATE, questions={"q": Choice(criteria={"only": None})})
            refused = ""
        except TypeSafeUnprocessableEntityError as error:
            refused = str(error)
    angry = asyncio.run(many())
    print(
        json.dumps(
            {
                "choice": small.choices["team"].choice,
                "score": small.scores["urgency"].score,
                "request_id": small.request_id,
                "big_tokens": big.usage.input_tokens,
                "models": models,
                "refused": refused,
                "spread": max(angry) - min(angry),
                "noul": angry[0] - small.nouls["angry"].noul,
            }
        )
    )


if __name__ == "__main__":
    main()
