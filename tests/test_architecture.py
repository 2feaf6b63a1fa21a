"""Rules that the code keeps, read from its syntax trees: who imports whom, budgets, no print."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "dppeft").rglob("*.py"))
CODE = [*PACKAGE, *sorted((ROOT / "tasks").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]
MAX_LINES, MAX_FUNCTION_LINES = 400, 60

# Layer of each part: it may import parts of a lower layer, and itself. Parts of one layer never
# import each other: that is what keeps each of them readable and auditable alone.
LAYERS = (
    ("errors",),
    ("_validate",),
    ("_types",),
    ("_kind",),
    ("tuners", "clipping", "privacy", "text", "loss", "tables", "optimizers"),
    ("_on_peft", "masked_tokens"),
    ("infilling",),
    ("sharing",),
    ("training",),  # above sharing: a trainer saves what may be shared
    ("wrapping",),
    ("__init__",),
    ("classify",),
    ("cli", "__main__"),
)
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def _part(path: Path) -> str:
    """``dppeft/clipping/engine.py`` -> ``clipping``; ``dppeft/cli.py`` -> ``cli``."""
    return path.relative_to(ROOT / "dppeft").parts[0].removesuffix(".py")


def _imported_parts(path: Path) -> Iterator[tuple[str, int]]:
    """Parts of dppeft that a file imports anywhere in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            modules = [node.module or ""]
            if node.module == "dppeft":
                modules = [f"dppeft.{alias.name}" for alias in node.names]
        for module in modules:
            if module == "dppeft":
                yield "__init__", node.lineno
            elif module.startswith("dppeft."):
                yield module.split(".")[1], node.lineno


def _upward_imports(files: list[Path]) -> list[str]:
    faults = []
    for path in files:
        part = _part(path)
        for imported, line in _imported_parts(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            if imported == "__version__":
                continue
            if imported not in LAYER:
                faults.append(f"{where}: {imported} has no layer, or is the public package")
            elif imported != part and LAYER[imported] >= LAYER[part]:
                faults.append(f"{where}: {part} may not import {imported}")
    return faults


def test_imports_go_one_way() -> None:
    files = [path for path in PACKAGE if path.name != "__init__.py" or path.parent.name != "dppeft"]
    assert _upward_imports(files) == []


def test_an_upward_and_a_sideways_import_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path, raising=True)
    (tmp_path / "dppeft" / "privacy").mkdir(parents=True)
    bad = tmp_path / "dppeft" / "privacy" / "noise.py"
    bad.write_text("def f():\n    from dppeft.training import run\nimport dppeft.clipping.engine\n")
    assert len(_upward_imports([bad])) == 2


def test_tasks_and_notebooks_use_public_names_only() -> None:
    faults = [
        f"{path.name}:{line}: {part}"
        for path in sorted((ROOT / "tasks").rglob("*.py"))
        for part, line in _imported_parts(path)
        if part.startswith("_") and part != "__init__"
    ]
    assert faults == []


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Documentation is not what makes a function long."""
    first = node.body[0]
    return 0 if ast.get_docstring(node) is None else (first.end_lineno or 0) - first.lineno + 1


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES, f"{path}: split it"
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in functions:
        length = (node.end_lineno or 0) - node.lineno + 1 - _docstring_lines(node)
        assert length <= MAX_FUNCTION_LINES, f"{path}:{node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_print_and_no_swallowing_of_options(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{path}:{node.lineno}: print"


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout


def test_import_is_light() -> None:
    loaded = _run(
        "import dppeft, sys; print([m for m in ('torch','transformers') if m in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_command_line_help_is_light() -> None:
    loaded = _run(
        "import dppeft.cli, sys; print([m for m in ('torch','transformers') if m in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_every_public_name_exists() -> None:
    import dppeft

    for name in dppeft.__all__:
        assert getattr(dppeft, name) is not None, name
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = dppeft.no_such_name


def test_no_error_class_outside_errors() -> None:
    """One place for the errors that callers catch."""
    faults = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PACKAGE
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Exception"))
    ]
    assert faults == []
