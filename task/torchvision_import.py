"""Import torchvision's datasets also where its compiled operators do not load."""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

# torchvision registers meta kernels for these while it is imported, and fails if they were not
# declared, as happens when its binary was built for another torch than the one installed.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# Declarations vanish with their Library object, so it is kept for the life of the process.
_declared: list[torch.library.Library] = []


def import_torchvision_datasets() -> ModuleType:
    """Return the module ``torchvision.datasets``.

    The missing operator schemas are declared only after the plain import failed for their lack.
    """
    try:
        return importlib.import_module("torchvision.datasets")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in list(sys.modules):
        if name.partition(".")[0] == "torchvision":  # half imported
            del sys.modules[name]
    make_library: Any = torch.library.Library  # torch leaves it untyped
    library = make_library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared.append(library)
    return importlib.import_module("torchvision.datasets")
