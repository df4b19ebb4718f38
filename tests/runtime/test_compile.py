"""torch.compile under the engine: exact in fp64, one function for many layers, collectives in their order, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from operator import getitem

import pytest
import torch
import torch._dynamo
from support import dropout_runs as dropping
from support import half_precision as half
from support import padded_runs as padding
from support.effort import tried
from support.exactness import (
    TOLERANCE,
    case,
    engine_for,
    reference,
    run_steps,
    setting,
    sgd,
    solved_plan,
    train,
    update_error,
)
from support.meshes import DP2, ONE, PP2, TP2
from support.pipeline_runs import check_carried
from support.staged_runs import pipelined
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.api import plan as make_plan
from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.rewrite.collectives.transitions import NODE_FUNCTIONS, wait
from autopar.rewrite.lowerings.late_gradients import late_gradient, late_linear
from autopar.rewrite.program import assemble
from autopar.rewrite.shard import local_shard
from autopar.runtime.engine import Engine
from autopar.runtime.programs.compiled import Compiler, check_compiles
from autopar.runtime.ranks.launch import run_workers

TORCH_KERNELS = {"backend": "aot_eager"}
"""Capture and autograd of torch.compile over torch's own kernels: seconds where making kernels takes minutes."""


def alone(name: str, mesh: MeshShape, mode: str = "none", number: int = 2, zero: int = 0) -> Plan:
    """A plan without a pipeline, every segment under one recompute mode."""
    found = case(name)
    plan = solved_plan(found.traced, found.annotator, setting(mesh, number))
    return replace(
        plan, zero=zero, blocks=tuple(replace(block, recompute=mode) for block in plan.blocks)
    )


def compiled_steps(rank: int, name: str, texts: list[str], options: dict | bool) -> list[tuple]:
    """(losses, parameters, what is compiled, counters of torch.compile) of each plan."""
    found = []
    for text in texts:
        torch._dynamo.utils.counters.clear()
        engine = engine_for(name, Plan.from_json(text), compile=options)
        losses, state = run_steps(engine, case(name).batches)
        counted = {kind: dict(counts) for kind, counts in torch._dynamo.utils.counters.items()}
        found.append((losses, state, engine.compiled, counted))
    return found


def check(runs: list, name: str, plans: list[Plan]) -> None:
    """Every rank's run of each plan equals one device; every function was captured whole, and once for all layers and micro-batches (one
    of moe runs on values with and without gradients)."""
    expected = reference(name)
    for by_plan in runs:
        for plan, (losses, state, compiled, counted) in zip(plans, by_plan, strict=True):
            what = f"{plan.mesh} zero={plan.zero} {plan.schedule} {plan.blocks[0].recompute}"
            assert update_error(expected, state) <= 1.0, (what, update_error(expected, state))
            assert losses == pytest.approx(expected.losses, rel=TOLERANCE), what
            again = counted["stats"]["unique_graphs"] - compiled.functions
            assert again <= (name == "moe-tiny") and 0 < compiled.functions <= compiled.calls, (
                what,
                compiled,
                counted,
            )
            assert not counted.get("graph_break"), (what, counted)


def test_programs_of_two_ranks_are_exact_whatever_they_do(pool2):
    cells = tried(((DP2, "full", 2, 3),), ((TP2, "selective", 2, 0), (DP2, "full", 2, 3)))
    plans = [alone("llama-tiny", *cell) for cell in cells]
    runs = pool2.run(
        compiled_steps, "llama-tiny", [plan.to_json() for plan in plans], TORCH_KERNELS
    )
    check(runs, "llama-tiny", plans)
    assert all(compiled.calls > compiled.functions for *_, compiled, _ in runs[0]), (
        "layers share their functions"
    )


def mixed_cells(name: str) -> list[Plan]:
    """Meshes, ZeRO stages, recompute modes, schedules and micro-batches over four ranks."""
    dptp, cells = MeshShape(dp=2, tp=2), []
    if name == "moe-tiny":  # the loss of a router is not linear in the batch
        cells = [
            (MeshShape(dp=4, ep=2), "none", 1, 0),
            (MeshShape(dp=4, ep=2), "full", 1, 3),
            (dptp, "selective", 1, 2),
        ]
        return [alone(name, *cell) for cell in cells]
    cells = [(dptp, "none", 2, 1), (dptp, "selective", 1, 3), (MeshShape(dp=4), "full", 2, 2), (MeshShape(cp=2, tp=2), "selective", 1, 0),
             (MeshShape(dp=2, cp=2), "full", 2, 3)]  # fmt: skip
    ppdp, pptp, ones = MeshShape(pp=2, dp=2), MeshShape(pp=2, tp=2), (1, 1, 1, 1)
    return [
        *(alone(name, *cell) for cell in cells),
        replace(pipelined(name, ppdp, "gpipe", (1, 3), 2, ("full", "none")), zero=2),
        replace(
            pipelined(name, ppdp, "1f1b", (2, 2), 2, ("none", "selective", "none", "full")), zero=3
        ),
        pipelined(name, pptp, "interleaved_1f1b", ones, 4, ("selective", "full")),
        pipelined(name, MeshShape(pp=4), "1f1b", ones, 8),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny", "moe-tiny"])
def test_all_that_the_engine_combines_is_exact(pool4, name):
    plans = mixed_cells(name)
    check(
        pool4.run(
            compiled_steps, name, [plan.to_json() for plan in plans], TORCH_KERNELS, timeout_s=900
        ),
        name,
        plans,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf-llama", "hf-gpt2"])
def test_transformers_models_are_exact(pool2, name):
    pytest.importorskip("transformers")
    plans = [alone(name, TP2, "selective"), alone(name, DP2, "full", 2, 3)]
    check(
        pool2.run(
            compiled_steps, name, [plan.to_json() for plan in plans], TORCH_KERNELS, timeout_s=300
        ),
        name,
        plans,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_machine_code_is_exact(pool4):
    plans = [
        alone("llama-tiny", MeshShape(dp=2, tp=2), "selective", 2, 3),
        mixed_cells("llama-tiny")[-2],
    ]
    check(
        pool4.run(
            compiled_steps, "llama-tiny", [plan.to_json() for plan in plans], True, timeout_s=1100
        ),
        "llama-tiny",
        plans,
    )


def dropped(rank: int, texts: list[str]) -> list:
    model, traced, _ = dropping.model()
    found = []
    for text in texts:
        engine = Engine(
            model, traced, Plan.from_json(text), sgd, None, None, "cpu", compile=TORCH_KERNELS
        )
        steps = run_steps(engine, dropping.batches())
        found.append(
            (
                steps,
                float(engine.eval_step(engine.local_batch(dropping.batches()[0]))),
                engine.compiled.others,
            )
        )
    return found


@pytest.mark.slow
def test_dropout_draws_the_same_masks(pool2):
    plans = [dropping.solved(mesh, 2, mode) for mesh, mode in ((DP2, "none"), (TP2, "full"))]
    for by_rank in pool2.run(dropped, [plan.to_json() for plan in plans]):
        for plan, (steps, evaluated, others) in zip(plans, by_rank, strict=True):
            dropping.check(steps, str(plan.mesh))
            assert evaluated == pytest.approx(by_rank[0][1], rel=TOLERANCE) and others["dropout"]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "schedule", "cuts", "modes"), [
    (MeshShape(pp=4), "1f1b", (2, 1, 1, 1), ("none", "full")), (MeshShape(pp=2, tp=2), "interleaved_1f1b", (1, 2, 1, 1), ("full", "none")),
])  # fmt: skip
def test_what_stages_pass_on_and_buffers_are_those_of_one_device(
    pool4, mesh, schedule, cuts, modes
):
    check_carried(pool4, mesh, schedule, cuts, modes, TORCH_KERNELS)


@pytest.mark.slow
def test_batches_of_other_lengths_have_functions_of_their_own():
    engine = padding.padding_engine("llama-tiny", alone("llama-tiny", ONE), compile=TORCH_KERNELS)
    batches = padding.batches_of("llama-tiny", (8, 5, 12))
    expected = train(case("llama-tiny").model, batches)
    torch._dynamo.utils.counters.clear()
    losses, state = run_steps(engine, batches)
    assert update_error(expected, state) <= 1.0 and losses == pytest.approx(
        expected.losses, rel=TOLERANCE
    )
    # some with and without gradients
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * engine.compiled.functions


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_other_precisions_stay_within_their_rounding(precision):
    plan = half.plan_of(precision, ONE, 0, 2)
    engine = Engine(
        half.model(), half.traced(precision)[0], plan, half.sgd, None, None, "cpu", compile=True
    )
    _, state = run_steps(engine, half.batches())
    assert half.error(half.reference(precision, 2), state) <= {**half.NEAR, "fp32": 1e-4}[precision]


class Counted(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += any(
            name in str(function) for name in ("aten.mm", "aten.addmm", "attention_for_cpu")
        )
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_no_product_is_recomputed_that_was_not_without(name, mode):
    """Recomputation stops before the last product."""
    counts = []
    for options in (False, TORCH_KERNELS):
        engine = engine_for(name, alone(name, ONE, mode), compile=options)
        _, state = run_steps(engine, case(name).batches)
        assert update_error(reference(name), state) <= 1.0
        with Counted() as counted:
            engine.step(case(name).batches[0])
        counts.append(counted.products)
    assert counts[0] == counts[1] > 0


# ------------------------------------------------------------------------------------------------------------------- what is compiled


@pytest.mark.parametrize("mesh", [TP2, MeshShape(cp=2, tp=2)], ids=str)
def test_ops_and_collectives_keep_the_order_of_the_program(mesh):
    """What communicates, or says when a gradient is computed, is called by the segment itself, after what came before it there."""
    found = case("gpt-tiny")
    program = assemble(
        found.traced,
        solved_plan(found.traced, found.annotator, setting(mesh)),
        0,
        torch.device("cpu"),
    )
    compiler, segments = Compiler(TORCH_KERNELS), dict(program.module.named_children())
    before = {name: _order(segment) for name, segment in segments.items()}
    compiler.compile(program)
    for name, segment in segments.items():
        assert _order(segment.forward.__self__) == before[name], name
    inside = {
        node.target
        for function in compiler._functions.values()
        for node in function._orig_mod.graph.nodes
    }
    apart = {*NODE_FUNCTIONS.values(), wait, late_gradient, late_linear}
    assert compiler.coverage.calls and inside and not inside & apart
    assert sum(target in apart for order in before.values() for target in order) > 10


def _order(module: GraphModule) -> list:
    """What a segment runs, in order, that of compiled functions included; but for products that compilers do not have, which may come
    before a function that does not read them."""
    found = []
    for node in module.graph.nodes:
        called = (
            module.get_submodule(node.target)._orig_mod.graph.nodes
            if node.op == "call_module"
            else [node]
        )
        found += [
            each.target
            for each in called
            if each.op == "call_function" and each.target not in (getitem, local_shard, late_linear)
        ]
    return found


def _multiplied(factor: float) -> GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (doubled, factor)),))
    return GraphModule(torch.nn.Module(), graph)


def test_one_structure_is_one_function_and_another_constant_another():
    compiler, x = Compiler({"backend": "eager"}), torch.ones(2)
    found = [float(compiler._compiled(_multiplied(factor))(x)[0][0]) for factor in (2.0, 3.0, 2.0)]
    assert found == [4.0, 6.0, 4.0] and (compiler.coverage.calls, compiler.coverage.functions) == (
        3,
        2,
    )


def test_an_op_alone_is_not_compiled():
    """Of one op a compiler makes nothing better."""
    compiler, graph = Compiler(TORCH_KERNELS), torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(
        (
            graph.call_function(
                torch.ops.aten.tanh.default, (graph.call_function(torch.ops.aten.t.default, (x,)),)
            ),
        )
    )
    module = compiler._compiled(GraphModule(torch.nn.Module(), graph))
    assert compiler.coverage.calls == 0 and str(compiler.coverage).endswith("as they are: 1 tanh")
    assert torch.equal(module(torch.eye(2))[0], torch.eye(2).tanh())


# ---------------------------------------------------------------------------------------------------------------- plans and refusals


def test_a_plan_made_to_be_compiled_is_priced_for_it():
    spec = parse_model("llama-tiny")
    batch = spec.example_inputs(2, 16, "cpu")
    model = spec.build("cpu")
    engine = autopar.parallelize(model, "cpu:1", batch, compile=True)
    assert "torch.compile" in autopar.explain(engine.plan) and engine.compiled.calls
    eager = autopar.parallelize(model, "cpu:1", batch)
    assert (
        eager.compiled is None
        and engine.plan.predicted.step_time_s < eager.plan.predicted.step_time_s
    )


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(AutoparError, match=r"cannot compile under zero_bubble.*Pin schedule=1f1b"):
        engine_for("gpt-tiny", pipelined("gpt-tiny", PP2, "zero_bubble", (2, 2), 4), compile=True)
    with pytest.raises(AutoparError, match=r"cannot compile with recompute=op.*selective or full"):
        engine_for("gpt-tiny", alone("gpt-tiny", ONE, "op"), compile=True)
    with pytest.raises(AutoparError, match=r"CUDA graphs with recompute=full.*none or selective"):
        check_compiles(
            alone("gpt-tiny", ONE, "full"), Compiler({"mode": "reduce-overhead"}).cuda_graphs
        )
    assert not Compiler({"mode": "default"}).cuda_graphs
    assert Compiler({"options": {"triton.cudagraphs": True}}).cuda_graphs
    spec = parse_model("llama-tiny")
    with pytest.raises(AutoparError, match=r"cannot run torch.compile under zero_bubble"):
        make_plan(spec.build("meta"), "cpu:2", spec.example_inputs(4, 16), 4, {"pp": 2, "schedule": "zero_bubble"},
                  software=autopar.request.software.Software(compiled=True))  # fmt: skip


@pytest.mark.parametrize(("options", "words"), [
    ("inductor", "compile='inductor' is not known"), ({"fullgraph": True}, "compile='fullgraph' is not known"),
    ({"backend": "nothing"}, "torch.compile does not take"), ({"mode": "fastest"}, "torch.compile does not take"),
])  # fmt: skip
def test_options_that_torch_does_not_take(options, words):
    with pytest.raises(AutoparError, match=words):
        engine_for("llama-tiny", alone("llama-tiny", ONE), compile=options)


def test_a_compiler_that_fails_says_what_to_do():
    def broken(module, inputs):
        raise OSError("no C++ compiler")

    engine = engine_for("llama-tiny", alone("llama-tiny", ONE), compile={"backend": broken})
    with pytest.raises(AutoparError, match=r"torch.compile failed.*aot_eager.*no C\+\+ compiler"):
        engine.step(case("llama-tiny").batches[0])


def test_too_many_shapes_are_no_secret():
    engine = engine_for(
        "llama-tiny",
        alone("llama-tiny", ONE, number=1),
        compile={"backend": "eager", "dynamic": False},
    )
    batch = case("llama-tiny").batches[0]
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (8, 4):
            engine.eval_step({name: tensor[:rows] for name, tensor in batch.items()})
        with pytest.raises(AutoparError, match=r"torch.compile failed.*batches of fewer shapes"):
            engine.eval_step({name: tensor[:2] for name, tensor in batch.items()})


def compile_on_a_thread(rank: int) -> int:
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile.pool().submit(int, "7").result(timeout=20.0)


def test_a_forked_rank_compiles_on_threads_of_its_own(monkeypatch):
    """A process that has compiled has a pool of threads, which a fork takes for its own."""
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 2)
    assert compile_on_a_thread(0) == 7
    assert run_workers(compile_on_a_thread, 1) == [7]
