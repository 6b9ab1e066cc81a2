"""`make` on machines that lack something."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
HALF = """#!/bin/sh
# as Debian's python3 without python3-venv: makes most of a folder, and fails
[ "$1" = -c ] && exit 0
mkdir -p .venv/bin && touch .venv/bin/python
echo "ensurepip is not available" >&2
exit 1
"""


def test_half_an_environment_is_not_kept(tmp_path: Path) -> None:
    """Or the next `make` would take it for a whole one."""
    python = tmp_path / "python3"
    python.write_text(HALF)
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for _ in range(2):
        done = subprocess.run(
            ["make", ".venv/bin/python", f"PYTHON={python}"],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
        assert done.returncode != 0
        assert "python3-venv" in done.stdout
        assert not (tmp_path / ".venv").exists()
