"""What is read off a reply, apart from whether it may count (test_loop.py)."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedpsa_strategy.wire.replies import count_bytes


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 8),
        (0.5, 8),
        (np.float64(0.5), 8),
        (True, 1),
        ("", 0),
        ("four", 4),
        (b"two", 3),
        ([], 0),
        ([1, 2, 3], 24),
        ([0.5] * 16, 128),
        ([True, False], 2),
        (["a", "bcd"], 4),
    ],
)
def test_bytes_of_a_setting_are_its_name_and_its_value(value, size):
    assert count_bytes(RecordDict({"config": ConfigRecord({"name": value})})) == 4 + size


def test_bytes_of_a_message_are_those_of_all_records():
    arrays = ArrayRecord({"w": Array(np.zeros(10, np.float32)), "b": Array(np.zeros(1))})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"loss": 0.5, "n": 3})})
    data = sum(len(array.data) for array in arrays.values())
    assert count_bytes(content) == data + (4 + 8) + (1 + 8)
