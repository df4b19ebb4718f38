"""What training on a number of tokens takes under a plan, and what its rows are."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.text.units import count


@dataclass(frozen=True, slots=True)
class Training:
    """What a plan takes to train on `tokens` (or images, or samples): `days`, `device_hours`, and
    `dollars` (None if the price is unknown). Failures, evaluation and checkpoints are not counted.
    """

    tokens: float
    days: float
    device_hours: float
    dollars: float | None


def training_of(plan: Plan, tokens: float, cluster: Cluster | None) -> Training:
    """What `plan` takes to train on `tokens`, at the price of `cluster`."""
    seconds = tokens / plan.predicted.tokens_per_s
    device_hours = seconds / 3600 * plan.mesh.num_devices
    price = None if cluster is None else cluster.price_per_device_hour
    return Training(
        tokens, seconds / 86400, device_hours, None if price is None else price * device_hours
    )


def training_words(plan: Plan, training: Training) -> str:
    """As text: `15.2 days, 23,345 GPU-hours, $58,363`. Without a price, it says what gives one."""
    device = "GPU" if plan.cluster_name[:3] != "cpu" else "device"
    money = (
        "no price (--price)"
        if training.dollars is None
        else f"${training.dollars:,.{_cents(training)}f}"
    )
    return (
        f"{_digits(training.days)} days, {_digits(training.device_hours)} {device}-hours, {money}"
    )


def _cents(training: Training) -> int:
    return 2 if training.dollars is not None and training.dollars < 100 else 0


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def total_words(plan: Plan, tokens: float) -> str:
    """The name of a row for training: `training on 1.4 T tokens`."""
    return f"training on {count(tokens)} {plan.made_for.rows}"
