"""The engine as Ray Serve deployments, and the client that agents hold. Importing it loads no
torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deployments.client import DecisionClient

__all__ = ["DecisionClient"]


def __getattr__(name: str) -> Any:
    if name == "DecisionClient":
        from deployments.client import DecisionClient

        return DecisionClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
