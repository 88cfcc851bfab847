"""What the app's pyproject.toml says about its run config."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from simulation.environment import ConfigValue
from simulation.errors import Refused


def default_run_config(app_dir: Path) -> dict[str, ConfigValue]:
    """Return the app's default run config, with dotted keys for nested tables."""
    return dict(flatten(_app_table(app_dir).get("config", {})))


def app_components(app_dir: Path) -> tuple[str, str]:
    """Return where the app's ServerApp and ClientApp are, as ``module:attribute`` each."""
    found = _app_table(app_dir).get("components", {})
    try:
        return str(found["serverapp"]), str(found["clientapp"])
    except KeyError as error:
        raise Refused(
            f"{app_dir} is not the folder of a Flower app: [tool.flwr.app.components] in its"
            f" pyproject.toml has no {error}."
        ) from error


def _app_table(app_dir: Path) -> dict[str, Any]:
    path = app_dir / "pyproject.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
    except (OSError, KeyError, ValueError) as error:
        raise Refused(
            f"{app_dir} is not the folder of a Flower app: its pyproject.toml must have a"
            f" [tool.flwr.app] table ({type(error).__name__}: {error})."
        ) from error
    return dict(table)


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, ConfigValue]]:
    """Yield the values of a table with dotted keys for nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_keys(run_config: Mapping[str, ConfigValue], defaults: Mapping[str, ConfigValue]) -> None:
    """Refuse run-config keys that the app does not have, before anything is started."""
    for key in run_config:
        if key in defaults:
            continue
        # Not at the top: it loads Flower, and --help should not wait for that.
        from server_app.setting_names import hint_for

        known = [*defaults, *_own_settings(str(run_config.get("strategy", "")))]
        hint = hint_for(key.removeprefix("method."), known, "see [tool.flwr.app.config].")
        raise Refused(f"there is no setting {key!r}: {hint}")


def _own_settings(strategy: str) -> list[str]:
    """Return the settings of a user's own method, as the command line takes them."""
    from fedpsa_strategy.methods.registry import MethodError, find_method, is_ours

    if not strategy or is_ours(strategy):
        return []
    try:
        return [f"method.{key}" for key in find_method(strategy).setting_keys()]
    except MethodError:  # which is said elsewhere
        return []


def read_config(path: Path) -> dict[str, ConfigValue]:
    """Return the run config in a file; settings of an own method are in a table ``[method]``.

    The config.toml of a run repeats that run, in a folder of its own.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"--config {path}: {error}") from error
    own = table.pop("method", {})
    if not isinstance(own, Mapping):
        raise Refused(f"--config {path}: method must be a table")
    config = dict(flatten(table))
    for key, value in [*config.items(), *flatten({"method": own})]:
        if not isinstance(value, bool | int | float | str):
            raise Refused(f"--config {path}: {key} must be a number, a text, true or false")
    if str(config.get("run-dir")) == str(path.absolute().parent):
        config = {key: value for key, value in config.items() if key not in ("run-dir", "resume")}
    if own:
        from server_app.method_settings import as_text

        given = str(config.get("method-settings", ""))
        config["method-settings"] = f"{given} {as_text(own)}".strip()
    return config
