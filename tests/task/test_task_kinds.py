"""What integer targets are to outputs: classes in one of two places, or single decisions."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from task.errors import TaskError
from task.kinds import Kind, chosen_kind, logits_of, possible_kinds


def cross_entropy(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none").flatten(1).mean(1)


def kinds(outputs, targets):
    return possible_kinds(outputs, targets, targets, "test_data")


@pytest.mark.parametrize(
    ("outputs", "targets", "expected"),
    [
        ((3, 4), (3,), [Kind(4, 1)]),
        ((3, 1), (3,), [Kind(2, None)]),
        ((3,), (3,), [Kind(2, None)]),
        ((3, 5), (3, 5), [Kind(2, None)]),
        ((3, 4, 5), (3, 5), [Kind(4, 1)]),
        ((3, 5, 4), (3, 5), [Kind(4, 2)]),
        ((3, 5, 5), (3, 5), [Kind(5, 1), Kind(5, 2)]),
        ((3, 4, 6, 7), (3, 6, 7), [Kind(4, 1)]),
        ((3, 6, 7, 4), (3, 6, 7), [Kind(4, 3)]),
        ((3, 1, 6, 7), (3, 6, 7), [Kind(2, None)]),
        ((3, 6, 7, 1), (3, 6, 7), [Kind(2, None)]),
        ((3, 1, 6, 7), (3, 1, 6, 7), [Kind(2, None)]),
    ],
)
def test_shapes(outputs, targets, expected):
    assert kinds(torch.zeros(outputs), torch.zeros(targets, dtype=torch.int64)) == expected


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [((3, 4), (3, 1)), ((3, 4), (3, 2)), ((3, 4, 5), (3,)), ((3, 4, 5), (3, 6)), ((3, 2), (3, 1))],
)
def test_shapes_that_fit_nothing(outputs, targets):
    with pytest.raises(TaskError, match="do not fit the model's outputs"):
        kinds(torch.zeros(outputs), torch.zeros(targets, dtype=torch.int64))


def test_the_loss_decides_between_two_places_of_the_classes():
    targets = torch.randint(5, (4, 5), generator=torch.Generator().manual_seed(0))
    outputs = torch.randn(4, 5, 5)
    both = kinds(outputs, targets)
    assert chosen_kind(both, outputs, targets, cross_entropy).class_dim == 1
    last = chosen_kind(both, outputs, targets, lambda o, t: cross_entropy(o.mT, t))
    assert last.class_dim == 2
    wrapped = types.SimpleNamespace(logits=outputs)
    last = chosen_kind(both, wrapped, targets, lambda o, t: cross_entropy(o.logits.mT, t))
    assert last.class_dim == 2


def hinge(outputs, targets):
    return (1 - (2 * targets - 1) * outputs).clamp(min=0)


def bce(outputs, targets, **kwargs):
    targets = targets.float()
    return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none", **kwargs)


@pytest.mark.parametrize(
    ("loss_fn", "threshold"),
    [
        (bce, 0.0),
        (lambda o, t: bce(o, t, pos_weight=torch.tensor(20.0)), 0.0),
        (lambda o, t: bce(o, t, pos_weight=torch.tensor(0.01)), 0.0),
        (lambda o, t: (1 - torch.exp(-bce(o, t))) ** 2 * bce(o, t), 0.0),  # focal
        (hinge, 0.0),
        (lambda o, t: hinge(o, t) ** 2, 0.0),
        (lambda o, t: functional.binary_cross_entropy(o, t.float(), reduction="none"), 0.5),
        (lambda o, t: 7 * functional.binary_cross_entropy(o, t.float(), reduction="none"), 0.5),
        (lambda o, t: (o - t) ** 2, 0.5),
        (lambda o, t: (o - t).abs(), 0.5),
    ],
)
def test_the_loss_says_whether_outputs_are_logits_or_probabilities(loss_fn, threshold):
    outputs, targets = torch.rand(6), torch.arange(6) % 2
    (kind,) = kinds(outputs, targets)
    assert chosen_kind([kind], outputs, targets, loss_fn) == Kind(2, None, threshold)
    dictionary = {"logits": outputs}
    found = chosen_kind([kind], dictionary, targets, lambda o, t: loss_fn(o["logits"], t))
    assert found.threshold == threshold
    assert dictionary["logits"] is outputs


@given(
    samples=st.integers(1, 5),
    positions=st.integers(1, 6),
    classes=st.integers(2, 4),
    last=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=40, deadline=None)
def test_counting(samples, positions, classes, last, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (samples, positions), generator=generator)
    targets[torch.rand(samples, positions, generator=generator) < 0.3] = -100
    logits = torch.randn(samples, positions, classes, generator=generator)
    right = sum(
        int(logits[i, j].argmax() == targets[i, j])
        for i in range(samples)
        for j in range(positions)
        if targets[i, j] != -100
    )
    kind = Kind(classes, 2 if last else 1)
    found, among = kind.count(logits if last else logits.mT, targets)
    assert (int(found), int(among)) == (right, int((targets != -100).sum()))


def test_what_has_logits():
    tensor = torch.zeros(2)
    assert logits_of(tensor) is tensor
    assert logits_of({"logits": tensor}) is tensor
    assert logits_of(types.SimpleNamespace(logits=tensor)) is tensor
    assert logits_of((tensor, tensor)) is None
    assert logits_of({"scores": tensor}) is None
    assert logits_of(types.SimpleNamespace(logits=None)) is None
