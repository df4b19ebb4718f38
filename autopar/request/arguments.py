"""Checks of the arguments of public functions, so that a mistake gives an error in the caller's
terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar_cost_models.checks import is_whole
from torch import nn
from torch.nn.parameter import is_lazy

from autopar.errors import AutoparError, shown
from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.plan import Plan


def check_model(model: Any) -> None:
    """Raise AutoparError unless `model` is a module."""
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
    """The cluster, parsed if it is a text. Raises AutoparError for any other type."""
    if isinstance(cluster, str):
        return ClusterSpec.parse(cluster)
    if not isinstance(cluster, Cluster):
        raise AutoparError(
            f"cluster is {shown(cluster)}, not a ClusterSpec or a text such as 'dgx-h100:8' or 'cpu:4'"
        )
    return cluster


def check_pin(pin: Any) -> None:
    """Raise AutoparError unless `pin` is a mapping or None."""
    check_kind("pin", pin, Mapping, "a mapping such as {'tp': 2, 'zero': 1}")


def check_plan_given(plan: Any) -> None:
    """Raise AutoparError unless `plan` is a Plan or None."""
    check_kind("plan", plan, Plan, "a Plan: read a file of one with autopar.Plan.load")


def check_beside_plan(
    plan: Plan, pin: Mapping[str, Any] | None, global_batch: int | None, precision: str | None
) -> None:
    """Raise AutoparError if an argument contradicts the plan that was passed with it."""
    if pin:
        raise AutoparError(
            f"plan and pin={dict(pin)} are given: a plan has its choices; leave out one of them"
        )
    given = ""
    if global_batch not in (None, plan.global_batch):
        given = f"a global batch of {plan.global_batch}, not global_batch={global_batch}"
    elif precision not in (None, plan.precision):
        given = f"{plan.precision}, not precision={precision!r}"
    if given:
        raise AutoparError(f"the plan is for {given}: plan again, or leave it out")


def check_positive(name: str, value: Any) -> None:
    """Raise AutoparError unless `value` is a number above 0; infinity is allowed."""
    if not (is_whole(value, 1, 10**18) or (isinstance(value, float) and value > 0)):
        raise AutoparError(f"{name}={shown(value)} must be a positive number")


def check_seed(seed: Any) -> None:
    """Raise AutoparError unless `seed` is an integer."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise AutoparError(f"seed is {shown(seed)}, not a whole number")


def check_lengths(name: str, value: Any) -> None:
    """Raise AutoparError unless `value` is a sequence or None."""
    if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
        raise AutoparError(
            f"{name} is {shown(value)}, not a sequence of lengths such as (128, 256)"
        )


def check_kind(name: str, value: Any, kind: type, words: str) -> None:
    """Raise AutoparError unless `value` is of type `kind` or None. `words` describes the type in
    the message.
    """
    if value is not None and not isinstance(value, kind):
        raise AutoparError(f"{name} is {shown(value)}, not {words}")


def check_callable(name: str, value: Any) -> None:
    """Raise AutoparError unless `value` is callable or None."""
    if value is not None and not callable(value):
        raise AutoparError(f"{name} is {shown(value)}, not a function")
