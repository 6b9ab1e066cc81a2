"""What a user may set on one app: `serve run deployments.app:build name=value ...`."""

import difflib
import json
import os
from typing import Any, Literal, NamedTuple, Self, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from flide_engine.config import EngineConfig
from router.auth import is_hash


class Threads(NamedTuple):
    """number: of threads, 0: as many as its machine has cores, divided among so many replicas."""

    number: int
    among: int

    def here(self) -> int:
        """On this machine."""
        return self.number or max(1, len(os.sched_getaffinity(0)) // self.among)


HandOver = Literal["auto", "always", "never"]


class AppArgs(BaseModel):
    """Arguments of one app. The engine's options stand beside them by their own names, e.g.
    `model=`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineConfig = Field(EngineConfig(), description="Options of each replica's engine.")
    num_replicas: int | Literal["auto"] = Field(
        1, description="Engine replicas; auto scales with load."
    )
    min_replicas: int = Field(
        1, ge=0, description="Fewest engine replicas when num_replicas is auto; 0: none in silence."
    )
    max_replicas: int = Field(
        8, gt=0, description="Most engine replicas when num_replicas is auto."
    )
    cold_start_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that a first engine replica is taken to need, until a process has seen"
        " it start; who waits less is sent away at once. Of use with min_replicas 0.",
    )
    latency_objective_ms: float = Field(
        500.0,
        gt=0,
        description="Predicted wait in milliseconds above which auto wants more replicas.",
    )
    busy_target: float = Field(
        0.7, gt=0, le=1, description="Share of a replica's time that auto lets load fill."
    )
    downscale_delay_s: float = Field(
        120.0, ge=0, description="Seconds that auto waits before it takes replicas away."
    )
    agents_per_replica: int = Field(
        32,
        gt=0,
        description="Agents (states asked about again within a minute) that one engine replica is"
        " meant for.",
    )
    handover: HandOver = Field(
        "auto",
        description="Whether a replica that leaves gives its checkpoints to those who own their"
        " states next; auto: where moving the bytes takes less time than computing them.",
    )
    graceful_shutdown_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that a replica, also of the Gateway, has to finish its requests and"
        " hand over before it is killed.",
    )
    gpus_per_replica: float | None = Field(
        None,
        ge=0,
        description="GPUs of one engine replica; none: 1 if the cluster has a GPU, else 0.",
    )
    cpus_per_replica: float = Field(
        1.0,
        ge=0,
        description="CPUs that Ray sets aside for a replica; if 1 or more are given, also the"
        " threads of its CPU kernels, which are else its machine's cores over all replicas.",
    )
    state_routing: bool = Field(
        True,
        description=(
            "Sends each state, also as it grows, to the replica that has it; off: Serve's own "
            "choice by requests in flight."
        ),
    )
    routing_stats_period_s: float | None = Field(
        None,
        gt=0,
        description=(
            "Seconds between what replicas tell all routers of their load and what they hold; "
            "none: 2, or a twentieth of the replicas if that is more."
        ),
    )
    channels: bool = Field(
        True,
        description=(
            "Gateways ask replicas over connections of their own, each on a port that the system "
            "chooses; off, or where it cannot be reached: by Serve's handles."
        ),
    )
    gateway_replicas: int = Field(
        1, gt=0, description="Gateway replicas; fixed, one for 400 requests/s."
    )
    max_body_bytes: int = Field(
        3 << 20,
        gt=0,
        description="Largest request body, as it comes; decoded it is max_decoded_bytes'.",
    )
    api_key_sha256: str = Field(
        "",
        description="SHA-256 hashes of API keys, in hex, comma separated; without these and"
        " api_keys no key is needed.",
    )
    api_keys: str = Field(
        "",
        description="File of tenants, with hashes of their keys and quotas, or env:NAME for an"
        " environment variable with the same text; Gateways read it.",
    )
    log_encoding: Literal["TEXT", "JSON"] | None = Field(
        None, description="Format of the replicas' logs; none: as Serve is configured, else TEXT."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None = Field(
        None, description="Least level that is logged; none: as Serve is configured, else INFO."
    )
    tenant_names: str = Field(
        "",
        description='Names of keys in metrics: name=hash, comma separated; other keys are "other".',
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_engine_options(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        flat = {k: v for k, v in data.items() if k in EngineConfig.model_fields}
        rest = {k: v for k, v in data.items() if k not in flat}
        nested = rest.get("engine", {})
        if isinstance(nested, EngineConfig):
            nested = nested.model_dump(exclude_unset=True)
        if not isinstance(nested, dict) or not (given := {**nested, **flat}):
            return data
        return {**rest, "engine": {name: _parsed(name, value) for name, value in given.items()}}

    @model_validator(mode="wrap")
    @classmethod
    def _near_names(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise _with_near_names(error) from None

    @model_validator(mode="after")
    def _values_make_sense(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} exceeds {self.max_replicas} (max)")
        if self.may_sleep and not self.state_routing:
            raise ValueError("min_replicas 0 needs state_routing, which tells who is there")
        if isinstance(self.num_replicas, int) and self.num_replicas < 1:
            raise ValueError(f"num_replicas {self.num_replicas}; at least 1, or auto")
        if not all(map(is_hash, self.key_hashes)):
            raise ValueError(
                "api_key_sha256 takes SHA-256 hashes of keys in lower-case hex, not keys"
            )
        _ = self.names_by_key  # raises for what cannot be meant
        return self

    @property
    def names_by_key(self) -> dict[str, str]:
        """What tenants are called in metrics, by the hash of their key. Raises ValueError."""
        found = {}
        for pair in filter(None, (p.strip() for p in self.tenant_names.split(","))):
            name, separator, digest = pair.partition("=")
            if not separator or not name or digest not in self.key_hashes:
                raise ValueError(
                    f"tenant_names has {pair!r}; name=hash is expected, of a key in api_key_sha256"
                )
            found[digest] = name
        return found

    def engine_options(self, gpus: float) -> dict[str, Any]:
        """Fields of each replica's EngineConfig; gpus: those that a replica gets. One that shares
        its card takes no more of its memory than that part, unless told otherwise.
        """
        options = self.engine.model_dump()
        if 0 < gpus < 1 and "device_share" not in self.engine.model_fields_set:
            options["device_share"] = gpus
        return options

    def gpus_here(self, gpus: float) -> float:
        """GPUs of one engine replica where there are so many in all."""
        if self.gpus_per_replica is not None:
            return self.gpus_per_replica
        return 1.0 if gpus >= 1 else 0.0

    @property
    def threads(self) -> Threads:
        """How many threads the CPU kernels of a replica run on: those that are set aside for it, if
        that was said, else its share of its machine.
        """
        if "cpus_per_replica" in self.model_fields_set and self.cpus_per_replica >= 1:
            return Threads(int(self.cpus_per_replica), 1)
        scales = self.num_replicas == "auto"
        return Threads(0, max(1, self.min_replicas) if scales else self.most_replicas)

    @property
    def stats_period_s(self) -> float:
        """Seconds between a replica's routing stats.

        Each goes to every router, so a large fleet tells less often: 1,000 replicas every 50 s, as
        simulated.
        """
        if self.routing_stats_period_s is not None:
            return self.routing_stats_period_s
        return max(2.0, self.most_replicas / 20)

    @property
    def most_replicas(self) -> int:
        """Engine replicas that there may be."""
        return self.max_replicas if self.num_replicas == "auto" else self.num_replicas

    @property
    def may_sleep(self) -> bool:
        """Whether there may be no engine replica where there is nothing to do."""
        return self.num_replicas == "auto" and self.min_replicas == 0

    @property
    def key_hashes(self) -> tuple[str, ...]:
        """The configured key hashes."""
        return tuple(h.strip() for h in self.api_key_sha256.split(",") if h.strip())


def _parsed(name: str, value: Any) -> Any:
    """A mapping that came as a word, which is JSON; what is none is left as it is."""
    field = EngineConfig.model_fields.get(name)
    if field is None or get_origin(field.annotation) is not dict or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _with_near_names(error: ValidationError) -> ValidationError:
    """The same faults; of an option that there is not, with the name that is nearest."""
    names = (*AppArgs.model_fields, *EngineConfig.model_fields)
    lines: list[InitErrorDetails] = []
    for fault in error.errors(include_url=False):
        kind: str | PydanticCustomError = fault["type"]
        if kind == "extra_forbidden":
            near = difflib.get_close_matches(str(fault["loc"][-1]), names, 1)
            told = f"no such option; did you mean {near[0]}?" if near else "no such option"
            kind = PydanticCustomError("no_such_option", told)
        more = {"loc": fault["loc"], "input": fault["input"], "ctx": fault.get("ctx", {})}
        lines.append(InitErrorDetails(type=kind, **more))  # type: ignore[typeddict-item]
    return ValidationError.from_exception_data(error.title, lines)
