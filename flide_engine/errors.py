"""Every error a caller can meet, as one tree; `router/http_errors.py` maps its leaves to HTTP
statuses.

    FlideError
      RequestError            the caller's own: asking again unchanged cannot help
        InvalidRequest          a field is missing, of the wrong type or out of range
        TooManyTokens           a prompt or a request is longer than the engine takes
        BodyTooLarge            more bytes than the server reads
        UnsupportedEncoding     a content encoding or type the server does not decode
        UnknownModel            no such model is served here
        AuthenticationFailed    no key, or a key that is not known
        UnknownState            nothing is remembered of a state of this name
        TooMuchPinned           more would be kept from eviction than may be
        TooManyBranches         a checkpoint is kept for as many names as may be
        RequestQuarantined      replicas have died under this very request
      UnavailableError        not the caller's fault: asking again later can help
        Overloaded              the queue is full
        QuotaExceeded           a tenant has had what it may have
        NotReady                the engine is starting or stopping
        EngineStopped           the engine ended while it had the request
        DeadlineExceeded        the answer did not come within the time the caller gave
      EngineError             a fault of ours
        NonFiniteOutput         the model produced NaN or infinity for this request
        RoundFailed             the forward pass of this request failed
        PoolExhausted           a round needs more pages or slots than are free
        RoundTooLarge           a round has more rows or nodes than any bucket
        CheckpointRefused       a checkpoint from elsewhere is damaged or computed otherwise
      SetupError              the engine cannot start
        ConfigError             options contradict each other or the machine
        WeightsError            a checkpoint folder lacks tensors, or has unknown or misshapen ones

Each class passes all its arguments to the base constructor: errors cross processes by pickle.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

MOST_FAULTS = 20
"""Faults of one request that are told."""

_MOST_CHARS = 300
_MOST_NAMED = 5  # questions in one message


class FlideError(Exception):
    """Root of the tree. `error_type` is the wire name of the kind of error."""

    error_type = "internal_error"

    @property
    def for_logs(self) -> str:
        """What is wrong, without what was asked: that is not for logs to tell."""
        return str(self)


class RequestError(FlideError):
    """The request itself is at fault."""

    error_type = "api_usage_error"


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a request: where it is, what is wrong, and the machine-readable kind."""

    loc: tuple[str | int, ...]
    msg: str
    type: str = "value_error"


class InvalidRequest(RequestError):
    """The request does not have the shape that the contract asks for."""

    error_type = "invalid_request_error"

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__(faults)
        self.faults = faults

    @property
    def for_logs(self) -> str:
        """How many faults of which kind."""
        counts = Counter(fault.type for fault in self.faults)
        return ", ".join(f"{count} {kind}" for kind, count in counts.items())

    def __str__(self) -> str:
        return "; ".join(f"{'.'.join(map(str, f.loc))}: {f.msg}" for f in self.faults)


class TooManyTokens(RequestError):
    """A prompt or a whole request has more tokens than the engine takes."""

    def __init__(self, what: str, tokens: int, limit: int, option: str) -> None:
        super().__init__(what, tokens, limit, option)
        self.what, self.tokens, self.limit, self.option = what, tokens, limit, option

    def __str__(self) -> str:
        return (
            f"{self.what} has {self.tokens} tokens; the maximum context length is {self.limit}"
            f" tokens ({self.option}). Nothing was truncated."
        )


class BodyTooLarge(RequestError):
    """The body, before or after decoding, has more bytes than the server reads."""

    def __init__(self, limit: int, option: str) -> None:
        super().__init__(limit, option)
        self.limit, self.option = limit, option

    def __str__(self) -> str:
        return f"the request body is larger than {self.limit} bytes ({self.option})"


class UnsupportedEncoding(RequestError):
    """A content encoding or content type that the server does not decode."""

    def __init__(self, value: str, supported: str) -> None:
        super().__init__(value, supported)
        self.value, self.supported = value, supported

    def __str__(self) -> str:
        return f"cannot decode {self.value!r}; supported: {self.supported}"

    @property
    def for_logs(self) -> str:
        """What is supported."""
        return f"supported: {self.supported}"


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        super().__init__(model, served)
        self.model, self.served = model, served

    def __str__(self) -> str:
        return f"unknown model {_cut(self.model)!r}; {self.for_logs}"

    @property
    def for_logs(self) -> str:
        """What is served."""
        return f"served here: {', '.join(self.served)}"


class UnknownState(RequestError):
    """Nothing is remembered of a state: not now, not of this tenant, or not so early in it."""

    error_type = "not_found_error"

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"nothing is remembered of a state {self.name!r}{self.why}"


class TooMuchPinned(RequestError):
    """More would be kept from eviction than one engine lets a tenant keep."""

    def __init__(self, name: str, count: int, kind: str, limit: int, option: str) -> None:
        super().__init__(name, count, kind, limit, option)
        self.name, self.count, self.kind = name, count, kind
        self.limit, self.option = limit, option

    def __str__(self) -> str:
        return (
            f"with state {self.name!r} pinned, {self.count} {self.kind} of its tenant would be kept"
            f" from eviction; it may keep {self.limit} now ({self.option}). Unpin others of its"
            " own first."
        )


class TooManyBranches(RequestError):
    """A checkpoint is kept for as many names as it may be."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(name, limit)
        self.name, self.limit = name, limit

    def __str__(self) -> str:
        return f"that checkpoint of state {self.name!r} is kept for {self.limit} others already"


class RequestQuarantined(RequestError):
    """Replicas have died under this very request, so it is not tried again for a while."""

    def __init__(self, deaths: int, seconds: int) -> None:
        super().__init__(deaths, seconds)
        self.deaths, self.seconds = deaths, seconds

    def __str__(self) -> str:
        return f"{self.deaths} replicas died under this request; it is refused for {self.seconds} s"


class AuthenticationFailed(RequestError):
    """The server asks for a key, and the request has none that it knows."""

    error_type = "authentication_error"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class UnavailableError(FlideError):
    """The request may be asked again later."""

    error_type = "unavailable_error"


class Overloaded(UnavailableError):
    """The queue is full; `retry_after_ms` is when it is expected to have room."""

    error_type = "rate_limit_error"

    def __init__(
        self, waiting: int, unit: str, limit: int, option: str, retry_after_ms: int
    ) -> None:
        super().__init__(waiting, unit, limit, option, retry_after_ms)
        self.waiting, self.unit, self.limit, self.option = waiting, unit, limit, option
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return (
            f"{self.waiting} {self.unit} wait, the queue takes {self.limit} ({self.option});"
            f" try again in {self.retry_after_ms} ms"
        )


class QuotaExceeded(UnavailableError):
    """A tenant's quota is used up; `retry_after_ms` is when there is more of it."""

    error_type = "rate_limit_error"

    def __init__(self, unit: str, quota: float, retry_after_ms: int) -> None:
        super().__init__(unit, quota, retry_after_ms)
        self.unit, self.quota, self.retry_after_ms = unit, quota, retry_after_ms

    def __str__(self) -> str:
        return (
            f"the quota of {self.quota:g} {self.unit} a minute is used up"
            f" ({self.unit}_per_minute); try again in {self.retry_after_ms} ms"
        )


class NotReady(UnavailableError):
    """The engine is starting or stopping; `retry_after_ms` is when it should be there, 0 if nobody
    can tell.
    """

    def __init__(self, reason: str, retry_after_ms: int = 0) -> None:
        super().__init__(reason, retry_after_ms)
        self.reason, self.retry_after_ms = reason, retry_after_ms

    def __str__(self) -> str:
        later = f"; try again in {self.retry_after_ms} ms" if self.retry_after_ms else ""
        return self.reason + later


class EngineStopped(UnavailableError):
    """The engine ended while it had the request, or before: another one may answer it.

    running: whether the request was in the round that it ended with, or only waited. replica: the
    id of the one whose engine it was, "" where that is not known.
    """

    def __init__(self, cause: str, running: bool = True, replica: str = "") -> None:
        super().__init__(cause, running, replica)
        self.cause, self.running, self.replica = cause, running, replica

    def __str__(self) -> str:
        return f"the engine stopped: {self.cause}"


class DeadlineExceeded(UnavailableError):
    """The answer did not come within the time the caller gave."""

    error_type = "timeout_error"

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return f"no answer within {self.seconds:g} s"


class EngineError(FlideError):
    """A fault of the engine, not of the request."""


class NonFiniteOutput(EngineError):
    """The model's output for this request holds NaN or infinity; no probability can be given.

    args: the questions. Any may have made the others so, as they are computed together.
    """

    def __str__(self) -> str:
        named, more = ", ".join(self.args[:_MOST_NAMED]), len(self.args) - _MOST_NAMED
        of = f"{named} and {more} more" if more > 0 else named
        which = "; one of them may have made the others so" if len(self.args) > 1 else ""
        return f"the model's output for {of} is not finite{which}"

    @property
    def for_logs(self) -> str:
        """Without the questions' ids."""
        return "the model's output is not finite"


class RoundFailed(EngineError):
    """The forward pass of this request failed, also when it ran alone."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)

    def __str__(self) -> str:
        return f"the forward pass failed: {self.args[0]}"


class PoolExhausted(EngineError):
    """A round needs more pages or slots than are free."""

    def __init__(self, kind: str, needed: int, free: int, total: int) -> None:
        super().__init__(kind, needed, free, total)
        self.kind, self.needed, self.free, self.total = kind, needed, free, total

    def __str__(self) -> str:
        return f"{self.needed} {self.kind} needed, {self.free} of {self.total} free (pool_bytes)"


class RoundTooLarge(EngineError):
    """A round fits no captured bucket: it has too many rows or nodes."""

    def __init__(self, rows: int, nodes: int, most_rows: int, most_nodes: int) -> None:
        super().__init__(rows, nodes, most_rows, most_nodes)
        self.rows, self.nodes, self.most_rows, self.most_nodes = rows, nodes, most_rows, most_nodes

    def __str__(self) -> str:
        return (
            f"a round of {self.rows} rows in {self.nodes} nodes fits no bucket; the largest holds"
            f" {self.most_rows} rows in {self.most_nodes} nodes (max_round_tokens)"
        )


class CheckpointRefused(EngineError):
    """A checkpoint from elsewhere cannot be used here."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"checkpoint refused: {self.reason} ({self.detail})"


class SetupError(FlideError):
    """The engine cannot start."""


class ConfigError(SetupError):
    """Options contradict each other, the checkpoint or the machine."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class WeightsError(SetupError):
    """A checkpoint folder lacks tensors, has unknown ones, or has wrong shapes."""

    def __init__(self, folder: str, problems: tuple[str, ...]) -> None:
        super().__init__(folder, problems)
        self.folder, self.problems = folder, problems

    def __str__(self) -> str:
        shown = "; ".join(self.problems[:8])
        more = f"; and {len(self.problems) - 8} more" if len(self.problems) > 8 else ""
        return f"{self.folder}: {shown}{more}"


def as_faults(errors: list[Any], prefix: tuple[str | int, ...] = ()) -> tuple[Fault, ...]:
    """pydantic's error list (`ValidationError.errors()`) as faults, each location under
    `prefix`: the first `MOST_FAULTS`, with names and messages cut, as both repeat what was sent.
    """
    found = [
        Fault((*prefix, *map(_cut, e["loc"])), str(_cut(e["msg"])), str(e["type"]))
        for e in errors[:MOST_FAULTS]
    ]
    if len(errors) > MOST_FAULTS:
        more = f"there are more faults than these {MOST_FAULTS}"
        found.append(Fault(prefix, more, "too_many_faults"))
    return tuple(found)


def _cut(part: str | int) -> str | int:
    if isinstance(part, int) or len(part) <= _MOST_CHARS:
        return part
    return f"{part[:_MOST_CHARS]}... ({len(part)} characters)"
