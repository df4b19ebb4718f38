"""Recomputation by op and of every k-th layer, against what torch.utils.checkpoint keeps and runs again."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from autopar_cost_models import FITTED
from support.effort import every, slow_but
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autopar.annotate.annotator import Annotator
from autopar.annotate.setting import Setting
from autopar.api import plan as make_plan
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.calls import op_name
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.models.base import NativeSpec
from autopar.models.common import rotary_tables
from autopar.models.gpt import GPTConfig
from autopar.models.llama import LlamaConfig
from autopar.ops.values import ops
from autopar.request.software import Software
from autopar.solve.costs.placement_cost import saved_bytes
from autopar.solve.integer_program.placement_solver import solve_placement
from autopar.trace.deepen import counted

aten = torch.ops.aten
ROWS, SEQ = 2, 16
LLAMA = LlamaConfig(64, 32, 3, 4, 2, 48)
GPT = GPTConfig(64, 32, 3, 4, max_seq=SEQ)
DEAR = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
KINDS = {  # what the dispatcher sees -> what a captured graph calls it; norms and views are spelled otherwise
    "mm": "aten::linear", "addmm": "aten::linear", "silu": "aten::silu", "gelu": "aten::gelu", "cat": "aten::cat", "neg": "aten::neg",
    "_scaled_dot_product_flash_attention_for_cpu": "aten::scaled_dot_product_attention",
}  # fmt: skip


def policy():
    """torchtitan's: every dear op is saved, except every second product."""
    count = Counter()

    def decide(ctx, func, *args, **kwargs):
        mode = "again" if ctx.is_recompute else "forward"
        product = func in (aten.mm.default, aten.addmm.default)
        count[mode] += product
        save = func in DEAR and not (product and count[mode] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


class Watch(TorchDispatchMode):
    """Counts what really runs, by kind, and remembers the storages that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.made, self.counting = Counter(), set(), False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if self.counting and name in KINDS:
            self.counts[KINDS[name]] += 1
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made.add(storage._cdata)
        return out


def contexts():
    return create_selective_checkpoint_contexts(policy())


def observed(config) -> tuple[Counter, int]:
    """(ops that the second forward of one layer runs, bytes kept after the first) with torch's own selective checkpointing."""
    torch.manual_seed(0)
    model = config.module()
    layer = (model.blocks if isinstance(config, GPTConfig) else model.layers)[1]
    x = torch.randn(ROWS, SEQ, config.hidden, requires_grad=True)
    extra = (
        ()
        if isinstance(config, GPTConfig)
        else rotary_tables(SEQ, config.head_dim, 1e4, like=x.detach())
    )
    watch, calls = Watch(), []

    def run(*inputs):
        calls.append(1)
        watch.counting = len(calls) == 2
        try:
            return layer(*inputs)
        finally:
            watch.counting = False

    with watch:
        out = checkpoint(run, x, *extra, use_reentrant=False, context_fn=contexts)
        gc.collect()
        known = {
            tensor.untyped_storage()._cdata for tensor in (out, x, *extra, *layer.parameters())
        }
        alive = [
            t.untyped_storage()
            for t in gc.get_objects()
            if isinstance(t, torch.Tensor) and not t.is_meta
        ]
        kept = sum({s._cdata: s.nbytes() for s in alive if s._cdata in watch.made - known}.values())
        out.sum().backward()
    assert len(calls) == 2
    return watch.counts, kept + sum(t.untyped_storage().nbytes() for t in (x, *extra))


def traced_of(config, precision: str = "fp32"):
    spec = NativeSpec.of("model", config)
    return trace(spec.build("meta"), spec.example_inputs(ROWS, SEQ), None, precision)


def annotated(traced, recompute: str, compiled: bool = False, tp: int = 1, **options):
    software = Software(compiled=compiled, fitted=replace(FITTED, fragmentation=0))
    setting = Setting(
        MeshShape(tp=tp),
        ROWS,
        1,
        0,
        recompute,
        "fp32",
        ClusterSpec.parse("h100:8"),
        software=software,
        **options,
    )
    annotator = Annotator(traced)
    return annotator, annotator.annotate(setting)


def again_of(annotator: Annotator, compiled: bool) -> Counter:
    index = next(
        i
        for i, block in enumerate(annotator.traced.classes)
        if sum(s.class_index == i for s in annotator.traced.segments) > 1
    )
    rerun = annotator.facts.classes[index].rerun("op", compiled)
    graph = annotator.traced.classes[index].graph
    return Counter(
        op_name(node)
        for node in ops(graph)
        if node.name in rerun.ops and op_name(node) in KINDS.values()
    )


def layer_of(model):
    return next(block for block in model.classes if block.count > 1)


def kept_by_a_layer(model) -> int:
    """Bytes, those that all layers have in common included."""
    layer = layer_of(model)
    return saved_bytes([op.strategies[0] for op in layer.ops]) + sum(
        max(sizes.values()) for sizes in layer.common_bytes.values()
    )


@pytest.mark.parametrize("config", slow_but([LLAMA], [LLAMA, GPT]), ids=["llama", "gpt"])
def test_eager_mode_keeps_and_reruns_what_torch_does(config):
    counts, kept_bytes = observed(config)
    annotator, model = annotated(traced_of(config), "op")
    assert again_of(annotator, False) == counts
    assert kept_by_a_layer(model) == kept_bytes


def test_a_compiler_reruns_what_backward_needs_and_keeps_no_result_that_nobody_reads():
    """Against the partitioner of torch.compile, at the products: each has two in its backward, and those that run again have a third."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs, layer = [], LLAMA.module().layers[1]

    def look(graph, example_inputs):
        graphs.append(graph.graph)
        return graph.forward

    @torch.compile(
        backend=aot_autograd(
            fw_compiler=look, bw_compiler=look, partition_fn=min_cut_rematerialization_partition
        )
    )
    def run(*inputs):
        return checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)

    x = torch.randn(ROWS, SEQ, LLAMA.hidden, requires_grad=True)
    run(x, *rotary_tables(SEQ, LLAMA.head_dim, 1e4, like=x.detach())).sum().backward()
    forward, backward = graphs
    annotator, compiled = annotated(traced_of(LLAMA), "op", compiled=True)
    products = sum(node.target == aten.mm.default for node in backward.nodes)
    assert products == 2 * 7 + again_of(annotator, True)["aten::linear"]
    parameters = {tuple(p.shape) for p in layer.parameters()}
    kept = [(node.op, node.meta["val"]) for node in set(forward.output_node().args[0][1:])]
    expected = kept_by_a_layer(compiled)
    assert (
        sum(
            val.nbytes
            for op, val in kept
            if op != "placeholder" or tuple(val.shape) not in parameters
        )
        == expected
    )
    eager = kept_by_a_layer(annotated(traced_of(LLAMA), "op")[1])
    assert eager - expected == 4 * ROWS * SEQ * LLAMA.hidden, (
        "the last product's result, which eager mode keeps for nothing"
    )


@pytest.mark.slow
def test_it_costs_what_its_ops_cost():
    traced = traced_of(LLAMA)
    for compiled in (False, True):
        plain, (annotator, model) = (
            annotated(traced, "none", compiled)[1],
            annotated(traced, "op", compiled),
        )
        layer = next(own for own in annotator.facts.classes if own.place.count > 1)
        rerun = layer.rerun("op", compiled)
        for before, after in zip(layer_of(plain).ops, layer_of(model).ops, strict=True):
            one, other = before.strategies[0], after.strategies[0]
            again = one.forward_s if before.name in rerun.ops else 0.0
            assert other.forward_s == one.forward_s and other.backward_s == pytest.approx(
                one.backward_s + again
            )


@pytest.mark.parametrize(
    ("pin", "layouts"), every(2, [(True, {"S(1)"}), (False, {"R"})], unpacked=True)
)
def test_layers_hand_on_what_the_pin_of_sequence_parallelism_says(pin, layouts):
    """Neither a shard of the features nor a partial sum, which no framework has between layers."""
    traced = traced_of(LlamaConfig(64, 64, 3, 4, 4, 128))
    layer = layer_of(annotated(traced, "none", True, tp=2, sequence_parallel=pin)[1])
    handed = next(op for op in layer.ops if op.name == "output0")
    assert {str(strategy.inputs[0]) for strategy in handed.strategies} == layouts


def test_with_sequence_parallelism_gathers_are_made_again_and_scatters_are_not():
    traced = traced_of(LlamaConfig(64, 64, 3, 4, 4, 128))
    plain = layer_of(annotated(traced, "none", True, tp=2, sequence_parallel=True)[1])
    model = layer_of(annotated(traced, "op", True, tp=2, sequence_parallel=True)[1])
    seen = set()
    for name, value in plain.values.items():
        for pair, price in value.conversions.items():
            again = model.values[name].conversions[pair].backward_s - price.backward_s
            if price.forward_comm_s and again:
                assert again == pytest.approx(price.forward_s) and str(pair[0]) != "P"
                seen.add(str(pair[0])[0])
    assert seen == {"S"}
    for before, after in zip(plain.ops, model.ops, strict=True):
        for one, other in zip(before.strategies, after.strategies, strict=True):
            if one.outputs and str(one.outputs[0]) == "P":
                assert other.backward_s == one.backward_s, "its sum over tp is kept"


def test_every_kth_layer():
    """Layers k, 2k, ... cost what recomputed ones cost, the others what plain ones do."""
    traced = traced_of(GPTConfig(64, 32, 4, 4, max_seq=SEQ))

    def cost(recompute: str, every: int | None = None):
        model = annotated(counted(traced, every) if every else traced, recompute)[1]
        return solve_placement(model, None).priced

    none, full = cost("none"), cost("full")
    for number, share in ((1, 1.0), (2, 0.5), (5, 0.0)):
        found = cost(f"every-{number}", number)
        assert found.time_s == pytest.approx(none.time_s + share * (full.time_s - none.time_s))
        assert found.static_bytes == none.static_bytes
        assert found.kept_bytes == pytest.approx(
            none.kept_bytes + share * (full.kept_bytes - none.kept_bytes)
        )
        assert found.transient_bytes == (full if share else none).transient_bytes
        assert cost("full", number).time_s == full.time_s
    names = [
        s.name
        for s in counted(traced, 2).segments
        if counted(traced, 2).classes[s.class_index].picked
    ]
    assert names == ["blocks.1", "blocks.3"]


@pytest.mark.slow
def test_pinned_plans_lie_between_none_and_full():
    spec = NativeSpec.of("gpt", GPTConfig(512, 1024, 4, 16, max_seq=2048))
    example = spec.example_inputs(2, 2048)
    traced = trace(spec.build("meta"), example, None, "bf16")

    def planned(recompute: str, **options):
        pin = {"tp": 1, "dp": 8, "micro_batch": 2, "zero": 0, "recompute": recompute}
        return make_plan(spec.build("meta"), "h100:8", example, 16, pin, traced=traced, **options)

    none, full = planned("none").predicted, planned("full").predicted
    for mode in ("op", "every-2"):
        plan = planned(mode)
        assert none.step_time_s < plan.predicted.step_time_s < full.step_time_s
        assert full.peak_memory_bytes < plan.predicted.peak_memory_bytes < none.peak_memory_bytes
        assert plan.recompute == mode and not plan.lacks
    for wrong in ("every-0", "every", "layers", 2):
        with pytest.raises(AutoparError, match="is not known"):
            planned(wrong)


def test_what_all_layers_read_is_kept_once():
    traced, table = traced_of(LLAMA), 4 * SEQ * LLAMA.head_dim
    _, plain = annotated(traced, "none")
    _, again = annotated(traced, "full")
    for model in (plain, again):
        layer, last = layer_of(model), model.classes[model.last]
        assert [
            max(layer.message_bytes(name, x) for x in sizes)
            for name, sizes in layer.common_bytes.items()
        ] == [table, table]
        assert layer.common_bytes.keys() < set(layer.inputs)
        kept = [saved for strategy in last.ops[0].strategies for saved in strategy.saved]
        assert [saved.size_bytes for saved in kept] == [table, table]
    assert (
        sum(max(sizes.values()) for sizes in layer_of(again).input_bytes.values())
        == 4 * ROWS * SEQ * LLAMA.hidden
    )
    saved = {
        saved.value
        for op in layer_of(plain).ops
        for strategy in op.strategies
        for saved in strategy.saved
    }
    assert saved.isdisjoint(layer_of(plain).common_bytes), "they are in no layer's own"
    _, alone = annotated(traced_of(replace(LLAMA, layers=1)), "none")
    assert not any(block.common_bytes for block in alone.classes), "one reader keeps it itself"
