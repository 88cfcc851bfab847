"""What `fedpsa doctor` adds in a checkout: the local engine, containers, the datasets."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from fedpsa_strategy.cli.doctor import NOTE, OK, Finding
from simulation.environment import APP
from simulation.machine import cpu_model, num_cores

_PATIENCE = 10.0  # seconds


def checks() -> Iterator[Finding]:
    """Yield what there is to say about this checkout."""
    yield Finding("checkout", OK, str(APP))
    yield Finding("engine: local", OK, f"can run: {num_cores()} cores ({cpu_model()})")
    yield _containers()
    yield from _datasets()


def _containers() -> Finding:
    subject, advice = "engine: containers", "for `make docker-up`: install Docker, or start it"
    if shutil.which("docker") is None:
        return Finding(subject, NOTE, "Docker is not installed", advice)
    try:
        done = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return Finding(subject, NOTE, "the Docker engine does not answer", advice)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it does not run"])[-1]
        return Finding(subject, NOTE, f"no Docker engine: {reason}", advice)
    return Finding(subject, OK, f"can run: Docker {done.stdout.strip()}")


def _datasets() -> Iterator[Finding]:
    from task.datasets import DATASETS, find_dataset, resolve_data_dir

    for name in DATASETS:
        found = find_dataset(name)
        if found is None:
            yield Finding(
                f"dataset {name}",
                NOTE,
                f"not found in {resolve_data_dir()}",
                f"python -m task.download {name} {resolve_data_dir()}",
            )
        else:
            yield Finding(f"dataset {name}", OK, str(found))
