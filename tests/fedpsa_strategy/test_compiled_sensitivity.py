from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpsa_strategy import Calibration, Probe, Sketch, compiled_sensitivity, errors
from fedpsa_strategy.compiled_sensitivity import compile_seconds, sketched_sensitivity
from fedpsa_strategy.compiled_sensitivity import compiled_sensitivity as compiled
from fedpsa_strategy.parameter_sensitivity import num_trainable, sensitivity


class Perceptron(nn.Module):
    """Two layers, one parameter that is not trained, and a buffer that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(5, 3)
        self.second.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.second(self.dropout(torch.relu(self.first(x * self.scale))))


def batch(classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator)
    return x, torch.randint(classes, (8,), generator=generator)


def sketched(sketch: Sketch, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    return sketched_sensitivity(sketch, Calibration(x.numpy(), y.numpy()), model)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert not found.requires_grad
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.max()))


def test_it_is_the_sensitivity_also_of_the_next_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, (x, y) = Perceptron(), batch()
    assert model.training
    before = compile_seconds()
    assert_close(compiled(model, x, y), sensitivity(model, x, y))
    assert compile_seconds() > before
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    # Other parameters, another buffer, another batch: none of them is part of the code.
    monkeypatch.setattr(compiled_sensitivity, "_compile", None)
    before = compile_seconds()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
        model.scale.fill_(0.5)
    assert_close(compiled(model, x, y), sensitivity(model, x, y))
    assert_close(compiled(model, -x, y.flip(0)), sensitivity(model, -x, y.flip(0)))
    # The same bits every time.
    assert torch.equal(compiled(model, x, y), compiled(model, x, y))
    assert compile_seconds() == before


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("dim", "hidden", "dtype"),
    [
        (16, 5, torch.float32),
        (3, 5, torch.float32),
        (21, 5, torch.float64),
        (16, 900, torch.float32),
    ],
)
def test_a_sketch_is_part_of_the_code_and_adds_up_in_the_same_order(
    dim: int, hidden: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3)).to(dtype)
    sketch, other = (Sketch(num_trainable(model), dim, seed) for seed in (7, 8))
    x, y = batch()
    x = x.to(dtype)
    sketched(sketch, model, x, y)
    ((_, code),) = compiled_sensitivity._known[model]
    assert code is not None
    before = compile_seconds()
    sketched(other, model, x, y)
    assert compile_seconds() == before  # another projection is no other code
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        vector = compiled(model, x, y)
        for projection in (sketch, other):
            found = sketched(projection, model, x, y)
            assert found.tolist() == projection(vector).tolist()
            expected = projection(sensitivity(model, x, y))
            assert_close(torch.from_numpy(found), torch.from_numpy(expected))
    with torch.no_grad():
        parameter[0] = torch.nan
    assert not np.isfinite(sketched(sketch, model, x, y)).any()


@pytest.mark.usefixtures("one_thread")
def test_a_sketch_that_adds_up_in_another_order_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rounding(graph: Any, arguments: list[Any]) -> Any:
        def code(*tensors: torch.Tensor) -> Any:
            found = graph(*tensors)
            return (found[0] * (1 + 2e-16), found[1]) if isinstance(found, tuple) else found

        return code

    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", rounding)
    model, (x, y) = nn.Linear(6, 3), batch()
    sketch = Sketch(21)
    for _ in range(2):
        found = sketched(sketch, model, x, y)
        assert found.tolist() == sketch(compiled(model, x, y)).tolist()
    (warning,) = warnings_of(caplog)
    assert "The sketch of Linear" in warning
    assert "another order" in warning


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", [20, 22])
def test_a_sketch_of_another_size_is_an_error(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", recorded_only)
    model, (x, y) = nn.Linear(6, 3), batch()
    with pytest.raises(ValueError, match=f"size={size}"):
        sketched(Sketch(size), model, x, y)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", ["several threads", "gaussian", "long"])
def test_a_sketch_that_does_not_suit_is_made_of_the_compiled_sensitivity(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", recorded_only)
    hidden = 2**13 if case == "long" else 5
    model = nn.Sequential(nn.Linear(6, hidden), nn.Linear(hidden, 3))
    sketch = Sketch(num_trainable(model), kind="gaussian" if case == "gaussian" else "rademacher")
    torch.set_num_threads(2 if case == "several threads" else 1)
    x, y = batch()
    found = sketched(sketch, model, x, y)
    ((key, code),) = compiled_sensitivity._known[model]
    assert key[1] is None  # code without a sketch
    assert code is not None
    assert found.tolist() == sketch(compiled(model, x, y)).tolist()


@pytest.mark.usefixtures("one_thread")
def test_a_sketch_of_a_model_that_does_not_suit_is_made_as_usual() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    x, y = batch()
    sketch = Sketch(35)
    found = sketched(sketch, model, x[:, None], y)
    assert found.tolist() == sketch(sensitivity(model, x[:, None], y)).tolist()


def test_a_loss_of_ones_own() -> None:
    def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(outputs, targets, reduction="none")

    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 3), batch()[0], torch.randn(8, 3)
    assert_close(compiled(model, x, y, squared_error), sensitivity(model, x, y, squared_error))


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.again(torch.relu(self.first(x)))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
        nn.Sequential(nn.Linear(6, 2**15), nn.Linear(2**15, 3)),
        Shared(),
    ],
    ids=["other layers", "large", "shared"],
)
def test_models_that_do_not_suit_are_not_compiled(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_sensitivity, "_compile", None)
    x, y = batch()
    if isinstance(model, nn.Sequential) and isinstance(model[0], nn.Conv1d):
        x = x[:, None]
    for _ in range(2):
        assert torch.equal(compiled(model, x, y), sensitivity(model, x, y))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "flwr"]


def recorded_only(graph: Any, arguments: list[Any]) -> Any:
    """Stand in for the compiler: the operations as they were recorded."""
    return graph


class Scaled(nn.Module):
    """Knows a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.mean = torch.tensor(0.13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.layer(x - self.mean)


def test_what_cannot_be_recorded_is_computed_as_usual(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", recorded_only)
    model, (x, y) = Scaled(), batch()
    for _ in range(2):
        assert torch.equal(compiled(model, x, y), sensitivity(model, x, y))
    (warning,) = warnings_of(caplog)
    assert "Scaled" in warning
    assert "cannot be recorded" in warning


def test_too_many_operations_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", recorded_only)
    monkeypatch.setattr(compiled_sensitivity, "_MOST_OPERATIONS", 5)
    model, (x, y) = nn.Linear(6, 3), batch()
    assert torch.equal(compiled(model, x, y), sensitivity(model, x, y))
    (warning,) = warnings_of(caplog)
    assert "operations" in warning


@pytest.mark.parametrize("bad", [torch.nan, 1e30])
def test_whether_it_is_compiled_does_not_depend_on_the_first_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bad: float
) -> None:
    used = []

    def noting(graph: Any, arguments: list[Any]) -> Any:
        return lambda *tensors: used.append(1) or graph(*tensors)

    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", noting)
    model, (x, y) = nn.Linear(6, 3), batch()
    own = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(bad)
    compiled(model, x, y)
    left = torch.full_like(own, bad)
    torch.testing.assert_close(model.weight.detach(), left, rtol=0, atol=0, equal_nan=True)
    with torch.no_grad():
        model.weight.copy_(own)
    used.clear()
    assert_close(compiled(model, x, y), sensitivity(model, x, y))
    assert used
    assert not warnings_of(caplog)


def test_recording_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return the logits, and keep them."""
            self.last = self.layer(x)
            return self.last

    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", recorded_only)
    model, (x, y) = Remembering(), batch()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    compiled(model, x, y)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert type(model.last) is torch.Tensor  # not a placeholder of the recording
    assert model.last.sum().item() != 0


def test_other_strides_are_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", recorded_only)
    model, (x, y) = nn.Linear(6, 3), batch()
    compiled(model, x, y)
    other = x.t().contiguous().t()
    assert other.stride() != x.stride()
    compiled(model, other, y)
    assert len(compiled_sensitivity._known[model]) == 2


@pytest.mark.usefixtures("one_thread")
def test_code_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(graph: Any, arguments: list[Any]) -> Any:
        def code(*tensors: torch.Tensor) -> Any:
            found = graph(*tensors)
            # All of it, so that the sketch still fits the sensitivities.
            return tuple(1.01 * part for part in found) if sketching else 1.01 * found

        return code

    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", wrong)
    model, (x, y) = nn.Linear(6, 3), batch()
    sketching = False
    for _ in range(2):
        assert torch.equal(compiled(model, x, y), sensitivity(model, x, y))
    (warning,) = warnings_of(caplog)
    assert "off by" in warning
    sketch, sketching = Sketch(21), True
    for _ in range(2):
        found = sketched(sketch, model, x, y)
        assert found.tolist() == sketch(sensitivity(model, x, y)).tolist()
    assert "The sketch of Linear is not compiled: its compiled code is off" in caplog.text
    assert len(warnings_of(caplog)) == 2


def test_a_loss_with_tensors_of_its_own_is_no_part_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", recorded_only)
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    loss_fn.register_buffer("unused", torch.ones(2))
    model, (x, y) = nn.Linear(6, 3), batch()
    assert_close(compiled(model, x, y, loss_fn), sensitivity(model, x, y, loss_fn))


def test_a_mistake_of_the_user_is_told_as_such() -> None:
    model, (x, y) = nn.Linear(6, 3), batch()
    with pytest.raises(ValueError, match="one loss per sample"):
        compiled(model, x, y, functional.cross_entropy)


def test_other_types_and_losses_are_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counting(graph: Any, arguments: list[Any]) -> Any:
        made.append(arguments)
        return graph

    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", counting)
    model, (x, y) = nn.Linear(6, 3), batch()
    compiled(model, x, y)
    compiled(model, x, y)
    assert len(made) == 1
    model.double()
    assert_close(compiled(model, x.double(), y), sensitivity(model, x.double(), y))
    assert len(made) == 2
    # Who brings a new loss every time gets his numbers, but not a compiler's time for ever.
    for _ in range(20):
        compiled(
            model, x.double(), y, lambda *args: functional.cross_entropy(*args, reduction="none")
        )
    assert len(made) == compiled_sensitivity._MOST_VARIANTS


def test_a_probe_compiles_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(sketch: Sketch, *_: object) -> Any:
        return sketch(torch.ones(sketch.size))

    monkeypatch.setattr(compiled_sensitivity, "sketched_sensitivity", fake)
    model = nn.Linear(6, 3)
    plain, other = (
        Probe.gaussian(model, (6,), num_classes=3, compiled=compiled) for compiled in (False, True)
    )
    assert other.fingerprint == plain.fingerprint
    assert other(model) == other.sketch(torch.ones(21)).tolist()
    assert plain(model) != other(model)


@pytest.mark.slow
def test_a_missing_compiler_is_a_clear_error(run_without_compiler: Callable[[str], str]) -> None:
    script = (
        "import torch\n"
        "from fedpsa_strategy.compiled_sensitivity import compiled_sensitivity\n"
        "from fedpsa_strategy.errors import CompilationError\n"
        "try:\n"
        "    compiled_sensitivity(torch.nn.Linear(6, 3), torch.zeros(8, 6), torch.arange(8) % 3)\n"
        "except CompilationError as error:\n"
        "    print(error)\n"
    )
    printed = run_without_compiler(script)
    assert "compiler" in printed
    assert 'step = "eager"' in printed
    assert issubclass(errors.CompilationError, errors.FedPSAError)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_that_writes_into_its_targets_does_not_change_the_batch(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    def halving(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets.mul_(0.5)
        return functional.mse_loss(outputs[:, 0], targets, reduction="none")

    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", recorded_only)
    model = nn.Linear(6, 1)
    probe = Probe.gaussian(model, (6,), loss_fn=halving, compiled=compiled)
    assert probe(model) == probe(model)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_writes_into_its_input_does_not_change_the_batch(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return the logits."""
            x -= 0.5
            return self.layer(x)

    monkeypatch.setattr(compiled_sensitivity, "_compile_graph", recorded_only)
    model = Writing()
    probe = Probe.gaussian(model, (6,), num_classes=3, compiled=compiled)
    assert probe(model) == probe(model)
