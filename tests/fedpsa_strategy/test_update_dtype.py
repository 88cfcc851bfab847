"""Updates in fewer bytes: what arrives is what was sent, and what does not fit is refused."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from fedpsa_strategy import FedPSA, Probe, make_reply
from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.server.options import Failures, Training
from fedpsa_strategy.wire.contract import DELTA, REPLY_ARRAYS, STATES
from fedpsa_strategy.wire.layout import Layout
from fedpsa_strategy.wire.replies import read_train_reply
from fedpsa_strategy.wire.update_dtype import UPDATE_DTYPES, decode
from server_app.settings import Settings
from support.clients import model, trained_reply
from support.grids import ScriptedGrid, model_arrays
from support.messages import train_message
from support.runs import Recorder, run, virtual

HALVES = ("float16", "bfloat16")
PRECISION = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class WithCounter(torch.nn.Module):
    """A model with float and integer buffers beside its parameters."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.layer(x))


def reply_to(before, after, **config):
    arrays = ArrayRecord(before.state_dict())
    message = train_message(arrays, {REPLY_ARRAYS: DELTA, **config})
    return make_reply(message, after, num_examples=3)


def shifted(before, scale=1e-2):
    torch.manual_seed(1)
    after = WithCounter()
    with torch.no_grad():
        for old, new in zip(before.parameters(), after.parameters(), strict=True):
            new.copy_(old + scale * torch.randn_like(old))
    after.norm.num_batches_tracked += 7
    return after


@pytest.mark.parametrize("update_dtype", ["float32", *HALVES])
def test_the_server_reads_what_the_client_rounded(update_dtype):
    before = WithCounter()
    after = shifted(before)
    exact = {k: (v - before.state_dict()[k]) for k, v in after.state_dict().items()}
    reply = reply_to(before, after, **{"update-dtype": update_dtype})
    layout = Layout(ArrayRecord(before.state_dict()))
    start = layout.read(ArrayRecord(before.state_dict()))
    read = read_train_reply(reply, layout, start, update_dtype=update_dtype)
    assert read.delta.dtype == np.float32
    assert read.states["norm.num_batches_tracked"] == 7
    # States travel as they are, whatever the format of updates.
    assert np.array_equal(read.states["norm.running_mean"], after.norm.running_mean)
    for key in ("layer.weight", "layer.bias", "norm.weight"):
        got = torch.from_numpy(layout.view(read.delta, key).copy())
        torch.testing.assert_close(got, exact[key], rtol=PRECISION[update_dtype], atol=1e-7)
        if update_dtype != "float32":
            assert torch.equal(got, exact[key].to(getattr(torch, update_dtype)).float())
    plain = reply_to(before, shifted(before)).content["arrays"]
    width = 4 if update_dtype == "float32" else 2
    assert len(reply.content["arrays"]["layer.weight"].data) == (
        len(plain["layer.weight"].data) - (4 - width) * 15
    )


def test_without_the_key_updates_travel_in_the_dtypes_of_the_model():
    before = WithCounter().double()
    reply = reply_to(before, shifted(WithCounter()).double())
    assert reply.content["arrays"]["layer.weight"].dtype == "float64"
    layout = Layout(ArrayRecord(before.state_dict()))
    delta, _ = layout.read_update(reply.content["arrays"], reply.content[STATES])
    assert delta.dtype == np.float64


def test_an_unknown_format_is_refused_on_both_sides():
    with pytest.raises(ValueError, match="'int2', must be one of"):
        reply_to(WithCounter(), WithCounter(), **{"update-dtype": "int2"})
    with pytest.raises(ValueError, match="'int2', must be one of"):
        Training(update_dtype="int2")


def test_every_bfloat16_is_decoded_exactly_into_any_precision():
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits).view(torch.bfloat16)
    for dtype in (np.float32, np.float64):
        out = np.empty(2**16, dtype)
        decode(bits, "bfloat16", out, "w")
        np.testing.assert_array_equal(out, expected.to(torch.float64).numpy().astype(dtype))


@pytest.mark.parametrize("update_dtype", HALVES)
def test_a_client_that_ignores_the_format_is_refused(update_dtype):
    layout = Layout(model_arrays())
    with pytest.raises(InvalidReplyError, match="has dtype float32, not"):
        layout.read_update(model_arrays(), {}, update_dtype)


# --- In a run ----------------------------------------------------------------------------------


def audited(update_dtype, scale=1.0, **kwargs):
    """Run FedPSA with honest clients and an audit of every sketch."""
    start = model()
    probe = Probe.gaussian(start, (5,), num_classes=3, size=16)

    def behaviour(message):
        if scale == 1.0:
            return trained_reply(message).content
        local = model()
        local.load_state_dict(message.content["arrays"].to_torch_state_dict())
        with torch.no_grad():
            next(local.parameters())[0, 0] += scale
        return make_reply(message, local, num_examples=8).content

    recorder = Recorder()
    strategy = FedPSA(
        sketch_fn=probe.sketch_fn(model()),
        buffer_size=2,
        max_in_flight=2,
        audit_fraction=1.0,
        audit_tolerance=1e-6,
        training=Training(update_dtype=update_dtype),
        failures=Failures(max_failures=2),
        listeners=[recorder],
        **virtual(4),
        **kwargs,
    )
    arrays, config = ArrayRecord(start.state_dict()), probe.config()
    grid = ScriptedGrid(4, behaviour)
    return run(strategy, grid, num_versions=5, arrays=arrays, config=config), recorder


@pytest.mark.parametrize("update_dtype", UPDATE_DTYPES)
def test_the_sketch_is_that_of_the_model_the_server_reconstructs(update_dtype):
    _, recorder = audited(update_dtype)
    assert len(recorder.of("upload")) == 10
    assert not recorder.of("reject")


def test_an_update_beyond_float16_is_refused_and_one_within_bfloat16_counts():
    with pytest.raises(Exception, match=r"contain NaN, Inf .*float16 ends at 65504"):
        audited("float16", scale=1e5)
    _, recorder = audited("bfloat16", scale=1e5)
    assert not recorder.of("reject")


def test_a_run_of_before_the_setting_may_be_resumed_but_not_in_another_format():
    before = Settings().to_run_config()
    del before["update-dtype"]
    assert not Settings().changed_since(before)
    changed = Settings(update_dtype="float16").changed_since(before)
    assert changed == {"update-dtype": ("float32", "float16")}
