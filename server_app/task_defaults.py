"""What a task says about settings that were left to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server_app.method_settings import SettingsError
from server_app.settings import DATASET_DEFAULTS, PAPER_DEFAULTS, Settings


def resolve(settings: Settings, before: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings with the task's own learning rate, batch size and interval of tests.

    A 0 leaves them to the task. If a run is resumed, the values in its run config count (`before`).
    An own task that declares something else than these is a `SettingsError`.
    """
    if settings.is_resolved:
        return settings
    if before is not None:
        return settings.resolved(before)
    if settings.task:
        return settings.resolved(_declared(settings.task))
    return settings.resolved(DATASET_DEFAULTS.get(settings.dataset, {}))


def _declared(reference: str) -> dict[str, Any]:
    """Return the `defaults` of an own task, checked."""
    # Not at the top: it loads torch, which the datasets' own values do not need.
    from task.tasks import find_task

    declared = getattr(find_task(reference), "defaults", {})
    known = ", ".join(PAPER_DEFAULTS)
    if not isinstance(declared, Mapping) or not declared.keys() <= PAPER_DEFAULTS.keys():
        raise SettingsError(f"task = {reference!r}: its `defaults` must be a dict of {known}")
    try:
        settings = Settings.from_run_config(declared)
    except SettingsError as error:
        raise SettingsError(f"task = {reference!r}: in its `defaults`, {error}") from None
    values = settings.to_run_config()
    return {key: values[key] for key in declared}
