"""The cache of memory-mapped arrays."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from task import cache as cache_module
from task.cache import cached_arrays, resolve_cache_dir
from task.errors import CacheError

ROOT = Path(__file__).resolve().parents[2]


def make():
    return {"a": np.arange(6).reshape(2, 3), "b": np.array([1.5, 2.5], dtype=np.float32)}


def refuse():
    raise AssertionError("made again")


def test_second_call_reads_the_files(tmp_path):
    first = cached_arrays(tmp_path, "key", make)
    second = cached_arrays(tmp_path, "key", refuse)
    for arrays in (first, second):
        assert set(arrays) == {"a", "b"}
        assert np.array_equal(arrays["a"], make()["a"])
        assert arrays["b"].dtype == np.float32
        assert all(isinstance(array, np.memmap) for array in arrays.values())
        with pytest.raises(ValueError, match="read-only"):
            arrays["a"][0, 0] = 9
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def truncate(folder):
    path = folder / "a.npy"
    path.write_bytes(path.read_bytes()[:-8])


def other_shape(folder):
    np.save(folder / "a.npy", make()["a"].reshape(3, 2))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "b.npy").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text("[1]"),
        lambda folder: (folder / "manifest.json").write_text('{"a": {}}'),
        lambda folder: (folder / "b.npy").write_bytes(b"x" * (folder / "b.npy").stat().st_size),
        truncate,
        other_shape,
    ],
)
def test_a_damaged_folder_is_rebuilt(tmp_path, damage):
    cached_arrays(tmp_path, "key", make)
    damage(tmp_path / "key")
    arrays = cached_arrays(tmp_path, "key", make)
    assert np.array_equal(arrays["a"], make()["a"])
    cached_arrays(tmp_path, "key", refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_file_in_the_way_is_replaced(tmp_path):
    (tmp_path / "key").write_text("not a folder")
    assert np.array_equal(cached_arrays(tmp_path, "key", make)["a"], make()["a"])


def test_a_failing_maker_leaves_nothing(tmp_path):
    with pytest.raises(AssertionError, match="made again"):
        cached_arrays(tmp_path, "key", refuse)
    assert list(tmp_path.iterdir()) == []


def test_the_loser_uses_the_winners_files(tmp_path):
    def slow():
        # While this process is still making the arrays, another one finishes.
        cached_arrays(tmp_path, "key", lambda: {"a": np.array([1])})
        return {"a": np.array([2])}

    assert cached_arrays(tmp_path, "key", slow)["a"].tolist() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_folder_taken_away_in_between_is_written_again(tmp_path, monkeypatch):
    publish = cache_module._publish
    calls = []

    def publish_and_lose(folder, values):
        publish(folder, values)
        calls.append(folder)
        if len(calls) == 1:
            folder.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(cache_module, "_publish", publish_and_lose)
    assert np.array_equal(cached_arrays(tmp_path, "key", make)["a"], make()["a"])
    assert len(calls) == 2


RACER = """
import sys
import numpy as np
from task.cache import cached_arrays
folder, me = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for key in range(40):
    arrays = cached_arrays(
        folder, f"key{key}", lambda: {n: np.full(20_000, me) for n in ("a", "b", "c")}
    )
    values = {int(v) for array in arrays.values() for v in (array.min(), array.max())}
    print(key, *values, flush=True)
"""


def test_two_processes_agree_on_one_complete_version(tmp_path):
    # Half of the keys start out damaged, so that both processes also want to replace a folder.
    for key in range(0, 40, 2):
        cached_arrays(tmp_path, f"key{key}", make)
        truncate(tmp_path / f"key{key}")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), str(me)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in (1, 2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    values = [[set(line.split()[1:]) for line in lines] for lines in outputs]
    assert [len(lines) for lines in values] == [40, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"key{k}" for k in range(40))
    for key in range(40):
        final = {str(int(cached_arrays(tmp_path, f"key{key}", refuse)["a"][0]))}
        if key % 2:
            # Nothing was in the way: what was put there first is what both have seen, all of it.
            assert values[0][key] == values[1][key] == final
        else:
            # Both may have replaced the damaged folder, one after the other.
            assert values[0][key] | values[1][key] <= {"1", "2"}


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDPSA_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve_cache_dir("") == tmp_path / "own"
    assert resolve_cache_dir(tmp_path / "given") == tmp_path / "given"
    monkeypatch.setenv("FEDPSA_CACHE", "")
    assert resolve_cache_dir("") == tmp_path / "xdg" / "fedpsa"
    monkeypatch.delenv("FEDPSA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert resolve_cache_dir("") == tmp_path / "home" / ".cache" / "fedpsa"
    assert resolve_cache_dir("~/there") == tmp_path / "home" / "there"


def test_a_folder_that_cannot_be_made_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="FEDPSA_CACHE"):
        cached_arrays(tmp_path / "file" / "cache", "key", make)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_names_the_setting(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CacheError, match="FEDPSA_CACHE"):
        cached_arrays(tmp_path, "key", make)


@pytest.mark.parametrize("key", ["", "..", "a/b", ".hidden", "a b"])
def test_keys_are_plain_names(tmp_path, key):
    with pytest.raises(ValueError, match="cache key"):
        cached_arrays(tmp_path, key, make)
