"""Pictures of runs."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO

from fedpsa_strategy.server.clock import DAY
from fedpsa_strategy.watch.run_state import Curve


def draw_curve(curve: Curve, *, title: str, virtual: bool, measure: str = "accuracy") -> bytes:
    """Return a PNG of accuracy or loss against time.

    Parameters
    ----------
    curve : list[tuple[float, float]]
        Times and values.
    title : str
        Written above.
    virtual : bool
        Whether times are virtual units (shown in days) or seconds.
    measure : "accuracy" or "loss" (default: "accuracy")
        What the values are.
    """
    percent = measure == "accuracy"
    points = [(time / DAY if virtual else time, value) for time, value in curve]
    unit = "virtual days" if virtual else "seconds"
    return _draw({"": points}, title, unit, percent, f"test {measure}")


def draw_curves(curves: Mapping[str, Curve], *, unit: str, measure: str = "accuracy") -> bytes:
    """Return a PNG of several curves.

    Parameters
    ----------
    curves : Mapping[str, list[tuple[float, float]]]
        Times and values, by what is written beside them.
    unit : str
        What the times are.
    measure : "accuracy" or "loss" (default: "accuracy")
        What the values are.
    """
    return _draw(curves, "", unit, measure == "accuracy", f"test {measure}")


def _draw(curves: Mapping[str, Curve], title: str, unit: str, percent: bool, what: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    alone = len(curves) == 1
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
    axes.set_xlabel(unit)
    axes.set_ylabel(f"{what} (%)" if percent else what)
    axes.set_ylim(0, 100 if percent else None)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    output = BytesIO()
    figure.savefig(output, format="png")
    return output.getvalue()
