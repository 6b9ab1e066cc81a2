"""What a soak asks: a seeded mix of good, bad, hasty and abandoned requests, each with the ends
that it may have.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from loadtest.synthetic import WORDS

POISON = "\N{LATIN SMALL LETTER THORN}"
"""A letter whose token the soaked model cannot embed (`benchmarks.random_model`): NaN comes out."""

ANSWERED, LEFT = "answered", "left"
"""Ends of a request beside the errors of the tree, which go by the names of their classes."""

TENANTS = ("tenant-0", "tenant-1", "tenant-2")

SHARES = {
    "short": 30,
    "many questions": 10,
    "long": 3,
    "step": 22,
    "batch": 8,
    "left": 9,
    "deadline": 7,
    "malformed": 6,
    "oversized": 2,
    "poisoned": 3,
}
"""Percent of the requests by kind."""


@dataclass(frozen=True)
class Sizes:
    """Of the soaked engine's limits, and of what is asked, in tokens and counts.

    prompt_tokens, questions, bytes: the limits. words: of a short state. long_words: of one that
    takes several rounds. steps: of an agent's trajectory, each of `step_words`. distinct: different
    requests of each kind.
    """

    prompt_tokens: int
    questions: int
    bytes: int
    words: int = 60
    long_words: int = 1500
    steps: int = 8
    step_words: int = 60
    distinct: int = 12


@dataclass(frozen=True)
class Ask:
    """One request. kind: which of `SHARES`. body: what is sent; plain: the same as a handle takes
    it, None for what is no JSON. ends: those it may have. known: index of the good request that it
    is, whose answer is known; -1 for a bad one. tenant, session: as which it is asked. timeout_s:
    its deadline. batch: its class. leave_s: after how many seconds its caller leaves; None: never.
    """

    kind: str
    body: bytes
    plain: dict[str, Any] | None
    ends: frozenset[str]
    known: int = -1
    tenant: str = ""
    session: str = ""
    timeout_s: float | None = None
    batch: bool = False
    leave_s: float | None = None


@dataclass
class Mix:
    """The requests of a soak. good: the distinct good ones; their answers must be those that each
    gets alone.
    """

    sizes: Sizes
    seed: int = 0
    good: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng, sizes = random.Random(self.seed), self.sizes
        self._first: dict[str, range] = {}
        self._add("short", [_request(rng, sizes.words, 1) for _ in range(sizes.distinct)])
        self._add("many questions", [_request(rng, sizes.words, 7) for _ in range(sizes.distinct)])
        self._add("long", [_request(rng, sizes.long_words, 2) for _ in range(2)])
        trajectories = [_trajectory(rng, sizes) for _ in range(max(1, sizes.distinct // 4))]
        self._add("step", [step for steps in trajectories for step in steps])
        self._bad = _malformed()
        self._oversized = _oversized(sizes)

    def client(self, number: int) -> Iterator[Ask]:
        """Endless requests of one client; clients differ by their number."""
        rng = random.Random(f"{self.seed} {number}")
        kinds, shares = list(SHARES), list(SHARES.values())
        at = rng.randrange(len(self._first["step"]))
        while True:
            kind = rng.choices(kinds, shares)[0]
            if kind == "step":
                at = (at + 1) % len(self._first["step"])
                yield self._step(self._first["step"][at], number)
            else:
                yield self._of(kind, rng, number)

    def _of(self, kind: str, rng: random.Random, number: int) -> Ask:
        tenant = TENANTS[number % len(TENANTS)]
        if kind in ("malformed", "oversized"):
            return rng.choice(self._bad if kind == "malformed" else self._oversized)
        if kind == "poisoned":
            return self._poisoned(rng, tenant)
        of = kind if kind in self._first else rng.choice(("short", "many questions", "step"))
        known = rng.choice(self._first[of])
        if kind == "left":
            return self._good(kind, known, tenant, {LEFT}, leave_s=rng.expovariate(1 / 0.02))
        if kind == "deadline":
            seconds = rng.choice((0.0, 0.001, 0.01, 0.05, 0.2))
            return self._good(kind, known, tenant, {"DeadlineExceeded"}, timeout_s=seconds)
        return self._good(kind, known, tenant, batch=kind == "batch")

    def _poisoned(self, rng: random.Random, tenant: str) -> Ask:
        words = rng.choices(WORDS, k=self.sizes.words)
        words.insert(rng.randrange(len(words)), POISON)
        plain = {"state": " ".join(words), "questions": _questions(rng, 2)}
        return Ask("poisoned", _json(plain), plain, frozenset({"NonFiniteOutput"}), tenant=tenant)

    def _good(
        self, kind: str, known: int, tenant: str, ends: set[str] | None = None, **how: Any
    ) -> Ask:
        plain = self.good[known]
        may = frozenset({ANSWERED, *(ends or ())})
        return Ask(kind, _json(plain), plain, may, known, tenant, **how)

    def _step(self, known: int, number: int) -> Ask:
        """A step of a trajectory; all clients of a tenant are one agent there."""
        tenant = TENANTS[number % len(TENANTS)]
        session = f"agent {(known - self._first['step'][0]) // self.sizes.steps}"
        return self._good("step", known, tenant, session=session)

    def _add(self, kind: str, requests: list[dict[str, Any]]) -> None:
        begin = len(self.good)
        self.good += requests
        self._first[kind] = range(begin, len(self.good))


def _json(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain).encode()


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def _questions(rng: random.Random, count: int) -> dict[str, Any]:
    """Questions of all types in turn."""
    found: dict[str, Any] = {}
    for i in range(count):
        text = _text(rng, rng.randint(3, 12))
        options = {_text(rng, 2): _text(rng, 3) for _ in range(rng.randint(2, 5))}
        found[f"q{i}"] = (
            {"type": "noul", "instructions": text},
            {"type": "choice", "instructions": text, "criteria": {"none": None, **options}},
            {"type": "score", "instructions": text, "criteria": [*options.values(), "high"]},
        )[i % 3]
    return found


def _request(rng: random.Random, words: int, questions: int) -> dict[str, Any]:
    return {"state": _text(rng, words), "questions": _questions(rng, questions)}


def _trajectory(rng: random.Random, sizes: Sizes) -> list[dict[str, Any]]:
    """An agent's steps: a list of messages that grows, and the same questions about it."""
    messages = [{"role": "user", "content": _text(rng, sizes.step_words)}]
    questions = _questions(rng, 2)
    steps = []
    for _ in range(sizes.steps):
        messages = [*messages, {"role": "tool", "content": _text(rng, sizes.step_words)}]
        steps.append({"state": messages, "questions": questions})
    return steps


def _encoded(kind: str, plain: dict[str, Any], end: str) -> Ask:
    return Ask(kind, _json(plain), plain, frozenset({end}))


def _malformed() -> list[Ask]:
    """Bodies that no caller should send."""
    noul = {"type": "noul", "instructions": "?"}
    plain: list[dict[str, Any]] = [
        {},
        {"state": "s"},
        {"state": 7, "questions": {"q": noul}},
        {"state": "s", "questions": {}},
        {"state": "s", "questions": {"q": {"type": "box"}}},
        {"state": "s", "questions": {"q": {"type": "choice", "criteria": {"a": None}}}},
        {"state": "s", "questions": {"q": {"type": "score", "criteria": ["x"] * 11}}},
        {"state": "s", "questions": {"q": noul}, "assets": {"<image:0>": {}}},
    ]
    raw = [b"", b"{", b"[]", b'{"state": NaN}', b"\xff", b'{"state": ' + b"[" * 5000]
    bad = frozenset({"InvalidRequest"})
    other = {"state": "s", "questions": {"q": noul}, "model": "gpt"}
    return [
        *(_encoded("malformed", p, "InvalidRequest") for p in plain),
        *(Ask("malformed", body, None, bad) for body in raw),
        _encoded("malformed", other, "UnknownModel"),
    ]


def _oversized(sizes: Sizes) -> list[Ask]:
    """One over each limit; a word is one token at least."""
    noul = {"type": "noul", "instructions": "?"}
    questions = {f"q{i}": noul for i in range(sizes.questions + 1)}
    return [
        _encoded("oversized", {"state": "the " * n, "questions": {"q": noul}}, end)
        for n, end in ((sizes.prompt_tokens, "TooManyTokens"), (sizes.bytes // 4, "BodyTooLarge"))
    ] + [_encoded("oversized", {"state": "s", "questions": questions}, "InvalidRequest")]
