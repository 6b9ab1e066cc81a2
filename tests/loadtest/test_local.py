"""Starting a server for a load test, over stand-ins for the server."""

import stat
import sys
from pathlib import Path

import pytest

from loadtest.local import RAY_WAS_SLOW, serving

SERVES = 'echo "serving at $3"; echo "cluster: 1.2.3.4:5"; exec sleep 1000'


def stand_in(folder: Path, patch: pytest.MonkeyPatch, *starts: str) -> Path:
    """Each start does as told, one after the other. Returns the file that has a line a start."""
    script, count = folder / "python", folder / "count"
    cases = "".join(f"{number}) {what};;\n" for number, what in enumerate(starts, 1))
    script.write_text(
        f"#!/bin/sh\necho start >>{count}\ncase $(wc -l <{count} | tr -d ' ') in\n{cases}esac\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    patch.setattr(sys, "executable", str(script))
    return count


def test_a_start_that_ray_gives_up_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine; and the server is ended with the block."""
    count = stand_in(tmp_path, monkeypatch, f'echo "Exception: {RAY_WAS_SLOW}."; exit 1', SERVES)
    with serving(tmp_path / "out" / "log") as server:
        assert server.address == "1.2.3.4:5"
        assert server.url.startswith("http://127.0.0.1:")
        assert server.process.poll() is None
    assert server.process.poll() is not None
    assert len(count.read_text().split()) == 2


@pytest.mark.parametrize(("told", "starts"), [("port 80 is busy", 1), (RAY_WAS_SLOW, 3)])
def test_what_does_not_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, starts: int
) -> None:
    """With what the server said; at once where another try could not help."""
    count = stand_in(tmp_path, monkeypatch, *[f'echo "{told}"; exit 1'] * 3)
    with pytest.raises(RuntimeError, match=told), serving(tmp_path / "log"):
        raise AssertionError("nothing was started")
    assert len(count.read_text().split()) == starts
