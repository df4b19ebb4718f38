"""`Program.code` is Python that a person can read, over names that it imports."""

from __future__ import annotations

import ast
import builtins

import torch

from autopar.api import plan, trace
from autopar.models import parse_model
from autopar.rewrite.program import assemble
from autopar.verify import free_network


def test_code_is_python_over_known_names():
    spec = parse_model("llama-tiny").shrunk()
    inputs = spec.example_inputs(8, 16, "cpu")
    model = spec.build("cpu")
    traced = trace(model, inputs)
    chosen = plan(model, free_network(4), inputs, 8, {"cp": 2, "tp": 2}, runnable=True, traced=traced)
    code = assemble(traced, chosen, 0, torch.device("cpu")).code
    tree, scope = ast.parse(code), {}
    exec(compile(tree, "program", "exec"), scope)
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        known = set(scope) | set(dir(builtins)) | {a.arg for a in function.args.args}
        known |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
        assert {n.id for n in names} <= known
    assert "def program(self, input_ids, labels, mean_count):" in code
    assert "# layers_0, layers_1: one structure" in code and "def layers_1" not in code
    assert "self.attention_norm_weight" in code and "# tp: " in code
    for noise in (" = None", "torch.ops.aten.linear", "autopar_rewrite", "local_shard", ".default"):
        assert noise not in code
