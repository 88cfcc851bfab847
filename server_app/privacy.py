"""Differential privacy, as the run config asks for it."""

from __future__ import annotations

from fedpsa_strategy.methods.base import Method
from fedpsa_strategy.methods.registry import METHODS
from fedpsa_strategy.server.callbacks import DifferentialPrivacy
from fedpsa_strategy.server.callbacks.privacy import weight_of
from server_app.declared import Declared


def make_privacy(settings: Declared) -> list[DifferentialPrivacy]:
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


def why_not_private(settings: Declared, method: Method) -> str:
    """Return what keeps a run with these settings from being private; empty if nothing does."""
    wanted = f"dp-noise-multiplier = {settings.dp_noise_multiplier:g}"
    if not settings.dp_noise_multiplier:
        return ""
    if not settings.dp_clip:
        return f"{wanted} needs dp-clip, the largest norm of an update"
    if not settings.dp_max_participations:
        return f"{wanted} needs dp-max-participations, how often a client may take part"
    if weight_of(method) is None:
        known = [repr(name) for name, kind in METHODS.items() if weight_of(kind()) is not None]
        return (
            f"{wanted}: with strategy {settings.strategy!r} it is not known how much one update "
            f"changes; {' and '.join(known)} can be private"
        )
    if settings.max_update_norm or settings.max_update_ratio:
        return (
            f"{wanted}: whether an update counts must not depend on it, or on those of others; "
            "leave max-update-norm and max-update-ratio at 0, dp-clip is the limit"
        )
    if settings.clock == "wall" and settings.checkpoint_versions != 1:
        return (
            f"{wanted} with clock 'wall' needs checkpoint-versions = 1: a run that resumed from an "
            "older checkpoint would not know which versions clients have seen"
        )
    return ""
