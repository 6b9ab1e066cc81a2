"""What an engine counts."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Since the start. Tokens: asked for, found in checkpoints, computed; of those found, how many
    came back from host memory and from disk; and of the states' whole grains, how many were
    computed again, request by request; rows that padded rounds to their buckets. Requests that
    resumed from a checkpoint. Rounds, and seconds in which one was under way.
    """

    asked: int = 0
    reused: int = 0
    computed: int = 0
    from_host: int = 0
    from_disk: int = 0
    recomputed: int = 0
    padding: int = 0
    resumed: int = 0
    rounds: int = 0
    busy_seconds: float = 0.0
