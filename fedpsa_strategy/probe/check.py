"""Whether a model can be measured on a calibration batch; if not, which argument is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpsa_strategy.probe.calibration import Calibration
from fedpsa_strategy.probe.per_sample import LossFn
from fedpsa_strategy.probe.sensitivity import evaluation

# As many samples as it takes to see a loss that mixes them. Of token ids all: any may be too large.
_FEW = 3


def check_fit(
    model: nn.Module,
    calibration: Calibration,
    loss_fn: LossFn | None,
    recipe: Mapping[str, Any] | None,
) -> None:
    """Pass some of the calibration batch through model and loss, which both stay as they are.

    The loss is per sample, None is cross-entropy; `recipe` are the arguments of
    `Calibration.gaussian`, if it drew the batch. A ValueError names the argument of that or of
    `Calibration.real` that does not fit the model.
    """
    few = None if calibration.inputs.dtype.kind == "i" else _FEW
    inputs, targets = (tensor[:few].clone() for tensor in calibration.tensors(*placed_like(model)))
    outputs = _outputs(model, inputs, recipe)
    if loss_fn is None:
        _check_cross_entropy(outputs, targets, calibration, recipe)
    else:
        _check_loss(loss_fn, outputs, targets, recipe)


def check_parameters(model: nn.Module) -> None:
    """Refuse a model without sensitivities; raises ValueError."""
    trained = [(name, item) for name, item in model.named_parameters() if item.requires_grad]
    if not trained:
        raise ValueError(
            f"the model {type(model).__name__} has no parameters to train: all have "
            "requires_grad=False"
        )
    for name, item in trained:
        if item.is_complex():
            raise ValueError(
                f"parameter {name!r} is {item.dtype}: sketches are of real parameters. Keep its "
                "real and imaginary parts (torch.view_as_real) in the model instead"
            )


def placed_like(model: nn.Module) -> tuple[str, torch.dtype]:
    """Return the device of a model, and the number format that its floating-point inputs have."""
    parameters = list(model.parameters())
    formats = (item.dtype for item in parameters if item.is_floating_point())
    return str(parameters[0].device), next(formats, torch.float32)


def _outputs(model: nn.Module, inputs: Tensor, recipe: Mapping[str, Any] | None) -> Any:
    entered: list[tuple[str, nn.Module, Any]] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: entered.append((name, module, args))
        )
        for name, module in model.named_modules()
        if not list(module.children()) and not isinstance(module, torch.jit.ScriptModule)
    ]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        with evaluation(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = model(inputs)
    except Exception as error:  # anything may come out of a user's forward pass
        raise ValueError(_inputs_text(inputs, recipe, entered, error)) from error
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, buffer, values in buffers:  # some models write into them even now
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            buffer.copy_(values)
    return outputs


def _inputs_text(
    inputs: Tensor,
    recipe: Mapping[str, Any] | None,
    entered: list[tuple[str, nn.Module, Any]],
    error: Exception,
) -> str:
    """Say which argument is wrong, and which layer cannot take the inputs."""
    tokens = not inputs.is_floating_point()
    name, module, args = entered[-1] if entered else ("", None, ())
    if recipe is None:
        what = f"Calibration.real's inputs of shape {tuple(inputs.shape[1:])} per sample"
        if tokens:
            what += f" and numbers up to {int(inputs.max())}"
    elif recipe["vocabulary"] is not None and isinstance(module, nn.Embedding):
        what = f"vocabulary={recipe['vocabulary']}"
    else:
        what = f"shape={recipe['shape']}"
        what += f" with vocabulary={recipe['vocabulary']}" if tokens else ""
        if isinstance(module, nn.Embedding):
            what += " without vocabulary, which makes inputs token ids,"
    text = f"{what} does not fit the model"
    if module is not None:
        given = next((tuple(item.shape) for item in args if isinstance(item, Tensor)), ())
        text += f", whose layer {name or type(module).__name__!r}, {module}, was given {given}"
    return f"{text}: {error}"


def _check_loss(
    loss_fn: LossFn, outputs: Any, targets: Tensor, recipe: Mapping[str, Any] | None
) -> None:
    """Refuse targets that a loss of the user's own cannot take, or not sample by sample."""
    what = f"targets of shape {tuple(targets.shape[1:])} per sample"
    if recipe is not None:
        what = f"target_shape={recipe['target_shape']}, num_classes={recipe['num_classes']}"
    found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    shapes = f"the model's outputs are {found}, the targets {tuple(targets.shape)}"

    def losses_of(some: Any, some_targets: Tensor) -> Tensor:
        try:
            losses = loss_fn(some, some_targets.clone())
        except Exception as error:  # anything may come out of a user's loss
            raise ValueError(f"{what} does not fit loss_fn: {shapes}: {error}") from error
        if losses.dim() == 0 or len(losses) != len(some_targets):
            raise ValueError(
                f"loss_fn must return one loss per sample (reduction='none'): {shapes}, the losses "
                f"{tuple(losses.shape)}"
            )
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    if not isinstance(outputs, Tensor) or len(outputs) != len(targets):
        losses_of(outputs, targets)
        return
    losses, fewer = (losses_of(outputs[:n].clone(), targets[:n]) for n in (_FEW, _FEW - 1))
    if not torch.allclose(losses[: _FEW - 1], fewer, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise ValueError(
            f"{what} does not fit loss_fn: {shapes}, and the loss of a sample changes with the "
            "other samples, as it does when different shapes broadcast"
        )


def _check_cross_entropy(
    outputs: Any, targets: Tensor, calibration: Calibration, recipe: Mapping[str, Any] | None
) -> None:
    """Refuse targets that are no classes of the model."""
    if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != len(targets):
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        hint = ""
        if isinstance(getattr(outputs, "logits", None), Tensor):
            hint = (
                ": give a loss_fn such as lambda outputs, targets: "
                "cross_entropy(outputs.logits, targets, reduction='none')"
            )
        raise ValueError(
            "without a loss_fn the model must return one tensor with a row of classes per sample, "
            f"but it returns {found} for {len(targets)} samples{hint}"
        )
    if targets.is_floating_point() and recipe is not None and targets.dim() == 1:
        raise ValueError(
            "num_classes is missing: without it targets are drawn for regression, which needs a "
            f"loss_fn; the model has {outputs.shape[-1]} outputs"
        )
    if not targets.is_floating_point() and outputs.dim() > 1:
        classes = outputs.shape[1]
        if recipe is not None and recipe["num_classes"] > classes:
            raise ValueError(
                f"num_classes={recipe['num_classes']} does not fit the model, which has {classes} "
                "outputs"
            )
        low, high = int(calibration.targets.min()), int(calibration.targets.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f"Calibration.real's targets {low} to {high} do not fit the model, which has "
                f"{classes} outputs: labels must lie in 0 to {classes - 1}"
            )
    try:
        functional.cross_entropy(outputs, targets, reduction="none")
    except (RuntimeError, ValueError, IndexError) as error:
        raise ValueError(
            f"targets of shape {tuple(targets.shape[1:])} per sample do not fit cross-entropy on "
            f"outputs of shape {tuple(outputs.shape[1:])} (give loss_fn for another loss): {error}"
        ) from error
