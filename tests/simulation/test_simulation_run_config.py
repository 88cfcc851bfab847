"""`format_run_config` against the parser that Flower reads it with."""

import enum
import math
from pathlib import Path

import numpy as np
import pytest
from flwr.common.config import parse_config_args
from flwr.common.serde import user_config_from_proto, user_config_to_proto
from hypothesis import example, given
from hypothesis import strategies as st

from simulation.environment import format_run_config

WORDS = st.text("abcXYZ019_-", min_size=1, max_size=8)
VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)


def same(left, right):
    return type(left) is type(right) and left == right


@given(st.dictionaries(WORDS, VALUES, max_size=6))
@example({"path": 'C:\\Users\\"Ann" O\'Neil\\run dir', "next": "a=b c='d' e=\"f\""})
@example(
    {"text": "tab\t newline\n return\r nul\0 bell\x07 delete\x7f nel\x85 line\u2028 \U0001f33c"}
)
@example({"file": "settings.toml"})
@example({"a": "", "b": " ", "c": "\\", "d": '"', "e": "'"})
@example({"small": 5e-324, "large": 1.7976931348623157e308, "zero": -0.0, "one": 1.0})
@example({"inf": math.inf, "minus": -math.inf})
def test_flower_reads_back_what_was_written(config):
    read = parse_config_args([format_run_config(config)])
    assert read.keys() == config.keys()
    assert all(same(read[key], config[key]) for key in config)
    # ... and can put it into a message.
    assert user_config_from_proto(user_config_to_proto(read)) == read


def test_nan_and_dotted_keys():
    read = parse_config_args([format_run_config({"a.b": math.nan, "a.c": 1})])
    assert math.isnan(read["a.b"])
    assert read["a.c"] == 1


def test_subclasses_of_the_plain_types_are_written_as_these():
    class Colour(str, enum.Enum):  # noqa: UP042 - prints itself unlike a StrEnum
        RED = "red"

    class Level(enum.IntEnum):
        HIGH = 3

    config = {"colour": Colour.RED, "level": Level.HIGH, "lr": np.float64(0.1)}
    assert format_run_config(config) == 'colour="red" level=3 lr=0.1'


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, b"x", Path("/tmp"), np.float32(1), 1j])
def test_types_that_flower_cannot_take_are_refused(value):
    with pytest.raises(TypeError, match="key: a run config holds"):
        format_run_config({"key": value})


@pytest.mark.parametrize("key", ["", "a b", "a=b", 'a"', ".a", "a.", "a..b", "ä"])
def test_keys_that_toml_cannot_take_are_refused(key):
    with pytest.raises(ValueError, match="run-config key"):
        format_run_config({key: 1})


def test_values_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="64 bits"):
        format_run_config({"seed": 2**63})
    with pytest.raises(ValueError, match="Unicode"):
        format_run_config({"name": "\ud800"})
    with pytest.raises(ValueError, match="below another key"):
        format_run_config({"a": 1, "a.b": 2})
