"""Documents that can rot are held to the code."""

import re
from pathlib import Path

from benchmarks.plots import PLOTS, drawn
from benchmarks.results_file import RESULTS
from benchmarks.tables import FILES, redrawn
from deployments.config import AppArgs
from flide_engine.config import EngineConfig
from router.http_errors import STATUS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
HTTP = (ROOT / "docs" / "http.md").read_text()


def test_folders_in_the_readme_exist_and_none_is_missing() -> None:
    """Every folder of the table is there; every package is in the table."""
    named = set(re.findall(r"^\| `([\w/]+)/`", README, re.MULTILINE))
    for folder in named:
        assert (ROOT / folder).is_dir(), folder
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    parts = {f"flide_engine/{p.parent.name}" for p in (ROOT / "flide_engine").glob("*/__init__.py")}
    assert packages | parts <= named


def test_errors_and_limits_are_documented() -> None:
    """Every error with its status, every limit with its default."""
    for error, status in STATUS.items():
        assert re.search(rf"^\| {status} \| .*`{error.__name__}`", HTTP, re.MULTILINE), error
    limits = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+)", HTTP, re.MULTILINE))
    fields = {**EngineConfig.model_fields, **AppArgs.model_fields}
    for name, shown in limits.items():
        default = fields[name].default
        value = int(shown.replace(",", ""))
        assert default in (value, value << 20), name
    assert {name for name in fields if name.startswith("max_")} - set(limits) == {
        "max_round_tokens",
        "max_replicas",
    }


def test_every_option_says_what_it_does() -> None:
    """A sentence on each field."""
    for model in (EngineConfig, AppArgs):
        for name, field in model.model_fields.items():
            assert field.description, name
            assert field.description.endswith("."), name


def test_tables_are_those_of_the_result_files() -> None:
    """`python -m benchmarks.tables` would change nothing."""
    for path in FILES:
        assert redrawn(path.read_text()) == path.read_text(), path.name


def test_plots_are_those_of_the_result_files() -> None:
    """`python -m benchmarks.plots` would change nothing."""
    for name in PLOTS:
        assert drawn(name) == (RESULTS / f"{name}.svg").read_text(), name
