"""The software of a request: that of a framework, named or targeted, and its changed parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from autopar_cost_models.checks import nearest

from autopar.errors import AutoparError, shown
from autopar.foreign.limits.frameworks import limits_of
from autopar.ir.cluster import Cluster
from autopar.request.framework_names import FRAMEWORKS, foreign_name, framework_of
from autopar.request.frameworks import RECIPE_OF_SCALING, software_as_pinned
from autopar.request.plan_request import choose_precision
from autopar.request.software import Software

_PINNED = ("tp", "pp", "dp", "zero")
"""Pins that are facts of a job, by which frameworks run it otherwise."""


def software_like(
    software: Software | str | None,
    parts: Software,
    cluster: Cluster | None,
    pins: Mapping[str, Any],
    precision: str | None,
    target: str | None = None,
) -> Software:
    """The software of a request, by the one rule of the API and the command line.

    Args:
        software: a `Software`, the name of a framework, or None for that of the target, or else
            autopar's own.
        parts: what differs from its defaults replaces that of a framework or target.
        cluster: its devices decide the framework's kernel of attention, if they are of one
            generation. None if it is not known.
        pins: those of tp, pp, dp and zero count as facts of the framework's job.
        precision: a fact too, by default that of the cluster.
        target: the framework whose limits the plan keeps, or None.

    Raises AutoparError for an unknown framework or target.
    """
    name = None if isinstance(software, Software) else software
    parts = software if isinstance(software, Software) else parts
    if name is None and target is None:
        return parts
    if name is not None and framework_of(name) == "other":
        raise AutoparError(
            f"software={shown(name)} (--software) is not known; {nearest(name, list(FRAMEWORKS))}"
        )
    facts = {key: pins[key] for key in _PINNED if isinstance(pins.get(key), int)}
    facts["compiled"] = parts.compiled
    if parts.matmul_dtype == "fp8":
        recipe = RECIPE_OF_SCALING.get(parts.fp8_scaling, parts.fp8_scaling)
        facts |= {"matmul": "fp8", "recipe": recipe}
    if precision is None and cluster is not None:
        precision = choose_precision(cluster)
    if precision in ("bf16", "fp16", "fp32"):
        facts["compute"] = precision
    groups = cluster.groups if cluster is not None else ()
    generations = {group.device.generation for group in groups}
    own = (
        limits_of(target or "").software_for if name is None else partial(software_as_pinned, name)
    )
    base = own(generations.pop() if len(generations) == 1 else "", **facts)
    framework = foreign_name(limits_of(target or "").software if name is None else name)
    own_parts = {name: getattr(parts, name) for name in parts.as_data()}
    return replace(base, framework=framework, **own_parts)
