"""What callers of an engine may do with its states by name, from any thread."""

from collections.abc import Callable, Mapping
from functools import partial

from flide_engine.loop import RoundLoop
from flide_engine.states import Leaf, StateInfo, States


class StateOperations:
    """The part of `Engine` that is about what it remembers. Each call waits until the engine is
    between two rounds, and raises NotReady if it is closed. What it changes holds on disk when it
    returns.

    name: of a state, what its requests were submitted with; or the anchor of a state without one.
    """

    _loop: RoundLoop
    _states: States
    _origin: Mapping[str, str]  # what computes its states: weights and stack

    def states(self, tenant: str | None = "", name: str = "") -> list[StateInfo]:
        """What is remembered of a tenant's states, of one name or of all, longest first.

        tenant: None for every one's.
        """
        found: list[StateInfo] = self._loop.call(lambda: self._states.describe(tenant, name))
        return found

    def pin(self, name: str, tenant: str = "", pinned: bool = True) -> int:
        """Keeps a named state from eviction on every tier, or no longer: how many copies.

        Raises TooMuchPinned.
        """
        return self._changed(lambda: self._states.pin(tenant, name, pinned))

    def snapshot(self, name: str, tenant: str = "") -> int:
        """Keeps the longest checkpoint of a named state from eviction: its tokens, 0 if there is
        none; `rollback` and `branch` take them. Raises TooMuchPinned.
        """
        return self._changed(lambda: self._states.snapshot(tenant, name))

    def rollback(self, name: str, tokens: int, tenant: str = "") -> int:
        """Forgets what a named state was after `tokens`, on every tier: how many copies.

        The next request that begins alike resumes from what is left.
        """
        return self._changed(lambda: self._states.forget(tenant, name, tokens))

    def branch(
        self, name: str, new: str, tokens: int = 1 << 62, tenant: str = "", anchor: str = ""
    ) -> int:
        """Keeps a named state as it was after at most `tokens` for a second trajectory: the tokens
        that both begin with, 0 if nothing is remembered. Either may be forgotten without the other.

        anchor: what the second one is routed on. Raises TooManyBranches.
        """
        return self._changed(lambda: self._states.branch(tenant, name, new, tokens, anchor))

    def forget(self, name: str, tenant: str = "") -> int:
        """Drops a named state on every tier, but for what requests are using and other names are
        kept for: how many copies.
        """
        return self._changed(lambda: self._states.forget(tenant, name))

    def _changed(self, change: Callable[[], int]) -> int:
        """Makes a change on the engine's thread, and files agree with it on the caller's."""
        count = int(self._loop.call(change))
        self._states.flush()
        return count

    def export_state(self, name: str = "", tenant: str = "") -> list[bytes]:
        """A tenant's checkpoints, of one name or of all, for another process like this one:
        those on the device that values were read after, and were finite.
        """
        known = self._loop.call(lambda: self._states.known(tenant, name))
        # one by one: rounds run between the copies
        copied = (self._loop.call(partial(self._states.copied, *one)) for one in known)
        return [self._states.write(c, self._origin) for c in copied if c is not None]

    def import_state(self, data: bytes) -> int:
        """Takes in an exported checkpoint: its tokens, or 0 if it was known.

        Raises CheckpointRefused, and PoolExhausted if no room can be made for it.
        """
        parcel = self._states.read(data, self._origin)  # here, as it holds up no round
        return int(self._loop.call(lambda: self._states.adopt(parcel)))

    def leaves(self) -> list[Leaf]:
        """What another engine needs to go on with every state, the last used first."""
        found: list[Leaf] = self._loop.call(self._states.leaves)
        return found

    def export_leaf(self, leaf: Leaf) -> bytes | None:
        """One of `leaves` for `import_state` elsewhere; None if it was evicted meanwhile."""
        parcel = self._loop.call(lambda: self._states.copied_leaf(leaf))
        return None if parcel is None else self._states.write(parcel, self._origin)
