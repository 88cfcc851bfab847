"""The settings reference, generated: `python -m server_app.settings_page > docs/SETTINGS.md`.

With `--pyproject` it rewrites the run config in pyproject.toml.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from fedpsa_strategy.checks import describe_range, key_of
from fedpsa_strategy.methods.registry import readers
from server_app.settings import Settings

_HEAD = """# Settings

Every setting of a run, generated from `server_app/declared.py` and the methods. Change any of them
with `flwr run . --run-config "key=value ..."`, or with `--set key=value` of our own commands;
strings are quoted in a run config. Impossible values and combinations are refused before the first
message.
"""
# The setting with which each group begins.
_GROUPS = {
    "strategy": "What is trained",
    "lr": "Local training",
    "fraction_train": "Who works when",
    "num_server_rounds": "When it ends, and when it is tested",
    "buffer_size": "The methods",
    "min_nodes": "Nodes that fail",
    "dp_noise_multiplier": "Privacy",
    "checkpoint_versions": "Checkpoints",
    "run_dir": "Places",
    "status_interval": "Watching",
}
_PYPROJECT = "pyproject.toml"
_TABLE = "[tool.flwr.app.config]\n"


def settings_page() -> str:
    """Return the page."""
    lines = [_HEAD]
    for item in fields(Settings):
        if heading := _GROUPS.get(item.name, ""):
            lines += ["", f"## {heading}", "", "| key | default | allowed | meaning |"]
            lines += ["|---|---|---|---|"]
        default, allowed = json.dumps(item.default).replace('"', "'"), describe_range(item.metadata)
        lines.append(f"| `{key_of(item.name)}` | `{default}` | {allowed} | {_meaning(item)} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def run_config_table() -> str:
    """Return the table of pyproject.toml that declares the run config to Flower."""
    lines = []
    for item in fields(Settings):
        if heading := _GROUPS.get(item.name, ""):
            lines += ["", f"# --- {heading} ---"]
        meaning = _meaning(item)
        if item.metadata["choices"]:
            meaning += f" ({', '.join(item.metadata['choices'])})"
        lines += [f"# {line}" for line in textwrap.wrap(meaning, 98)]
        lines.append(f"{key_of(item.name)} = {json.dumps(item.default)}")
    return _TABLE + "\n".join(lines) + "\n"


def with_run_config(pyproject: str) -> str:
    """Return the text of pyproject.toml with the run config as it is declared."""
    start = pyproject.index(_TABLE)
    following = re.search(r"^\[", pyproject[start + 1 :], re.MULTILINE)
    end = len(pyproject) if following is None else start + 1 + following.start()
    rest = pyproject[end:]
    return pyproject[:start] + run_config_table() + (f"\n{rest}" if rest else "")


def _meaning(item: Field[Any]) -> str:
    """Return what a setting means, and which methods read it."""
    meaning, methods = item.metadata["meaning"], readers().get(key_of(item.name))
    return f"{meaning} [{', '.join(methods)}]" if methods else str(meaning)


if __name__ == "__main__":
    if "--pyproject" in sys.argv:
        path = Path(_PYPROJECT)
        path.write_text(with_run_config(path.read_text()))
    else:
        print(settings_page(), end="")
