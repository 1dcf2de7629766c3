"""`python -m perf solexecbench`: an operator as a solution for the public SOL-ExecBench harness.

The solution stands alone: it holds the entry point of `perf/solutions`, and every file of `cute_kernels` that it
imports, under another package name, with `perf/solutions/backend.py` in the place of `cute_kernels.runtime.backend`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console()
ROOT = Path(__file__).parent.parent
SOLUTIONS = Path(__file__).parent / "solutions"
OPERATORS = {  # operator: the benchmark's definition
    "mamba_segsum": "044_mamba_discretization_and_segsum",
    "hyena_block": "051_seqlen-finetuned-reconstructed_hyena_complete_forward_block",
}
PACKAGE, BUNDLED = "cute_kernels", "solution_kernels"  # another name, so that an installed cute_kernels is never used
REPLACED = {"cute_kernels/runtime/backend.py": SOLUTIONS / "backend.py"}


def solexecbench(
    op: Annotated[str, typer.Option(help=f"{' or '.join(OPERATORS)}.")],
    out: Annotated[Path, typer.Option(help="Folder of solution.json.")],
    author: Annotated[str, typer.Option(help="As the solution names it.")] = "cute-kernels",
) -> None:
    """Writes an operator as a solution.json for SOL-ExecBench, which needs nothing of this package."""
    try:
        made = solution(op, author)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    out.mkdir(parents=True, exist_ok=True)
    path = out / "solution.json"
    path.write_text(json.dumps(made, indent=1) + "\n")
    console.print(f"Written: {path}, {len(made['sources'])} files", highlight=False, soft_wrap=True)


def solution(op: str, author: str) -> dict[str, Any]:
    """The content of solution.json. ValueError: no such operator."""
    if op not in OPERATORS:
        raise ValueError(f"op is {op!r}, but must be {' or '.join(map(repr, OPERATORS))}")
    return {
        "name": f"cute_kernels_{op}",
        "definition": OPERATORS[op],
        "author": author,
        "spec": {
            "languages": ["cute_dsl"],
            "target_hardware": ["B200", "LOCAL"],
            "entry_point": "kernel.py::run",
            "dependencies": ["torch", "cutlass"],
            "destination_passing_style": True,
        },
        "sources": [{"path": path, "content": content} for path, content in sources(SOLUTIONS / f"{op}.py").items()],
    }


def sources(entry: Path) -> dict[str, str]:
    """Path and content of kernel.py and of every file it needs, by its imports."""
    found = {"kernel.py": _renamed(entry.read_text())}
    todo = _imported(entry.read_text())
    while todo:
        path = todo.pop()
        target = path.replace(PACKAGE, BUNDLED, 1)
        if target in found:
            continue
        text = REPLACED.get(path, ROOT / path).read_text()
        found[target] = _renamed(text)
        for folder in Path(target).parents[:-1]:
            # The package's own __init__ files import what the solution doesn't need.
            found.setdefault(f"{folder}/__init__.py", f'"""Part of {PACKAGE}."""\n')
        todo |= _imported(text)
    return dict(sorted(found.items()))


def _imported(text: str) -> set[str]:
    """Files of the package that a source imports, wherever the import stands."""
    names = set()
    for node in _executed(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    paths = {name.replace(".", "/") + ".py" for name in names if name.split(".")[0] == PACKAGE}
    return {path for path in paths if (ROOT / path).is_file()}


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but what stands under `if TYPE_CHECKING`."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _executed(child)


def _renamed(text: str) -> str:
    return re.sub(rf"^(\s*(?:from|import) ){PACKAGE}\b", rf"\g<1>{BUNDLED}", text, flags=re.MULTILINE)
