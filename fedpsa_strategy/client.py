"""The client's half: from a trained model to the reply the server expects."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedpsa_strategy.fedpsa import CALIBRATION_KEY
from fedpsa_strategy.probe import LossFn, Probe


def make_reply(
    message: Message,
    model: nn.Module,
    *,
    num_examples: int,
    metrics: Mapping[str, Any] | None = None,
    context: Context | None = None,
    loss_fn: LossFn | None = None,
    arrays_key: str = "arrays",
    config_key: str = "config",
) -> Message:
    """Return the reply to a train message.

    It carries Δ (new values for integer buffers) and, when the message asks for one, the sketch of
    the model that the server will reconstruct, which is w + Δ as it travels.

    Parameters
    ----------
    message : Message
        The train message; holds w, the model before training.
    model : nn.Module
        The model after training. It holds w + Δ afterwards.
    num_examples : int
        Size of the local training data.
    metrics : Mapping[str, Any] (default: None)
        More to report: `train-loss`, timings, ...
    context : Context (default: None)
        The node's context, where a calibration batch that was sent is kept.
    loss_fn : Callable[[Tensor, Tensor], Tensor] (default: None)
        Per-sample loss for the sensitivity; None is cross-entropy.
    arrays_key, config_key : str
        Keys of the records in the message.
    """
    config = message.content.config_records[config_key]
    before = message.content.array_records[arrays_key].to_torch_state_dict()
    delta = _difference(before, model.state_dict())
    record = MetricRecord({**(metrics or {}), "num-examples": num_examples})
    if "sketch-dim" in config:
        started = time.perf_counter()
        probe = Probe.from_config(
            config, arrays=_calibration(message, context, config), loss_fn=loss_fn
        )
        model.load_state_dict(_sum(before, delta))
        record["sketch"] = probe(model)
        record["sensitivity-seconds"] = time.perf_counter() - started
    content = RecordDict({arrays_key: ArrayRecord(delta), "metrics": record})
    return Message(content, reply_to=message)


def _difference(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: value.detach().cpu() - before[key] if value.is_floating_point() else value.detach()
        for key, value in after.items()
    }


def _sum(before: Mapping[str, Tensor], delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: before[key] + value if value.is_floating_point() else value
        for key, value in delta.items()
    }


def _calibration(
    message: Message, context: Context | None, config: ConfigRecord
) -> ArrayRecord | None:
    """Return the calibration batch that came with this message or an earlier one."""
    if config.get("calibration-transport") != "arrays":
        return None
    sent = message.content.array_records.get(CALIBRATION_KEY)
    if context is None:
        return sent
    if sent is not None:
        context.state[CALIBRATION_KEY] = sent
    return context.state.array_records.get(CALIBRATION_KEY)
