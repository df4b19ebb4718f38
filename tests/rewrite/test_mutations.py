"""The exactness check has teeth: damage one collective of a program at a time, and training must differ from one device.

Every transition node of the root and of each segment is deleted, doubled, or given every other backward that its function allows; every
parameter's gradient reduction is dropped or doubled, axis by axis.  A mutant is caught if the verifier rejects it, if it raises, or if
three steps leave losses or parameters outside the tolerance.

Mutations that provably change nothing are predicted, and the prediction is checked: they must train exactly.
  - `mask` and `identity` with backward `mask` doubled: masking is idempotent, and the other direction is an identity;
  - another backward of a value that no gradient flows to (rotary tables, labels): backward never runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from exactness import case, engine_for, random_plan, reference, setting, sgd, solved_plan, update_error
from torch.fx import GraphModule, Interpreter, Node

from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.sharding import R
from autopar.rewrite.collectives import _LEGAL_BACKWARD, NODE_FUNCTIONS, active_axes, apply_primitive
from autopar.rewrite.verify import verify_program
from autopar.runtime.engine import Engine

MESH = MeshShape(dp=2, tp=2)
PRIMITIVE = {function: name for name, function in NODE_FUNCTIONS.items()}


@dataclass(frozen=True)
class Mutation:
    """`kind` is delete, double, a backward, drop or reduce_again; `place` a module and node, or a parameter and axis."""

    place: tuple[str, str]
    kind: str
    no_op: bool = False
    what: str = ""


def modules(engine: Engine) -> dict[str, GraphModule]:
    found = {"": engine.program.module}
    found.update((name, getattr(child, "body", child)) for name, child in engine.program.module.named_children())
    return found


class Differentiable(Interpreter):
    """Runs the program and writes down which transitions a gradient flows through."""

    def run_node(self, node: Node):
        result = super().run_node(node)
        if "transition" in node.meta:
            node.meta["differentiable"] = result.requires_grad
        return result

    def call_module(self, target, args, kwargs):
        child = self.submodules[target]
        return Differentiable(getattr(child, "body", child)).run(*args)


def mutations_of(engine: Engine, batch: dict) -> list[Mutation]:
    micro_batches, mean_count = engine._split(engine.local_batch(batch))
    with active_axes(engine.axes):
        Differentiable(engine.program.module).run(*micro_batches[0].values(), mean_count)
    found = []
    for place, module in modules(engine).items():
        for node in module.graph.nodes:
            if "transition" not in node.meta:
                continue
            forward, backward = PRIMITIVE[node.target], node.kwargs["backward"]
            at, what = (place, node.name), f"{forward}/{backward} {'->'.join(node.meta['transition'])} on {node.args[1]}"
            untouched = not node.meta["differentiable"]
            # an identity that changes the gradient of a value without gradient is nothing at all; masking twice is masking once
            found.append(Mutation(at, "delete", forward == "identity" and untouched, what))
            found.append(Mutation(at, "double", forward == "mask" or forward == "identity" and (backward == "mask" or untouched), what))
            found += [Mutation(at, other, untouched, what) for other in _LEGAL_BACKWARD[forward] if other != backward]
    for name in engine._masters:
        for axis in engine.gradient_axes(name):
            found += [Mutation((name, axis), kind, False, f"gradient over {axis}") for kind in ("drop", "reduce_again")]
    return found


def damage(engine: Engine, mutation: Mutation):
    """Apply the mutation; returns what undoes it."""
    if mutation.kind in ("drop", "reduce_again"):
        return damage_reduction(engine, *mutation.place, mutation.kind)
    module = modules(engine)[mutation.place[0]]
    node = next(n for n in module.graph.nodes if n.name == mutation.place[1])
    users, kwargs = list(node.users), dict(node.kwargs)
    if mutation.kind == "delete":
        node.replace_all_uses_with(node.args[0])

        def undo():
            for user in users:
                user.replace_input_with(node.args[0], node)
    elif mutation.kind == "double":
        with module.graph.inserting_after(node):
            again = module.graph.call_function(node.target, (node, *node.args[1:]), kwargs)
        again.meta = {"whole": node.meta["whole"], "layouts": node.meta["layouts"]}
        node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)

        def undo():
            again.replace_all_uses_with(node)
            module.graph.erase_node(again)
    else:
        node.kwargs = {**kwargs, "backward": mutation.kind}

        def undo():
            node.kwargs = kwargs

    module.recompile()
    return lambda: (undo(), module.recompile())


def damage_reduction(engine: Engine, name: str, axis: str, kind: str):
    """The gradient of one parameter is not added up over one axis, or added up twice."""
    if kind == "drop":
        layouts = engine._layouts
        engine._layouts = layouts | {name: layouts[name] | {axis: R}}
        return lambda: setattr(engine, "_layouts", layouts)
    reduce = engine.reduce_gradients

    def reduce_again() -> None:
        reduce()
        grad = engine._leaves[name].grad
        grad.copy_(apply_primitive("all_reduce", grad, engine.axes[axis]))

    engine.reduce_gradients = reduce_again
    return lambda: delattr(engine, "reduce_gradients")


def any_rank(flag: bool) -> bool:
    flags = torch.tensor([float(flag)])
    dist.all_reduce(flags)
    return bool(flags)


def reset(engine: Engine, initial: dict) -> None:
    with torch.no_grad():
        for name, leaf in engine._leaves.items():
            leaf.copy_(initial[name])
            leaf.grad = None
    engine.optimizer = sgd(list(engine._masters.values()))


def outcome(engine: Engine, name: str, initial: dict, verify: bool = True) -> str:
    """'exact', or how the mutant was caught; equal on all ranks.  Stops at the first step whose loss differs."""
    try:
        if verify:
            verify_program(engine.program)
        rejected = False
    except Exception:  # noqa: BLE001 - any error rejects the program
        rejected = True
    if verify and any_rank(rejected):
        return "rejected by the verifier"
    reset(engine, initial)
    expected = reference(name)
    for batch, loss in zip(case(name).batches, expected.losses, strict=True):
        try:
            wrong = not abs(float(engine.step(engine.local_batch(batch))) - loss) <= 1e-9
        except Exception:  # noqa: BLE001 - raised alike on all ranks: shapes passed the verifier
            wrong = True
        if any_rank(wrong):
            return "differs"
    return "differs" if any_rank(not update_error(expected, engine.full_state_dict()) <= 1.0) else "exact"


def run_mutants(rank: int, name: str, text: str, start: int, step: int) -> list[tuple[Mutation, str]]:
    engine = engine_for(name, Plan.from_json(text))
    initial = {key: leaf.detach().clone() for key, leaf in engine._leaves.items()}
    verdict = outcome(engine, name, initial)
    assert verdict == "exact", f"the program itself: {verdict}"
    found = []
    for mutation in itertools.islice(mutations_of(engine, case(name).batches[0]), start, None, step):
        undo = damage(engine, mutation)
        try:
            found.append((mutation, outcome(engine, name, initial, verify=mutation.kind in ("delete", "double"))))
        finally:
            undo()
    verdict = outcome(engine, name, initial)
    assert verdict == "exact", f"the program after all mutations are undone: {verdict}"
    return found


def check(pool, name: str, plan: Plan, step: int = 1, start: int = 0) -> None:
    found = pool.run(run_mutants, name, plan.to_json(), start, step, timeout_s=1200)[0]
    escaped = [f"{m.kind} {'/'.join(m.place)} ({m.what})" for m, verdict in found if verdict == "exact" and not m.no_op]
    assert not escaped, f"{len(escaped)} of {len(found)} mutations escaped: " + "; ".join(escaped[:20])
    wrong = [f"{m.kind} {'/'.join(m.place)} ({m.what}): {verdict}" for m, verdict in found if m.no_op and verdict != "exact"]
    assert not wrong, "predicted to change nothing: " + "; ".join(wrong[:20])
    print(f"\n{name}: {len(found)} mutations, {dict(Counter('no-op' if m.no_op else verdict for m, verdict in found))}")
    assert len(found) > 5


def plans(name: str) -> dict[str, Plan]:
    found = case(name)
    where = setting(MESH)
    return {
        "solved": solved_plan(found.traced, found.annotator, where),
        "random": random_plan(found.traced, found.annotator, where, seed=5, random_fixed=False),
    }


def test_every_mutation_of_the_solved_program_is_caught(pool4):
    check(pool4, "llama-tiny", plans("llama-tiny")["solved"])


@pytest.mark.parametrize("name", ["gpt-tiny", "hf-llama"])
def test_mutations_of_other_solved_programs_are_caught(pool4, name):
    """Every 6th here, all of them with --runslow."""
    check(pool4, name, plans(name)["solved"], step=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "hf-llama", "hf-gpt2", "moe-tiny"])
def test_every_mutation_of_other_solved_programs_is_caught(pool4, name):
    check(pool4, name, plans(name)["solved"])


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_mutations_of_a_random_program_are_caught(pool4, name):
    """Every primitive, sequence sharding included; every 30th mutation here, all of them with --runslow."""
    check(pool4, name, plans(name)["random"], step=30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny", "moe-tiny", "hf-llama", "hf-gpt2"])
def test_every_mutation_of_random_programs_is_caught(pool4, name, seed):
    found = case(name)
    check(pool4, name, random_plan(found.traced, found.annotator, setting(MESH), seed))
