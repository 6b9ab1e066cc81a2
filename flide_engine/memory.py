"""An engine's memory on its device: what it may take, what for, and what does not fit."""

import gc
import logging
from dataclasses import dataclass

import torch

from flide_engine.config import GRAIN, EngineConfig
from flide_engine.errors import ConfigError
from flide_engine.layout.state_shape import StateShape

log = logging.getLogger(__name__)

WORK_SHARE, LEAST_WORK, MOST_WORK = 0.2, 5 << 30, 24 << 30
"""Part of an engine's memory on a card that graphs and work buffers may take; its bounds, bytes."""

SPARE_STATES = 16
"""Recurrent states of a pool without a byte budget, before those of checkpoints."""

CHECKPOINT_BYTES = 256 << 20
"""Bytes for checkpoints in a pool without a byte budget."""


@dataclass(frozen=True)
class Card:
    """Bytes of a GPU: in all, free, and those that this process holds."""

    total: int
    free: int
    own: int

    @classmethod
    def of(cls, device: torch.device) -> "Card | None":
        """As it is now, once what engines before had in this process is given back; None if the
        device is no GPU.
        """
        if device.type != "cuda":
            return None
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes: allowed in all (0 on a CPU: whatever there is), of the weights that are loaded, kept
    for graphs and work buffers, of the pool. units: pages that the pool holds, of `unit` bytes
    each; slot: how many of them a recurrent state takes; least: how many the longest prompt and one
    round take, with two states.
    """

    allowed: int
    weights: int
    work: int
    pool: int
    units: int
    unit: int
    slot: int
    least: int

    def __str__(self) -> str:
        parts = [
            f"pool {_gib(self.pool)} ({self.units} pages of {GRAIN} tokens, {self.unit} bytes each;"
            f" a recurrent state takes {self.slot})"
        ]
        if self.allowed:
            parts += [
                f"weights {_gib(self.weights)}",
                f"graphs and work buffers {_gib(self.work)}",
                f"of {_gib(self.allowed)} allowed (device_share)",
            ]
        return ", ".join(parts)

    def check_work(self, before: Card, after: Card) -> None:
        """Logs what this process has allocated for graphs of what was kept for them.

        What the driver holds for them is not in it. It is in what the card has less free, and so is
        all that other processes took meanwhile, as engines do that start beside each other.
        """
        taken, gone = after.own - before.own, before.free - after.free
        level = logging.WARNING if taken > self.work else logging.INFO
        log.log(
            level,
            "graphs take %s of %s kept for them; %s less are free on the card, whoever took them",
            _gib(taken), _gib(self.work), _gib(gone),
        )  # fmt: skip


def plan_memory(
    config: EngineConfig, shape: StateShape, dtype: torch.dtype, card: Card | None
) -> MemoryPlan:
    """What the pool may take once the weights are loaded.

    card: as it is then; None on a CPU. Without `pool_bytes` the pool takes on a GPU what the
    engine's share leaves, on a CPU what it needs. Raises ConfigError, with numbers, if the longest
    prompt and one round with two states do not fit, or if more than the share would be taken.
    """
    unit, slot = shape.unit_bytes(dtype.itemsize), shape.slot_units(dtype.itemsize)
    least = (config.max_prompt_tokens + config.max_round_tokens) // GRAIN + 1 + 2 * slot
    budget = config.pool_bytes
    allowed = weights = work = 0
    if card is not None:
        allowed, weights = int(config.device_share * card.total), card.own
        work = int(min(max(WORK_SHARE * allowed, LEAST_WORK), MOST_WORK))
        left = min(card.free, allowed - weights) - work
        budget = left if budget is None else budget
        if left <= 0 or budget > left:
            asked = "the pool" if config.pool_bytes is None else f"pool_bytes {budget}"
            raise ConfigError(
                f"device_share {config.device_share} of {card.total} bytes leaves {max(0, left)}"
                f" for {asked}: {card.free} are free, {weights} are taken by weights, {work} are"
                " kept for graphs and work buffers"
            )
    if budget is None:
        units = least + SPARE_STATES * slot + CHECKPOINT_BYTES // unit
    else:
        units = budget // unit
        if least > units:
            raise ConfigError(
                f"pool_bytes {budget} holds {units} pages of {GRAIN} tokens; max_prompt_tokens"
                f" {config.max_prompt_tokens} with max_round_tokens {config.max_round_tokens} needs"
                f" {least}, of which two states take {2 * slot}: {least * unit} bytes"
            )
    return MemoryPlan(allowed, weights, work, units * unit, units, unit, slot, least)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
