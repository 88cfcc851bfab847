import pytest

from simulation.experiments.answer import answer, verdict
from simulation.experiments.numbers import Estimate
from simulation.experiments.rows import COMPLETED, Row


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([1.0, 1.1, 0.9], "ahead"),  # 1 above 4.303 · 0.1 / √3
        ([-1.0, -1.1, -0.9], "behind"),
        ([1.0, 0.0, 0.5], "unclear"),  # 0.5 below 4.303 · 0.5 / √3
        ([0.0, 0.0, 0.0], "unclear"),
        ([9.0, 9.0], "too few seeds"),
    ],
)
def test_a_difference_is_judged_by_students_t(differences, expected):
    assert verdict(Estimate(dict(enumerate(differences)))) == expected


def row(method, seed, accuracy, alpha=0.1, **more):
    labels = {"method": method, "dataset": "fmnist", "alpha": alpha, "seed": seed, **more}
    numbers = {"accuracy": accuracy, "area_under_curve": 5.0 - accuracy}
    return Row(labels, f"{method}{seed}{alpha}", COMPLETED, numbers=numbers)


def test_methods_are_ranked_where_the_control_has_enough_seeds():
    rows = [row("Uniform", seed, 0.80 + 0.01 * seed) for seed in range(3)]
    rows += [row("A", seed, 0.90 + 0.01 * seed + 0.001 * (seed == 1)) for seed in range(3)]
    rows += [row("Uniform", 0, 0.9, alpha=1.0), row("A", 0, 0.8, alpha=1.0)]
    ((place, table),) = answer(rows).items()
    assert place == "Fashion-MNIST, α = 0.1"
    first, second = ([cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:])
    assert first[1:5] == ["A", "91.03 ± 1.00", "ahead", "behind"]
    assert second[1:5] == ["Uniform", "81.00 ± 1.00", "control", "control"]


def test_runs_of_several_models_are_not_mixed():
    rows = [
        row(method, seed, accuracy + 0.01 * seed, model=model)
        for model, best in (("perceptron", "A"), ("the dataset's own model", "Uniform"))
        for method in ("A", "Uniform")
        for accuracy in [0.9 if method == best else 0.8]
        for seed in range(3)
    ]
    found = {
        place: [line.split("|")[1].strip() for line in table.splitlines()[2:]]
        for place, table in answer(rows).items()
    }
    assert found == {
        "Fashion-MNIST, α = 0.1, perceptron": ["A", "Uniform"],
        "Fashion-MNIST, α = 0.1, the dataset's own model": ["Uniform", "A"],
    }
