"""The library's wheel, and environments that it is installed in."""

import importlib.metadata
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LIBRARY = Path(__file__).parents[2] / "fedpsa_strategy"


def closure(requirements):
    """Return the names of the distributions that requirements lead to, as installed here."""
    found, todo = set(), [Requirement(text) for text in requirements]
    seen = set()
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found.add(key[0])
        for text in importlib.metadata.requires(requirement.name) or []:
            needed = Requirement(text)
            # A torch with CUDA brings what it was built with.
            if needed.name.startswith(("nvidia-", "cuda-", "triton")):
                continue
            extras = ["", *requirement.extras]
            if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras):
                todo.append(needed)
    return found


def build_wheel(folder):
    """Build the library's wheel into a folder; return its path."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    done = subprocess.run(build, cwd=LIBRARY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def make_environment(folder, wheel, requirements):
    """Return the Python of a new environment with the wheel, and what is required as it is here.

    Packages are links to those of this environment; their commands are written anew.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    python = folder / "bin" / "python"
    for name in closure(requirements):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
        for entry in distribution.entry_points.select(group="console_scripts"):
            script = folder / "bin" / entry.name
            script.write_text(
                f"#!{python}\nimport sys\nfrom {entry.module} import {entry.attr.split('.')[0]}\n"
                f"sys.exit({entry.attr}())\n"
            )
            script.chmod(0o755)
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
    subprocess.run([*pip, "check"], check=True)
    return python
