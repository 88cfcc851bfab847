"""The settings reference, generated: `python -m server_app.settings_page > docs/SETTINGS.md`."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

from server_app.settings import Settings, describe_range, key_of

_HEAD = """# Settings

Every setting of a run, generated from `server_app/settings.py`. Change any of them with
`flwr run . --run-config "key=value ..."`, or with `--set key=value` of our own commands; strings
are quoted in a run config. Impossible values and combinations are refused before the first message.
"""


def settings_page() -> str:
    """Return the page."""
    headings = _headings()
    lines = [_HEAD]
    for item in fields(Settings):
        if item.name in headings:
            lines += [f"## {headings[item.name]}\n", "| key | default | allowed | meaning |"]
            lines += ["|---|---|---|---|"]
        default = repr(item.default).replace("True", "true").replace("False", "false")
        allowed = describe_range(item.metadata)
        lines.append(
            f"| `{key_of(item.name)}` | `{default}` | {allowed} | {item.metadata['meaning']} |"
        )
        following = _after(item.name)
        if following is None or following in headings:
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _after(name: str) -> str | None:
    names = [item.name for item in fields(Settings)]
    place = names.index(name) + 1
    return names[place] if place < len(names) else None


def _headings() -> dict[str, str]:
    """Return the comments that head groups of settings, by the setting that follows."""
    pattern = r"^    # (.+)\n    (\w+): \w+ = _setting"
    return {name: text for text, name in re.findall(pattern, inspect.getsource(Settings), re.M)}


if __name__ == "__main__":
    print(settings_page(), end="")
