"""Mutations of a program's communication: list them, apply one, and see whether anything notices.

Every transition node is deleted, doubled, or given every other backward that its function allows.
Every value that backward gathers again becomes zeros, this rank's shard for all ranks, or twice itself.
Every message inside a special lowering is damaged (`inner_mutations.py`). Every parameter's
gradient reduction is dropped or done again, axis by axis.  Of segments of one class the first is
mutated.  A mutant is caught if the verifier rejects it, or if training raises, gets stuck, or
leaves losses or parameters outside the tolerance of `autopar verify`.

Mutations that provably change nothing are predicted, and the prediction is checked: they must train exactly.
  - `mask` and `identity` with backward `mask` doubled: masking is idempotent, and the other direction is an identity;
  - another backward of a value that no gradient flows to (rotary tables, labels): backward never runs;
  - the reduction of a gradient that is zero (a bias of all keys shifts all scores of a query alike, which softmax ignores), again or,
    where its parts are zero too, at all;
  - the largest logit of the loss, over which ranks need only agree: see `inner_mutations.kinds_of`.

Another backward that in the undamaged run returns what the right one returns is predicted too, and
counted apart: see `same_gradients.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from autopar.ir.plan import Plan
from autopar.ir.sharding import R
from autopar.ir.traced import TracedModel
from autopar.rewrite.collectives.axes import active_axes
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.rewrite.collectives.transitions import _LEGAL_BACKWARD, NODE_FUNCTIONS
from autopar.rewrite.lowerings.kept_shards import GatheredAgain, gathered_again
from autopar.rewrite.root import module_name
from autopar.rewrite.shape_check import verify_program
from autopar.runtime.engine import Engine
from autopar.verify.verify import TOLERANCES, Case, compare_training, make_engine, relative_error
from benchmarks.exactness.inner_mutations import (
    COMMUNICATING,
    KINDS,
    Message,
    Place,
    Watch,
    kinds_of,
)
from benchmarks.exactness.same_gradients import any_rank, same_backwards

TOLERANCE, ABSOLUTE = TOLERANCES["fp64"]
EXACT, DIFFERS, REJECTED, RAISED, STUCK = (
    "exact",
    "differs",
    "rejected by the verifier",
    "raised",
    "stuck",
)
_PRIMITIVE = {function: name for name, function in NODE_FUNCTIONS.items()}

Source = tuple
"""(function, *arguments) whose call makes the case: it travels to the workers, which make equal cases."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One way to damage a program.

    `kind` is "delete", "double" or another backward of a transition node; "drop" or "reduce_again"
    of a gradient's reduction; or a kind of damage to `message`. `place` is (module, node), or
    (parameter, axis). `no_op`: the mutation provably changes nothing. `same`: why its backward
    returns what the right one returns, or ''. `what` describes the place.
    """

    place: Place
    kind: str
    no_op: bool = False
    what: str = ""
    message: Message | None = None
    same: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {'/'.join(self.place)} ({self.message or self.what})"


# --------------------------------------------------------------------------------------------------------------------- the list


def modules(engine: Engine) -> dict[str, GraphModule]:
    """The graph modules of a program by name: the root ('') and each segment (of a recomputed
    segment, the graph inside).
    """
    found = {"": engine.program.module}
    found.update((name, _inside(child)) for name, child in engine.program.module.named_children())
    return found


def _inside(child: nn.Module) -> GraphModule:
    """The graph module of a segment: of a recomputed one the graph that the plan describes, or the
    one that runs, if that gathers again.
    """
    run = getattr(child, "run", child)
    again = isinstance(run, GraphModule) and any(
        node.target is gathered_again for node in run.graph.nodes
    )
    return run if again else getattr(child, "body", child)


def representatives(traced: TracedModel) -> dict[str, int]:
    """The first segment of each block class, by the name of its module -> the index of
    its class.
    """
    found: dict[int, str] = {}
    for segment in traced.segments:
        found.setdefault(segment.class_index, module_name(segment.name))
    return {name: index for index, name in found.items()}


def _distinct_nodes(engine: Engine, traced: TracedModel) -> Iterator[tuple[str, GraphModule, Node]]:
    """(module's name, module, node) of the nodes to mutate: those of the root, and of one segment
    of each class. Among the root's nodes between segments of the same classes, only the first
    counts.
    """
    classes = {module_name(segment.name): segment.class_index for segment in traced.segments}
    first, seen = representatives(traced), set()
    for name, module in modules(engine).items():
        if name and name not in first:
            continue
        for node in module.graph.nodes:
            if not name and "transition" in node.meta:
                key = (_origin(node, classes), frozenset(_uses(node, classes)))
                if key in seen:
                    continue
                seen.add(key)
            yield name, module, node


def _origin(node: Node, classes: dict[str, int]) -> tuple:
    """Where a value of the root comes from: equal for values that differ only in the number of
    their segment.
    """
    if node.op == "placeholder":
        return (node.name,)
    if node.op == "call_module":
        return (classes[node.target],)
    rest = (
        str(node.target),
        str([a for a in node.args if not isinstance(a, Node)]),
        str(dict(node.kwargs)),
    )
    return (*rest, *(_origin(source, classes) for source in node.all_input_nodes))


def _uses(node: Node, classes: dict[str, int]) -> Iterator[tuple]:
    for user in node.users:
        position = user.args.index(node) if node in user.args else -1
        yield (
            (classes[user.target], position)
            if user.op == "call_module"
            else (str(user.target), position)
        )


class _Differentiable(Interpreter):
    """Runs the program node by node, and sets `node.meta["differentiable"]` of each transition:
    whether its result requires a gradient.
    """

    def run_node(self, node: Node):
        result = super().run_node(node)
        if "transition" in node.meta:
            node.meta["differentiable"] = result.requires_grad
        return result

    def call_module(self, target, args, kwargs):
        child = self.submodules[target]
        return _Differentiable(_inside(child)).run(*args)


def mutations_of(trial: Trial) -> list[Mutation]:
    """All mutations of the trial's program; equal on every rank. Trains the trial's engine, which
    is to be reset afterwards.
    """
    engine, case = trial.engine, trial.case
    nodes, messages = list(_distinct_nodes(engine, case.traced)), []
    watch = Watch(messages.append)
    with watch.over(
        [(name, module, node) for name, module, node in nodes if node.target in COMMUNICATING]
    ):
        gradients = _run_once(engine, case.batches[0])
    transitions = [
        (name, module, node) for name, module, node in nodes if "transition" in node.meta
    ]
    candidates = [
        (*place, _others(place[2])) for place in transitions if place[2].meta["differentiable"]
    ]
    same = same_backwards(engine, case.batches, candidates, trial.reset)
    found = []
    for name, _, node in transitions:
        forward, backward = _PRIMITIVE[node.target], node.kwargs["backward"]
        at, what = (
            (name, node.name),
            f"{forward}/{backward} {'->'.join(map(str, node.meta['transition']))} on {node.args[1]}",
        )
        untouched = not node.meta["differentiable"]
        # an identity that changes the gradient of a value without gradient is nothing at all; masking twice is masking once
        gone = same.get((at, "identity"), "") if forward == "identity" else ""
        found.append(Mutation(at, "delete", forward == "identity" and untouched, what, same=gone))
        found.append(
            Mutation(
                at,
                "double",
                forward == "mask" or (forward == "identity" and (backward == "mask" or untouched)),
                what,
            )
        )
        found += [
            Mutation(at, other, untouched, what, same=same.get((at, other), ""))
            for other in _others(node)
        ]
    for name, _, node in nodes:
        if node.target is gathered_again:
            found += [Mutation((name, node.name), kind, what="gather again") for kind in KINDS]
    for message in messages:
        found += [
            Mutation(message.place, kind, no_op, "", message) for kind, no_op in kinds_of(message)
        ]
    first = representatives(case.traced)
    mutated = {
        parameter.spec.name for parameter in engine.program.parameters if parameter.module in first
    }
    for name in engine._masters:
        still = (
            name in case.after and float((case.after[name] - case.before[name]).norm()) <= ABSOLUTE
        )
        for axis in engine.gradient_axes(name) if name in mutated else ():
            what = f"gradient over {axis}"
            found.append(
                Mutation(
                    (name, axis),
                    "drop",
                    still and _is_zero_without(engine, name, axis, gradients),
                    what,
                )
            )
            found.append(Mutation((name, axis), "reduce_again", still, what))
    return found


def _others(node: Node) -> list[str]:
    """The backwards that the transition's function allows, other than the right one, by name."""
    return [
        backward
        for backward in _LEGAL_BACKWARD[_PRIMITIVE[node.target]]
        if backward != node.kwargs["backward"]
    ]


def _is_zero_without(engine: Engine, name: str, axis: str, gradients: dict[str, Tensor]) -> bool:
    """Whether a gradient that is zero in total is zero on every rank even before it is summed over
    `axis`. `gradients` are this rank's before any sum. Every rank must call it.
    """
    gradient = gradients[name]
    for other in engine.gradient_axes(name):
        if other != axis:
            gradient = apply_primitive("all_reduce", gradient, engine.axes[other])
    return not any_rank(float(gradient.norm()) > ABSOLUTE)


def _run_once(engine: Engine, batch: dict) -> dict[str, Tensor]:
    """Run forward and backward of the first micro-batch, node by node. Returns this rank's
    gradients by name, before they are summed over ranks; zeros where there are none.
    """
    work = engine.batches.split(engine.local_batch(batch))
    program = replace(
        engine.program, module=lambda *args: _Differentiable(engine.program.module).run(*args)
    )
    with active_axes(engine.axes):
        loss, _ = engine._passes.forward(program, work.inputs[0], engine._noise(work, 0))
        loss.backward()
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in engine._leaves.items()
    }
    for leaf in engine._leaves.values():
        leaf.grad = None
    return gradients


# ------------------------------------------------------------------------------------------------------------------- apply one


@contextlib.contextmanager
def damaged(engine: Engine, mutation: Mutation) -> Iterator[None]:
    """A context in which the engine's program has the mutation. It is undone at the end."""
    if mutation.kind in ("drop", "reduce_again"):
        undo = _damage_reduction(engine, *mutation.place, mutation.kind)
    else:
        module = modules(engine)[mutation.place[0]]
        node = next(n for n in module.graph.nodes if n.name == mutation.place[1])
        if mutation.message is not None:
            with Watch(lambda seen: mutation.kind if seen == mutation.message else None).over(
                [(mutation.place[0], module, node)]
            ):
                yield
            return
        damage = _damage_again if node.target is gathered_again else _damage_node
        undo = damage(module, node, mutation.kind)
    try:
        yield
    finally:
        undo()


def _damage_again(module: GraphModule, node: Node, kind: str) -> Callable[[], None]:
    """Make a value that backward gathers again wrong: zeros, this rank's shard for all ranks, or
    twice itself. Returns a function that undoes it.
    """

    def damaged(*args: Any, **kwargs: Any) -> GatheredAgain | None:
        value = gathered_again(*args, **kwargs)
        if value is not None:
            take, shard = value.take, value._shard

            def taken(*form: Any) -> Tensor:
                whole = take(*form)
                own = shard.reshape(-1).repeat(whole.numel() // max(shard.numel(), 1) + 1)
                wrong = {
                    "zero": torch.zeros_like(whole),
                    "double": 2 * whole,
                    "delete": own[: whole.numel()].view(whole.shape),
                }
                return wrong[kind]

            value.take = taken
        return value

    node.target = damaged
    module.recompile()

    def undo():
        node.target = gathered_again
        module.recompile()

    return undo


def _damage_node(module: GraphModule, node: Node, kind: str) -> Callable[[], None]:
    """Delete or double a transition in the graph, or give it the backward `kind`. Returns a
    function that undoes it.
    """
    kwargs = {key: value for key, value in node.kwargs.items() if key != "async_op"}
    # of an asynchronous transition, what is waited for
    value = next(iter(node.users)) if len(kwargs) < len(node.kwargs) else node
    if kind == "delete":
        before = [(user, user.args, user.kwargs) for user in value.users]
        value.replace_all_uses_with(node.args[0])

        def undo():
            for user, args, named in before:
                user.args, user.kwargs = args, named
    elif kind == "double":
        with module.graph.inserting_after(value):
            again = module.graph.call_function(node.target, (value, *node.args[1:]), kwargs)
        again.meta = {"whole": node.meta["whole"], "layouts": node.meta["layouts"]}
        value.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)

        def undo():
            again.replace_all_uses_with(value)
            module.graph.erase_node(again)
    else:
        right = node.kwargs
        node.kwargs = {**right, "backward": kind}

        def undo():
            node.kwargs = right

    module.recompile()
    return lambda: (undo(), module.recompile())


def _damage_reduction(engine: Engine, name: str, axis: str, kind: str) -> Callable[[], None]:
    """Make the engine not sum the gradient of a parameter over an axis ("drop"), or sum it twice.
    Returns a function that undoes it.
    """
    if kind == "drop":
        holding = engine.parameters.holding
        cuttings = holding.cuttings
        whole = dict(cuttings[name].layouts) | {axis: R}
        holding.cuttings = cuttings | {name: replace(cuttings[name], layouts=whole)}
        return lambda: setattr(holding, "cuttings", cuttings)
    reduce = engine.reduce_gradients

    def reduce_again() -> None:
        reduce()
        grad = engine._leaves[name].grad
        grad.copy_(apply_primitive("all_reduce", grad, engine.axes[axis]))

    engine.reduce_gradients = reduce_again
    return lambda: delattr(engine, "reduce_gradients")


# -------------------------------------------------------------------------------------------------------------------- see


@dataclass
class Trial:
    """An engine on this rank, and the data to compare mutants with.

    Attributes:
        initial: this rank's tensors before the first step, by name.
        first: this rank's tensors after the first undamaged step.
        moved: the norm of what that step changed in each whole tensor.
    """

    engine: Engine
    case: Case
    initial: dict[str, Tensor]
    first: dict[str, Tensor]
    moved: dict[str, float]

    @classmethod
    def of(cls, case: Case, plan: Plan) -> Trial:
        engine = make_engine(case, plan)
        initial = {key: leaf.detach().clone() for key, leaf in engine._leaves.items()}
        trial = cls(engine, case, initial, {}, {})
        verdict = trial.outcome()
        if verdict != EXACT:
            raise RuntimeError(f"the program itself: {verdict}")
        trial.reset()
        before = engine.full_state_dict()
        engine.step(engine.local_batch(case.batches[0]))
        trial.first = {key: leaf.detach().clone() for key, leaf in engine._leaves.items()}
        trial.moved = {
            key: float((whole - before[key]).norm())
            for key, whole in engine.full_state_dict().items()
            if whole.is_floating_point()
        }
        return trial

    def reset(self) -> None:
        """Restore the engine to its state before the first step."""
        engine = self.engine
        with torch.no_grad():
            for name, leaf in engine._leaves.items():
                leaf.copy_(self.initial[name])
                leaf.grad = None
        engine.optimizer.state.clear()
        engine.steps = 0

    def _step(self, batch, found: list[float]) -> None:
        found.append(float(self.engine.step(self.engine.local_batch(batch))))

    def _verify(self) -> None:
        """Verify the program with the graphs of recomputed segments in place of these segments."""
        module = self.engine.program.module
        children = dict(module.named_children())
        try:
            for name, child in children.items():
                setattr(module, name, _inside(child))
            verify_program(self.engine.program)
        finally:
            for name, child in children.items():
                setattr(module, name, child)

    def outcome(self, verify: bool = True) -> str:
        """Train for all batches and compare. Returns EXACT, or the way in which the damage was
        caught; stops at the first difference. `verify`: first let the verifier check the program.
        Equal on all ranks, unless their control flow differs.
        """
        if verify and any_rank(_fails(self._verify)):
            return REJECTED
        self.reset()
        for batch, loss in zip(self.case.batches, self.case.losses, strict=True):
            found: list[float] = []
            raised = _fails(partial(self._step, batch, found))
            wrong = (
                raised
                or not relative_error(found[0], loss) <= TOLERANCE
                or (batch is self.case.batches[0] and self._parted())
            )
            if any_rank(wrong):
                return RAISED if any_rank(raised) else DIFFERS
        error, _ = compare_training(
            self.case.before, self.case.after, self.engine.full_state_dict(), "fp64"
        )
        return DIFFERS if any_rank(not error <= TOLERANCE) else EXACT

    def _parted(self) -> bool:
        """Whether, after the first step, this rank's part of some tensor is off by so much that the
        whole is outside the tolerance.
        """
        for name, expected in self.first.items():
            if name in self.moved:
                error = float((self.engine._leaves[name].detach() - expected).norm())
                if not error <= max(self.moved[name] * TOLERANCE, ABSOLUTE):
                    return True
        return False


def _fails(action: Callable[[], object]) -> bool:
    """Call `action`, and return whether it raised: any error catches a mutant."""
    try:
        action()
    except Exception:
        return True
    return False
