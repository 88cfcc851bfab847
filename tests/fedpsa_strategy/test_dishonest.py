"""What broken or dishonest clients can do: huge updates and forged sketches."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from scripted_grid import ScriptedGrid, update
from test_loop import Recorder, run, virtual
from torch import nn

from fedpsa_strategy import FedBuff, FedPSA, Probe, make_reply
from fedpsa_strategy.norm_guard import NormGuard


def go(guard, huge=(300.0, 400.0), num_versions=30):
    def behaviour(message):
        return update(huge) if grid.partition(message) == 2 else update([0.6, 0.8])

    grid = ScriptedGrid(4, behaviour)
    recorder = Recorder()
    strategy = FedBuff(
        buffer_size=1,
        max_in_flight=1,
        staleness_exponent=0.0,
        norm_guard=guard,
        failure_pause=1e9,
        listeners=[recorder],
        **virtual(4),
    )
    return run(strategy, grid, num_versions=num_versions), recorder


def test_without_a_limit_a_huge_update_counts():
    result, recorder = go(None)
    assert np.linalg.norm(result.arrays["w"].numpy()) > 500
    assert not recorder.of("reject")


def test_an_absolute_limit_rejects():
    result, recorder = go(NormGuard(most=2.0))
    np.testing.assert_allclose(result.arrays["w"].numpy(), [18.0, 24.0], rtol=1e-5)
    assert {event.client for event in recorder.of("reject")} == {2}
    assert "norm 500 is above 2" in recorder.of("reject")[0].reason


def test_an_absolute_limit_clips():
    result, recorder = go(NormGuard(most=2.0, action="clip"))
    huge = sum(event.client == 2 for event in recorder.of("upload"))
    assert huge > 0
    expected = np.array([0.6, 0.8]) * (30 - huge) + np.array([1.2, 1.6]) * huge
    np.testing.assert_allclose(result.arrays["w"].numpy(), expected, rtol=1e-5)
    assert {event.squared_norm for event in recorder.of("upload") if event.client == 2} == {4.0}


def test_a_multiple_of_the_median_rejects_once_there_is_a_median():
    _, recorder = go(NormGuard(ratio=10.0), num_versions=60)
    accepted = [event for event in recorder.of("upload") if event.client == 2]
    assert {event.client for event in recorder.of("reject")} == {2}
    assert all(event.sequence < 12 for event in accepted)


@pytest.mark.parametrize("kwargs", [{"most": -1.0}, {"ratio": float("nan")}, {"action": "shrug"}])
def test_impossible_limits_are_refused(kwargs):
    with pytest.raises(ValueError, match="is"):
        NormGuard(**kwargs)


# --- Forged sketches ---------------------------------------------------------------------------


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def trained_reply(message: Message) -> Message:
    """What an honest client answers: a little training, then make_reply."""
    local = model()
    local.load_state_dict(message.content["arrays"].to_torch_state_dict())
    generator = torch.Generator().manual_seed(message.content["config"]["seed"] % 2**32)
    for _ in range(3):
        x = torch.randn(8, 5, generator=generator)
        loss = nn.functional.cross_entropy(local(x), torch.arange(8) % 3)
        gradients = torch.autograd.grad(loss, list(local.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(local.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    return make_reply(message, local, num_examples=8)


def audited_run(forge, **kwargs):
    start = model()
    probe = Probe.gaussian(start, (5,), num_classes=3, size=16)
    server = probe.sketch_fn(model())

    def behaviour(message):
        content: RecordDict = trained_reply(message).content
        if grid.partition(message) == 1 and forge:
            # The greedy forger answers with the sketch of the model it was given: κ close to 1.
            content["metrics"]["sketch"] = server(message.content["arrays"])
        return content

    grid = ScriptedGrid(4, behaviour)
    recorder = Recorder()
    strategy = FedPSA(
        sketch_fn=probe.sketch_fn(model()),
        buffer_size=2,
        max_in_flight=2,
        failure_pause=1e9,
        listeners=[recorder],
        **virtual(4),
        **kwargs,
    )
    arrays = ArrayRecord(start.state_dict())
    run(strategy, grid, num_versions=20, arrays=arrays, config=probe.config())
    return recorder


def test_honest_clients_pass_a_full_audit():
    recorder = audited_run(forge=False, audit_fraction=1.0, audit_tolerance=1e-6)
    assert len(recorder.of("upload")) == 40
    assert not recorder.of("reject")


def test_a_forger_is_caught_and_left_out_at_once():
    recorder = audited_run(forge=True, audit_fraction=1.0)
    (rejection,) = recorder.of("reject")
    assert rejection.client == 1
    assert "sketch is not that of the model" in rejection.reason
    assert [event.client for event in recorder.of("quarantine")] == [1]
    assert 1 not in {event.client for event in recorder.of("upload")}


def test_a_forger_is_caught_sooner_or_later_by_a_partial_audit():
    recorder = audited_run(forge=True, audit_fraction=0.3)
    assert [event.client for event in recorder.of("quarantine")] == [1]


def test_without_audit_a_forger_goes_unnoticed():
    recorder = audited_run(forge=True)
    assert 1 in {event.client for event in recorder.of("upload")}
    assert not recorder.of("reject")
