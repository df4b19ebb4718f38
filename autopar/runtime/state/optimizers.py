"""Optimizers over sharded parameters: which can run on shards, and which need whole matrices.

Element-wise optimizers (`_ELEMENTWISE`, by exact type) run on shards unchanged. Where torch lacks
ops for DTensors (Rprop, `fused=True`), they get the local tensors instead. Adafactor averages rows
and columns, which are sums over ranks on DTensors. torch 2.13 leaves these sums pending and then
refuses to modify them in place; `Summed` completes them at once. Every other class, including
subclasses of these, may use whole matrices and receives them (`whole_matrices.py`).

An optimizer whose step takes a closure runs the model again, as often as it asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

from autopar.errors import AutoparError
from autopar.ir.calls import sparse_argument
from autopar.ir.plan import Plan
from autopar.ir.traced import ParameterSpec, TracedModel
from autopar.runtime.ranks.agreement import from_all, say
from autopar.runtime.ranks.process_groups import call_group
from autopar.runtime.state.factories import (
    OptimizerFactory,
    built,
    keep,
    parameter_attributes,
    replace_parameters,
)
from autopar.runtime.state.holding import HOST
from autopar.runtime.state.optimizer_trials import Habits, check_step, habits_of, needs_closure
from autopar.runtime.state.reach import tensors_of

if TYPE_CHECKING:
    from autopar.runtime.state.parameters import Parameters

_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


class Summed(TorchFunctionMode):
    """A mode in which a DTensor result that is a pending sum over some axes is summed at once."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        placements = getattr(result, "placements", ())
        if any(placement.is_partial() for placement in placements):
            from torch.distributed.tensor import Replicate

            return result.redistribute(
                placements=[
                    Replicate() if placement.is_partial() else placement for placement in placements
                ]
            )
        return result


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is known to be element-wise: by its class, and without step hooks,
    which could see more.
    """
    return type(optimizer) in _ELEMENTWISE and not step_hooks(optimizer)


def step_hooks(optimizer: torch.optim.Optimizer) -> list[int]:
    """The numbers of the hooks that run before or after the optimizer's step: its own, and torch's
    for all optimizers. torch numbers each hook of a process anew.
    """
    own = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    common = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    return [number for hooks in (*own, *common) for number in hooks]


# ---------------------------------------------------------------------------------------------------------------- making one


@dataclass(frozen=True, slots=True)
class Updating:
    """How parameters are updated.

    Attributes:
        optimizer: the optimizer over this rank's masters.
        groups: for each of its parameter groups, the names of the model's parameters in it, over
            all ranks.
        hooks: gradient hooks that the factory set, by name of the parameter.
        closure: whether its step takes a closure, which runs the model again.
        gradients_first: whether such a step reads gradients before it calls the closure.
        moving: options of its groups that its own step changes, so that ranks may differ in them.
    """

    optimizer: torch.optim.Optimizer
    groups: tuple[tuple[str, ...], ...]
    hooks: Mapping[str, Mapping[int, Callable[[torch.Tensor], torch.Tensor | None]]]
    closure: bool = False
    gradients_first: bool = True
    moving: frozenset[str] = frozenset()

    def with_group(self, names: Iterable[str]) -> Updating:
        """The same with one more parameter group."""
        return replace(self, groups=(*self.groups, tuple(names)))


def make_optimizer(
    factory: OptimizerFactory,
    parameters: Parameters,
    plan: Plan,
    specs: Mapping[str, ParameterSpec],
    model: nn.Module,
    alike: Callable[[Callable[[], Updating]], Updating],
) -> Updating:
    """The optimizer that `factory` makes, over this rank's master parameters. `specs` has all
    parameters of `model`, by name. `alike(build)` returns `build()`, and raises an AutoparError on
    all ranks if it fails on one, or if ranks build different optimizers.

    If it may use whole matrices and the plan cuts or copies any, it is made again over whole
    masters; `factory` is then called twice. Raises AutoparError if it cannot run exactly under the
    plan.
    """
    attributes = parameter_attributes(model, specs)
    found = alike(lambda: _built(factory, parameters, specs, attributes))
    optimizer = found.optimizer
    if is_elementwise(optimizer) or (_is_adafactor(optimizer) and plan.offload == "none"):
        _keep_owned(optimizer, parameters)
        _on_local_tensors(optimizer, parameters)
        return found
    if plan.mesh.num_devices == 1 and _steps_on_gradients(optimizer):
        return found
    if type(optimizer) is torch.optim.SparseAdam:
        return found  # `check_dense_is_the_same` refuses it
    habits = habits_of(optimizer)
    if habits.keeps_gradients:
        raise AutoparError(
            f"{type(optimizer).__name__}.zero_grad keeps gradients, and each step of the engine begins with none. Keep what the next "
            "step needs in the optimizer's state, and add it to the gradients in its step"
        )
    if plan.mesh.num_devices > 1:
        build = partial(_built, factory, parameters, specs, attributes)
        found = _over_wholes(build, found, habits, parameters, plan)
    if habits.closure and plan.precision == "fp16":
        raise AutoparError(
            f"{type(optimizer).__name__} runs the model several times a step, and fp16 skips steps whose gradients overflow: use "
            "precision='bf16'"
        )
    return replace(
        found,
        closure=habits.closure,
        gradients_first=habits.gradients_first,
        moving=habits.moving,
    )


def _over_wholes(
    build: Callable[[], Updating],
    found: Updating,
    habits: Habits,
    parameters: Parameters,
    plan: Plan,
) -> Updating:
    """`found`, made again by `build()` over whole masters, where the plan parts any. Every rank must
    call it.
    """
    optimizer = found.optimizer
    cut = parameters.cut({id(p) for group in optimizer.param_groups for p in group["params"]})
    everywhere = _everywhere(optimizer, habits, bool(cut), plan)
    before = list(parameters.masters.values())
    parameters.update_whole(cut, everywhere)
    if any(
        master is not old for master, old in zip(parameters.masters.values(), before, strict=True)
    ):
        found = build()
    _keep_owned(found.optimizer, parameters)
    if cut:
        whole = parameters.wholes.most_elements() * parameters.holding.master_dtype.itemsize / 2**20
        where = (
            "on every rank, as it looks at several at once" if everywhere else "each on one rank"
        )
        say(
            f"{type(optimizer).__name__} is given whole parameters: the {len(cut)} that ranks hold in parts are gathered for the update, "
            f"{where}, which holds the weights ({whole:,.1f} MiB at most) and their gradients and optimizer state whole; the plan does not "
            "count them"
        )
    return found


def _steps_on_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's whose step takes no closure."""
    return type(optimizer).__module__.startswith("torch.optim.") and not needs_closure(optimizer)


def _is_adafactor(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is torch.optim.Adafactor


def _built(
    factory: OptimizerFactory,
    parameters: Parameters,
    specs: Mapping[str, ParameterSpec],
    attributes: Mapping[str, Mapping[str, Any]],
) -> Updating:
    """What `factory` makes of the model's trained parameters: this rank's masters, and placeholders
    for those of other stages. They get the `attributes` of the model's parameters, by name.
    """
    if not callable(factory) or isinstance(factory, torch.optim.Optimizer):
        raise AutoparError(
            "optimizer= takes a function from parameters to an optimizer, such as lambda params: torch.optim.AdamW(params, 3e-4); "
            f"this is a {type(factory).__name__}, built over tensors that the engine does not train"
        )
    holding, masters = parameters.holding, parameters.masters
    device = HOST if holding.offloads else holding.device
    like = torch.zeros((), dtype=holding.master_dtype, device=device)
    trained = {
        name: masters[name] if name in masters else nn.Parameter(like.expand(spec.shape))
        for name, spec in specs.items()
        if spec.trainable
    }
    for name, parameter in trained.items():
        for key, value in attributes.get(name, {}).items():
            setattr(parameter, key, value)
    made = built(factory, trained)
    check_step(made.optimizer)
    _check_options(made.optimizer, device)
    _check_hooks(made.hooks, trained, parameters)
    shard_state(made.optimizer, trained, parameters)
    return Updating(made.optimizer, made.groups, made.hooks)


def _check_hooks(
    hooks: Mapping[str, Mapping[int, Any]],
    trained: Mapping[str, nn.Parameter],
    parameters: Parameters,
) -> None:
    """Raise AutoparError if a gradient hook of the factory reads a parameter that this rank does not
    hold as a whole tensor.
    """
    names = {id(parameter): name for name, parameter in trained.items()}
    here = [(name, own) for name, own in hooks.items() if name in parameters.trained]
    for name, own in here:
        for read in {names.get(id(t), "") for hook in own.values() for t in tensors_of(hook)}:
            if read and (held := _held(read, trained[read], parameters)):
                raise AutoparError(
                    f"a gradient hook that the optimizer's factory set on {name} reads {read}, of which this rank holds {held}. "
                    "Set a step hook in the factory instead (optimizer.register_step_pre_hook), which sees whole parameters and their "
                    "gradients"
                )


def _held(name: str, parameter: nn.Parameter, parameters: Parameters) -> str:
    """What this rank holds of a parameter, as text; '' if it is a whole tensor."""
    if name not in parameters.trained:
        return "nothing"
    if parameters.holding.cuttings[name].is_cut:
        return "a part"
    return "a DTensor" if hasattr(parameter, "_spec") else ""


def _check_options(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raise AutoparError for torch's optimizers and options that eager PyTorch refuses too, or that
    need what the engine does not make.
    """
    kind = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise AutoparError(
            f"{kind}(differentiable=True) is for gradients through the update, which a training step does not take: leave it out"
        )
    if device.type == "cpu" and any(group.get("capturable") for group in optimizer.param_groups):
        raise AutoparError(
            f"{kind}(capturable=True) is for CUDA graphs, and the parameters are on the CPU, where torch refuses it: leave it out"
        )


def _everywhere(optimizer: torch.optim.Optimizer, habits: Habits, cut: bool, plan: Plan) -> bool:
    """Whether every rank must update all parameters, for what any rank found about the optimizer.
    `cut`: whether this rank holds only parts of some. Raises AutoparError if the plan separates
    what the optimizer needs together. Every rank must call it.
    """
    ranks = from_all(call_group(), lambda: (habits, cut))
    obstacle = next((habits.obstacle for habits, _ in ranks if habits.obstacle), "")
    couples = any(habits.couples for habits, _ in ranks)
    kind, mesh = type(optimizer).__name__, plan.mesh
    if obstacle and (mesh.pp > 1 or any(cut for _, cut in ranks)):
        raise AutoparError(
            f"{kind} {obstacle}, and the plan (pp={mesh.pp}, tp={mesh.tp}, ep={mesh.ep}, ZeRO {plan.zero}) parts the "
            "parameters of the model. Pin pp=1, tp=1, ep=1 and zero=0, under which every rank updates all of them, or use an optimizer "
            "that treats each element alone, such as AdamW"
        )
    if couples and mesh.pp > 1:
        raise AutoparError(
            f"{kind} updates a parameter by what it knows of others, which are in other stages of the pipeline (pp={mesh.pp}). "
            "Pin pp=1, under which every rank updates all of them, or use an optimizer that treats each element alone, such as AdamW"
        )
    return couples or any(habits.needs_some for habits, _ in ranks)


def _keep_owned(optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    """Remove from the optimizer's groups the parameters of other stages, and those that other ranks
    update, with their state.
    """
    keep(
        optimizer,
        (master for name, master in parameters.masters.items() if parameters.has_master(name)),
    )


def _on_local_tensors(optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    """Give an element-wise optimizer this rank's local tensors, where torch's DTensors lack ops
    that its step needs.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_elementwise(optimizer) and (fused or type(optimizer) is torch.optim.Rprop):
        replace_parameters(optimizer, parameters.masters_as_local())


def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Run an optimizer step, correctly on DTensors too. Raises AutoparError if torch lacks a
    DTensor op that the step needs.
    """
    try:
        with Summed() if _is_adafactor(optimizer) else contextlib.nullcontext():
            if closure is None:
                optimizer.step()
            else:
                optimizer.step(closure)
    except RuntimeError as error:  # NotImplementedError is one
        if "sharding strategy" not in str(error):
            raise
        kind, op = (
            type(optimizer).__name__,
            next((word for word in str(error).split() if word.startswith("aten.")), "an op"),
        )
        raise AutoparError(
            f"{kind} steps by {op}, which torch {torch.__version__} has for whole parameters alone, and these are sharded: "
            f"use {kind} with its default options, or another optimizer"
        ) from error


def shard_state(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], parameters: Parameters
) -> None:
    """Cut whole tensors in the state of sharded parameters as these are. `trained` has what the
    factory was given, by name. Raises AutoparError for a tensor of another shape.
    """
    for name, parameter in trained.items():
        spec = getattr(parameter, "_spec", None)
        if spec is None or parameter not in optimizer.state:
            continue
        state = optimizer.state[parameter]
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.dim() or hasattr(value, "_spec"):
                continue
            if value.shape != parameter.shape:
                raise AutoparError(
                    f"the factory put a state {key} of shape {tuple(value.shape)} into the optimizer for {name}, of which ranks hold "
                    "parts. Load the state with engine.load_optimizer_state_dict after parallelize"
                )
            from torch.distributed.tensor import DTensor

            part = parameters.holding.cuttings[name].part(value, parameters.holding.axes)
            state[key] = DTensor.from_local(
                part.clone(memory_format=torch.contiguous_format),
                spec.mesh,
                spec.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )


def check_dense_is_the_same(optimizer: torch.optim.Optimizer, traced: TracedModel) -> None:
    """Raise AutoparError if forward requests sparse gradients and the optimizer may treat dense
    ones differently.

    torch.optim's SGD and Adagrad make the same update for both. Its other optimizers accept no
    sparse gradients, except SparseAdam, which accepts no dense ones. Optimizers of other libraries
    are unknown.
    """
    tables = _sparse_tables(traced)
    kind = type(optimizer)
    if kind is not torch.optim.SparseAdam and (
        not tables or kind.__module__.startswith("torch.optim.")
    ):
        return
    if kind is torch.optim.SparseAdam:
        read = (
            f", that of {tables[0]!r} too, which forward reads with sparse=True" if tables else ""
        )
        raise AutoparError(
            f"SparseAdam takes sparse gradients alone, but the engine adds up dense gradients over ranks{read}. "
            "Use torch.optim.SGD or Adagrad, which update a table alike in both cases, or torch.optim.Adam, which "
            "also moves the rows that a step does not read"
        )
    raise AutoparError(
        f"forward reads {tables[0]!r} with sparse=True, and {kind.__name__} may treat sparse gradients otherwise than dense ones, which "
        f"is what the engine gives it. Read the table with sparse=False, for which {kind.__name__} gets dense gradients in eager PyTorch "
        "too, or use torch.optim.SGD or Adagrad, which update a table alike in both cases"
    )


def _sparse_tables(traced: TracedModel) -> list[str]:
    """The parameters that forward reads with sparse gradients. A table that forward computes is
    named by the op that reads it.
    """
    found: dict[str, None] = {}
    for segment in traced.segments:
        block = traced.classes[segment.class_index]
        names = dict(zip(block.slots, segment.parameters, strict=True))
        for node in block.graph.nodes:
            if node.op == "call_function" and sparse_argument(node)[1]:
                found[names.get(node.args[0].target, node.name)] = None
    return list(found)
