"""How figures look, in files and inside the report."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from io import BytesIO
from typing import Any

from fedpsa_strategy.methods.registry import METHODS

INK = "#22272e"
"""The colour of text and axes; the report replaces it by that of its own text."""

COLOURS = {method.label: method.colour for method in METHODS.values()} | {
    variant.label: variant.colour for method in METHODS.values() for variant in method.variants
}
OTHER_COLOURS = ("#d1480f", "#2f7fc1", "#139a74", "#d99a00", "#8a6fc4", "#c065a0")

_SETTINGS: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    # Ids of elements are otherwise drawn at random.
    "svg.hashsalt": "fedpsa",
}

_CAPTION_SIZE = 6.5
_CAPTION_LETTER = 0.05  # inches, of such a letter on average

Draw = Callable[[Any], None]
"""Draws into a figure of matplotlib."""


def colour_of(name: str, index: int) -> str:
    """Return the colour of a method, or that of the row with this number."""
    return COLOURS.get(name) or OTHER_COLOURS[index % len(OTHER_COLOURS)]


def render(draw: Draw, caption: str) -> tuple[bytes, bytes]:
    """Return a figure as PNG and as SVG, the same bytes for the same content.

    `draw` sets its size too; the caption is written below, small.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(layout="constrained")
        draw(figure)
        width = int(figure.get_figwidth() / _CAPTION_LETTER)
        lines = [part for line in caption.split("\n") for part in textwrap.wrap(line, width)]
        figure.supxlabel("\n".join(lines), fontsize=_CAPTION_SIZE, x=0.01, ha="left", alpha=0.75)
        # Once for both files: finding places for everything is half of the work.
        if (layout := figure.get_layout_engine()) is not None:
            layout.execute(figure)
        figure.set_layout_engine("none")
        png, svg = BytesIO(), BytesIO()
        figure.savefig(png, format="png", dpi=150, facecolor="white")
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return png.getvalue(), svg.getvalue()
