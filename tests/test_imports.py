"""Imports point down, and what must stay light stays light."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = [
    {"api", "config", "errors"},
    {"layout", "kernels", "families", "costs", "counters", "fairness", "pacing", "threads", "wire"},
    {"cache", "models", "admission", "limits", "packing"},
    {"scheduler", "readout", "resolve", "memory", "tiers", "work"},
    {"device_plan", "executor", "checkpoints"},
    {"runner", "graphs", "states", "parity"},
    {"rounds"},
    {"loop", "measuring"},
    {"state_operations"},
    {"engine"},
    {"fingerprint"},
]
ONLY = {
    "ray": (
        "router/request_router.py",
        "router/ingress.py",
        "router/asking.py",
        "router/channel.py",
        "router/request_context.py",
        "router/fan_out.py",
        "router/suspects.py",
        "router/crash.py",
        "router/waking.py",
        "router/ledger.py",
        "deployments/",
        "loadtest/handles.py",
        "benchmarks/fleet/",
        "benchmarks/serving.py",
        "benchmarks/callers.py",
        "benchmarks/soak.py",
    ),
    "triton": ("flide_engine/kernels/",),
    "cuda": ("flide_engine/kernels/hopper/program.py",),
    "fla": ("flide_engine/kernels/",),
    "torch": (
        "flide_engine/kernels/",
        "flide_engine/models/",
        "flide_engine/cache/beside.py",
        "flide_engine/cache/pinned.py",
        "flide_engine/cache/pool.py",
        "flide_engine/cache/rows.py",
        "flide_engine/cache/state_format.py",
        "flide_engine/cache/transfer.py",
        "flide_engine/cache/host.py",
        "flide_engine/cache/disk.py",
        "flide_engine/cache/disk_file.py",
        "flide_engine/tiers.py",
        "flide_engine/executor.py",
        "flide_engine/device_plan.py",
        "flide_engine/graphs.py",
        "flide_engine/parity.py",
        "benchmarks/",
        "flide_engine/memory.py",
        "flide_engine/resolve.py",
        "flide_engine/engine.py",
        "deployments/replica.py",
        "deployments/doctor.py",
        "deployments/inventory.py",
        "tiny_model/",
    ),
}
PACKAGES = ("flide_engine", "router", "deployments", "tiny_model", "loadtest", "benchmarks")


@cache
def sources() -> list[tuple[str, ast.Module]]:
    """(path from the root, syntax tree) of every file of the packages."""
    files = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
    return [(str(p.relative_to(ROOT)), ast.parse(p.read_text())) for p in files]


@cache
def imported(tree: ast.Module) -> set[str]:
    """Full names of all modules a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def level(part: str) -> int:
    """Level of a module or package of the engine."""
    return next(i for i, names in enumerate(LEVELS) if part in names)


def test_the_engine_imports_downwards_only() -> None:
    """A file imports lower levels, and its own package; level 0 imports itself only."""
    for path, tree in sources():
        parts = Path(path).with_suffix("").parts
        if parts[0] != "flide_engine" or parts[1] == "__init__":
            continue
        for name in imported(tree):
            other = name.split(".")
            assert other[0] not in {"router", "deployments", "loadtest", "benchmarks"}, path
            if other[0] != "flide_engine" or other[1] == parts[1] or level(parts[1]) == 0:
                continue
            assert level(other[1]) < level(parts[1]), f"{path} imports {name}"


def test_rooms_import_the_engine_and_never_each_other_upwards() -> None:
    """`router` knows no deployment."""
    for path, tree in sources():
        if path.startswith("router/"):
            assert not any(n.split(".")[0] == "deployments" for n in imported(tree)), path


@pytest.mark.parametrize("library", ONLY)
def test_libraries_stay_in_their_rooms(library: str) -> None:
    """Ray, Triton, fla and torch are imported only where they belong."""
    for path, tree in sources():
        if any(name.split(".")[0] == library for name in imported(tree)):
            assert path.startswith(ONLY[library]), f"{path} imports {library}"


@pytest.mark.parametrize(
    "statement", ["import flide_engine", "from deployments import DecisionClient", "import router"]
)
def test_importing_loads_no_torch(statement: str) -> None:
    """A client's process stays small."""
    code = f"import sys; {statement}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_files_stay_small() -> None:
    """Files of at most 400 lines, functions of at most 60."""
    for path, tree in sources():
        lines = (ROOT / path).read_text().count("\n")
        assert lines <= 400, f"{path} has {lines} lines"
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[1 if ast.get_docstring(node) else 0 :][:1]
                length = (node.end_lineno or 0) - first[0].lineno + 1 if first else 0
                assert length <= 60, f"{path}: {node.name} has {length} lines"
