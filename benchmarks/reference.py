"""Time of whole requests on this machine's engine: `python -m benchmarks.reference`.

The embedded model as `make serve` runs it, without Serve around it: a 500-token state with four
questions, one long state, and a wide choice. Each once with nothing kept between requests (option
vectors are), and once asked again by the same caller.
"""

import argparse
import statistics
import time
from typing import Any

from benchmarks.results_file import Row, stamp, write
from flide_engine import Engine, EngineConfig

SENTENCE = "The customer writes that the parcel came late and that the box was open. "
NOUL = {"type": "noul", "instructions": "Is the customer angry?"}
TEAM = {
    "type": "choice",
    "instructions": "Who handles it?",
    "criteria": {"billing": "payments and refunds", "delivery": "parcels on their way"},
}
WIDE = {
    "type": "choice",
    "instructions": "Which?",
    "criteria": {f"intent_{i}": None for i in range(150)},
}
REQUESTS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "500 + 4 questions": (500, [NOUL, TEAM, {**NOUL, "instructions": "Is it late?"}, TEAM]),
    "7000 + 1 question": (7000, [NOUL]),
    "20 + 150 options": (20, [WIDE]),
}


def request(
    engine: Engine, tokens: int, questions: list[dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    """(a request whose state has about `tokens` tokens, its input tokens)."""
    one = engine.decide({"state": SENTENCE, "questions": {"q": NOUL}}).usage.input_tokens
    ten = engine.decide({"state": SENTENCE * 10, "questions": {"q": NOUL}}).usage.input_tokens
    state = SENTENCE * max(1, round(tokens / ((ten - one) / 9)))
    asked = {"state": state, "questions": {f"q{i}": q for i, q in enumerate(questions)}}
    return asked, engine.decide(asked).usage.input_tokens


def main() -> None:
    """Medians of ten calls each, written to benchmarks/results/engine.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="weights folder or hub name; none: the embedded model")
    args = parser.parse_args()
    rows: list[Row] = []
    for mode, keep in (("reference, nothing kept", False), ("reference, asked again", True)):
        engine = Engine(EngineConfig(model=args.model, keep_checkpoints=keep))
        for work, (tokens, questions) in REQUESTS.items():
            asked, counted = request(engine, tokens, questions)
            spans = []
            for _ in range(10):
                began = time.perf_counter()
                engine.decide(asked)
                spans.append(1000 * (time.perf_counter() - began))
            row: Row = {
                "engine": "ours",
                "shape": "embedded" if args.model is None else args.model,
                "mode": mode,
                "work": work,
                "clients": 1,
                "input_tokens": counted,
                "p50_ms": round(statistics.median(spans), 1),
                "p90_ms": round(sorted(spans)[8], 1),
            }
            print(row)
            rows.append(row)
        engine.close()
    print(
        "written to", write("engine", stamp(rows), ("engine", "shape", "mode", "work", "clients"))
    )


if __name__ == "__main__":
    main()
