"""The method of docs/METHODS.md, as a reader would save it."""

from pathlib import Path

from support.doc_commands import code_blocks

REFERENCE = "trimmed:TrimmedMean"


def write_example(folder: Path) -> None:
    """Save exactly the text of the page as `trimmed.py`."""
    (code,) = [
        block for block in code_blocks("docs/METHODS.md", "python") if "TrimmedMean" in block
    ]
    assert len(code.splitlines()) < 40
    folder.mkdir(exist_ok=True)
    (folder / "trimmed.py").write_text(code)
