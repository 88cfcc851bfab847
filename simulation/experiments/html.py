"""From our own Markdown and SVG to HTML; only what our tables use is understood."""

from __future__ import annotations

import html
import re

from simulation.experiments.style import INK

_FOLDED = ("Behind the numbers",)
"""Headings whose contents a reader unfolds."""


def to_html(text: str) -> str:
    """Return Markdown as HTML: headings, paragraphs, lists, tables, bold and code.

    The document's first heading and its picture are left out: a page has its own.
    """
    parts: list[str] = []
    folded = False
    for block in text.strip().split("\n\n"):
        if block.startswith(("# ", "![")):
            continue
        heading = re.match(r"(##+) (.*)", block)
        if heading:
            title = _inline(heading[2])
            folded = heading[2] in _FOLDED
            level = len(heading[1]) + 1
            parts.append(
                f"<details><summary>{title}</summary>"
                if folded
                else f"<h{level}>{title}</h{level}>"
            )
            continue
        parts.append(_block(block))
        if folded:
            parts.append("</details>")
            folded = False
    return "\n".join(parts)


def _block(block: str) -> str:
    lines = block.splitlines()
    if lines[0].startswith("|"):
        return _table(lines)
    if lines[0].startswith("- "):
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
    return f"<p>{_inline(' '.join(lines))}</p>"


def _table(lines: list[str]) -> str:
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    kinds = ["beside" if title in ("paper", "difference") else "" for title in header]

    def cells(tag: str, values: list[str]) -> str:
        return "".join(
            f"<{tag}{f' class={kind!r}' if kind else ''}>{_entry(value)}</{tag}>".replace("'", '"')
            for kind, value in zip(kinds, values, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{cells("th", header)}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _entry(text: str) -> str:
    return re.sub(r" ± ([−\d.]+)", r' <span class="deviation">± \1</span>', _inline(text))


def _inline(text: str) -> str:
    escaped = html.escape(text, quote=True).replace("&#x27;", "’")
    escaped = re.sub(r"`([^`]*)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escaped)


def inline_svg(svg: str, prefix: str, label: str) -> str:
    """Return a figure of matplotlib as an element of a page.

    Parameters
    ----------
    svg : str
        The file.
    prefix : str
        Put before all ids, which would otherwise meet those of other figures.
    label : str
        What a reader who cannot see it is told.
    """
    picture = svg[svg.index("<svg") :]
    picture = re.sub(r"<metadata>.*?</metadata>", "", picture, flags=re.DOTALL)
    picture = re.sub(r'\bid="', f'id="{prefix}-', picture)
    picture = picture.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")
    # Text and axes take the colour of the page, light or dark.
    picture = picture.replace(INK, "currentColor")
    width = re.search(r'\bwidth="([\d.]+)pt"', picture)
    picture = re.sub(r'\b(width|height)="[\d.]+pt" ?', "", picture, count=2)
    limit = f"max-width: {float(width[1]) * 1.45:.0f}px" if width else ""
    opening = f'<svg role="img" aria-label="{html.escape(label)}" style="{limit}"'
    return picture.replace("<svg", opening, 1)
