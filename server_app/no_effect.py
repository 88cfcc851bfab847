"""Settings that were changed and change nothing in this run."""

from __future__ import annotations

from fedpsa_strategy.checks import shown
from fedpsa_strategy.methods.registry import readers
from server_app.settings import Settings


def without_effect(settings: Settings) -> list[str]:
    """Return a sentence about every setting that was changed and changes nothing here."""
    values, defaults = settings.to_run_config(), Settings().to_run_config()
    return [
        f"{key} = {shown(values[key])} has no effect: {reason}"
        for key, reason in _reasons(settings).items()
        if values[key] != defaults[key]
    ]


def _reasons(settings: Settings) -> dict[str, str]:
    """Return why settings would have no effect, by their keys."""
    reasons: dict[str, str] = {}

    def note(useless: bool, reason: str, *keys: str) -> None:
        if useless:
            reasons.update({key: reason for key in keys if key not in reasons})

    for key, methods in readers().items():
        by_upload = key == "buffer-size" and settings.lr_decay_per == "upload"
        named = ", ".join(methods)
        note(
            settings.strategy not in methods and not by_upload,
            f"strategy {settings.strategy!r} does not read it ({named} would)",
            key,
        )
    for key, reason in settings.method.unread().items():
        note(True, reason, key)
    note(
        bool(settings.task),
        f"task {settings.task!r} brings its own data",
        *("dataset", "model", "model-width", "partition", "dirichlet-alpha", "test-fraction"),
        "held-out",
        *("data-dir", "cache-dir"),
    )
    single_layer = not settings.task and not settings.has_encoder
    note(single_layer, "the model is a single layer", "model-width")
    note(settings.method.rounds, "methods in rounds have no stale updates", "max-staleness")
    note(settings.partition == "iid", "partition is 'iid'", "dirichlet-alpha")
    note(
        settings.clock == "wall",
        "response times are real with clock 'wall'",
        *("latency", "latency-min", "latency-max", "latency-per", "virtual-days"),
    )
    note(settings.clock == "virtual", "with clock 'virtual' all num-clients take part", "min-nodes")
    overdue = ("overdue-factor", "overdue-floor", "overdue-ceiling")
    note(settings.clock == "virtual", "with clock 'virtual' no client is late", *overdue)
    note(settings.clock == "virtual", "clock is 'virtual'", "queued-per-node")
    everybody = settings.fraction_train == 1 or settings.max_in_flight >= settings.num_clients
    note(not everybody, "not all nodes are kept busy (fraction-train=1.0)", "queued-per-node")
    note(
        settings.method.rounds,
        f"strategy {settings.strategy!r} waits for all of its clients",
        *overdue,
        "queued-per-node",
    )
    note(settings.overdue_factor == 0, "overdue-factor is 0", *overdue)
    note(settings.latency == "constant", "latency is 'constant': latency-max", "latency-min")
    note(settings.max_in_flight > 0, "max-in-flight takes its place", "fraction-train")
    note(settings.evaluate_interval > 0, "evaluate-interval takes its place", "evaluate-every")
    note(
        not (settings.max_update_norm or settings.max_update_ratio),
        "neither max-update-norm nor max-update-ratio is set",
        "norm-action",
    )
    note(
        not settings.dp_noise_multiplier,
        "dp-noise-multiplier is 0",
        *("dp-clip", "dp-max-participations", "dp-delta", "dp-noise-seed"),
    )
    return reasons
