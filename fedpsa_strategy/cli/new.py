"""`fedpsa new`: a small Flower app of one's own on these strategies."""

from __future__ import annotations

import json
import keyword
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click

from fedpsa_strategy.cli.main import examples

_FILES = ("server_app.py", "client_app.py", "task.py")
_REFERENCE = re.compile(r"(file|https|git\+(https|ssh|file)|ssh)://[^\s\"']+")


class NoReferenceError(ValueError):
    """It is not known where this library came from; the text says what to do."""


def write_app(folder: Path, library: str) -> list[Path]:
    """Write the app's files and return their paths.

    The folder must be new or empty; its name becomes the app's. Else this raises ValueError.
    `library` is the direct reference by which the app gets this library; see `checked_reference`.
    """
    name = folder.absolute().name
    package = re.sub(r"[-.]+", "_", name)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]", name) or keyword.iskeyword(package):
        raise ValueError(
            f"{name!r} cannot be an app's name: use letters, digits and dashes, such as my-app"
        )
    if package in sys.stdlib_module_names or package in ("flwr", "torch", "fedpsa_strategy"):
        raise ValueError(f"{name!r} is the name of a package that the app needs: choose another")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: choose another name")
    values = {
        "name": name,
        "package": package,
        "library": library,
        "runs": json.dumps((folder.absolute() / "runs").as_posix(), ensure_ascii=False),
    }
    template = files("fedpsa_strategy.cli") / "template"
    written = {folder / "pyproject.toml": "pyproject.toml"}
    written |= {folder / package / file: file for file in _FILES}
    (folder / package).mkdir(parents=True, exist_ok=True)
    for path, source in written.items():
        text = (template / f"{source}.template").read_text(encoding="utf-8")
        path.write_text(_filled(text, values), encoding="utf-8")
    (folder / package / "__init__.py").write_text(f'"""The app {name}."""\n', encoding="utf-8")
    (folder / ".gitignore").write_text("runs/\n__pycache__/\n", encoding="utf-8")
    return list(written)


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace("{{" + key + "}}", value)
    return text


def checked_reference(text: str) -> str:
    """Return a direct reference to this library, as a dependency has it behind the @.

    The text is a wheel or a folder on this machine, or an address with its scheme. All else raises
    ValueError: a bare name may be anybody's.
    """
    if _REFERENCE.fullmatch(text):
        return text
    path = Path(text).expanduser()
    if path.suffix == ".whl" and path.is_file():
        return path.resolve().as_uri()
    if text and (path / "pyproject.toml").is_file():
        library = path / "fedpsa_strategy"
        inner = library if (library / "pyproject.toml").is_file() else path
        return inner.resolve().as_uri()
    raise ValueError(
        f"{text!r} is neither a wheel, nor a checkout, nor an address such as"
        " git+https://host/fedpsa.git#subdirectory=fedpsa_strategy"
    )


def installed_reference() -> str:
    """Return where this environment got the library from, as a direct reference.

    If the installer has not noted it, or it is no longer there, this raises NoReferenceError.
    """
    for name, subfolder in (("fedpsa-strategy", ""), ("fedpsa", "/fedpsa_strategy")):
        try:
            text = distribution(name).read_text("direct_url.json")
        except PackageNotFoundError:
            continue
        if text is not None:
            return _reference(json.loads(text), subfolder)
    raise NoReferenceError(
        "it is not noted where this library was installed from: say it with --library, a wheel, a"
        " checkout or an address such as git+https://host/fedpsa.git#subdirectory=fedpsa_strategy"
    )


def _reference(noted: Mapping[str, Any], subfolder: str) -> str:
    url = str(noted["url"])
    if vcs := noted.get("vcs_info"):
        inner = noted.get("subdirectory") or subfolder.strip("/")
        end = f"#subdirectory={inner}" if inner else ""
        return f"{vcs['vcs']}+{url}@{vcs['commit_id']}{end}"
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path) + subfolder)
        if not path.exists():
            raise NoReferenceError(
                f"this library was installed from {path}, which is no longer there: say with"
                " --library where a wheel or a checkout of it is"
            )
        return path.as_uri()
    return url


@click.command(
    "new",
    short_help="write a small Flower app of your own",
    epilog=examples(
        "fedpsa new my-app",
        'cd my-app && flwr run . --stream --federation-config "num-supernodes=10"',
        "fedpsa dashboard my-app/runs",
        "fedpsa new my-app --library git+https://host/fedpsa.git#subdirectory=fedpsa_strategy",
    ),
)
@click.argument("folder", type=Path)
@click.option(
    "--library",
    metavar="WHERE",
    help="Where the app gets this library: a wheel, a checkout, or an address (default: where it"
    " was installed from here).",
)
def command(folder: Path, library: str | None) -> None:
    """Write a small Flower app into FOLDER: server, client, task and pyproject.

    It runs at once with `flwr run`, on made-up data. Comments in it say where your model and data
    go.
    """
    try:
        reference = installed_reference() if library is None else checked_reference(library)
        written = write_app(folder, reference)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    for path in written:
        click.echo(path)
    click.echo(
        f"\nThe model and the data are in {written[-1]}.\n\n"
        f"  cd {folder}\n"
        '  flwr run . --stream --federation-config "num-supernodes=10"\n'
        "  fedpsa dashboard runs"
    )
