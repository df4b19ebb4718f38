"""Optimizers over sharded parameters: which can run on shards, and which need whole matrices.

Element-wise optimizers (`ELEMENTWISE`, by exact type) run on shards unchanged. Adafactor averages
rows and columns, which are sums over ranks on DTensors. torch 2.13 leaves these sums pending and
then refuses to modify them in place; `Summed` completes them at once. Every other class, including
subclasses of these, may use whole matrices and receives them (`whole_matrices.py`).

An optimizer that needs more than gradients (a closure), or ops that torch supports only for plain
tensors, is refused by name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.runtime.ranks.agreement import from_all, say
from autopar.runtime.ranks.process_groups import file_group
from autopar.runtime.state.optimizer_trials import habits_of

if TYPE_CHECKING:
    from autopar.runtime.state.parameters import Parameters

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

ELEMENTWISE = (
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
    hooks = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    return type(optimizer) in ELEMENTWISE and not any(hooks)


# ---------------------------------------------------------------------------------------------------------------- making one


def make_optimizer(factory: Factory, parameters: Parameters, plan: Plan) -> torch.optim.Optimizer:
    """The optimizer that `factory` makes, over this rank's master parameters.

    If it may use whole matrices and the plan cuts or copies any, it is made again over whole
    masters; `factory` is then called twice. Raises AutoparError if it cannot run exactly under the
    plan.
    """
    if not callable(factory) or isinstance(factory, torch.optim.Optimizer):
        raise AutoparError(
            "optimizer= takes a function from parameters to an optimizer, such as lambda params: torch.optim.AdamW(params, 3e-4); "
            f"this is a {type(factory).__name__}, built over tensors that the engine does not train"
        )
    optimizer = _built(factory, parameters)
    if (
        plan.mesh.num_devices == 1
        or is_elementwise(optimizer)
        or (_is_adafactor(optimizer) and plan.offload == "none")
    ):
        return optimizer
    cut = parameters.cut(
        {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    )
    everywhere = _couples(optimizer, bool(cut), plan)
    before = list(parameters.masters.values())
    parameters.update_whole(cut, everywhere)
    if any(
        master is not old for master, old in zip(parameters.masters.values(), before, strict=True)
    ):
        optimizer = _built(factory, parameters)
    if cut:
        _keep_owned(optimizer, parameters)
        whole = parameters.wholes.most_elements() * parameters.holding.master_dtype.itemsize / 2**20
        where = (
            "on every rank, as it looks at several at once" if everywhere else "each on one rank"
        )
        say(
            f"{type(optimizer).__name__} is given whole parameters: the {len(cut)} that ranks hold in parts are gathered for the update, "
            f"{where}, which holds the weights ({whole:,.1f} MiB at most) and their gradients and optimizer state whole; the plan does not "
            "count them"
        )
    return optimizer


def _is_adafactor(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is torch.optim.Adafactor


def _built(factory: Factory, parameters: Parameters) -> torch.optim.Optimizer:
    trained = list(parameters.masters.values()) or [
        nn.Parameter(torch.zeros(0, 0, device=parameters.holding.device))
    ]  # torch wants one at least
    optimizer = factory(trained)
    check_step(optimizer)
    own = {id(master) for master in trained}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise AutoparError(
            f"the optimizer holds {foreign} tensors that the engine does not train: build it from the parameters that the "
            "function is given, not from model.parameters()"
        )
    return optimizer


def _couples(optimizer: torch.optim.Optimizer, cut: bool, plan: Plan) -> bool:
    """Whether the optimizer, on any rank, couples parameters: an update depends on other parameters
    too. `cut`: whether this rank holds only parts of some. Raises AutoparError if the plan
    separates what the optimizer needs together. Every rank must call it.
    """
    # stages of a pipeline hold, and try, different parameters
    ranks = from_all(file_group(), lambda: (habits_of(optimizer), cut))
    couples = any(habits.couples for habits, _ in ranks)
    obstacle = next((habits.obstacle for habits, _ in ranks if habits.obstacle), "")
    if couples and plan.mesh.pp > 1:
        obstacle = (
            obstacle
            or "updates a parameter by what it knows of others, which are in other stages of the pipeline"
        )
    if obstacle and (plan.mesh.pp > 1 or any(cut for _, cut in ranks)):
        mesh = plan.mesh
        raise AutoparError(
            f"{type(optimizer).__name__} {obstacle}, and the plan (pp={mesh.pp}, tp={mesh.tp}, ep={mesh.ep}, ZeRO {plan.zero}) parts the "
            "parameters of the model. Pin pp=1, tp=1, ep=1 and zero=0, under which every rank updates all of them, or use an optimizer "
            "that treats each element alone, such as AdamW"
        )
    return couples


def _keep_owned(optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    """Remove from the optimizer's groups the parameters that other ranks update, with
    their state.
    """
    others = {
        id(master) for name, master in parameters.masters.items() if not parameters.has_master(name)
    }
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in others:
                optimizer.state.pop(parameter, None)  # made by the constructor
        group["params"] = [
            parameter for parameter in group["params"] if id(parameter) not in others
        ]


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise AutoparError for an object that is not an optimizer, and for an optimizer whose step
    needs a closure.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AutoparError(
            f"the optimizer factory returned a {type(optimizer).__name__}, not a torch.optim.Optimizer: pass, for example, "
            "lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
        )
    parameters = inspect.signature(optimizer.step).parameters.values()
    if needed := [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]:
        raise AutoparError(
            f"{type(optimizer).__name__}.step needs {needed[0]}: it runs the model several times a step, which the engine "
            "does once; use an optimizer that steps on gradients alone, such as AdamW"
        )


def step(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer step, correctly on DTensors too. Raises AutoparError if torch lacks a
    DTensor op that the step needs.
    """
    try:
        with Summed() if _is_adafactor(optimizer) else contextlib.nullcontext():
            optimizer.step()
    except RuntimeError as error:  # NotImplementedError is one
        if "sharding strategy" not in str(error):
            raise
        kind, op = (
            type(optimizer).__name__,
            next((word for word in str(error).split() if word.startswith("aten.")), "an op"),
        )
        raise AutoparError(
            f"{kind} steps by {op}, which torch {torch.__version__} has for whole parameters alone, and these are sharded: "
            f"use {kind} without fused=True, or another optimizer"
        ) from error
