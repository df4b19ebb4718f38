"""Checks of a plan that need no model: types, ranges, and agreement of its parts.

Users may edit a plan file. An edit that keeps the plan valid is accepted. Otherwise the error names
the wrong field.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from autopar_cost_models import OFFLOADS, check_schedule
from autopar_cost_models.checks import finite

from autopar.errors import shown
from autopar.ir.mesh import AXES, LAYOUT_AXES, MOST_DEVICES, MeshShape
from autopar.ir.plan_fields import Certificate, PlanFields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")

PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
HALF = ("bf16", "fp16")
"""Precisions whose master weights have another dtype than the graphs."""
SELECTIVE_MODES = ("gather", "selective", "op")
"""Recompute modes that run parts of a layer again (`ops/recomputed.py`)."""
BLOCK_MODES = ("none", *SELECTIVE_MODES, "full")
PLAN_MODES = (*BLOCK_MODES, "mixed")
EVERY = re.compile(r"every-[1-9][0-9]{0,8}")
_KINDS = {"str": (str,), "int": (int,), "float": (int, float), "tuple[str, ...]": (tuple,), "dict[str, float]": (dict,),
          "dict[str, int]": (dict,), "dict": (dict,)}  # fmt: skip
_CANDIDATE = {"mesh": dict, "micro_batch": int, "zero": int, "recompute": str, "outcome": str}
"""Keys, with types, that each entry of `Certificate.meshes` must have."""
_SOLVED: dict[str, type | tuple[type, ...]] = {
    "mesh": dict,
    "micro_batch": int,
    "num_microbatches": int,
    "zero": int,
    "shard": int,
    "recompute": str,
    "schedule": str,
    "stages_per_rank": int,
    "time_s": (int, float),
    "memory_bytes": (int, float),
}
"""Keys, with types, of a plan in the certificate: the fastest one, and each runner-up."""
_COUNTS = {"micro_batch": 1, "num_microbatches": 1, "global_batch": 1, "zero": 0, "shard": 0}
"""Integer fields of a plan, with their smallest valid values."""
_CLOSE = 1e-6
"""Relative tolerance between the parts of a prediction and their sum."""


def made(kind: type[_T], data: Any, what: str) -> _T:
    """A dataclass of type `kind` from a mapping of its fields. Lists become tuples where the field
    is one. Fields with a default may be absent.

    Raises ValueError, which begins with `what`, if `data` is no dict, a field without a default is
    missing, or a field is unknown. If a tuple field is no list or tuple, ValueError begins with the
    field's name. Checks of the class itself raise their own errors.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{what} is {shown(data)}, not a mapping of its fields")
    known = {of.name: of for of in fields(kind)}
    if odd := [name for name in data if name not in known]:
        raise ValueError(f"{what} has the unknown field {shown(odd[0])}; it has {', '.join(known)}")
    needed = (
        name
        for name, of in known.items()
        if of.default is MISSING and of.default_factory is MISSING
    )
    if missing := [name for name in needed if name not in data]:
        raise ValueError(f"{what} lacks the field {missing[0]}")
    lists = {
        name: tuple(listed_in(data[name], name))
        for name in data
        if str(known[name].type).startswith("tuple[")
    }
    return kind(**data | lists)


def listed_in(value: Any, name: str) -> list | tuple:
    """`value` itself if it is a list or tuple. Raises ValueError otherwise, with the field's name
    `name`.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {shown(value)}, not a list")
    return value


def check_consistent(plan: PlanFields) -> None:
    """Raise ValueError or AutoparError, naming the field, if a field has a wrong type or range, or
    contradicts another. Needs no model.
    """
    _check_kinds(plan)
    _check_choices(plan)
    _check_mesh(plan)
    _check_segments(plan)
    _check_numbers(plan)
    _check_certificate(plan)


def _check_kinds(plan: PlanFields) -> None:
    parts: list[DataclassInstance] = [plan, plan.predicted, plan.certificate, plan.made_for]
    parts += plan.blocks
    for part in parts:
        for of in fields(part):
            value = getattr(part, of.name)
            texts = value if of.type == "tuple[str, ...]" else ()
            is_kind = isinstance(value, _KINDS.get(str(of.type), (object,))) and isinstance(
                value, bool
            ) == (of.type == "bool")
            if not is_kind or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{of.name} is {shown(value)}, which is no {of.type}")
    for name, least in _COUNTS.items():
        if not least <= getattr(plan, name) <= MOST_DEVICES:
            raise ValueError(
                f"{name} is {shown(getattr(plan, name))}, which is not from {least} to {MOST_DEVICES:,}"
            )
    if not all(isinstance(name, str) for stage in plan.stages for name in stage):
        raise ValueError("stages hold what is no name of a segment")


def _check_choices(plan: PlanFields) -> None:
    """Raise ValueError if precision, recompute, offload, ZeRO stage, batch sizes or ZeRO groups are
    unknown or do not go together.
    """
    if plan.precision not in PRECISIONS:
        raise ValueError(f"precision is {shown(plan.precision)}; {', '.join(PRECISIONS)} are known")
    if plan.zero > 3:
        raise ValueError(f"zero={plan.zero} is not a ZeRO stage; 0, 1, 2 and 3 are")
    for block in plan.blocks:
        if block.recompute not in BLOCK_MODES:
            raise ValueError(
                f"recompute of block {shown(block.name)} is {shown(block.recompute)}; {', '.join(BLOCK_MODES)} are known"
            )
    if plan.recompute not in PLAN_MODES and not EVERY.fullmatch(plan.recompute):
        raise ValueError(
            f"recompute is {shown(plan.recompute)}; {', '.join(PLAN_MODES)} and every-2, every-3, ... are known"
        )
    if plan.offload not in OFFLOADS:
        raise ValueError(f"offload is {shown(plan.offload)}; {', '.join(OFFLOADS)} are known")
    if plan.micro_batch * plan.num_microbatches * plan.mesh.dp != plan.global_batch:
        raise ValueError(
            f"micro_batch={plan.micro_batch} x num_microbatches={plan.num_microbatches} x dp={plan.mesh.dp} is not its "
            f"global_batch={plan.global_batch}"
        )
    if plan.shard and not (plan.zero and plan.mesh.can_share(plan.shard)):
        raise ValueError(
            f"shard={plan.shard} is no part of the data-parallel ranks of {plan.mesh} that share out what zero={plan.zero} does"
        )
    if plan.zero and plan.mesh.dp * plan.mesh.cp == 1:
        raise ValueError(
            f"zero={plan.zero} shares out over dp and cp, and both are 1 in {plan.mesh}"
        )


def _check_mesh(plan: PlanFields) -> None:
    """Raise ValueError unless the axes of layouts, the stages, the kinds of devices and the
    schedule agree with the mesh. Also if it has more than `MOST_DEVICES` devices.
    """
    mesh = plan.mesh
    if mesh.num_devices > MOST_DEVICES:
        raise ValueError(
            f"its mesh has {mesh.num_devices:,} devices, and at most {MOST_DEVICES:,} can be planned"
        )
    for block in plan.blocks:
        for op, axes in block.ops.items():
            if odd := set(axes) ^ set(mesh.active):
                raise ValueError(
                    f"op {shown(op)} of block {shown(block.name)} has layouts over {_listed(axes)}, and the axes of the mesh "
                    f"with several ranks are {_listed(mesh.active)}: {sorted(odd)[0]} is in one alone"
                )
    if not plan.stages or len(plan.stages) % mesh.pp or len(plan.devices) not in (0, mesh.pp):
        raise ValueError(
            f"{len(plan.stages)} stages or {len(plan.devices)} devices are not those of pp={mesh.pp} pipeline ranks"
        )
    if mesh.pp == 1:
        if plan.schedule != "none" or len(plan.stages) != 1:
            raise ValueError(
                f"without a pipeline (pp=1) there is one stage and schedule 'none', not {len(plan.stages)} stages and "
                f"schedule {shown(plan.schedule)}"
            )
        return
    try:
        check_schedule(plan.schedule, mesh.pp, len(plan.stages) // mesh.pp, plan.num_microbatches)
    except ValueError as error:
        raise ValueError(
            f"schedule {shown(plan.schedule)} of {len(plan.stages)} stages: {error}"
        ) from None


def _check_segments(plan: PlanFields) -> None:
    """Raise ValueError unless every segment is in exactly one block and one stage, and no block or
    stage is empty.
    """
    if bare := [block.name for block in plan.blocks if not block.segments]:
        raise ValueError(f"block {shown(bare[0])} has no segments")
    if not all(plan.stages):
        raise ValueError(f"stage {plan.stages.index(())} has no segments")
    in_blocks = Counter(name for block in plan.blocks for name in block.segments)
    in_stages = Counter(name for stage in plan.stages for name in stage)
    for counted, what in ((in_blocks, "blocks"), (in_stages, "stages")):
        if twice := [name for name, count in counted.items() if count > 1]:
            raise ValueError(
                f"segment {shown(twice[0])} is {counted[twice[0]]} times in its {what}"
            )
    for name in (*in_blocks, *in_stages):
        if in_blocks[name] != in_stages[name]:
            where, other = ("blocks", "stages") if in_blocks[name] else ("stages", "blocks")
            raise ValueError(f"segment {shown(name)} is in its {where} and not in its {other}")


def _check_numbers(plan: PlanFields) -> None:
    """Raise ValueError unless all numbers of prediction and certificate are finite and at least 0,
    and the step time is more than 0.

    Also if memory is not one number for each pipeline rank, or the parts of a step do not add up to
    its time.
    """
    for name, value in _numbers(plan):
        if isinstance(value, bool) or not isinstance(value, int | float) or not finite(value):
            raise ValueError(f"{name} is {shown(value)}, which is no number")
        if value < 0:
            raise ValueError(f"{name} is {shown(value)}, which is less than 0")
    predicted, ranks = plan.predicted, plan.mesh.pp
    if predicted.step_time_s <= 0:
        raise ValueError("step_time_s is 0, which no step takes")
    if len(predicted.peak_memory_bytes) != ranks:
        raise ValueError(
            f"peak_memory_bytes is that of {len(predicted.peak_memory_bytes)} pipeline ranks, of which there are {ranks}"
        )
    total = sum(predicted.breakdown.values())
    if predicted.breakdown and abs(total - predicted.step_time_s) > _CLOSE * predicted.step_time_s:
        raise ValueError(
            f"breakdown adds up to {total:.6g} s, and step_time_s is {predicted.step_time_s:.6g}"
        )


def _numbers(plan: PlanFields) -> Iterator[tuple[str, Any]]:
    predicted, proof = plan.predicted, plan.certificate
    yield from (
        (name, getattr(predicted, name))
        for name in ("step_time_s", "tokens_per_s", "mfu", "host_bytes")
    )
    yield from (
        (name, getattr(proof, name))
        for name in ("objective_s", "bound_s", "gap", "solve_time_s", "headroom", "simpler_left")
    )
    if proof.unlimited_s is not None:
        yield "unlimited_s", proof.unlimited_s
    yield from ((f"breakdown {part}", seconds) for part, seconds in predicted.breakdown.items())
    yield from ((f"memory {part}", size) for part, size in predicted.memory.items())
    yield from ((f"details {part}", seconds) for part, seconds in predicted.details.items())
    yield from (
        (f"peak memory of rank {rank}", size)
        for rank, size in enumerate(predicted.peak_memory_bytes)
    )


def _check_certificate(plan: PlanFields) -> None:
    """Raise ValueError unless the certificate's status is known, and its candidates and ledger have
    the fields that reports read. Its bound may be at most its objective, which must be the
    predicted step time.
    """
    proof = plan.certificate
    if proof.status not in ("optimal", "feasible"):
        raise ValueError(
            f"status of the certificate is {shown(proof.status)}; optimal and feasible are known"
        )
    _check_rules(proof)
    _check_other_plans(proof)
    if not 0 <= proof.tolerance < 1:
        raise ValueError(f"tolerance={shown(proof.tolerance)} is no fraction from 0 to below 1")
    if proof.bound_s > proof.objective_s * (1 + _CLOSE):
        raise ValueError(
            f"bound_s={proof.bound_s:.6g} is more than objective_s={proof.objective_s:.6g}"
        )
    if abs(proof.objective_s - plan.predicted.step_time_s) > _CLOSE * plan.predicted.step_time_s:
        raise ValueError(
            f"objective_s={proof.objective_s:.6g} is not the predicted step_time_s={plan.predicted.step_time_s:.6g}"
        )
    for entry in proof.meshes:
        if not isinstance(entry, dict):
            raise ValueError(f"a candidate of the certificate's meshes is {shown(entry)}")
        for name, kind in _CANDIDATE.items():
            if not isinstance(entry.get(name), kind):
                raise ValueError(
                    f"{name} of a candidate of the certificate is {shown(entry.get(name))}"
                )
        if any(
            not isinstance(entry.get(name), int | float | None)
            for name in ("time_s", "bound_s", "shard")
        ):
            raise ValueError("times or ranks of a candidate are no numbers")
        made(MeshShape, entry["mesh"], "the mesh of a candidate")
    for entry in proof.ledger:
        if not isinstance(entry, dict) or not isinstance(entry.get("part"), str):
            raise ValueError(f"an entry of the certificate's ledger is {shown(entry)}")
        for name, value in entry.items():
            if name.endswith(("_s", "_bytes")) and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                raise ValueError(
                    f"{name} in the certificate's ledger is {shown(value)}, which is no number"
                )


def _check_rules(proof: Certificate) -> None:
    """Raise ValueError unless each rule of the search space is three texts."""
    for entry in proof.rules:
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("choice", "values", "why")
        ):
            raise ValueError(f"a rule of the certificate is {shown(entry)}")


def _check_other_plans(proof: Certificate) -> None:
    """Raise ValueError unless the fastest plan and each runner-up of a certificate have the fields
    that reports read. The fastest may be {}, and a runner-up without a plan has the time None.
    """
    others: list[tuple[str, Any]] = [("the fastest plan", proof.fastest)] if proof.fastest else []
    for entry in proof.runners_up:
        if not isinstance(entry, dict) or not isinstance(entry.get("family"), str):
            raise ValueError(f"a runner-up of the certificate is {shown(entry)}")
        if "time_s" not in entry:
            raise ValueError(f"time_s of runner-up {shown(entry['family'])} is missing")
        if entry["time_s"] is not None:
            others.append((f"runner-up {shown(entry['family'])}", entry))
    for what, entry in others:
        for name, kind in _SOLVED.items():
            value = entry.get(name)
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"{name} of {what} is {shown(value)}")
        breakdown = entry.get("breakdown") or {}
        if not isinstance(breakdown, dict):
            raise ValueError(f"breakdown of {what} is {shown(breakdown)}")
        numbers = {name: entry[name] for name in ("time_s", "memory_bytes")} | breakdown
        if entry.get("bound_s") is not None:  # None: no plan fits
            numbers["bound_s"] = entry["bound_s"]
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not finite(value):
                raise ValueError(f"{name} of {what} is {shown(value)}, which is no number")
            if value < 0 or (value == 0 and name == "time_s"):
                raise ValueError(f"{name} of {what} is {shown(value)}, which no plan takes")
        if missing := [axis for axis in AXES if axis not in entry["mesh"]]:
            raise ValueError(f"the mesh of {what} lacks {missing[0]}")
        made(MeshShape, entry["mesh"], f"the mesh of {what}")


def _listed(axes: Iterable[str]) -> str:
    return ", ".join(axis for axis in LAYOUT_AXES if axis in set(axes)) or "none"
