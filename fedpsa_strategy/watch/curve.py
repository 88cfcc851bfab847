"""The picture of a run."""

from __future__ import annotations

from io import BytesIO

from fedpsa_strategy.server.clock import DAY


def draw_curve(
    curve: list[tuple[float, float]], *, title: str, virtual: bool, measure: str = "accuracy"
) -> bytes:
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    times = [time / DAY if virtual else time for time, _ in curve]
    percent = measure == "accuracy"
    values = [100 * value if percent else value for _, value in curve]
    figure = Figure(figsize=(7.0, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(times, values, color="#0b6e99", linewidth=1.8)
    if curve:
        axes.plot(times[-1:], values[-1:], "o", color="#0b6e99", markersize=5)
        axes.annotate(
            f"{values[-1]:.1f} %" if percent else f"{values[-1]:.3g}",
            (times[-1], values[-1]),
            textcoords="offset points",
            xytext=(-2, -34 if percent else 16),  # where the curve is not
            ha="right",
            color="#0b6e99",
            weight="bold",
        )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("virtual days" if virtual else "seconds")
    axes.set_ylabel("test accuracy (%)" if percent else "test loss")
    axes.set_ylim(0, 100 if percent else None)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    output = BytesIO()
    figure.savefig(output, format="png")
    return output.getvalue()
