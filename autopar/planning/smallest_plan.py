"""The plan that needs the least memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from autopar.errors import NoPlanFits
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.text.plan_words import PlanOn

_ROOM = 1.001
"""Memory with which the smallest plan is solved again, relative to what it needs. CP-SAT rounds
bytes up to its own units.
"""


def smallest_plan(
    plan_on: PlanOn, cluster: Cluster, pin: Mapping[str, Any], least_bytes: int | None
) -> Plan | None:
    """The plan that needs the least memory: the fastest on devices with barely more than
    `least_bytes`, the least memory of any plan under the pins `pin`. `plan_on` plans under pins on
    a cluster. None if `least_bytes` is None, if devices are of several kinds, or if none is found.
    """
    if least_bytes is None or len(cluster.groups) > 1:
        return None
    try:
        spec = cluster.groups[0]
        device = replace(spec.device, memory_bytes=ceil(least_bytes * _ROOM))
        return plan_on(pin, replace(spec, device=device, headroom=0.0))
    except NoPlanFits:
        return None
