"""`python -m deployments.options_page`: writes docs/options.md from the options themselves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from deployments.config import AppArgs
from flide_engine.config import EngineConfig

PAGE = Path(__file__).parents[1] / "docs" / "options.md"

HEAD = """\
# Options

`make serve ARGS="name=value ..."` and `serve run deployments.app:build name=value ...` take them as
words, `args` of a Serve config file as a mapping; `EngineConfig` has those of the engine. A mapping
is given as JSON: `tenant_weights='{"acme": 2}'`. `make doctor ARGS=...` shows every value after
defaults and what is wrong with them. This page is written by `python -m deployments.options_page`.
"""

LOCAL = (
    ("port", "8000", "Port of the server on this machine; `PORT=` of make."),
    (
        "insecure",
        "false",
        "Starts although `RAY_AUTH_MODE=disabled` lets whoever reaches this machine run code in the"
        " cluster.",
    ),
)


def page() -> str:
    """The page."""
    parts = [
        HEAD,
        "## Of the app\n",
        *_table("option", tuple(_rows(AppArgs))),
        "\n## Of each engine\n",
        *_table("option", tuple(_rows(EngineConfig))),
        "\n## Of `make serve` alone\n",
        *_table("word", LOCAL),
    ]
    return "\n".join(parts) + "\n"


def _table(what: str, rows: tuple[tuple[str, str, str], ...]) -> Iterator[str]:
    yield f"| {what} | default | what it is |"
    yield "|---|---|---|"
    for name, default, text in rows:
        yield f"| `{name}` | {default} | {text.replace('|', chr(92) + '|')} |"


def _rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        if name != "engine":
            yield name, _shown(field.default), field.description or ""


def _shown(default: Any) -> str:
    """A default as it would be given."""
    if default is None or default in ("", {}):
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:,}" if isinstance(default, int) else str(default)


if __name__ == "__main__":
    PAGE.write_text(page())
