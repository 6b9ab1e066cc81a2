"""For whom a checkpoint is kept: names of states, and what these were routed on."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

MOST_BRANCHES = 64
"""Further names a checkpoint may be kept for."""


@dataclass(eq=False, kw_only=True)
class Named:
    """For whom a checkpoint is kept.

    name: what its state goes by (a session, a trajectory), or "". anchor: what its state was last
    routed on, or ""; a state without a name goes by it. branches: further names it is kept for,
    each with its anchor. pinned: never evicted. is_base: it is kept for nobody any more but those
    that continue it.
    """

    name: str = ""
    anchor: str = ""
    branches: dict[str, str] = field(default_factory=dict)
    pinned: bool = False
    is_base: bool = False

    def goes_by(self, name: str) -> bool:
        """Whether a name means it; "" means every one that is kept for somebody."""
        known = name in ("", self.name or self.anchor) or name in self.branches
        return known and not self.is_base

    def names(self) -> list[tuple[str, str]]:
        """Each name, "" for none, with its anchor; nothing if it is kept for nobody."""
        if self.is_base:
            return []
        branches = [("" if n == anchor else n, anchor) for n, anchor in self.branches.items()]
        return [(self.name, self.anchor), *branches]

    def keep_for(self, name: str, anchor: str) -> bool:
        """Keeps it for one more name; False if it is kept for as many as may be. Without a name:
        `anchor` is what its state without one is routed on from now on.
        """
        if self.is_base:
            self.name, self.anchor, self.is_base = name, anchor, False
        elif name == self.name and (name or anchor not in self.branches):
            self.anchor = anchor or self.anchor
        else:
            return self._keep_beside(name or anchor, anchor)
        return True

    def _keep_beside(self, goes_by: str, anchor: str) -> bool:
        if goes_by and not self.goes_by(goes_by):
            if len(self.branches) == MOST_BRANCHES:
                return False
            self.branches[goes_by] = anchor
        return True

    def leave(self, name: str) -> bool:
        """No longer keeps it for a name, "" for all; False if it is now kept for nobody."""
        if not name or not self.branches:
            self.name, self.anchor, self.branches = "", "", {}
            self.pinned, self.is_base = False, True
        elif self.branches.pop(name, None) is None:
            first = next(iter(self.branches))
            self.anchor = self.branches.pop(first)
            self.name = "" if first == self.anchor else first
        return not self.is_base

    def known(self) -> "Named":
        """All of this, and nothing of what it is part of; changes of one are not the other's."""
        told = {f.name: getattr(self, f.name) for f in fields(Named)}
        return Named(**{**told, "branches": dict(self.branches)})

    def learn(self, other: "Named") -> None:
        """Keeps it for all that another, later told copy of it is kept for."""
        for i, (name, anchor) in enumerate(other.names()):
            if i and not name:  # of one more nameless state: the first is not routed on that
                self._keep_beside(anchor, anchor)
            else:
                self.keep_for(name, anchor)
        self.pinned = self.pinned or other.pinned


def names_text(known: Named) -> str:
    """For whom a checkpoint is kept, as text."""
    return json.dumps(asdict(known.known()))


def names_in(text: str) -> dict[str, Any]:
    """The fields of `names_text`. Raises ValueError if one is missing or of another type."""
    found = json.loads(text)
    kinds = {"name": str, "anchor": str, "branches": dict, "pinned": bool, "is_base": bool}
    if not isinstance(found, dict) or set(found) != set(kinds):
        raise ValueError("it has other fields")
    typed = all(isinstance(found[k], kind) for k, kind in kinds.items())
    if not typed or not all(isinstance(t, str) for t in found["branches"].values()):
        raise ValueError("a field is of another type")
    return found
