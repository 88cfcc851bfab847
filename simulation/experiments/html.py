"""From Markdown and SVG to the parts of a page."""

from __future__ import annotations

import html
import re
from itertools import pairwise

from markdown_it import MarkdownIt

from simulation.experiments.style import INK

_MARKDOWN = MarkdownIt("commonmark", {"html": False, "typographer": True})
_MARKDOWN.enable(["table", "smartquotes"])

_COMPARED = ("paper", "difference")
"""Columns that stand back behind the one they are compared with."""


def to_html(text: str) -> str:
    """Return Markdown as HTML, with headings one level down.

    The document's first heading and its picture are left out: a page has its own.
    """
    tokens = _MARKDOWN.parse(re.sub(r"^(# |!\[).*", "", text, flags=re.MULTILINE))
    titles: list[str] = []
    column = 0
    for token, following in pairwise(tokens):
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{int(token.tag[1]) + 1}"
        elif token.type == "thead_open":
            titles = []
        elif token.type == "tr_open":
            column = 0
        elif token.type in ("th_open", "td_open"):
            if token.type == "th_open":
                titles.append(following.content)
            token.attrs = {"class": "beside"} if titles[column] in _COMPARED else {}
            column += 1
    page: str = _MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {})
    page = re.sub(r" ± ([−\d.]+)", r' <span class="deviation">± \1</span>', page)
    page = re.sub(r"(<table>.*?</table>)", r'<div class="scroll">\1</div>', page, flags=re.DOTALL)
    return re.sub(
        r"<h4>(Behind the numbers)</h4>(.*?</div>)",  # a table that a reader unfolds
        r"<details><summary>\1</summary>\2</details>",
        page,
        flags=re.DOTALL,
    )


def inline_svg(svg: str, prefix: str, label: str) -> str:
    """Return a figure of matplotlib as an element of a page.

    The prefix is put before all ids, which would otherwise meet those of other figures; the label
    is what a reader who cannot see it is told.
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
