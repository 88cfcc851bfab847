"""The client's half: from a trained model to the reply the server expects."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpsa_strategy.probe.probe import LossFn, Probe
from fedpsa_strategy.probe.state_dicts import read_arrays
from fedpsa_strategy.seeds import derive
from fedpsa_strategy.wire.contract import (
    CALIBRATION,
    DELTA,
    MARK,
    REPLY_ARRAYS,
    STATES,
    mark,
    trainable_keys,
)
from fedpsa_strategy.wire.layout import write_array
from fedpsa_strategy.wire.quantise import BITS, pack
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
    arrays_key: str = "arrays",
    config_key: str = "config",
) -> Message:
    """Return the reply to a train message.

    It carries what the message asks for: Δ in some number format, and the sketch of the model that
    the server will reconstruct, which is w + Δ as it travels. A message that asks for nothing gets
    the whole trained model, as Flower's own strategies expect it.

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
    arrays_key, config_key : str
        Keys of the records in the message.
    """
    config = cast(ConfigRecord, message.content[config_key])
    wants_delta, wants_sketch = config.get(REPLY_ARRAYS) == DELTA, "sketch-dim" in config
    record = dict(metrics or {})
    if num_examples is not None:
        record["num-examples"] = num_examples
    if wants_delta:
        if before is None:
            before = read_arrays(cast(ArrayRecord, message.content[arrays_key]))
        records = _update_records(model, before, config, arrays_key, keep_sum=wants_sketch)
        content = RecordDict({**records})
    else:
        values = model.state_dict()
        arrays = {key: write_array(value.numpy(force=True)) for key, value in values.items()}
        content = RecordDict({arrays_key: _record(arrays)})
    seconds = None
    if wants_sketch:
        started = time.perf_counter()
        batch = _calibration(message, context, config)
        probe = Probe.from_config(config, arrays=batch, loss_fn=loss_fn)
        record["sketch"] = probe(model)
        seconds = time.perf_counter() - started
    content["metrics"] = MetricRecord(record)
    if wants_delta:
        content[MARK] = ConfigRecord(mark(seconds))
    return Message(content, reply_to=message)


def _update_records(
    model: nn.Module,
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
    after, trainable = model.state_dict(), set(trainable_keys(model))
    values, states = {}, {}
    sent: dict[str, NDArray[Any]] = {}
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is for the server
        for key, tensor in after.items():
            array = tensor.numpy(force=True)  # on a CPU the very memory
            if key in trainable:
                values[key] = array
                delta = np.asarray(array - before[key])
                sent[key] = _rounded(delta, update_dtype, _rounding_seed(config, len(sent)))
            else:
                states[key] = write_array(array)
        if keep_sum:
            _set_to_sum(after, values, before, sent, update_dtype)
    records = {arrays_key: _record({key: write_array(delta) for key, delta in sent.items()})}
    return records | ({STATES: _record(states)} if states else {})


def _record(arrays: Mapping[str, Array]) -> ArrayRecord:
    record = ArrayRecord()  # one that is made from a dict makes every array again
    for key, array in arrays.items():
        record[key] = array
    return record


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
    """Write w + Δ into the tensors of a model and their values, Δ being what the server reads."""
    for key, delta in sent.items():
        if update_dtype == "bfloat16" or update_dtype in BITS:
            received, delta = delta, np.empty(values[key].shape, np.float32)
            decode(received.reshape(-1), update_dtype, delta.reshape(-1), key)
        np.add(before[key], delta, out=values[key], casting="same_kind")
        if tensors[key].device.type != "cpu":
            tensors[key].copy_(torch.from_numpy(values[key]))


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
