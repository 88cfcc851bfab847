"""Differential privacy, as the run config asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpsa_strategy.server.callbacks import DifferentialPrivacy

if TYPE_CHECKING:
    from server_app.settings import Settings


def make_privacy(settings: Settings) -> list[DifferentialPrivacy]:
    """Return the callback, if the settings want one."""
    if not settings.dp_noise_multiplier:
        return []
    return [
        DifferentialPrivacy(
            settings.dp_clip,
            settings.dp_noise_multiplier,
            settings.dp_max_participations,
            settings.dp_delta,
            settings.dp_noise_seed or None,
        )
    ]


def why_not_private(settings: Settings) -> str:
    """Return what keeps a run with these settings from being private; empty if nothing does."""
    wanted = f"dp-noise-multiplier = {settings.dp_noise_multiplier:g}"
    if not settings.dp_noise_multiplier:
        return ""
    if not settings.dp_clip:
        return f"{wanted} needs dp-clip, the largest norm of an update"
    if not settings.dp_max_participations:
        return f"{wanted} needs dp-max-participations, how often a client may take part"
    if settings.method.largest_weight is None:
        return (
            f"{wanted}: with strategy {settings.strategy!r} it is not known how much one update "
            "changes; 'fedbuff' and 'fedasync' can be private"
        )
    if settings.max_update_ratio:
        return (
            f"{wanted}: with max-update-ratio = {settings.max_update_ratio:g} the updates of some "
            "decide whether those of others count; use max-update-norm"
        )
    if settings.clock == "wall" and settings.checkpoint_versions != 1:
        return (
            f"{wanted} with clock 'wall' needs checkpoint-versions = 1: a run that resumed from an "
            "older checkpoint would not know which versions clients have seen"
        )
    return ""
