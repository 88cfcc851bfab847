"""Pictures of runs."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO

from fedpsa_strategy.watch.run_state import Curve


def draw_curves(
    curves: Mapping[str, Curve], *, virtual: bool, measure: str = "accuracy", title: str = ""
) -> bytes:
    """Return a PNG of accuracy or loss against virtual days or seconds.

    The keys are written beside the curves if there are several.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    alone, percent = len(curves) == 1, measure == "accuracy"
    for label, curve in curves.items():
        times = [time for time, _ in curve]
        values = [100 * value if percent else value for _, value in curve]
        colour = "#0b6e99" if alone else None
        (line,) = axes.plot(times, values, color=colour, linewidth=1.8, label=label)
        axes.plot(times[-1:], values[-1:], "o", color=line.get_color(), markersize=5)
        if curve and alone:
            axes.annotate(
                f"{values[-1]:.1f} %" if percent else f"{values[-1]:.3g}",
                (times[-1], values[-1]),
                textcoords="offset points",
                xytext=(-2, -34 if percent else 16),  # where the curve is not
                ha="right",
                color=line.get_color(),
                weight="bold",
            )
    if not alone:
        axes.legend(frameon=False, fontsize=9)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("virtual days" if virtual else "seconds")
    axes.set_ylabel("test accuracy (%)" if percent else f"test {measure}")
    axes.set_ylim(0, 100 if percent else None)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    output = BytesIO()
    figure.savefig(output, format="png")
    return output.getvalue()
