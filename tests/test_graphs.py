"""What of captured graphs needs no GPU."""

import numpy as np
import pytest
import torch

from flide_engine.graphs import MOST_PARTS, Landing


def test_a_landing_keeps_a_few_slices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that lives long meets every number of logits; each brings the right ones."""
    empty = torch.empty

    def pageable(*args: object, pin_memory: bool, **more: object) -> torch.Tensor:
        return empty(*args, **more)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", pageable)
        patched.setattr(torch.cuda, "Event", object)
        landing = Landing(torch.arange(3.0 * MOST_PARTS))
    for count in (*range(1, 3 * MOST_PARTS), *range(1, 9)):
        landing._host.zero_()
        assert np.array_equal(landing.bring(count), np.arange(count))
        assert not landing._host[count:].any()
        assert len(landing._parts) <= MOST_PARTS
