"""A client mod that turns an ordinary Flower app into a client of these strategies."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message
from torch import nn

from fedpsa_strategy.client.reply import make_reply
from fedpsa_strategy.probe.per_sample import LossFn
from fedpsa_strategy.probe.state_dicts import StateFn, load_arrays, read_arrays
from fedpsa_strategy.wire.contract import CALIBRATION, REPLY_ARRAYS
from fedpsa_strategy.wire.text import shown_names

Next = Callable[[Message, Context], Message]


def fedpsa_mod(
    model_fn: Callable[[], nn.Module],
    *,
    loss_fn: LossFn | None = None,
    state_fn: StateFn | None = None,
) -> Callable[[Message, Context, Next], Message]:
    """Return a mod for `ClientApp(mods=[fedpsa_mod(Net)])`.

    It wraps an existing `@app.train()` that replies with the arrays that it was sent, trained, as
    Flower's apps do, and makes Δ and the sketch of that reply. These may be all arrays of the model
    or some, such as adapters. Everything else passes unchanged: messages of other strategies, other
    kinds of messages, error replies, the names of records, and further records of a reply.
    Mods that change the model, such as Flower's for differential privacy, follow it:
    `mods=[fedpsa_mod(Net), LocalDpMod(...)]`.

    Parameters
    ----------
    model_fn : Callable[[], nn.Module]
        Makes a model of the app's architecture, with the parameters frozen that are not trained.
        The values of what travels do not matter; the others have to be the server's.
    loss_fn : Callable[[Tensor, Tensor], Tensor] (default: None)
        Per-sample loss of (outputs, targets); None is cross-entropy.
    state_fn : Callable[[nn.Module], Mapping[str, Tensor]] (default: None)
        Names the arrays that travel, as in `arrays_of`; None is the state dict.
    """
    workspace: list[nn.Module] = []  # one model for all messages of this process

    def mod(message: Message, context: Context, call_next: Next) -> Message:
        config_key = next(
            (key for key, item in message.content.config_records.items() if REPLY_ARRAYS in item),
            None,
        )
        if config_key is None:  # not for a strategy of this library
            return call_next(message, context)
        (arrays_key,) = _only(list(message.content.array_records), "ArrayRecord", "message")
        # Now, as an app may change the message.
        before = read_arrays(message.content.array_records[arrays_key])
        # What is for this mod alone: others take a message with two array records for a mistake.
        batch = message.content.pop(CALIBRATION, None)
        reply = call_next(message, context)
        if batch is not None:
            message.content[CALIBRATION] = batch
        if reply.has_error():
            return reply
        (reply_key,) = _only(list(reply.content.array_records), "ArrayRecord", "reply")
        (metrics_key,) = _only(list(reply.content.metric_records), "MetricRecord", "reply")
        arrays = reply.content.array_records[reply_key]
        if arrays.keys() != before.keys():
            raise ValueError(
                "the reply must have the arrays of the message: missing are "
                f"{shown_names(before.keys() - arrays.keys())}, not asked for "
                f"{shown_names(arrays.keys() - before.keys())}"
            )
        if not workspace:
            workspace.append(model_fn())
        model = workspace[0]
        load_arrays(model, arrays, state_fn)
        made = make_reply(
            message,
            model,
            metrics=reply.content.metric_records[metrics_key],
            context=context,
            loss_fn=loss_fn,
            before=before,
            state_fn=state_fn,
            arrays_key=arrays_key,
            config_key=config_key,
        )
        made.content[metrics_key] = made.content.pop("metrics")
        for key, record in reply.content.items():
            if key not in (reply_key, metrics_key):
                made.content[key] = record
        return made

    return mod


def _only(keys: list[str], kind: str, where: str) -> list[str]:
    """Return the keys if there is exactly one, apart from the calibration batch."""
    keys = [key for key in keys if key != CALIBRATION]
    if len(keys) != 1:
        raise ValueError(f"fedpsa_mod needs exactly one {kind} in the {where}, found {keys}")
    return keys
