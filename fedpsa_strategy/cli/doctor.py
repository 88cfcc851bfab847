"""`fedpsa doctor`: what can run here, and what to do about what cannot."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from fedpsa_strategy.cli.main import examples, library_version

GROUP = "fedpsa.checks"
"""The group of entry points by which a checkout adds checks: functions that yield findings."""

OK, NOTE, PROBLEM = "ok", "note", "problem"

_LEAST_FLOWER = (1, 39)
_LEAST_SHARED_MEMORY = 2**30
_EXTRAS = {
    "torch": ("torch", "FedPSA's sensitivities and the client's half"),
    "watch": ("starlette", "the live page"),
    "tensorboard": ("tensorboard", "TensorBoard"),
}
# Who listens on them when Flower and this library are started without options.
_PORTS = {
    8000: "SuperLink: Control and Runtime API",
    8050: "the live page",
    9092: "SuperLink: nodes",
    39091: "`flwr run`'s own SuperLink",
    39093: "`flwr run`'s own SuperLink",
}


@dataclass(frozen=True)
class Finding:
    """What was found out about one thing, and what to do about it."""

    subject: str
    state: str  # "ok", "problem", or "note": what a person may want to know, or has no need of
    text: str
    advice: str = ""


def examine() -> list[Finding]:
    """Return what there is to say about this machine and environment."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _flower,
        _extras,
        _ray,
        _deployment,
        _gpus,
        _ports,
        _left_running,
    ]
    for entry in entry_points(group=GROUP):
        try:
            checks.append(entry.load())
        except (ImportError, AttributeError):  # of a checkout that has moved, or is older
            continue
    return [finding for check in checks for finding in _safely(check)]


def _safely(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield what a check finds; one that fails must not keep the others from speaking."""
    try:
        yield from check()
    except Exception as error:  # a broken installation raises nearly anything
        name = check.__name__.strip("_").replace("_", " ")
        yield Finding(name, PROBLEM, f"could not be checked: {type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    yield Finding(
        "fedpsa",
        OK,
        f"{library_version()} on Python {platform.python_version()}, {sys.prefix}",
    )


def _flower() -> Iterator[Finding]:
    found = version("flwr")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < _LEAST_FLOWER:
        needed = ".".join(map(str, _LEAST_FLOWER))
        yield Finding("Flower", PROBLEM, f"{found} is too old", f"pip install 'flwr>={needed}'")
        return
    channel = "gRPC" if numbers < (1, 40) else "HTTP"
    yield Finding("Flower", OK, f"{found}; its nodes talk {channel}")


def _extras() -> Iterator[Finding]:
    for extra, (module, purpose) in _EXTRAS.items():
        try:
            found = version(module)
        except PackageNotFoundError:
            yield Finding(
                f"extra {extra}",
                NOTE,
                f"{module} is not installed: no {purpose}",
                f"install the library with [{extra}]",
            )
        else:
            yield Finding(f"extra {extra}", OK, f"{module} {found}")


def _ray() -> Iterator[Finding]:
    subject = "engine: Ray"
    if find_spec("ray") is None:
        yield Finding(
            subject, NOTE, "Ray is not installed", "pip install 'flwr[simulation]' for `flwr run`"
        )
        return
    memory = Path("/dev/shm")
    free = shutil.disk_usage(memory).free if memory.is_dir() else None
    if free is not None and free < _LEAST_SHARED_MEMORY:
        yield Finding(
            subject,
            NOTE,
            f"can run, but /dev/shm has only {free / 2**20:.0f} MiB: Ray will use the disk instead",
            "in a container: --shm-size=2g",
        )
        return
    yield Finding(subject, OK, f"can run: Ray {version('ray')}, {os.cpu_count()} cores")


def _deployment() -> Iterator[Finding]:
    subject = "engine: processes"
    names = ("flower-superlink", "flower-supernode", "flwr-clientapp")
    beside = Path(sys.executable).parent
    missing = [n for n in names if not (beside / n).exists() and shutil.which(n) is None]
    if missing:
        yield Finding(
            subject,
            PROBLEM,
            f"Flower's commands {', '.join(missing)} are not found",
            "activate the environment in which Flower is installed",
        )
    else:
        yield Finding(subject, OK, "can run: SuperLink and SuperNodes as processes")


def _gpus() -> Iterator[Finding]:
    if find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("GPUs", OK, f"{', '.join(names)}; CUDA {torch.version.cuda}")
        return
    seen = _nvidia_gpus()
    if seen and torch.version.cuda is None:
        yield Finding(
            "GPUs",
            PROBLEM,
            f"{seen}, but this build of torch is for the CPU alone",
            "install a build of torch with CUDA",
        )
    elif seen:
        yield Finding(
            "GPUs",
            PROBLEM,
            f"{seen}, but torch cannot use it: it is built for CUDA {torch.version.cuda}",
            "compare with the CUDA version that nvidia-smi shows, and check CUDA_VISIBLE_DEVICES",
        )
    else:
        yield Finding("GPUs", NOTE, "none: training runs on the CPU")


def _nvidia_gpus() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    with subprocess.Popen(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            return "nvidia-smi does not answer"
    return ", ".join(output.split("\n")).strip(", ") if process.returncode == 0 else ""


def _ports() -> Iterator[Finding]:
    taken = {port: use for port, use in _PORTS.items() if _answers(port)}
    for port, use in taken.items():
        yield Finding(
            f"port {port}",
            NOTE,
            f"in use ({use})",
            "choose another one, or end what listens there if you do not need it",
        )
    if not taken:
        yield Finding("ports", OK, f"{', '.join(map(str, _PORTS))} are free")


def _answers(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _left_running() -> Iterator[Finding]:
    if find_spec("psutil") is None:
        yield Finding(
            "SuperLinks", NOTE, "not looked for: psutil is not installed", "pip install psutil"
        )
        return
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "cmdline", "create_time", "username"]):
        command = [Path(word).name for word in (process.info["cmdline"] or [])[:2]]
        if "flower-superlink" in command and process.info["create_time"]:
            found.append(process.info)
    for info in found:
        yield Finding(
            f"SuperLink {info['pid']}",
            NOTE,
            f"is running {_since(info)}: runs of `flwr run` go to it with the settings and the"
            " folder it was started with",
            f"if it is not needed: kill {info['pid']}",
        )
    if not found:
        yield Finding("SuperLinks", OK, "none is running")


def _since(info: dict[str, Any]) -> str:
    minutes = (time.time() - info["create_time"]) / 60
    span = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
    return f"since {span} ({info['username']})"


@click.command(
    "doctor",
    short_help="what is installed, what can run here, what to do about problems",
    epilog=examples("fedpsa doctor", "fedpsa doctor --json | jq '.[] | select(.state != \"ok\")'"),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(as_json: bool) -> int:
    """Say what is installed, which engines can run here, and what to do about each problem.

    The exit code is 1 if there is a problem; notes do not count.
    """
    findings = examine()
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.subject) for finding in findings)
        marks = {OK: ("✔", "green"), NOTE: ("·", "yellow"), PROBLEM: ("✘", "red")}
        for finding in findings:
            mark, colour = marks[finding.state]
            line = f"{click.style(mark, fg=colour)} {finding.subject.ljust(width)}  {finding.text}"
            click.echo(line + (f"\n  {' ' * width}  → {finding.advice}" if finding.advice else ""))
    return int(any(finding.state == PROBLEM for finding in findings))
