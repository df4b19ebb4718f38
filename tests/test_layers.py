"""The rooms of the code and their order: imports go up the column, wherever in a file they stand, and none closes a circle."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache

import networkx as nx
from support.imports import (
    CLASS_LINES,
    FUNCTION_LINES,
    ROOT,
    cycles,
    folder_graph,
    folder_of,
    import_graph,
    imported,
    imports_of,
    lone_files,
    long_definitions,
    modules,
    repeated_names,
)

ROOMS = """
    autopar autopar.garbage autopar.errors autopar.files
    autopar.ir
    autopar.models
    autopar.ops
    autopar.text
    autopar.request
    autopar.foreign.limits
    autopar.trace autopar.trace.fusion
    autopar.annotate
    autopar.solve.costs autopar.solve.integer_program autopar.solve.elimination autopar.solve.staging autopar.solve.bounds
    autopar.solve.search
    autopar.rewrite.collectives autopar.rewrite.lowerings autopar.rewrite
    autopar.runtime.ranks autopar.runtime.programs autopar.runtime.state autopar.runtime.batches autopar.runtime.pipeline
    autopar.runtime.checkpoint autopar.runtime.observe autopar.runtime
    autopar.planning
    autopar.recheck
    autopar.explaining
    autopar.api
    autopar.report
    autopar.verify autopar.calibrate
    autopar.foreign.texts autopar.foreign autopar.foreign.frameworks autopar.foreign.writers
    autopar.foreign.published
    autopar.foreign.checking
    autopar.foreign.measured
    autopar.cli
    autopar.__main__
""".split()
"""A room may import from those before it, and from the packages of cost models and kernels as tested below."""
CLOSED_FORMS = (
    "costs.pipeline_cost",
    "costs.schedule",
    "staging.stage_runs",
    "staging.rank_ways",
    "staging.interleaved",
    "staging.staged_time",
    "bounds.lagrangian",
)

LONE = {
    "autopar.annotate.expert_kernels": "kernels of one kind; kernels.py is at its length",
    "autopar.cli.console": "where the process of `autopar` begins",
    "autopar.cli.help_texts": "a table",
    "autopar.cli.list_commands": "commands that plan nothing",
    "autopar.foreign.published.constants": "a table",
    "autopar.models.hf_delta_rule": "a patch of one release of transformers",
    "autopar.trace.row_limits": "a pass",
    "autopar.trace.rows_together": "a pass",
    "autopar.verify.widened": "a mode of torch; verify.py is at its length",
    "autopar_kernels.rotary_kernels": "imports triton, where a kernel is launched",
}
"""Small files that one file imports, and why each is a file."""


def users_of(package: str) -> set[str]:
    """The modules that import a package."""
    return {
        name
        for name in modules()
        if any(target.split(".")[0] == package for target in imported(name))
    }


def in_rooms(names: set[str], *rooms: str) -> set[str]:
    """Of modules those in rooms of `autopar`, and in rooms inside them."""
    return {
        name for name in names if any(f"{name}.".startswith(f"autopar.{room}.") for room in rooms)
    }


def test_no_imports_go_round():
    assert cycles(import_graph()) == [] and cycles(folder_graph()) == []


def test_a_circle_is_found():
    graph = nx.DiGraph([("a", "b"), ("b", "a"), ("b", "c")])
    assert cycles(graph) == [["a", "b"]]
    assert "autopar.api" in import_graph()["autopar.verify.verify"], "imports are read"
    inside = [name for name in modules() if "autopar.planning.remedies" in import_graph()[name]]
    assert "autopar.api" in inside, "those inside functions too"


def test_rooms_import_from_rooms_before_them():
    place = {room: number for number, room in enumerate(ROOMS)}
    own = [name for name in modules() if name.split(".")[0] == "autopar"]
    assert {folder_of(name) for name in own if modules()[name].stem != "__init__"} - {
        "autopar"
    } == set(ROOMS) - {"autopar"}
    wrong = [
        (room, target)
        for room, target in folder_graph().edges
        if room in place and place.get(target, -1) > place[room]
    ]
    assert not wrong, f"rooms import from later ones: {wrong}"


def test_torch_and_cost_models_stay_where_they_belong():
    heavy = users_of("torch") | users_of("transformers")
    of_types = in_rooms(heavy, "ir", "solve")
    assert of_types == {"autopar.ir.traced", "autopar.ir.calls"}
    assert run(f"import sys, {', '.join(of_types)}; print('torch' in sys.modules)").split() == [
        "False"
    ]
    assert not {name for name in heavy if name.startswith("autopar_cost_models")}
    assert not {
        name
        for name in users_of("autopar")
        if not name.startswith("autopar.") and name != "autopar"
    }
    # of solve those may use the closed forms of pipeline schedules, which know times and no device
    known = {
        f"autopar.ir.{name}"
        for name in (
            "cluster",
            "cluster_parts",
            "layout",
            "model_shape",
            "plan_checks",
            "plan_fields",
        )
    }
    known |= {f"autopar.solve.{name}" for name in CLOSED_FORMS}
    assert (
        in_rooms(users_of("autopar_cost_models"), "ir", "solve", "ops", "trace", "rewrite") <= known
    )
    kernels = {name for name in users_of("autopar_kernels") if name.startswith("autopar.")}
    assert kernels == in_rooms(kernels, "models", "ops", "trace", "rewrite"), kernels


def test_planning_reads_no_foreign_files():
    names = run(
        "import sys, autopar.api; print(*(n for n in sys.modules if 'foreign' in n))"
    ).split()
    assert {name.split(".")[2] for name in names if name.count(".") > 1} == {"limits"}


def test_answers_are_data_until_they_are_printed():
    """Only the renderers know rich, and no folder before `report/` knows Jinja2."""
    renderers = {"autopar.text.tables", "autopar.text.replies", "autopar.cli.terminal"}
    assert users_of("rich") == renderers and users_of("jinja2") == {"autopar.report.page"}


def test_no_test_module_imports_another():
    """What tests share lies in `tests/support`; a test may import that, `benchmarks` and the product."""
    files = {path.stem: path for path in (ROOT / "tests").rglob("*.py")}
    assert len(files) > 150
    wrong = {
        (name, target)
        for name, path in files.items()
        for target in imports_of(path, name)
        if any(part.startswith("test_") for part in target.split(".")) and name != target
    }
    assert not wrong, f"tests import each other: {sorted(wrong)}"
    assert imports_of(ROOT / "tests/test_layers.py", "tests.test_layers") >= {
        "support.imports.ROOT"
    }


def test_no_top_level_package_is_called_kernels():
    assert not (ROOT / "kernels/__init__.py").exists()


def test_no_public_name_is_that_of_a_subpackage():
    """A subpackage takes the place of a function of its name as soon as somebody imports from it."""
    assert all_imported()[1:5] == ["True", "True", "<function", "diff"]


@cache
def all_imported() -> list[str]:
    """Of a process that imports every module: is CUDA initialized, are public names callable, the same, and functions?"""
    names = sorted(name for name in modules() if not name.endswith("__main__"))
    return run(
        "import torch; torch.cuda._lazy_init = lambda: (_ for _ in ()).throw(RuntimeError('CUDA was initialized'))\n"
        "import importlib, autopar\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "from autopar import plan, parallelize, register_rule, ClusterSpec, MeshShape, Plan, AutoparError\n"
        "print(torch.cuda.is_initialized(), all(callable(getattr(autopar, name)) for name in autopar.__all__))\n"
        "print(autopar.explain is autopar.explain, autopar.diff)"
    ).split()


def run(code: str) -> str:
    path = os.pathsep.join(
        [
            str(ROOT),
            str(ROOT / "cost_models"),
            str(ROOT / "kernels"),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_functions_and_classes_are_short():
    """Without docstrings."""
    long = long_definitions((ast.FunctionDef, ast.AsyncFunctionDef), FUNCTION_LINES)
    assert not [*map(str, [*long, *long_definitions(ast.ClassDef, CLASS_LINES)])]


def test_import_is_fast_and_leaves_cuda_alone():
    out = run(
        "import time; t = time.perf_counter(); import autopar; s = time.perf_counter() - t\n"
        "import torch; print(s, torch.cuda.is_initialized())"
    )
    seconds, initialized = out.split()
    print(f"import autopar: {float(seconds):.2f} s")
    assert float(seconds) < 3.0 and initialized == "False"


def test_planning_initializes_no_cuda():
    assert all_imported()[0] == "False"


def test_a_public_name_has_one_place():
    """Two things of one name are one thing, or need two names; what a module keeps to itself starts with `_`."""
    assert repeated_names() == {}


def test_small_files_with_one_importer_have_a_reason():
    assert set(lone_files()) <= set(LONE) and len(LONE) <= 10
