"""Threads and devices."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# Losses are summed in double precision, which these cannot.
_WITHOUT_FLOAT64 = {"mps"}


def set_threads(num_threads: int) -> None:
    """Set the number of threads of this process's tensor operations, at least 1.

    Results are bit-equal only for equal numbers of threads. The pool for independent operations can
    be sized once per process and only before its first use; later calls leave it as it is.
    """
    if num_threads < 1:
        raise ValueError(f"at least one thread is needed, got {num_threads}")
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != num_threads:
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(num_threads)


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device of a name: ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"auto"``.

    Other accelerators that torch has here have names too; auto is the accelerator if there is any,
    else the CPU.
    """
    text, own = str(name), _accelerator()
    if text == "auto":
        text = own or "cpu"
    if text == "cpu":
        return torch.device("cpu")
    kind, _, index = text.partition(":")
    if kind not in ("cuda", own) or (":" in text and not index.isdecimal()):
        raise ValueError(f"unknown device {text!r}; choose auto, cpu, cuda or cuda:N")
    if kind != own:
        raise RuntimeError(f"device {text!r} was asked for but CUDA is not available here")
    count = getattr(torch, kind).device_count()
    if index and int(index) >= count:
        raise RuntimeError(f"device {text!r} was asked for but there are {count} of them")
    if kind == "cuda":
        # Read when the first matrix product is made: without it, sums differ from run to run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(text)


def _accelerator() -> str | None:
    """Return the kind of the machine's accelerator, if it has a usable one."""
    if torch.cuda.is_available():
        return "cuda"
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return None
    found = torch.accelerator.current_accelerator()
    if found is None or found.type in _WITHOUT_FLOAT64 or not torch.accelerator.is_available():
        return None
    return str(found.type)


def move(model: nn.Module, device: torch.device) -> None:
    """Put a model on a device, unless all of it is there: finding that out is quicker."""
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)


@contextlib.contextmanager
def repeatable(place: torch.device, seed: int) -> Iterator[None]:
    """Make what is computed there depend on the seed alone: random numbers, and the order of sums.

    On an accelerator torch's deterministic algorithms are on inside. Of operations that have none,
    torch warns, by name. Everything is as before afterwards.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        with contextlib.nullcontext() if place.type == "cpu" else _repeatable_there(place, seed):
            yield
    finally:
        generator.set_state(before)


@contextlib.contextmanager
def _repeatable_there(place: torch.device, seed: int) -> Iterator[None]:
    module: Any = getattr(torch, place.type)
    index = module.current_device() if place.index is None else place.index
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with (
        torch.random.fork_rng(devices=[index], device_type=place.type),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True),
    ):
        torch.use_deterministic_algorithms(True, warn_only=not (was_on and not warned_only))
        try:
            with module.device(index):
                module.manual_seed(seed)
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=warned_only)


def release(place: torch.device) -> None:
    """Give memory that is no longer used back to a device that others use too."""
    if place.type != "cpu":
        empty: Any = getattr(getattr(torch, place.type), "empty_cache", None)
        if empty is not None:
            empty()
