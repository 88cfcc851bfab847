"""What the site needs beyond docs/: pages and files elsewhere in the repository, by their links.

README.md becomes the first page. Other pages and files that a page links to are taken into the
site under `repository/`, and links are rewritten to where things are.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docker/README.md": "docker.md",
}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)

_origins: dict[str, str] = {}  # where a page of the site is in the repository


def on_files(files: Any, config: Any) -> Any:
    """Take in what pages link to, and what those pages link to in turn."""
    _origins.clear()
    _origins.update({file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()})
    todo = [*_origins.values(), *PLACES]
    seen = set(todo)
    for path in PLACES:
        _add(files, config, path)
    while todo:
        page = todo.pop()
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in _targets(page, text):
            if target not in seen and not target.startswith("docs/") and (ROOT / target).is_file():
                seen.add(target)
                _add(files, config, target)
                if target.endswith(".md"):
                    todo.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    origin = _origins[page.file.src_uri]

    def rewrite(match: re.Match[str]) -> str:
        label, link, anchor = match.group(1), match.group(2), match.group(3) or ""
        if ":" in link:
            return match.group(0)
        target = _resolve(origin, link)
        if (ROOT / target).is_dir():
            return label[1:-1]  # a folder that has no page
        place = posixpath.relpath(_place(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{label}({place}{anchor})"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(rewrite, part) for part in parts)


def _targets(page: str, text: str) -> set[str]:
    links = {match.group(2) for match in _LINK.finditer(text)}
    found = {_resolve(page, link) for link in links if ":" not in link}
    return {_index(target) for target in found if not target.startswith("..")}


def _resolve(page: str, link: str) -> str:
    return _index(posixpath.normpath(posixpath.join(posixpath.dirname(page), link)))


def _index(target: str) -> str:
    """Return what a link to a folder shows, if there is anything to show."""
    for name in ("index.html", "README.md"):
        if (ROOT / target).is_dir() and (ROOT / target / name).is_file():
            return f"{target}/{name}"
    return target


def _place(target: str) -> str:
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return PLACES.get(target, f"repository/{target}")


def _add(files: Any, config: Any, path: str) -> None:
    place = _place(path)
    _origins[place] = path
    files.append(File.generated(config, place, abs_src_path=os.fspath(ROOT / path)))
