"""A tiny Flower app."""

import pytest

from support.tiny_app import write_app


@pytest.fixture(scope="session")
def tiny_app(tmp_path_factory):
    """Return the folder of a small Flower app."""
    return write_app(tmp_path_factory.mktemp("app"))
