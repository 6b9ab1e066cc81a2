"""The files of a run: its JSON and its page."""

import json
from collections.abc import Sequence
from pathlib import Path

from loadtest.report import page
from loadtest.stats import FORMAT, Run


def write_run(run: Run, folder: Path) -> tuple[Path, Path]:
    """Writes run.json and report.html into the folder, made if it is absent; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, report = folder / "run.json", folder / "report.html"
    data.write_text(json.dumps(run, indent=1) + "\n")
    return data, write_page([run], report)


def write_page(runs: Sequence[Run], path: Path) -> Path:
    """Writes the page about runs; its path."""
    path.write_text(page(runs))
    return path


def read_run(path: Path) -> Run:
    """A run's JSON. Raises ValueError if the file is not one, or of another format."""
    run = json.loads(path.read_text())
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise ValueError(f"{path} is not a run of format {FORMAT}")
    return run
