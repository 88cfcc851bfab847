"""The one writer of whole files."""

import os
import stat

import pytest

from fedpsa_strategy.files import PRIVATE, PUBLIC, write_atomically


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_mode_that_is_given_is_exact_and_the_umask_decides_else(tmp_path, umask):
    write_atomically(tmp_path / "key", b"secret", mode=PRIVATE)
    write_atomically(tmp_path / "certificate", "for ", b"all", mode=PUBLIC)
    write_atomically(tmp_path / "deep/summary.json", "{}")
    assert mode_of(tmp_path / "key") == 0o600
    assert mode_of(tmp_path / "certificate") == 0o644
    assert mode_of(tmp_path / "deep/summary.json") == 0o666 & ~umask
    assert (tmp_path / "certificate").read_bytes() == b"for all"


def test_a_file_never_has_wider_permissions_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(descriptor):
        (temporary,) = tmp_path.iterdir()
        assert mode_of(temporary) == 0o600
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/key'"):
        write_atomically(tmp_path / "key", b"secret", mode=PRIVATE)
    assert list(tmp_path.iterdir()) == []
