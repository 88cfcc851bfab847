"""Threads and devices."""

import contextlib

import torch
from torch import nn


def set_threads(num_threads: int) -> None:
    """Set the number of threads of this process's tensor operations.

    Results are bit-equal only for equal numbers of threads. The pool for independent operations can
    be sized once per process and only before its first use; later calls leave it as it is.

    Parameters
    ----------
    num_threads : int
        At least 1.
    """
    if num_threads < 1:
        raise ValueError(f"at least one thread is needed, got {num_threads}")
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != num_threads:
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(num_threads)


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device of a name.

    Parameters
    ----------
    name : str | torch.device
        ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"``: CUDA if there is any, else the CPU.
    """
    text = str(name)
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = text.partition(":")
    if text != "cpu" and (kind != "cuda" or (":" in text and not index.isdecimal())):
        raise ValueError(f"unknown device {text!r}; choose auto, cpu, cuda or cuda:N")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"device {text!r} was asked for but CUDA is not available here")
        if index and int(index) >= torch.cuda.device_count():
            raise RuntimeError(
                f"device {text!r} was asked for but there are {torch.cuda.device_count()} of them"
            )
    return torch.device(text)


def move(model: nn.Module, device: torch.device) -> None:
    """Put a model on a device, unless all of it is there: finding that out is quicker."""
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)
