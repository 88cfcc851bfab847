"""A device that computes on the CPU and keeps to the rules of a GPU; for a process of its own.

Its tensors hold real numbers in a tensor of the CPU. Whoever mixes them with tensors of the CPU, or
asks for their memory, gets an error, as on a GPU. Numbers without dimensions may be mixed, as
there.
"""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

NAME = "pseudo"


class MixedDevicesError(RuntimeError):
    """An operation got tensors of this device and of the CPU."""


class PseudoTensor(torch.Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
            requires_grad=held.requires_grad,
        )

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"PseudoTensor({self.held!r})"

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(f"can't convert a tensor of {NAME} to NumPy: copy it to the CPU first")
        return self.detach().cpu().numpy()

    def tolist(self):
        return self.detach().cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return on_device(func, args, kwargs or {})


_BETWEEN_DEVICES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


def on_device(func, args, kwargs):
    """Compute on the tensors that are held; results are on the device unless `device` says not."""
    place = kwargs.get("device")
    here = NAME if place is None else torch.device(place).type
    found = []
    tree_map(
        lambda item: found.append(item) if isinstance(item, torch.Tensor) else None, (args, kwargs)
    )
    strangers = [t for t in found if not isinstance(t, PseudoTensor) and t.dim()]
    if strangers and func not in _BETWEEN_DEVICES:
        raise MixedDevicesError(f"{func} got tensors of {NAME} and of the CPU")
    if place is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    held = {id(t.held): t for t in found if isinstance(t, PseudoTensor)}

    def unwrap(item):
        return item.held if isinstance(item, PseudoTensor) else item

    def wrap(item):
        if not isinstance(item, torch.Tensor) or isinstance(item, PseudoTensor):
            return item
        return held.get(id(item)) if id(item) in held else PseudoTensor(item)

    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    if func is torch.ops.aten.copy_.default:
        return args[0]
    return tree_map(wrap, result) if here == NAME else result


class Device(TorchDispatchMode):
    """Sends to the device what is made there from nothing: `torch.zeros(3, device="pseudo")`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        place = kwargs.get("device")
        if place is not None and torch.device(place).type == NAME:
            return on_device(func, args, kwargs)
        return func(*args, **kwargs)


class FromNumbers(TorchFunctionMode):
    """The same for what no dispatch mode sees: `torch.tensor(3, device="pseudo")`, `x[[1, 2]]`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        place = kwargs.get("device")
        if func is torch.tensor and place is not None and torch.device(place).type == NAME:
            return func(*args, **kwargs | {"device": "cpu"}).to(place)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], list):
            return func(args[0], torch.tensor(args[1]).to(args[0].device))
        return func(*args, **kwargs)


class Module(backend_registration._DummyBackendModule):
    """`torch.pseudo`: its random numbers are the CPU's, and it notes what it is asked for."""

    def __init__(self):
        self.seeds, self.emptied = [], 0

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)

    def manual_seed(self, seed):
        self.seeds.append(seed)

    def device(self, index):
        return contextlib.nullcontext()

    def empty_cache(self):
        self.emptied += 1


def install():
    """Give this process the device; returns the modes in which tensors can be made on it."""
    # As on a GPU, a parameter stays the same object when it is moved, so that ties hold.
    torch.__future__.set_swap_module_params_on_conversion(True)
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    return FromNumbers(), Device()
