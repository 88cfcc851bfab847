"""The code that the machines of a cluster get from the launcher."""

from __future__ import annotations

import os
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simulation.engines.flower.staging import staged_app
from simulation.environment import APP, QUIET, launch_folder

_OURS = ("client_app", "server_app", "task", "fedpsa_strategy")
_RUNNER = ("simulation", "fedpsa_strategy")  # what any app needs to be run
# Whoever takes no GPU sees none.
_VARIABLES = QUIET | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}


@contextmanager
def code_for_machines(app_dir: Path, modules: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Put together the code that a run needs on other machines, as a Ray runtime environment.

    Ray copies it to each machine that works for the run, where it comes before any other copy.
    Modules are the user's that are not part of the app, such as an own task.
    """
    with launch_folder() as folder:
        if app_dir == APP:
            code = folder / "code"
            code.mkdir()
            _copy(code, [APP / name for name in _OURS])
            yield from _environment(code, modules)
        else:
            with staged_app(app_dir, folder) as code:
                yield from _environment(code, modules)


def _environment(code: Path, modules: Sequence[str]) -> Iterator[dict[str, Any]]:
    _copy(code, [APP / name for name in _RUNNER])
    _copy(code, [place for name in modules if (place := _own_module(name)) is not None])
    variables = dict(_VARIABLES)
    if places := [path for path in sys.path if _is_users(path)]:
        variables["PYTHONPATH"] = os.pathsep.join(places)
    yield {"working_dir": str(code), "env_vars": variables}


def _copy(code: Path, sources: Sequence[Path]) -> None:
    for source in sources:
        target = code / source.name
        if target.exists():  # the app brings it along
            continue
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copyfile(source, target)


def _own_module(name: str) -> Path | None:
    """Return the file or folder of a module that is not installed."""
    found = find_spec(name.partition(".")[0])
    if found is None or not found.origin or not _is_users(str(Path(found.origin).parent)):
        return None
    path = Path(found.origin)
    return path.parent if path.name == "__init__.py" else path


def _is_users(path: str) -> bool:
    """Tell whether a place of modules belongs neither to Python nor to what is installed."""
    installed = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), site.USER_SITE]
    return bool(path) and not any(
        Path(path).is_relative_to(place) for place in filter(None, installed)
    )
