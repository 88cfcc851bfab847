"""The picture of a run."""

from __future__ import annotations

from io import BytesIO

from server_app.progress import DAY


def draw_curve(curve: list[tuple[float, float]], *, title: str, virtual: bool) -> bytes:
    """Return a PNG of accuracy against time.

    Parameters
    ----------
    curve : list[tuple[float, float]]
        Times and accuracies.
    title : str
        Written above.
    virtual : bool
        Whether times are virtual units (shown in days) or seconds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    times = [time / DAY if virtual else time for time, _ in curve]
    accuracies = [100 * accuracy for _, accuracy in curve]
    figure = Figure(figsize=(7.0, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(times, accuracies, color="#0b6e99", linewidth=1.8)
    if curve:
        axes.plot(times[-1:], accuracies[-1:], "o", color="#0b6e99", markersize=5)
        axes.annotate(
            f"{accuracies[-1]:.1f} %",
            (times[-1], accuracies[-1]),
            textcoords="offset points",
            xytext=(-2, -34),
            ha="right",
            color="#0b6e99",
            weight="bold",
        )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("virtual days" if virtual else "seconds")
    axes.set_ylabel("test accuracy (%)")
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    output = BytesIO()
    figure.savefig(output, format="png")
    return output.getvalue()
