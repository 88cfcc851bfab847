"""Runs a notebook's cells as Jupyter does: one after the other, in ``__main__``, in a running loop.

Arguments: the notebook. What the last line of a cell is worth is asked for its pictures.
"""

import ast
import asyncio
import json
import sys
from pathlib import Path


def run_cell(source, namespace):
    """Run a cell and return what its last line is worth."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)
    return (
        None
        if last is None
        else eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    )


async def main(path):
    """Run all cells; print what each shows."""
    namespace = sys.modules["__main__"].__dict__
    namespace.pop("__file__", None)  # a notebook has none
    for cell in json.loads(Path(path).read_text())["cells"]:
        if cell["cell_type"] == "code":
            value = run_cell("".join(cell["source"]), namespace)
            shown = [name for name in ("_repr_png_", "_repr_html_") if hasattr(value, name)]
            for name in shown:
                assert getattr(value, name)()
            print("[cell]", *(shown or [repr(value)]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
