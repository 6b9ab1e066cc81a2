"""What sets a replica's arithmetic apart from its fleet's. Pure.

Standard library only: this module travels by value with the request router.

Each replica answers the same few requests before it is ready and tells a hash of the raw bits
(`flide_engine.fingerprint`) beside the hash of its weights, in what Serve calls its replica
metadata. Replicas with equal weights should tell equal bits.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

METADATA = "flide_fingerprint"


class Fingerprint(NamedTuple):
    """weights: hash of the weights. bits: hash of what the probe gave, bit for bit. stack: what it
    was computed with. strict: whether this replica promises the fleet's bits (`deterministic`).
    since: seconds since the epoch when it was taken; elder replicas are the fleet where opinions
    are even.
    """

    weights: str
    bits: str
    stack: str
    strict: bool
    since: float

    @property
    def text(self) -> str:
        """What answers carry as `x_fingerprint`."""
        return f"{self.weights}-{self.bits}"

    def encode(self) -> dict[str, list[object]]:
        """What `record_replica_metadata` returns."""
        return {METADATA: list(self)}


def decode(metadata: object) -> Fingerprint | None:
    """The fingerprint in a replica's metadata, or None for anything else."""
    told = metadata.get(METADATA) if isinstance(metadata, Mapping) else None
    if not isinstance(told, (list, tuple)) or len(told) != len(Fingerprint._fields):
        return None
    weights, bits, stack, strict, since = told
    if not all(isinstance(text, str) for text in (weights, bits, stack)):
        return None
    if not isinstance(strict, bool) or not isinstance(since, (int, float)):
        return None
    return Fingerprint(weights, bits, stack, strict, since)


def odd_ones(replicas: Mapping[str, Fingerprint]) -> dict[str, str]:
    """Replicas whose bits are not their fleet's, each with the reason.

    A fleet is the replicas of equal weights; its bits are those of most of them, or of the eldest
    among as many. Other weights are another fleet: a rolling update has two for a while.
    """
    fleets: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, told in replicas.items():
        fleets[told.weights][told.bits].append(name)
    odd = {}
    for weights, parties in fleets.items():

        def weight(bits: str, parties: Mapping[str, list[str]] = parties) -> tuple[int, float, str]:
            eldest = min(replicas[name].since for name in parties[bits])
            return len(parties[bits]), -eldest, bits

        right = max(parties, key=weight)
        like = replicas[min(parties[right])]
        count = sum(map(len, parties.values()))
        for bits, names in parties.items():
            for name in names if bits != right else ():
                odd[name] = (
                    f"the probe gave bits {bits} here and {right} on {len(parties[right])} of"
                    f" {count} replicas with weights {weights}; here {replicas[name].stack}, there"
                    f" {like.stack}"
                )
    return odd
