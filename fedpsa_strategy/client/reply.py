"""The client's half: from a trained model to the reply the server expects."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpsa_strategy.probe.per_sample import LossFn
from fedpsa_strategy.probe.probe import Probe, ProbeError
from fedpsa_strategy.probe.state_dicts import (
    Part,
    StateFn,
    as_array,
    fingerprint_of_rest,
    part_of,
    read_arrays,
)
from fedpsa_strategy.seeds import derive
from fedpsa_strategy.wire.contract import (
    BASE,
    CALIBRATION,
    DELTA,
    MARK,
    REPLY_ARRAYS,
    STATES,
    mark,
)
from fedpsa_strategy.wire.layout import record_of
from fedpsa_strategy.wire.quantise import BITS, pack
from fedpsa_strategy.wire.text import shown_names
from fedpsa_strategy.wire.update_dtype import UPDATE_DTYPE_KEY, check_update_dtype, decode

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def make_reply(
    message: Message,
    model: nn.Module,
    *,
    num_examples: float | None = None,
    metrics: Mapping[str, Any] | None = None,
    context: Context | None = None,
    loss_fn: LossFn | None = None,
    before: Mapping[str, NDArray[Any]] | None = None,
    state_fn: StateFn | None = None,
    arrays_key: str = "arrays",
    config_key: str = "config",
) -> Message:
    """Return the reply to a train message.

    It carries what the message asks for: Δ in some number format, and the sketch of the model that
    the server will reconstruct, which is w + Δ as it travels. A message that asks for nothing gets
    the trained values, as Flower's own strategies expect them. Either way the reply has the arrays
    that the message has, which need not be all of the model.

    Parameters
    ----------
    message : Message
        The train message; holds w, the model before training.
    model : nn.Module
        The model after training. If there is to be a sketch, it holds w + Δ afterwards.
    num_examples : float (default: None)
        Size of the local training data; None if the metrics tell.
    metrics : Mapping[str, Any] (default: None)
        More to report: `train-loss`, timings, ...
    context : Context (default: None)
        The node's context, where a calibration batch that was sent is kept.
    loss_fn : Callable[[Tensor, Tensor], Tensor] (default: None)
        Per-sample loss for the sensitivity; None is cross-entropy.
    before : Mapping[str, NDArray[Any]] (default: None)
        w as arrays, from whoever has read the message already.
    state_fn : Callable[[nn.Module], Mapping[str, Tensor]] (default: None)
        Names the arrays that travel: see `arrays_of`; None is the state dict.
    arrays_key, config_key : str
        Keys of the records in the message.
    """
    config = cast(ConfigRecord, message.content[config_key])
    wants_delta, wants_sketch = config.get(REPLY_ARRAYS) == DELTA, "sketch-dim" in config
    record = dict(metrics or {})
    if num_examples is not None:
        record["num-examples"] = num_examples
    if before is None:
        before = read_arrays(cast(ArrayRecord, message.content[arrays_key]))
    part = part_of(model, before, state_fn)
    if wants_delta:
        records = _update_records(part, before, config, arrays_key, keep_sum=wants_sketch)
        content = RecordDict({**records})
    else:
        values = {key: _wire_values(item, before[key]) for key, item in part.tensors.items()}
        content = RecordDict({arrays_key: record_of(values.items())})
    seconds = None
    if wants_sketch:
        started = time.perf_counter()
        _check_base(model, part, config)
        batch = _calibration(message, context, config)
        probe = Probe.from_config(config, arrays=batch, loss_fn=loss_fn)
        record["sketch"] = probe(model)
        seconds = time.perf_counter() - started
    content["metrics"] = MetricRecord(record)
    if wants_delta:
        content[MARK] = ConfigRecord(mark(seconds, records[arrays_key]))
    return Message(content, reply_to=message)


def _update_records(
    part: Part,
    before: Mapping[str, NDArray[Any]],
    config: ConfigRecord,
    arrays_key: str,
    *,
    keep_sum: bool,
) -> dict[str, ArrayRecord]:
    """Return the records of Δ and, if there are any, of the states that are not trained.

    With `keep_sum` the model holds w + Δ as the server reads it afterwards.
    """
    update_dtype = check_update_dtype(config.get(UPDATE_DTYPE_KEY, "float32"))
    values: dict[str, NDArray[Any]] = {}
    sent: dict[str, NDArray[Any]] = {}
    states = {}
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is for the server
        for key, tensor in part.tensors.items():
            if key in part.trainable:
                values[key] = as_array(tensor)
                delta = _difference(tensor, values[key], before[key])
                sent[key] = _rounded(delta, update_dtype, _rounding_seed(config, len(sent)))
            else:
                states[key] = _wire_values(tensor, before[key])
        if keep_sum:
            _set_to_sum(part.tensors, values, before, sent, update_dtype)
    records = {arrays_key: record_of(sent.items())}
    return records | ({STATES: record_of(states.items())} if states else {})


def _difference(tensor: Tensor, after: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
    """Return Δ in the number format of the message.

    Where the model's own is narrower, training began from what was left of w in it.
    """
    if tensor.dtype == torch.bfloat16 or after.dtype != before.dtype:
        start = torch.from_numpy(before.copy()).to(tensor.dtype)
        delta = after.astype(before.dtype, copy=False) - as_array(start).astype(before.dtype)
    else:
        delta = after - before
    return np.asarray(delta)


def _wire_values(tensor: Tensor, before: NDArray[Any]) -> NDArray[Any]:
    return as_array(tensor).astype(before.dtype, copy=False)


def _check_base(model: nn.Module, part: Part, config: ConfigRecord) -> None:
    """Refuse to sketch a model that is another one than the server's, or has more to train."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    own = dict(model.named_parameters(remove_duplicate=False))
    if alone := [name for name in part.rest if id(own.get(name)) in trained]:
        raise ProbeError(
            f"the client trains {alone}, which the server did not send and whose sketch it could "
            "not make: freeze them (requires_grad_(False)), or let them travel"
        )
    if (expected := config.get(BASE)) and fingerprint_of_rest(model, part) != expected:
        raise ProbeError(
            f"the arrays of the model that do not travel, {shown_names(part.rest)}, are not the "
            "server's, so that sketches could not be compared: load the same base model on both "
            "sides. What training changes, such as BatchNorm's statistics, has to travel, or to be "
            "in eval mode"
        )


def _rounding_seed(config: ConfigRecord, position: int) -> int:
    """Return the seed with which an array of the update is rounded, if it is at random."""
    return derive(cast(int, config.get("seed", 0)), "rounding", position)


def _rounded(delta: NDArray[Any], update_dtype: str, seed: int) -> NDArray[Any]:
    """Return an update in a dtype of NumPy as it travels; what does not fit becomes Inf."""
    if update_dtype in BITS:
        return pack(delta, BITS[update_dtype], seed)
    if update_dtype not in _HALVES:
        return delta
    half = torch.from_numpy(delta).to(_HALVES[update_dtype])
    return (half.view(torch.uint16) if half.dtype == torch.bfloat16 else half).numpy()


def _set_to_sum(
    tensors: Mapping[str, Tensor],
    values: Mapping[str, NDArray[Any]],
    before: Mapping[str, NDArray[Any]],
    sent: Mapping[str, NDArray[Any]],
    update_dtype: str,
) -> None:
    """Write w + Δ into the tensors of a model, Δ being what the server reads."""
    for key, delta in sent.items():
        tensor, value = tensors[key], values[key]
        if update_dtype == "bfloat16" or update_dtype in BITS:
            received, delta = delta, np.empty(value.shape, np.float32)
            decode(received.reshape(-1), update_dtype, delta.reshape(-1), key)
        if value.dtype == before[key].dtype and tensor.dtype != torch.bfloat16:
            total = np.add(before[key], delta, out=value, casting="same_kind")
            if tensor.device.type == "cpu":
                continue  # the very memory
        else:
            total = np.add(before[key], delta, dtype=before[key].dtype, casting="same_kind")
        tensor.copy_(torch.from_numpy(np.asarray(total)))


def _calibration(
    message: Message, context: Context | None, config: ConfigRecord
) -> ArrayRecord | None:
    """Return the calibration batch that came with this message or an earlier one."""
    if config.get("calibration-transport") != "arrays":
        return None
    sent = cast(ArrayRecord | None, message.content.get(CALIBRATION))
    if context is None:
        return sent
    if sent is not None:
        context.state[CALIBRATION] = sent
    return context.state.array_records.get(CALIBRATION)
