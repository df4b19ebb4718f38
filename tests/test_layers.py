"""The import arrows of the design: which layer may import which, at module level and inside functions' type-checking blocks alike."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "ir": {"ir", "errors", "files"},
    "solve": {"ir", "errors", "solve"},
    "ops": {"ir", "errors", "ops"},
    "trace": {"ir", "errors", "ops", "trace", "batches"},
    "annotate": {"ir", "errors", "ops", "annotate"},
    "rewrite": {"ir", "errors", "ops", "rewrite"},
    "runtime": {"ir", "errors", "files", "ops", "rewrite", "runtime", "trace", "batches"},
    "models": {"errors", "files", "models"},
    "calibrate": {"annotate", "api", "calibrate", "errors", "ir", "models", "rewrite", "runtime"},
    "predict": {"annotate", "api", "errors", "files", "ir", "models", "predict"},
}
TOP = {
    "autopar/__init__.py",
    "autopar/__main__.py",
    "autopar/api.py",
    "autopar/cli/plan_commands.py",
    "autopar/planning/candidates.py",
    "autopar/planning/plan_writer.py",
    "autopar/verify/verify.py",
    "autopar/cli/demo.py",
    "autopar/predict/evaluate.py",
    "autopar/calibrate/operations.py",
}


def module_level_imports(path: Path) -> set[str]:
    """Absolute names that a file imports when it is imported; `if TYPE_CHECKING` blocks are for type checkers only."""
    found: set[str] = set()
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])

    def visit(body) -> None:
        for node in body:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                module = ".".join(part for part in (base if node.level else "", node.module or "") if part)
                found.update({module} if node.module else {f"{module}.{alias.name}" for alias in node.names})
                if module == "autopar":
                    found.update(f"autopar.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                visit(node.body + node.orelse)
            elif isinstance(node, (ast.Try, ast.ClassDef, ast.With)):
                visit(node.body)

    visit(ast.parse(path.read_text()).body)
    return found


def layer(name: str) -> str:
    parts = name.split(".")
    return parts[1] if parts[0] == "autopar" and len(parts) > 1 else ""


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_layers_import_along_the_arrows(name):
    for path in files(f"autopar/{name}"):
        imports = module_level_imports(path)
        wrong = {i for i in imports if i.startswith("autopar.") and layer(i) not in ALLOWED[name]}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}; {name} may import {sorted(ALLOWED[name])}"


def test_torch_and_cost_models_stay_where_they_belong():
    for path in files("autopar/ir", "autopar/solve", "cost_models/autopar_cost_models"):
        torch_imports = {i for i in module_level_imports(path) if i.split(".")[0] in ("torch", "transformers")}
        assert not torch_imports, f"{path.relative_to(ROOT)} imports {sorted(torch_imports)}"
    for path in files("cost_models/autopar_cost_models", "kernels/autopar_kernels"):
        assert not {i for i in module_level_imports(path) if i.split(".")[0] == "autopar"}, path
    users = {
        str(path.relative_to(ROOT))
        for path in files("autopar/ir", "autopar/solve", "autopar/ops", "autopar/trace", "autopar/rewrite")
        if any(i.split(".")[0] == "autopar_cost_models" for i in module_level_imports(path))
    }
    # of them solve may use the closed forms of pipeline schedules, which know times and no device
    solve = ("solve/bounds", "solve/cuts", "solve/deals", "solve/pipeline", "solve/schedule")
    known = {f"autopar/{file}.py" for file in ("ir/cluster", "ir/cluster_parts", "ir/plan_checks", *solve)}
    assert users <= known, f"{sorted(users)} import cost models"
    users = {
        path.relative_to(ROOT / "autopar").parts[0]
        for path in files("autopar")
        if any(i.split(".")[0] == "autopar_kernels" for i in module_level_imports(path))
    }
    assert users <= {"models", "ops", "rewrite"}, f"{sorted(users)} import kernels; models, ops and rewrite may"


def test_only_the_top_imports_the_api():
    for path in files("autopar"):
        name = str(path.relative_to(ROOT))
        if name not in TOP:
            wrong = {i for i in module_level_imports(path) if layer(i) in ("api", "cli")}
            assert not wrong, f"{name} imports {sorted(wrong)}"


def test_no_top_level_package_is_called_kernels():
    assert not (ROOT / "kernels/__init__.py").exists()


def run(code: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "cost_models"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_fast_and_leaves_cuda_alone():
    out = run(
        "import time; t = time.perf_counter(); import autopar; s = time.perf_counter() - t\n"
        "import torch; print(s, torch.cuda.is_initialized())"
    )
    seconds, initialized = out.split()
    print(f"import autopar: {float(seconds):.2f} s")
    assert float(seconds) < 3.0 and initialized == "False"


def test_planning_initializes_no_cuda():
    out = run(
        "import torch; torch.cuda._lazy_init = lambda: (_ for _ in ()).throw(RuntimeError('CUDA was initialized'))\n"
        "import autopar; from autopar import plan, parallelize, register_rule, ClusterSpec, MeshShape, Plan, AutoparError\n"
        "import autopar.api, autopar.annotate.annotator, autopar.solve.search.branch_and_bound, autopar.rewrite.program, autopar.runtime.engine\n"
        "print(torch.cuda.is_initialized())"
    )
    assert out.split() == ["False"]
