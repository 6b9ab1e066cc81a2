"""What a user may set on one engine: frozen, unknown names refused, no environment read."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flide_engine.api import MAX_OPTIONS

GRAIN = 64
"""Tokens of one grain: KV page, delta-rule chunk, unit of sharing and of checkpoints."""


class EngineConfig(BaseModel):
    """Options of one engine on one device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(
        None,
        description="Weights folder, hub name[@revision], or nano (random, for tests); none: the"
        " embedded model.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto takes a GPU if one is visible."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type of weights and activations; auto: float32 on a CPU, bfloat16 on a GPU.",
    )
    kernels: Literal["auto", "reference", "triton"] = Field(
        "auto", description="auto: Triton on a GPU, the references on a CPU."
    )
    deterministic: bool | None = Field(
        None,
        description="Whether every answer is bit for bit what its prompt gives alone; none: where"
        " the kernels are Triton's. True also has replicas with other bits than their fleet's taken"
        " out of service.",
    )
    fork: Literal["token", "grain"] = Field(
        "token",
        description="Where branches start: at their first own token, or at the grain before it.",
    )
    max_round_tokens: int = Field(
        8192,
        ge=2 * GRAIN,
        description="Longest flat stream of one round; longer work takes several.",
    )
    late_rounds: bool = Field(
        False,
        description="Whether a round is put together only when the one that runs is about to end,"
        " so that what comes meanwhile joins it; off: as soon as that one has begun. Of use on a"
        " GPU, where rounds run ahead; on an H200 with 64 clients it gained nothing.",
    )
    max_request_tokens: int = Field(65536, gt=0, description="Most new tokens of one request.")
    max_prompt_tokens: int = Field(
        32768, gt=0, description="Most tokens of the state and one question."
    )
    max_decoded_bytes: int = Field(
        3 << 20,
        gt=0,
        description="Largest request, in bytes of its JSON: a body when decoded, or what a handle"
        " was given.",
    )
    max_questions: int = Field(1024, gt=0, description="Most questions of one request.")
    max_options: int = Field(
        MAX_OPTIONS,
        ge=2,
        le=MAX_OPTIONS,
        description="Most options of one choice; the contract ends at 255.",
    )
    max_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Longest time in seconds that a request may ask for, and what it has if it"
        " names none.",
    )
    max_queued_tokens: int = Field(
        262144,
        gt=0,
        description="Tokens that may wait, half of them of batch work; more is refused with a time"
        " to try again.",
    )
    max_queue_ms: int = Field(
        30000,
        gt=0,
        description="Predicted wait in milliseconds from which on requests are refused; half of it"
        " for batch work.",
    )
    measure_costs: bool | None = Field(
        None,
        description="Whether rounds of each length are timed at start, so that the first waits are"
        " predicted, too; none: on a GPU.",
    )
    batch_age_s: float = Field(
        30.0, gt=0, description="Seconds after which batch work that waits counts as interactive."
    )
    tenant_weights: dict[str, Annotated[float, Field(ge=0.001, le=1000)]] = Field(
        {},
        description="Shares of tenants (names, or hashes of keys) where several wait, and of pins,"
        " from 0.001 to 1000; others 1.",
    )
    max_waiting_requests: int = Field(
        4096,
        gt=0,
        description="Requests that may wait or be rendered; each of several tenants has its share,"
        " also when others fill it.",
    )
    pool_bytes: int | None = Field(
        None,
        gt=0,
        description="Memory for KV pages, recurrent and convolution states; none: on a GPU what"
        " device_share leaves, else what the longest prompt and one round need, and 256 MiB.",
    )
    device_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Part of the card's memory that this engine may use, where several share it;"
        " in a replica its part of a GPU, unless set.",
    )
    keep_checkpoints: bool = Field(
        True, description="Whether states are kept for later requests that begin alike."
    )
    pin_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Part of the pool, of host_bytes and of disk_bytes that callers may keep from"
        " eviction by pins and snapshots; a tenant at most w/(w+1) of what others leave of it, w"
        " being its weight.",
    )
    host_bytes: int = Field(
        0, ge=0, description="Host memory for copies of checkpoints; 0: none are made."
    )
    disk_folder: Path | None = Field(
        None,
        description="Folder in which checkpoints outlive the process; needs host_bytes. Engines"
        " that share it each take a numbered folder in it, the next one that of one that ended.",
    )
    disk_bytes: int = Field(
        64 << 30, gt=0, description="Bytes of one engine's checkpoint files in disk_folder."
    )
    tier_state_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type of recurrent states in host memory and on disk; bfloat16 halves them and"
        " is not exact (docs/checkpoints.md).",
    )
    option_cache_entries: int = Field(
        65536,
        ge=0,
        description="Option vectors kept across requests, of all tenants together, each finding its"
        " own only (option-vector families).",
    )
    text_cache_bytes: int = Field(
        128 << 20,
        ge=0,
        description="Memory for texts and their token ids, by tenant, so that of a state that has"
        " grown only the end is tokenized; 0: none are kept.",
    )
    render_threads: int = Field(2, gt=0, description="Threads that render and tokenize.")
    watchdog_seconds: float = Field(
        120.0,
        gt=0,
        description="A round that takes longer counts as stuck: the engine is no longer healthy.",
    )
    compute_threads: int | None = Field(
        None,
        gt=0,
        description="Threads of the CPU kernels; none: 1 for a small model, else torch's choice.",
    )

    @model_validator(mode="after")
    def _request_holds_a_prompt(self) -> Self:
        if self.max_prompt_tokens > self.max_request_tokens:
            raise ValueError(
                f"max_prompt_tokens {self.max_prompt_tokens} exceeds"
                f" max_request_tokens {self.max_request_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _exact_states_where_bits_count(self) -> Self:
        if self.deterministic and self.tier_state_dtype != "float32":
            raise ValueError(
                f"deterministic needs tier_state_dtype float32, not {self.tier_state_dtype}"
            )
        return self
