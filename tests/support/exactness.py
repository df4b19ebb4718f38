"""Promise 1 of the design, measured: models, batches, a single-device reference, plans, and the update-relative error.

fp64, three SGD steps with momentum, a learning rate that moves the median tensor by 1 % or more, labels with uneven numbers of -100.
Workers build and trace a model once each and keep it: a traced model holds fake tensors, which do not travel.

Transformers computes norms, softmax and the loss in fp32 whatever the model's dtype.  Rounding to fp32 turns a difference of one ulp of
fp64, which any other order of sums makes, into one of fp32.  `Widened` makes every such cast one to fp64, in the reference and in the
capture alike, so that the same tolerance holds for all models.
"""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import networkx as nx
import torch
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.annotate.propagate import BatchPropagation, ContextPropagation, Propagation
from autopar.annotate.setting import Setting
from autopar.api import trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import AxisChoice, BlockPlan, Certificate, Prediction
from autopar.ir.sharding import RP, R
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.models.hf import HFSpec
from autopar.ops.values import (
    operand_names,
    ops,
    output_nodes,
    result_names,
    value_grads,
    value_name,
)
from autopar.planning.plan_writer import axis_choices
from autopar.runtime.engine import Engine
from autopar.solve.integer_program.placement_solver import solve_placement
from autopar.verify.verify import free_network
from autopar.verify.widened import Widened

ROWS, SEQ, STEPS = 8, 12, 3
TOLERANCE, ABSOLUTE = 1e-9, 1e-12
HF = {
    "hf-llama": dict(
        model_type="llama",
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=64,
    ),
    "hf-gpt2": dict(
        model_type="gpt2",
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=101,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    ),
}
MODELS = ("llama-tiny", "gpt-tiny", "moe-tiny", *HF)


def widened(name: str) -> contextlib.AbstractContextManager:
    return Widened() if name in HF else contextlib.nullcontext()


@dataclass
class Case:
    """A model with its batches and what one device makes of them."""

    name: str
    model: nn.Module
    batches: list[dict[str, Tensor]]
    traced: TracedModel
    annotator: Annotator


def token_batches(
    vocab: int, rows: int = ROWS, seq: int = SEQ, steps: int = STEPS
) -> list[dict[str, Tensor]]:
    """Random tokens; row r has (3 r mod seq) labels of -100, so that ranks hold different numbers of valid targets."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(steps):
        ids, labels = (torch.randint(0, vocab, (rows, seq), generator=generator) for _ in range(2))
        for row in range(rows):
            labels[row, : row * 3 % seq] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


@cache
def case(name: str) -> Case:
    """Build and trace, once a process.  Equal in every process."""
    spec = HFSpec.from_dict(name, HF[name]) if name in HF else parse_model(name)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = spec.build("cpu", torch.float64)
    torch.set_rng_state(state)
    for parameter in model.parameters():  # zeros (biases, router ties) and ones would hide errors
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter += 0.1 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float64))
    batches = token_batches(spec.vocab)
    with widened(name):
        traced = trace(model, batches[0])
    return Case(name, model, batches, traced, Annotator(traced))


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.5, momentum=0.9)


@dataclass
class Reference:
    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def loss_of(output) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


@cache
def reference(name: str) -> Reference:
    """Three steps on one device, in eager mode."""
    case_ = case(name)
    with widened(name):
        return train(case_.model, case_.batches)


def train(
    model: nn.Module, batches: list, max_grad_norm: float | None = None, call=None
) -> Reference:
    """Train a copy of `model` on one device; `call(model, batch)` gives the loss."""
    return train_in_place(copy.deepcopy(model), batches, max_grad_norm, call)


def train_in_place(
    model: nn.Module, batches: list, max_grad_norm: float | None = None, call=None
) -> Reference:
    call = call or (lambda model, batch: loss_of(model(**batch)))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer, losses = sgd([p for p in model.parameters() if p.requires_grad]), []
    for batch in batches:
        optimizer.zero_grad()
        loss = call(model, batch)
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(float(loss))
    return Reference(losses, before, {k: v.clone() for k, v in model.state_dict().items()})


def moved(result: Reference) -> float:
    """How far training moved the median tensor, relative to its norm."""
    shares = [
        ((result.after[k] - v).norm() / v.norm()).item()
        for k, v in result.before.items()
        if v.is_floating_point() and v.norm() > 0
    ]
    return sorted(shares)[len(shares) // 2]


def update_error(result: Reference, state: dict[str, Tensor]) -> float:
    """The largest update-relative error over the tolerance: exact means at most 1."""
    worst = 0.0
    for name, after in result.after.items():
        if not after.is_floating_point():
            continue
        difference, update = (
            (state[name] - after).norm().item(),
            (after - result.before[name]).norm().item(),
        )
        share = (
            difference / ABSOLUTE
            if update * TOLERANCE < ABSOLUTE
            else difference / update / TOLERANCE
        )
        worst = max(worst, share if share == share else float("inf"))
    return worst


# ----------------------------------------------------------------------------------------------------------------------- plans


def setting(
    mesh: MeshShape, num_microbatches: int = 1, recompute: str = "none", rows: int = ROWS
) -> Setting:
    return Setting(
        mesh,
        rows // mesh.dp // num_microbatches,
        num_microbatches,
        0,
        recompute,
        "fp64",
        free_network(mesh.num_devices),
    )


def make_plan(traced: TracedModel, where: Setting, blocks: tuple[BlockPlan, ...]) -> Plan:
    mesh = where.mesh
    return Plan(
        mesh,
        where.micro_batch,
        where.num_microbatches,
        where.micro_batch * where.num_microbatches * mesh.dp,
        "none",
        (tuple(segment.name for segment in traced.segments),),
        0,
        where.recompute,
        "fp64",
        blocks,
        Prediction(1.0, (1,) * mesh.pp, 0, 0),
        Certificate("feasible", 1, 0, 1, ""),
        "test",
        traced.model_hash,
        "test",
        "",
        "1",
    )


def _segments(traced: TracedModel, index: int) -> tuple[str, ...]:
    return tuple(s.name for s in traced.segments if s.class_index == index)


def solved_plan(traced: TracedModel, annotator: Annotator, where: Setting) -> Plan:
    """What the solver chooses for a free network."""
    model = annotator.annotate(where)
    solution = solve_placement(model, None)
    fixed = annotator.axis_choices(where)
    blocks = []
    for index, block in enumerate(model.classes):
        choices = {}
        for op in block.ops:
            strategy = op.strategy(solution.choices[index][op.name])
            choices[op.name] = axis_choices(where.mesh, fixed[index].get(op.name, {}), strategy)
        blocks.append(
            BlockPlan(
                block.name, _segments(traced, index), "full" if block.recompute else "none", choices
            )
        )
    return make_plan(traced, where, tuple(blocks))


def gathering_again(plan: Plan) -> Plan:
    """The plan with layers that keep shards of what linear layers read whole."""
    blocks = tuple(replace(block, recompute="gather") for block in plan.blocks)
    return replace(plan, recompute="gather", blocks=blocks)


def random_plan(
    traced: TracedModel, annotator: Annotator, where: Setting, seed: int, random_fixed: bool = True
) -> Plan:
    """Any strategy for any op, on tp and (with `random_fixed`) on the axes that propagation decides; tied parameters alike; any layout on
    every boundary."""
    rng = random.Random(seed)
    model = annotator.annotate(where)
    shared: dict[tuple[int, str], dict] = {}
    for places in nx.connected_components(
        nx.Graph([pair for group in model.ties for pair in pairwise(group)])
    ):
        one: dict[str, dict] = {}  # tied parameters read and write the same
        shared |= {key: one for key in places}
    fixed = annotator.axis_choices(where)
    propagations = {
        axis: propagation(traced, annotator, where, axis)
        for axis in where.mesh.active
        if axis != "tp"
    }
    blocks = []
    for index, block in enumerate(model.classes):
        outer = fixed[index]
        if random_fixed:
            found = {
                axis: random_axis(run, index, rng, shared, axis, fixed[index])
                for axis, run in propagations.items()
            }
            outer = {
                op: {axis: choices[op] for axis, choices in found.items()} for op in fixed[index]
            }
        choices = {}
        for op in block.ops:
            found = list(op.strategies)
            tied = shared.get((index, op.name))
            if tied is not None and "tp" in tied:
                found = [s for s in found if s.outputs[0] == tied["tp"]]
            strategy = rng.choice(found)
            if tied is not None:
                tied["tp"] = strategy.outputs[0]
            choices[op.name] = axis_choices(where.mesh, outer.get(op.name, {}), strategy)
        recompute = "full" if block.count > 1 and rng.random() < 0.3 else "none"
        blocks.append(BlockPlan(block.name, _segments(traced, index), recompute, choices))
    plan = make_plan(traced, where, tuple(blocks))
    check_conversions(model, plan)
    return plan


def propagation(
    traced: TracedModel, annotator: Annotator, where: Setting, axis: str
) -> Propagation:
    """What knows an op's strategies on an axis that the solver does not decide."""
    if axis != "cp":
        return BatchPropagation(
            traced, annotator.facts.reach, where.mesh.size(axis), experts=axis == "ep"
        )
    return ContextPropagation(
        traced, annotator.facts.reach, annotator.context(where), annotator.facts.positions
    )


def random_axis(
    run: Propagation, index: int, rng: random.Random, shared: dict, axis: str, propagated: dict
) -> dict[str, AxisChoice]:
    """Random choices on one axis of one class."""
    graph = run.traced.classes[index].graph
    grads, wanted, produced = value_grads(graph), {}, {}
    choices: dict[str, AxisChoice] = {}
    for node in ops(graph):
        names, outs = operand_names(node), result_names(node)
        found = run.options(index, node, [grads[n] for n in names], [grads[n] for n in outs])
        best = rng.choice(found)
        choices[node.name] = AxisChoice(best.name, best.inputs, best.outputs)
        for name, layout in zip(names, best.inputs, strict=True):
            wanted.setdefault(name, []).append(layout)
        produced.update(zip(outs, best.outputs, strict=True))
    for node in graph.nodes:
        whole = RP if grads.get(node.name) else R
        if node.op == "placeholder":
            layout = rng.choice(
                [whole, propagated[node.name][axis].outputs[0], *wanted.get(node.name, [])]
            )
            choices[node.name] = AxisChoice(str(layout), (), (layout,))
            produced[node.name] = layout
        elif node.op == "get_attr":
            tied = shared.get((index, node.name), {})
            layout = tied.setdefault(axis, rng.choice([whole, whole, R]))
            if propagated[node.name][axis].outputs[0].is_shard:
                layout = propagated[node.name][axis].outputs[0]
            choices[node.name] = AxisChoice(str(layout), (), (layout,))
            produced[node.name] = layout
    for k, node in enumerate(output_nodes(graph)):
        name = value_name(node)
        layout = rng.choice([produced[name], RP if grads[name] else R])
        choices[f"output{k}"] = AxisChoice(str(layout), (layout,), ())
    return choices


def check_conversions(model, plan: Plan) -> None:
    """Every change of layout of the plan on tp is one that the annotation prices."""
    if plan.mesh.tp == 1:
        return
    for block, chosen in zip(model.classes, plan.blocks, strict=True):
        produced = {
            name: chosen.ops[op.name]["tp"].outputs[k]
            for op in block.ops
            for k, name in enumerate(op.outputs)
        }
        for op in block.ops:
            for name, layout in zip(op.inputs, chosen.ops[op.name]["tp"].inputs, strict=True):
                assert (
                    produced[name] == layout
                    or (produced[name], layout) in block.values[name].conversions
                ), (block.name, op.name, name)
    for edge in model.edges:
        have = plan.blocks[edge.source].ops[f"output{edge.source_output}"]["tp"].inputs[0]
        want = (
            plan.blocks[edge.target]
            .ops[model.classes[edge.target].inputs[edge.target_input]]["tp"]
            .outputs[0]
        )
        assert have == want or (have, want) in edge.conversions, (
            edge.source,
            edge.target,
            str(have),
            str(want),
        )


# --------------------------------------------------------------------------------------------------------------------- workers


def engine_for(
    name: str, plan: Plan, max_grad_norm: float | None = None, compile: bool | dict = False
) -> Engine:
    found = case(name)
    return Engine(found.model, found.traced, plan, sgd, max_grad_norm, None, "cpu", compile=compile)


def run_steps(engine: Engine, batches: list) -> tuple[list[float], dict[str, Tensor]]:
    losses = [float(engine.step(engine.local_batch(batch))) for batch in batches]
    return losses, engine.full_state_dict()


def train_under(rank: int, name: str, plans: list[str]) -> list[tuple[float, float] | str]:
    """(update error over tolerance, loss error) of each plan on this rank, or the traceback of the plan that failed."""
    import traceback

    result, found = reference(name), []
    for text in plans:
        try:
            losses, state = run_steps(engine_for(name, Plan.from_json(text)), case(name).batches)
        except Exception:
            found.append(traceback.format_exc())
            continue
        found.append(
            (
                update_error(result, state),
                max(abs(a - b) for a, b in zip(losses, result.losses, strict=True)),
            )
        )
    return found
