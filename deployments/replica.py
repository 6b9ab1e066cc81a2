"""One engine as a Serve replica: asyncio around one `Engine`, which runs on threads of its own."""

import asyncio
import logging
import os
from importlib.metadata import version
from typing import Any

from flide_engine.api import DecisionRequest, DecisionResponse
from flide_engine.config import EngineConfig
from flide_engine.errors import NotReady

log = logging.getLogger("ray.serve")


class EngineReplica:
    """Deployment `Engine`: enqueues, awaits, and never blocks its event loop."""

    def __init__(self, config: dict[str, Any]) -> None:
        """config: fields of EngineConfig."""
        from flide_engine.engine import Engine  # loads torch, in the replica only

        self._engine = Engine(EngineConfig.model_validate(config))
        log.info("engine %s ready in process %d", self._engine.card.name, os.getpid())

    async def decide(
        self, request: DecisionRequest | dict[str, Any], tenant: str = ""
    ) -> DecisionResponse:
        """The answers; tenant: whose checkpoints may be used.

        Raises the error tree; a cancelled call drops its work before it is packed.
        """
        future = self._engine.submit(request, tenant=tenant)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            raise

    async def describe(self) -> dict[str, str]:
        """Name, description and release date of the model, weights hash and versions."""
        import torch

        card = self._engine.card
        return {
            "name": card.name,
            "description": card.description,
            "release_date": card.release_date,
            "weights_hash": self._engine.weights_hash,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "version": version("flide-serve"),
        }

    async def check_health(self) -> None:
        """Called by Serve; a replica whose engine thread has stopped is replaced."""
        if not self._engine.is_alive():
            raise NotReady("the engine's thread has stopped")

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            engine.close()
