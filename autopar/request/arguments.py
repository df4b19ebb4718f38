"""Checks of the arguments of public functions, so that a mistake gives an error in the caller's
terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar_cost_models.checks import is_whole
from torch import nn
from torch.nn.parameter import is_lazy

from autopar.errors import AutoparError, shown
from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.request.options import OPTIONS
from autopar.request.software import Software

Check = Callable[[str, Any], None]
"""Raises AutoparError for an argument of this name that cannot have this value."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """Checks a call's arguments, by name, with `CHECKS`; others are ignored. Raises AutoparError
    for the first that is refused.
    """
    for name, value in given.items():
        if name in CHECKS:
            CHECKS[name](name, value)


def _model(name: str, model: Any) -> None:
    if isinstance(model, type):
        raise AutoparError(
            f"model is the class {model.__name__}, not one of its instances: pass {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise AutoparError(
            f"model is {shown(model)}, not a torch.nn.Module; `autopar explain` and `autopar.models.parse_model` take models by their name"
        )
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise AutoparError(
            f"parameter {lazy[0]} of {type(model).__name__} has no shape yet: run the lazy model on one batch before"
        )
    if not any(parameter.numel() for parameter in model.parameters()):
        raise AutoparError(
            f"{type(model).__name__} has no parameters: there is nothing to train, and nothing that a plan could share out"
        )


def parsed_cluster(cluster: Any) -> Cluster:
    """The cluster itself, or a text parsed as one, such as 'dgx-h100:8'. Raises AutoparError for
    any other type, or a text that names no cluster.
    """
    if isinstance(cluster, str):
        return ClusterSpec.parse(cluster)
    if not isinstance(cluster, Cluster):
        raise AutoparError(
            f"cluster is {shown(cluster)}, not a ClusterSpec or a text such as 'dgx-h100:8' or 'cpu:4'"
        )
    return cluster


def check_beside_plan(
    plan: Plan | None,
    pin: Mapping[str, Any] | None,
    global_batch: int | None,
    precision: str | None,
    micro_batch_mean: bool,
) -> None:
    """Raises AutoparError if pins are passed together with a plan, or if batch or precision differ
    from the plan's, or if it has no mean of micro-batches. None and False mean not passed.
    """
    if plan is None:
        return
    if pin:
        raise AutoparError(
            f"plan and pin={dict(pin)} are given: a plan has its choices; leave out one of them"
        )
    given = ""
    if global_batch not in (None, plan.global_batch):
        given = f"a global batch of {plan.global_batch}, not global_batch={global_batch}"
    elif precision not in (None, plan.precision):
        given = f"{plan.precision}, not precision={precision!r}"
    elif micro_batch_mean and not plan.micro_batch_mean:
        given = "the loss of the batch, not allow_micro_batch_mean=True"
    if given:
        raise AutoparError(f"the plan is for {given}: plan again, or leave it out")


def check_again(plan: Plan, what: str, given: Any, planned: Any) -> None:
    """Raises AutoparError if `given` is not `planned`, which the plan says of `what`. None means not
    given. Files of earlier versions, which do not say what a plan was made for, contradict nothing.
    """
    if plan.made_for.cluster and given is not None and given != planned:
        raise AutoparError(
            f"the plan was made for {what} {shown(planned)}, not {shown(given)}: leave it out, or plan again"
        )


def check_trains(model: nn.Module) -> None:
    """Raises AutoparError if no parameter of the model requires a gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise AutoparError(
            f"no parameter of {type(model).__name__} requires a gradient, so that there is nothing to train: set requires_grad_(True) on "
            "those that are to be trained before parallelize. A model that is only evaluated needs no engine: run it under torch.no_grad()"
        )


def _positive(name: str, value: Any) -> None:
    if not (is_whole(value, 1, 10**18) or (isinstance(value, float) and value > 0)):
        raise AutoparError(f"{name}={shown(value)} must be a positive number")


def _positive_or_none(name: str, value: Any) -> None:
    if value is not None:
        _positive(name, value)


def _whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise AutoparError(f"{name} is {shown(value)}, not a whole number")


def _lengths(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
        raise AutoparError(
            f"{name} is {shown(value)}, not a sequence of lengths such as (128, 256)"
        )


def _function(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise AutoparError(f"{name} is {shown(value)}, not a function")


def _of(kind: type | tuple[type, ...], words: str) -> Check:
    """A check that accepts None and values of type `kind`; `words` say in its error what is
    expected.
    """

    def check(name: str, value: Any) -> None:
        if value is not None and not isinstance(value, kind):
            raise AutoparError(f"{name} is {shown(value)}, not {words}")

    return check


_KINDS: Mapping[str, Check] = {
    "number": _positive_or_none,
    "share": _of((int, float), "a fraction such as 0.02"),
    "switch": _of(bool, "True or False"),
    "name": _of(str, "a text"),
    "choice": _of(str, "a text such as 'bf16'"),
    "pins": _of(Mapping, "a mapping such as {'tp': 2, 'zero': 1}"),
}
"""What options of a request refuse, by kind. Others are checked where they are used."""

CHECKS: Mapping[str, Check] = {
    **{row.name: _KINDS[row.kind] for row in OPTIONS.values() if row.kind in _KINDS},
    "time_limit_s": _positive,
    "software": _of((Software, str), "an autopar.Software or the name of a framework"),
    "model": _model,
    "plan": _of(Plan, "a Plan: read a file of one with autopar.Plan.load"),
    "batch_dims": _of(Mapping, "a mapping such as {'frames': 1}"),
    "loss_fn": _function,
    "timeout_s": _positive,
    "max_grad_norm": _positive_or_none,
    "traced": _of(TracedModel, "what autopar.api.trace returns"),
    "progress": _function,
    "seed": _whole,
    "buckets": _lengths,
}
"""What `plan` and `parallelize` refuse, by the name of the argument."""
