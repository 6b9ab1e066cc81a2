"""Documents that can rot are held to the code."""

import inspect
import re
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch
import yaml
from ray.serve.config import RequestRouterConfig

from benchmarks.plots import PLOTS, drawn
from benchmarks.results_file import RESULTS
from benchmarks.shapes import SHAPES
from benchmarks.tables import FILES, redrawn
from deployments.client import DecisionClient
from deployments.config import AppArgs
from deployments.metrics import METRICS
from flide_engine.config import EngineConfig
from flide_engine.engine import Engine
from flide_engine.errors import ConfigError
from flide_engine.memory import Card, plan_memory
from flide_engine.models.qwen3_5 import Qwen35Config
from router.http_errors import STATUS
from router.ingress import Gateway

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
HTTP = (ROOT / "docs" / "http.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DOCUMENTS = sorted(
    p for folder in ("", "docs", "tests", "tiny_model") for p in (ROOT / folder).glob("*.md")
)
CURRENT = [p for p in DOCUMENTS if p.name not in ("CHANGELOG.md", "DECISIONS.md", "gpu_runs.md")]
"""Those that speak of what is there now."""
ENGINE = set(EngineConfig.model_fields)
CALLS = (DecisionClient, DecisionClient.decide, Gateway.decide, Engine.submit, Engine.states)
ARGUMENTS = {name for call in CALLS for name in inspect.signature(call).parameters}
SIZED, CARDS_GB = ("0.8B", "2B", "4B", "9B"), (24, 48, 80, 141)


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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_no_document_is_empty(path: Path) -> None:
    """A title, and sentences below it."""
    title, _, rest = path.read_text().partition("\n")
    assert title.startswith("# "), path
    assert len(re.sub(r"^#.*$", "", rest, flags=re.MULTILINE).split()) > 20, path


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    """To a file of this project that is not empty, and to a heading that is there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.is_file(), f"{path.name}: {target}"
        assert file.stat().st_size, f"{path.name}: {target}"
        assert not anchor or anchor in headings(file.read_text()), f"{path.name}: {target}"


def headings(text: str) -> set[str]:
    """Anchors of a document's headings, as the web makes them."""
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", CURRENT, ids=lambda p: p.name)
def test_options_in_documents_exist(path: Path) -> None:
    """In tables of options, and where they are set: by that name, to a value that they take."""
    text = path.read_text()
    for table in re.findall(r"^\| option .*\n((?:\|.*\n)+)", text, re.MULTILINE):
        for cell in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE):
            assert set(re.findall(r"`(\w+)`", cell)) <= set(AppArgs.model_fields) | ENGINE, cell
    for name, value in re.findall(r"`([a-z_]+)=([^`\s]*)`", text):
        assert name in set(AppArgs.model_fields) | ENGINE | ARGUMENTS, name
        if value and value != "N" and name not in ARGUMENTS:
            AppArgs.model_validate({name: value})


@pytest.mark.parametrize("path", CURRENT, ids=lambda p: p.name)
def test_names_in_documents_exist(path: Path) -> None:
    """Identifiers are in this project's files, or metrics, or Serve's; Ray's variables aside."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    spans = re.findall(r"`([A-Za-z_][\w.]*)(?:=[^`]*|\([^`]*\))?`", text)
    named = {word for span in spans for word in span.split(".") if "_" in word.strip("_")}
    gone = {name for name in named if not name.startswith("RAY_")} - known_names()
    assert not gone, f"{path.name}: {sorted(gone)}"


@cache
def known_names() -> frozenset[str]:
    """Words of the files that are no documents, metrics without their prefix, Serve's options."""
    found: set[str] = set(RequestRouterConfig.model_fields)
    found |= {metric.exported.removeprefix("ray_flide_") for metric in METRICS.values()}
    packages = {p.parent for p in ROOT.glob("*/__init__.py")} - {ROOT / "tests"}
    code = [file for package in packages for file in package.rglob("*.py")]
    for file in (*code, *ROOT.glob("*.yaml"), *(ROOT / "deployments").rglob("*.yaml")):
        found |= set(re.findall(r"\w+", file.read_text()))
    return frozenset(found)


def test_alerts_in_operations_are_the_rules() -> None:
    """Each rule has a line that says what to do."""
    rules = yaml.safe_load((ROOT / "deployments" / "observability" / "alerts.yaml").read_text())
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert set(re.findall(r"^\| `(Flide\w+)` \|", OPERATIONS, re.MULTILINE)) == names


def test_pools_in_operations_are_what_is_planned() -> None:
    """For cards of four sizes, with default options; GB and MB of 1000."""
    shown = re.findall(r"^\| (\d.*) \|$", OPERATIONS, re.MULTILINE)
    assert [row.split(" | ") for row in shown] == [sizes(shape) for shape in SIZED]


def sizes(shape: str) -> list[str]:
    """A row of that table."""
    config = Qwen35Config.of(SHAPES[shape])
    weights = 2 * sum(prod(tensor) for tensor in config.tensor_shapes().values())
    state = config.state_shape()
    unit = state.unit_bytes(2)
    slot = unit * state.slot_units(2)
    row = [shape, f"{weights / 1e9:.1f}", f"{unit / 64 * 1000 / 1e6:.1f}", f"{slot / 1e6:.1f}"]
    for card in CARDS_GB:
        free = Card(card * 10**9, card * 10**9 - weights, weights)
        try:
            plan = plan_memory(EngineConfig(), state, torch.bfloat16, free)
            row.append(f"{plan.pool / 1e9:.0f}")
        except ConfigError:
            row.append("-")
    return row
