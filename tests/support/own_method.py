"""The method of docs/METHODS.md, as a reader would save it."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "METHODS.md"
REFERENCE = "trimmed:TrimmedMean"


def write_example(folder: Path) -> None:
    """Save exactly the text of the page as `trimmed.py`."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "TrimmedMean" in block]
    assert len(code.splitlines()) < 40
    folder.mkdir(exist_ok=True)
    (folder / "trimmed.py").write_text(code)
