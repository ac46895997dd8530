"""What a module exports is listed, sorted and documented."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
FILES = sorted(p for p in (SRC / "headrace").rglob("*.py") if p.name != "__main__.py")


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def sort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as the linter sorts them."""
    if name.isupper():
        return 0, name
    return (1 if name[:1].isupper() else 2), name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_exports_are_listed_sorted_and_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body, f"{path}: say in a docstring what this module is for"
    names = exported(tree)
    if not tree.body or (path.name == "__init__.py" and names is None and len(tree.body) == 1):
        return
    assert names is not None, f"{path}: no __all__"
    assert names == sorted(names, key=sort_key), f"{path}: sort __all__"
    defined = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for name in names:
        if name in defined:
            assert ast.get_docstring(defined[name]), f"{path}: {name} has no docstring"
    for name in defined:
        assert name.startswith("_") or name in names, f"{path}: {name} is public but not in __all__"
