"""The import of torchvision beside a torch its operators were not built for."""

import types

import pytest

from task import torchvision_import
from task.torchvision_import import import_torchvision_datasets


class Importer:
    """Stand in for importlib: the first imports fail as told, the later ones succeed."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.module = types.ModuleType("torchvision.datasets")

    def import_module(self, name):
        assert name == "torchvision.datasets"
        if self.failures:
            raise self.failures.pop(0)
        return self.module


@pytest.fixture
def libraries(monkeypatch):
    """Record the operator libraries that are made, instead of making them."""
    made = []

    class Library:
        def __init__(self, namespace, kind):
            self.namespace, self.kind, self.schemas = namespace, kind, []
            made.append(self)

        def define(self, schema):
            self.schemas.append(schema.partition("(")[0])

    monkeypatch.setattr(torchvision_import.torch.library, "Library", Library)
    monkeypatch.setattr(torchvision_import, "_declared", [])
    return made


def test_a_working_torchvision_is_left_alone(monkeypatch, libraries):
    importer = Importer()
    monkeypatch.setattr(torchvision_import, "importlib", importer)
    assert import_torchvision_datasets() is importer.module
    assert libraries == []


def test_missing_schemas_are_declared_and_kept(monkeypatch, libraries):
    importer = Importer(RuntimeError("operator torchvision::nms does not exist"))
    monkeypatch.setattr(torchvision_import, "importlib", importer)
    monkeypatch.setitem(
        torchvision_import.sys.modules, "torchvision.half", types.ModuleType("torchvision.half")
    )
    # Taken out for the time of the test only: another test may have imported the real ones.
    for name in list(torchvision_import.sys.modules):
        if name.partition(".")[0] == "torchvision" and name != "torchvision.half":
            monkeypatch.delitem(torchvision_import.sys.modules, name)
    assert import_torchvision_datasets() is importer.module
    assert "torchvision.half" not in torchvision_import.sys.modules
    (library,) = libraries
    assert (library.namespace, library.kind) == ("torchvision", "DEF")
    assert library.schemas == ["nms", "qnms"]
    assert torchvision_import._declared == [library]


def test_other_failures_are_not_hidden(monkeypatch, libraries):
    monkeypatch.setattr(torchvision_import, "importlib", Importer(RuntimeError("disk on fire")))
    with pytest.raises(RuntimeError, match="disk on fire"):
        import_torchvision_datasets()
    monkeypatch.setattr(torchvision_import, "importlib", Importer(ImportError("no torchvision")))
    with pytest.raises(ImportError, match="no torchvision"):
        import_torchvision_datasets()
    assert libraries == []


@pytest.mark.slow
def test_the_real_torchvision_can_be_imported():
    assert import_torchvision_datasets().__name__ == "torchvision.datasets"
