"""The edge between Flower's records and NumPy's arrays or torch's state dicts.

Not all of a model has to travel: a frozen base model can be on both sides from the start, and then
messages carry the rest. And NumPy has no bfloat16: what a model holds in it travels as float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpsa_strategy.wire.contract import trainable_keys
from fedpsa_strategy.wire.layout import read_array, record_of

StateFn = Callable[[nn.Module], Mapping[str, Tensor]]
"""Returns the tensors of a model that travel, under any names; they are the model's own memory, as
those of a state dict are. For example `peft.get_peft_model_state_dict`."""

# By model: versions of the tensors that stay, and their hash, which takes long for a large model.
_hashes: WeakKeyDictionary[nn.Module, tuple[list[Any], str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Part:
    """What of a model travels."""

    tensors: dict[str, Tensor]  # the model's own, by the names under which they travel
    trainable: set[str]  # those names whose tensors are trained
    rest: dict[str, Tensor]  # the others, by their names in the state dict


def part_of(
    model: nn.Module, keys: Iterable[str] | None = None, state_fn: StateFn | None = None
) -> Part:
    """Return what of a model travels.

    These are the arrays called `keys`; for None all but frozen parameters, or all that `state_fn`
    returns. Raises ValueError if the model has no tensors of some of these names, or `state_fn`
    returns copies.
    """
    # Without what modules keep beside tensors (`get_extra_state`).
    own = {name: item for name, item in model.state_dict().items() if isinstance(item, Tensor)}
    trained = set(trainable_keys(model))
    offered = {name: name for name in own}
    if state_fn is not None:
        offered = _own_names(own, state_fn(model))
    if keys is None:
        frozen = dict(model.named_parameters(remove_duplicate=False)).keys() - trained
        chosen = {
            name
            for name, own_name in offered.items()
            if state_fn is not None or own_name not in frozen
        }
    else:
        chosen = set(keys)
        if unknown := sorted(chosen - offered.keys()):
            raise ValueError(f"the model {type(model).__name__} has no arrays {unknown}")
    tensors = {name: own[own_name] for name, own_name in offered.items() if name in chosen}
    # Two names of one parameter: it is where either is.
    places = {_place(tensor) for tensor in tensors.values()}
    return Part(
        tensors,
        {name for name in tensors if offered[name] in trained},
        {name: tensor for name, tensor in own.items() if _place(tensor) not in places},
    )


def arrays_of(model: nn.Module, state_fn: StateFn | None = None) -> ArrayRecord:
    """Return the arrays of a model that have to travel: all but frozen parameters.

    Parameters
    ----------
    model : nn.Module
        The model. What it holds in bfloat16, which Flower's records cannot, is written as float32.
    state_fn : Callable[[nn.Module], Mapping[str, Tensor]] (default: None)
        Chooses and names what travels instead, for example `peft.get_peft_model_state_dict`.
    """
    tensors = part_of(model, None, state_fn).tensors
    return record_of((name, as_array(tensor)) for name, tensor in tensors.items())


def load_arrays(model: nn.Module, arrays: ArrayRecord, state_fn: StateFn | None = None) -> None:
    """Load what `arrays_of` returned, or any other arrays that hold all that is trained.

    Parameters
    ----------
    model : nn.Module
        The model. What is not among the arrays keeps its values.
    arrays : ArrayRecord
        The arrays.
    state_fn : Callable[[nn.Module], Mapping[str, Tensor]] (default: None)
        See `arrays_of`.
    """
    load_values(model, read_arrays(arrays), state_fn)


def read_arrays(arrays: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return read-only views of a record's arrays; raises InvalidReplyError if one is malformed."""
    return {
        key: read_array(array, f"arrays[{key!r}]", np.dtype(array.dtype), tuple(array.shape))
        for key, array in arrays.items()
    }


def load_values(
    model: nn.Module, values: Mapping[str, NDArray[Any]], state_fn: StateFn | None = None
) -> None:
    """Load what `read_arrays` returned; see `load_arrays`."""
    part = part_of(model, values, state_fn)
    if missing := sorted(part.rest.keys() & set(trainable_keys(model))):
        raise ValueError(f"the model trains {missing}, which the arrays lack")
    for name, tensor in part.tensors.items():
        if tensor.shape != values[name].shape:
            raise ValueError(
                f"array {name!r} has shape {values[name].shape}, in the model {tuple(tensor.shape)}"
            )
    # Copies, because torch takes no arrays that are read-only.
    if state_fn is None:
        copies = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
        model.load_state_dict(copies, strict=False)
    else:
        for name, tensor in part.tensors.items():
            tensor.copy_(torch.from_numpy(values[name].copy()))


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array, on a CPU the very memory; bfloat16 as float32."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy(force=True)
    return array


def fingerprint_of_rest(model: nn.Module, part: Part) -> str:
    """Return a hash of what of a model does not travel, 32 hex digits; empty if nothing does not.

    Sketches can only be compared if the base model is the same on both sides.
    """
    if not part.rest:
        return ""
    state = [(_place(tensor), tensor._version) for tensor in part.rest.values()]
    known = _hashes.get(model)
    if known is None or known[0] != state:
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(part.rest.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            # As bytes: there are number formats that NumPy does not know.
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        known = _hashes[model] = (state, digest.hexdigest())
    return known[1]


def _own_names(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return, for the names under which tensors travel, those in the state dict."""
    by_place = {_place(tensor): name for name, tensor in own.items()}
    names = {name: by_place.get(_place(tensor)) for name, tensor in tensors.items()}
    if copies := [name for name, found in names.items() if found is None]:
        raise ValueError(
            f"state_fn returns tensors that are not the model's own memory: {copies}. It must "
            "choose among model.state_dict(), under any names, without copying"
        )
    return {name: found for name, found in names.items() if found is not None}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor's values are: equal for two names of one parameter."""
    if tensor.numel() == 0 or type(tensor) is not Tensor:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
