"""Planning from end to end: what the solver finds by itself, plans as data, and every way of asking for the impossible."""

import gc
import json
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from autopar_cost_models import SCHEDULES
from support.captures import captured_once
from support.effort import every, tried
from torch import nn

import autopar
from autopar.api import trace, trace_spec
from autopar.errors import AutoparError, NoPlanFits
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.sharding import transition
from autopar.models import parse_model
from autopar.rewrite.program import assemble
from autopar.solve.bounds.cell import Cell
from autopar.solve.search.driver import Driver
from autopar.solve.search.search_state import SearchState

BLOCK = "llama:layers=4,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256"


@pytest.fixture(scope="module")
def llama():
    spec = parse_model(BLOCK)
    return spec.build("meta"), spec.example_inputs(2, 4096), trace_spec(spec, 4096, "bf16")


@pytest.fixture(scope="module")
def megatron(llama):
    model, inputs, traced = llama
    """Where nothing that tp sends is hidden."""
    plain = autopar.Software(late_gradients=False)
    return autopar.plan(
        model,
        "dgx-h100:1",
        inputs,
        8,
        pin={"tp": 4, "dp": 2, "micro_batch": 1},
        traced=traced,
        software=plain,
    )


def tp_choices(plan, block):
    return {
        op: choices["tp"]
        for op, choices in next(b for b in plan.blocks if b.name == block).ops.items()
    }


def test_solver_finds_megatron_tensor_parallelism_by_itself(megatron):
    ops = tp_choices(megatron, "layers.0")
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert str(ops[name].inputs[1]) == "S(0)", name  # column-parallel
    for name in ("o_proj", "down_proj"):
        # row-parallel
        assert str(ops[name].inputs[1]) == "S(1)" and str(ops[name].outputs[0]) == "P", name
    assert str(ops["scaled_dot_product_attention"].inputs[0]) == "S(1)"  # heads


def test_a_block_communicates_as_little_as_two_all_reduces(llama, megatron):
    """All-reduce moves twice what reduce-scatter or all-gather moves: two all-reduces forward are four units of the hidden state."""
    block = next(c for c in llama[2].classes if c.name == "layers.0")
    ops = tp_choices(megatron, "layers.0")
    layout = {name: choice.outputs[0] for name, choice in ops.items() if choice.outputs}
    weight = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    moved, seen = {"forward": 0, "backward": 0}, set()
    for node in block.graph.nodes:
        if node.op != "call_function" or node.name not in ops:
            continue
        sources = [n for n in node.all_input_nodes]
        for source, want in zip(sources, ops[node.name].inputs, strict=False):
            have = layout.get(source.name)
            if have is None or have == want or (source.name, want) in seen:
                continue
            seen.add((source.name, want))
            forward, backward = transition(have, want)
            moved["forward"] += weight.get(forward, 0)
            moved["backward"] += weight.get(backward, 0)
    assert 0 < moved["forward"] <= 4 and 0 < moved["backward"] <= 4, moved


def test_certificate_is_optimal_and_adds_up(megatron):
    certificate = megatron.certificate
    assert certificate.status == "optimal" and certificate.gap <= 1e-6
    assert (
        certificate.bound_s
        <= certificate.objective_s
        == pytest.approx(megatron.predicted.step_time_s)
    )
    assert sum(megatron.predicted.breakdown.values()) == pytest.approx(
        megatron.predicted.step_time_s
    )
    assert sum(megatron.predicted.memory.values()) == megatron.predicted.peak_memory_bytes[0]
    assert [c for c in certificate.meshes if c["outcome"] == "chosen"]


@pytest.mark.slow
def test_mesh_is_searched_and_pinning_the_winner_changes_nothing(llama):
    model, inputs, traced = llama
    free = autopar.plan(model, "dgx-h100:1", inputs, 8, traced=traced)
    pinned = autopar.plan(
        model,
        "dgx-h100:1",
        inputs,
        8,
        traced=traced,
        pin={
            "tp": free.mesh.tp,
            "dp": free.mesh.dp,
            "micro_batch": free.micro_batch,
            "zero": free.zero,
            "recompute": free.recompute,
        },
    )
    assert pinned.predicted.step_time_s == pytest.approx(free.predicted.step_time_s, rel=1e-9)
    assert (
        len(
            {
                (c["mesh"]["dp"], c["mesh"]["tp"])
                for c in free.certificate.meshes
                if c["mesh"]["pp"] == 1
            }
        )
        == 4
    )
    assert {c["mesh"]["pp"] for c in free.certificate.meshes} > {1}, "pipelines are searched"
    for pin in ({"tp": 8}, {"dp": 8}, {"zero": 3}, {"recompute": "full"}):
        other = autopar.plan(model, "dgx-h100:1", inputs, 8, pin=pin, traced=traced)
        assert other.predicted.step_time_s >= free.predicted.step_time_s * (1 - 1e-9), pin


def test_plan_survives_saving(megatron, tmp_path):
    megatron.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == megatron
    assert replace(megatron, micro_batch=2) != megatron
    assert "tp=4" in autopar.explain(megatron)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "no format_version"),
        ("{}", "no format_version"),
        ('{"format_version": 99}', "format 99"),
        ('{"format_version": 4}', "not a complete plan"),
    ],
)
def test_damaged_plans_are_refused(text, message, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(AutoparError, match=message):
        Plan.load(tmp_path / "plan.json")


def test_damaged_fields_are_refused(megatron, tmp_path):
    data = json.loads(megatron.to_json())
    for damage in (
        lambda d: d["mesh"].update(tp=0),
        lambda d: d["mesh"].update(zz=1),
        lambda d: d["predicted"].update(step_time_s=0),
        lambda d: d["predicted"].update(step_time_s=None),
        lambda d: d["predicted"].update(peak_memory_bytes=[]),
        lambda d: d["predicted"]["memory"].update(kept="much"),
        lambda d: d["certificate"].update(bound_s=None),
        lambda d: d.update(stages=[[]]),
        lambda d: d.pop("zero"),
        lambda d: d.update(extra=1),
        lambda d: d["blocks"][0]["ops"].update(embed={"tp": ["x"]}),
        lambda d: d["blocks"][0]["ops"].update(embed={"xp": ["x", [], []]}),
        lambda d: d["blocks"][0]["ops"].update(embed={"tp": ["x", ["Q"], []]}),
    ):
        broken = json.loads(json.dumps(data))
        damage(broken)
        with pytest.raises(AutoparError):
            Plan.from_json(json.dumps(broken))
    with pytest.raises(AutoparError, match=r"absent.json does not exist"):
        Plan.load(tmp_path / "absent.json")


def small(vocab=128, **extra):
    spec = parse_model("llama-tiny")
    return spec.build("cpu"), spec.example_inputs(8, 16, "cpu")


@captured_once()
def test_plan_for_something_else_is_refused():
    model, inputs = small()
    plan = autopar.plan(model, "cpu:1", inputs)
    other = parse_model("gpt-tiny").build("cpu")
    with pytest.raises(AutoparError, match="plan was made for"):
        autopar.parallelize(other, "cpu:1", inputs, plan=plan)
    with pytest.raises(AutoparError, match="plan was made for cluster"):
        autopar.parallelize(model, "cpu:2", inputs, plan=plan)
    with pytest.raises(AutoparError, match="no process group"):
        autopar.parallelize(model, "cpu:2", inputs)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"tp": 3}, "tp=3 does not divide 8 devices; 1, 2, 4, 8 do"),
        ({"dp": 5}, "dp=5 does not divide 8 devices"),
        ({"tp": 4, "dp": 4}, "4 x dp=4 = 16 devices, but the cluster has 8"),
        ({"tp": 0}, "whole number"),
        ({"tp": True}, "whole number"),
        ({"tp": "x"}, "whole number"),
        ({"zero": 4}, "ZeRO stage"),
        ({"recompute": "some"}, "none, full, gather, selective, op and every-2, every-3, ... are"),
        ({"micro_batch": 3, "dp": 8}, "micro_batch=3 does not divide"),
        ({"pp": 3}, "pp=3 does not divide 8 devices"),
        ({"vpp": 2, "pp": 1}, "vpp=2 is of a pipeline, and pp is 1"),
        ({"vpp": 2, "tp": 8}, "vpp=2 is of a pipeline, and with 8 devices, 4 layers .* pp is 1"),
        ({"stages": "1-1-2"}, "stages=1-1-2 is of a pipeline, and with 8 devices"),
        ({"stages": "1-2"}, "has 2 stages with 3 layers"),
        ({"vpp": 2, "offload": "parameters"}, "offload=parameters needs pp=1"),
        ({"stages": "1-3", "offload": "parameters"}, "offload=parameters needs pp=1"),
        ({"vpp": 1, "schedule": "1f1b", "tp": 8}, "schedule=1f1b is of a pipeline"),
        ({"pp": 8, "vpp": 8}, "more than the model's 4 blocks"),
        ({"pp": 2, "schedule": "2f2b"}, "schedule='2f2b' is not known"),
        (
            {"pp": 2, "dp": 4, "micro_batch": 4, "schedule": "1f1b"},
            "1f1b needs a micro-batch for each rank",
        ),
        ({"nonsense": 1}, "unknown pin"),
    ],
)
def test_impossible_pins_say_why(llama, pin, message):
    model, inputs, traced = llama
    with pytest.raises(AutoparError, match=message):
        autopar.plan(model, "dgx-h100:1", inputs, 16, pin=pin, traced=traced)


@pytest.mark.parametrize(
    "pin",
    [{"vpp": 2}, {"stages": "1-3"}, {"schedule": "1f1b"}, {"schedule": "zero_bubble", "tp": 2}],
)
def test_pins_of_a_pipeline_leave_its_ranks_to_the_search(llama, pin):
    model, inputs, traced = llama
    ask = {"tolerance": 0, "traced": traced}
    plan = autopar.plan(model, "dgx-h100:1", inputs, 16, pin=pin, **ask)
    assert plan.mesh.pp > 1
    for name, value in pin.items():
        found = "-".join(str(len(s)) for s in plan.stages) if name == "stages" else None
        kept = {
            "vpp": len(plan.stages) // plan.mesh.pp,
            "schedule": plan.schedule,
            "tp": plan.mesh.tp,
        }
        assert found is not None or kept[name] == value
    for pp in (2, 4):
        with suppress(AutoparError):
            other = autopar.plan(model, "dgx-h100:1", inputs, 16, pin={**pin, "pp": pp}, **ask)
            assert plan.predicted.step_time_s <= other.predicted.step_time_s * (1 + 2e-3)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble"])
def test_the_stages_of_a_rank_follow_a_pinned_schedule(llama, schedule):
    model, inputs, traced = llama
    pin = {"pp": 2, "dp": 4, "micro_batch": 2, "schedule": schedule}
    found = autopar.plan(model, "dgx-h100:1", inputs, 16, pin=pin, traced=traced)
    assert len(found.stages) >= 2 * SCHEDULES[schedule].min_stages_per_rank
    uneven = {**pin, "micro_batch": 1}
    with pytest.raises(AutoparError, match="cuts micro_batches=5 over 2 ranks"):
        autopar.plan(model, "dgx-h100:1", inputs, 20, pin=uneven, traced=traced)


@pytest.mark.slow
def test_a_plan_that_is_found_can_be_pinned():
    """Where tensor parallelism looks good but for five heads."""
    spec = parse_model("gpt:layers=4,hidden=250,heads=5,vocab=1001")
    model, inputs = spec.build("meta"), spec.example_inputs(2, 127)
    traced = trace_spec(spec, 127, "bf16")
    plans = [
        autopar.plan(model, "h100:6", inputs, 12, traced=traced),
        autopar.plan(model, "h100:5", inputs, 13, traced=traced),
    ]
    for plan, cluster in zip(plans, ("h100:6", "h100:5"), strict=True):
        pins = {
            "pp": plan.mesh.pp,
            "tp": plan.mesh.tp,
            "dp": plan.mesh.dp,
            "micro_batch": plan.micro_batch,
            "zero": plan.zero,
        }
        again = autopar.plan(model, cluster, inputs, plan.global_batch, pin=pins, traced=traced)
        assert (
            again.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s)
            and 5 % plan.mesh.tp == 0
        )
        assert all(5 % entry["mesh"]["tp"] == 0 for entry in plan.certificate.meshes)


@pytest.mark.slow
@captured_once()
def test_heads_that_do_not_divide_are_run_where_tp_is_pinned():
    spec = parse_model("llama:layers=2,hidden=96,heads=6,kv_heads=6,ffn=96,vocab=64")
    model, inputs = spec.build("meta"), spec.example_inputs(4, 8)
    plan = autopar.plan(model, "h100:4", inputs, pin={"tp": 4})
    assert plan.mesh.tp == 4 and "tp: 4; " in plan.certificate.space
    assert autopar.plan(model, "h100:4", inputs).mesh.tp in (1, 2)


def test_nothing_fits_says_by_how_much_and_what_fits():
    spec = parse_model("llama2-7b")
    model, inputs = spec.build("meta"), spec.example_inputs(2, 4096)
    traced = trace_spec(spec, 4096, "bf16")
    with pytest.raises(
        NoPlanFits, match=r"No plan fits: the smallest needs 1\d\d\.\d\d GiB per device of 66\.4"
    ) as error:
        autopar.plan(model, "h100:1", inputs, 1, traced=traced)
    assert "most of it is optimizer state" in str(
        error.value
    ) and "\n  on 2 devices (h100:2): " in str(error.value)
    assert autopar.plan(model, "h100:2", inputs, 1, traced=traced), error
    with pytest.raises(NoPlanFits, match="Nothing fits without tp=1"):
        autopar.plan(model, "h100:1", inputs, 1, traced=traced, pin={"tp": 1})


@pytest.mark.parametrize("global_batch", [0, -1, 1.5, True])
def test_bad_global_batch(llama, global_batch):
    model, inputs, traced = llama
    with pytest.raises(AutoparError, match="global_batch"):
        autopar.plan(model, "dgx-h100:1", inputs, global_batch, traced=traced)


def test_models_that_cannot_be_captured_say_why():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).sum() if x.sum() > 0 else self.linear(x).mean()

    class NoLoss(nn.Linear):
        pass

    with pytest.raises(AutoparError, match="reads a number out of a tensor"):
        autopar.plan(Branches(), "cpu:1", {"x": torch.ones(4, 4)})
    with pytest.raises(AutoparError, match="not a scalar loss"):
        autopar.plan(NoLoss(4, 4), "cpu:1", (torch.ones(4, 4),))
    with pytest.raises(AutoparError, match="needs example_inputs"):
        autopar.plan(NoLoss(4, 4), "cpu:1")
    with pytest.raises(AutoparError, match="holds no tensor"):
        autopar.plan(NoLoss(4, 4), "cpu:1", {"x": 3})
    with pytest.raises(AutoparError, match="precision"):
        autopar.plan(
            NoLoss(4, 4),
            "cpu:1",
            (torch.ones(4, 4),),
            precision="int3",
            loss_fn=lambda o, t: o.sum(),
        )


@pytest.mark.slow
@captured_once()
def test_cluster_may_be_a_spec_or_a_name():
    model, inputs = small()
    by_name = autopar.plan(model, "cpu:2", inputs)
    by_spec = autopar.plan(model, ClusterSpec.parse("cpu:2"), inputs)
    assert by_name.predicted == by_spec.predicted
    with pytest.raises(AutoparError):
        autopar.plan(model, "cpu:none", inputs)


@pytest.mark.parametrize(
    ("family", "blocks"),
    every(2, [("gpt:", "blocks"), ("llama:kv_heads=4,ffn=4096,", "layers")], unpacked=True),
)
def test_sequence_parallel_blocks_have_megatrons_collectives(family, blocks):
    """Korthikanti et al. 2022 (arXiv:2205.05198), figure 5: a layer all-gathers before and reduce-scatters after attention and MLP, and
    does the dual of each backward; nothing else.  A bias of a row-parallel layer counts on one rank."""
    spec = parse_model(family + "layers=4,hidden=1024,heads=16,vocab=32000")
    model, inputs = spec.build("meta"), spec.example_inputs(4, 1024)
    traced = trace(model, inputs, precision="bf16")
    plan = autopar.plan(
        model,
        "h100:4",
        inputs,
        4,
        pin={"tp": 4, "sequence_parallel": True, "recompute": "none"},
        traced=traced,
    )
    program = assemble(traced, plan, 1, torch.device("cpu"))
    for layer in range(4):
        nodes = [
            n
            for n in getattr(program.module, f"{blocks}_{layer}").graph.nodes
            if "transition" in n.meta
        ]
        found = Counter(
            (n.target.__name__, n.kwargs["backward"]) for n in nodes if n.target.__name__ != "mask"
        )
        assert found == {("all_gather", "reduce_scatter"): 2, ("reduce_scatter", "all_gather"): 2}
        assert all(
            n.meta["whole"].dim() == (1 if n.target.__name__ == "mask" else 3) for n in nodes
        ), "weights stay where they are"


def test_sequences_stay_whole_if_pinned():
    spec = parse_model("llama:layers=2,hidden=256,heads=8,kv_heads=4,ffn=512,vocab=512")
    model, inputs = spec.build("meta"), spec.example_inputs(4, 64)
    plan = autopar.plan(model, "h100:4", inputs, 4, pin={"tp": 4, "sequence_parallel": False})
    block = next(b for b in plan.blocks if len(b.segments) > 1)
    layouts = {
        layout for op in block.ops.values() for layout in (*op["tp"].inputs, *op["tp"].outputs)
    }
    assert not any(
        layout.is_shard and layout.dim == 1 and layout.pattern.is_contiguous
        for name, op in block.ops.items()
        for layout in op["tp"].outputs
        if name.startswith(("mlp_norm", "attention_norm"))
    ), layouts


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"cp": 3}, "cp=3 does not divide 8 devices; 1, 2, 4, 8 do"),
        ({"cp": 4, "tp": 4}, "cp=4 = 16 devices, but the cluster has 8"),
        (
            {"cp": 2, "tp": 2, "dp": 4},
            "dp=4 = 16 devices, but the cluster has 8; with tp=2 cp=2, dp is 2",
        ),
        ({"ep": 2}, "ep=2: the model has no routed experts"),
        ({"cp": "two"}, "must be a whole number"),
        (
            {"context_method": "star"},
            "context_method='star' is not known; gather, ring, ulysses are",
        ),
        ({"sequence_parallel": 2}, "sequence_parallel=2 is not known"),
    ],
)
def test_impossible_meshes_say_why(llama, pin, message):
    model, inputs, traced = llama
    with pytest.raises(AutoparError, match=message):
        autopar.plan(model, "dgx-h100:1", inputs, 16, pin=pin, traced=traced)


def test_experts_and_positions_limit_the_mesh():
    spec = parse_model("moe-tiny").shrunk()
    model, inputs = spec.build("meta"), spec.example_inputs(8, 4)
    traced = trace(model, inputs)
    with pytest.raises(AutoparError, match="ep=4 does not divide dp=2"):
        autopar.plan(model, "cpu:4", inputs, 8, pin={"ep": 4, "dp": 2}, traced=traced)
    with pytest.raises(AutoparError, match="ep=8 is more than the 4 experts"):
        autopar.plan(model, "cpu:8", inputs, 8, pin={"ep": 8}, traced=traced)
    with pytest.raises(AutoparError, match="cp=8 is more than the 4 positions"):
        autopar.plan(model, "cpu:8", inputs, 8, pin={"cp": 8}, traced=traced)
    plan = autopar.plan(model, "cpu:8", inputs, 8, pin={"ep": 2, "cp": 2, "dp": 4}, traced=traced)
    assert str(plan.mesh) == "dp=4 cp=2 ep=2" and plan.mesh.num_devices == 8
    assert autopar.Plan.from_json(plan.to_json()) == plan


class ManyReaders(nn.Module):
    """One value that 70 ops keep, more than numpy's arrays have dims."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(70))

    def forward(self, x):
        x = self.first(x)
        return sum(x * weight for weight in self.weights).square().mean()


@pytest.mark.slow
def test_a_value_may_have_any_number_of_readers():
    plan = autopar.plan(
        ManyReaders(), "h100:2", {"x": torch.randn(4, 8)}, global_batch=8, pin={"tp": 2}
    )
    assert plan.mesh.tp == 2


@pytest.mark.parametrize(
    "cluster", ["dgx-h100:1", pytest.param("dgx-h100:1+dgx-a100-80g:1", marks=pytest.mark.slow)]
)
def test_what_a_search_held_is_freed_when_it_ends(llama, cluster):
    """Python looks for cycles so seldom while plans are made that many plans in one process would hold gigabytes."""
    model, inputs, traced = llama

    def held() -> int:
        return sum(isinstance(o, (Driver, SearchState, Cell)) for o in gc.get_objects())

    gc.collect()
    before = held()
    gc.disable()
    try:
        pin = {"tp": 2, "micro_batch": 1, **tried({"recompute": "none"}, {})}
        autopar.plan(model, cluster, inputs, 16, pin=pin, traced=traced)
        assert held() == before
    finally:
        gc.enable()


class SelfConditioned(torch.nn.Module):
    """The head is also read before the end, and what it says is fed back, as in self-conditioned CTC: what reads it there pays for it."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.head, self.back = (
            torch.nn.Linear(*of, bias=False) for of in ((16, 64), (64, 8192), (8192, 64))
        )
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

    def forward(self, features, labels):
        hidden = self.front(features)
        for number, layer in enumerate(self.layers):
            hidden = hidden + torch.tanh(layer(hidden))
            if number == 4:
                hidden = hidden + self.back(torch.softmax(self.head(hidden), -1))
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@captured_once()
def test_a_plan_fits_devices_of_just_the_memory_that_it_takes():
    with torch.device("meta"):
        model = SelfConditioned()
        batch = {"features": torch.zeros(8, 32, 16), "labels": torch.zeros(8, 32, dtype=torch.long)}
    pin = {"pp": 2, "schedule": "1f1b", "micro_batch": 1}
    cluster = ClusterSpec.parse("h100:2")
    whole = {"pin": pin, "headroom": 0, "tolerance": 0}
    free = autopar.plan(model, cluster, batch, **whole)
    size = max(free.predicted.peak_memory_bytes)
    found = autopar.plan(
        model, replace(cluster, device=replace(cluster.device, memory_bytes=size)), batch, **whole
    )
    assert found.predicted.step_time_s == free.predicted.step_time_s
    assert found.certificate.gap == free.certificate.gap
