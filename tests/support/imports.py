"""The shape of the product code: import cycles, long files, functions and classes, long calls, names
that several files define, and small files that only one other imports.

    python -m tests.support.imports

An import counts wherever it stands: at module level, inside a function, under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "autopar": ROOT / "autopar",
    "autopar_cost_models": ROOT / "cost_models/autopar_cost_models",
    "autopar_kernels": ROOT / "kernels/autopar_kernels",
}
"""Package name to its folder."""
FUNCTION_LINES, CLASS_LINES, POSITIONAL = 60, 300, 7
SMALL_FILE_LINES = 90


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its dotted name; a package's name is that of its `__init__`."""
    found = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts))
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(name: str) -> set[str]:
    """Absolute names that a module of the product imports anywhere in its file."""
    return imports_of(modules()[name], name)


def imports_of(path: Path, name: str) -> set[str]:
    """Absolute names that a file imports, which is the module `name`: modules, or names inside them."""
    found = set()
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (above, node.module or "") if part)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def edges(name: str) -> set[str]:
    """Modules of the product that a module imports from, itself left out."""
    known, found = modules(), set()
    for target in imported(name):
        while target and target not in known:
            target = target.rpartition(".")[0]
        if target and target != name:
            found.add(target)
    return found


@cache
def import_graph() -> nx.DiGraph:
    """An edge from each module to each module that it imports from."""
    graph = nx.DiGraph()
    graph.add_nodes_from(modules())
    graph.add_edges_from((name, target) for name in modules() for target in edges(name))
    return nx.freeze(graph)


def cycles(graph: nx.DiGraph) -> list[list[str]]:
    """Sets of modules or folders each of which reaches each other one of its set, largest first."""
    parts = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    return sorted(parts, key=len, reverse=True)


def folder_of(name: str) -> str:
    """The dotted name of the folder that holds a module; a file at the top is a room of its own."""
    folder = name if modules()[name].stem == "__init__" else name.rpartition(".")[0]
    return name if folder in SOURCES else folder


def folder_graph() -> nx.DiGraph:
    """An edge from each folder to each other folder that a file of it imports from.

    The files that make a package's public names (`__init__`) are left out: they are read from
    outside and import from everywhere.
    """
    graph = nx.DiGraph()
    for name, target in import_graph().edges:
        if modules()[name].stem != "__init__" and folder_of(name) != folder_of(target):
            graph.add_edge(folder_of(name), folder_of(target))
    return graph


@dataclass(frozen=True, slots=True)
class Place:
    """Something of `size` lines or arguments, and where it begins."""

    name: str
    where: str
    size: int

    def __str__(self) -> str:
        return f"{self.size:5d}  {self.where}  {self.name}"


def _places(kinds: type | tuple[type, ...]) -> Iterator[tuple[ast.AST, str]]:
    """Nodes of `kinds` in the product, and where each begins."""
    for path in modules().values():
        for node in ast.walk(tree(path)):
            if isinstance(node, kinds):
                yield node, f"{path.relative_to(ROOT)}:{node.lineno}"


def long_definitions(kinds: type | tuple[type, ...], lines: int) -> list[Place]:
    """Functions or classes of more than `lines` lines of code, longest first.  Docstrings do not count: public ones list arguments."""
    found = [
        Place(node.name, where, size)
        for node, where in _places(kinds)
        if node.end_lineno - node.lineno >= lines and (size := code_lines(node)) > lines
    ]
    return sorted(found, key=lambda place: -place.size)


def code_lines(definition: ast.AST) -> int:
    """Lines of a function or class without the docstrings in it."""
    docs = 0
    for node in ast.walk(definition):
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and ast.get_docstring(node) is not None
        ):
            docs += node.body[0].end_lineno - node.body[0].lineno + 1
    return definition.end_lineno - definition.lineno + 1 - docs


def long_calls(positional: int) -> list[Place]:
    """Calls with at least `positional` positional arguments."""
    return [
        Place(ast.unparse(node.func)[:60], where, len(node.args))
        for node, where in _places(ast.Call)
        if len(node.args) >= positional
    ]


def defined_names(module: ast.Module) -> set[str]:
    """The public names of functions, classes, constants and types at the top of a module."""
    found = set()
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            found.update(
                part.id
                for part in parts
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            )
    return {name for name in found if not name.startswith("_")}


def repeated_names() -> dict[str, list[str]]:
    """Public names that several modules of the product define, with the modules."""
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        for name in defined_names(tree(path)):
            places.setdefault(name, []).append(module)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


@cache
def importers() -> dict[str, set[str]]:
    """For each module those that import it, or have its name in a text: an import that is put off, or
    a process of its own.
    """
    found = {name: set(import_graph().predecessors(name)) for name in modules()}
    for module, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and node.value in found:
                found[node.value].add(module)
    return found


def lone_files() -> dict[str, str]:
    """Modules of fewer than `SMALL_FILE_LINES` lines that one other imports, with that one."""
    return {
        name: next(iter(users))
        for name, users in importers().items()
        if len(users) == 1
        and lines_of(modules()[name]) < SMALL_FILE_LINES
        and modules()[name].stem != "__init__"
    }


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def report() -> str:
    """What `python -m tests.support.imports` prints."""
    files, folders = cycles(import_graph()), cycles(folder_graph())
    longest = sorted(modules().values(), key=lines_of)[-1]
    functions = long_definitions((ast.FunctionDef, ast.AsyncFunctionDef), FUNCTION_LINES)
    classes, calls = long_definitions(ast.ClassDef, CLASS_LINES), long_calls(POSITIONAL)
    repeated, lone = repeated_names(), lone_files()
    total = sum(map(lines_of, modules().values()))
    return "\n".join(
        [
            f"{len(files)} import cycles of files"
            + "".join(f"\n    {len(part)} files: {' '.join(part)}" for part in files),
            f"{len(folders)} import cycles of folders"
            + "".join(f"\n    {' '.join(part)}" for part in folders),
            f"longest file: {longest.relative_to(ROOT)}, {lines_of(longest)} lines",
            f"{len(functions)} functions over {FUNCTION_LINES} lines",
            *map(str, functions),
            f"{len(classes)} classes over {CLASS_LINES} lines",
            *map(str, classes),
            f"{len(calls)} calls with {POSITIONAL} or more positional arguments",
            *map(str, calls),
            f"{len(repeated)} public names in several files",
            *(f"    {name}: {' '.join(places)}" for name, places in repeated.items()),
            f"{len(lone)} files under {SMALL_FILE_LINES} lines that one file imports",
            *(f"    {name}, by {user}" for name, user in lone.items()),
            f"{total} lines of product code in {len(modules())} files",
        ]
    )


if __name__ == "__main__":
    print(report())
