"""The Plan: what autopar decided, why, and what it expects.  Data only; JSON in, JSON out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import AutoparError, shown
from autopar.files import read_text, write_text
from autopar.ir.mesh import LAYOUT_AXES, MOST, MeshShape
from autopar.ir.sharding import Layout, parse_layout

if TYPE_CHECKING:
    from autopar.explain.diff import Difference

FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True)
class AxisChoice:
    """How one op runs over one mesh axis."""

    strategy: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Choices for one block class: op name -> axis -> choice, for the axes larger than 1."""

    name: str
    segments: tuple[str, ...]
    recompute: str  # 'none', 'full', or what of a block runs again ('selective', 'op')
    ops: dict[str, dict[str, AxisChoice]]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is proved.  Times in seconds; `gap` = (objective - bound) / objective; `space` says in words what was searched.

    `ledger` says what the objective is made of, for `explain/audit.py` to hold against its own prices: one entry for each block, in order,
    and one for each edge between blocks on which a layout changes.
    """

    status: str  # 'optimal' | 'feasible'
    objective_s: float
    bound_s: float
    gap: float
    space: str
    meshes: tuple[dict, ...] = ()  # one entry per candidate: mesh, micro_batch, zero, recompute, outcome, time_s, reason
    solve_time_s: float = 0.0
    ledger: tuple[dict, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted cost of one step.  `breakdown` maps a part ('compute', 'tp communication', ...) to seconds and sums to the step
    time; `memory` maps a part to bytes on the fullest device; `peak_memory_bytes` has one entry per pipeline stage; `host_bytes` are those
    that a rank holds in host memory, at most."""

    step_time_s: float
    peak_memory_bytes: tuple[int, ...]
    tokens_per_s: float
    mfu: float
    breakdown: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete decision.  `stages` lists the segments of each pipeline stage; `runnable` is '' or what the engine lacks; `offload` is
    'none', or 'optimizer' if the state of the optimizer is in host memory, where it is updated; `devices` has the kind of devices of each
    rank of the pipeline, where there are several kinds; `shard` data-parallel ranks, neighbours, share out what ZeRO does, and groups of
    them hold copies (0: all ranks share it out)."""

    mesh: MeshShape
    micro_batch: int  # sequences per data-parallel rank per micro-batch
    num_microbatches: int
    global_batch: int
    schedule: str
    stages: tuple[tuple[str, ...], ...]
    zero: int
    recompute: str
    precision: str
    blocks: tuple[BlockPlan, ...]
    predicted: Prediction
    certificate: Certificate
    model_name: str
    model_hash: str
    cluster_name: str
    cluster_hash: str
    cost_model_version: str
    runnable: str = ""
    notes: tuple[str, ...] = ()
    offload: str = "none"
    devices: tuple[str, ...] = ()
    shard: int = 0

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` gives back an equal plan."""
        data = asdict(self) | {"format_version": FORMAT_VERSION, "mesh": self.mesh.as_dict()}
        data["blocks"] = [_block_to_data(b) for b in self.blocks]
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str, origin: str = "plan") -> Plan:
        """Parse a plan; what `explain --json` adds to one (lints, objective, replay, audit) is left out.

        Raises AutoparError naming `origin` and the defect when the text is not one.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise AutoparError(f"{origin} is not a plan: not valid JSON ({error})") from None
        if not isinstance(data, dict) or "format_version" not in data:
            raise AutoparError(f"{origin} is not a plan: it has no format_version; write plans with Plan.save")
        version = data.pop("format_version")
        for added in ("lints", "objective", "replay", "audit"):
            data.pop(added, None)
        if version != FORMAT_VERSION:
            raise AutoparError(f"{origin} has plan format {version}; this autopar reads format {FORMAT_VERSION}: plan again")
        try:
            blocks = tuple(_block_from_data(b) for b in data.pop("blocks"))
            prediction = data.pop("predicted")
            prediction["peak_memory_bytes"] = tuple(prediction["peak_memory_bytes"])
            certificate = data.pop("certificate")
            certificate["meshes"], certificate["ledger"] = tuple(certificate["meshes"]), tuple(certificate.get("ledger", ()))
            data["stages"] = tuple(tuple(stage) for stage in data["stages"])
            data["notes"], data["devices"] = tuple(data["notes"]), tuple(data.get("devices", ()))
            plan = Plan(
                mesh=MeshShape(**data.pop("mesh")),
                blocks=blocks,
                predicted=Prediction(**prediction),
                certificate=Certificate(**certificate),
                **data,
            )
            _check_kinds(plan)
            _check_numbers(plan)
        except AutoparError as error:
            raise AutoparError(f"{origin} is not a complete plan: {error}") from None
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise AutoparError(f"{origin} is not a complete plan: {type(error).__name__}: {error}") from None
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to `path` as JSON.  Raises AutoparError if that cannot be written."""
        write_text(path, self.to_json() + "\n", "plan")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from `path`.  Raises AutoparError if there is none or it is damaged."""
        return Plan.from_json(read_text(path, "plan"), origin=str(path))

    def diff(self, other: Plan) -> tuple[Difference, ...]:
        """What differs between this plan and another, each printable as words; () if they are equal."""
        from autopar.explain.diff import diff

        return diff(self, other)

    def explain(self) -> str:
        """The plan and its reasons as text."""
        from autopar.explain.report import plan_text

        return plan_text(self)


def _block_to_data(block: BlockPlan) -> dict:
    ops = {
        name: {axis: [c.strategy, [str(x) for x in c.inputs], [str(x) for x in c.outputs]] for axis, c in axes.items()}
        for name, axes in block.ops.items()
    }
    return {"name": block.name, "segments": list(block.segments), "recompute": block.recompute, "ops": ops}


_KINDS = {"str": (str,), "int": (int,), "float": (int, float), "tuple[str, ...]": (tuple,), "dict[str, float]": (dict,),
          "dict[str, int]": (dict,)}  # fmt: skip
PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
_CANDIDATE = {"mesh": dict, "micro_batch": int, "zero": int, "recompute": str, "outcome": str}
"""What an entry of `Certificate.meshes` has at least."""


def _check_kinds(plan: Plan) -> None:
    """ValueError or TypeError if a field is of another kind than it says, or one of several does not belong to the others."""
    for one in (plan, plan.predicted, plan.certificate, *plan.blocks):
        for of in fields(one):
            value = getattr(one, of.name)
            texts = value if of.type == "tuple[str, ...]" else ()
            is_kind = isinstance(value, _KINDS.get(of.type, (object,))) and not isinstance(value, bool)
            if not is_kind or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{of.name} is {shown(value)}, which is no {of.type}")
    for name in ("micro_batch", "num_microbatches", "global_batch", "zero", "shard"):
        if getattr(plan, name) < (name not in ("zero", "shard")):
            raise ValueError(f"{name} is {getattr(plan, name)}")
    ranks, of_ops = plan.mesh.pp, {axis for block in plan.blocks for axes in block.ops.values() for axis in axes}
    if bare := [axis for axis in plan.mesh.active if axis in LAYOUT_AXES and axis not in of_ops and plan.blocks]:
        raise ValueError(f"{bare[0]}={getattr(plan.mesh, bare[0])}, over which no op has a layout")
    if plan.mesh.num_devices > MOST:
        raise ValueError(f"its mesh has {plan.mesh.num_devices} devices")
    if len(plan.stages) % ranks or len(plan.devices) not in (0, ranks):
        raise ValueError(f"stages or devices are not those of {ranks} pipeline ranks")
    if bare := [block.name for block in plan.blocks if not block.segments]:
        raise ValueError(f"block {bare[0]} has no segments")
    if plan.precision not in PRECISIONS:
        raise ValueError(f"precision is {shown(plan.precision)}; {', '.join(PRECISIONS)} are known")
    if plan.devices and len(plan.predicted.peak_memory_bytes) != ranks:
        raise ValueError(f"it has memory of {len(plan.predicted.peak_memory_bytes)} pipeline ranks, of which there are {ranks}")
    if not all(isinstance(name, str) for stage in plan.stages for name in stage):
        raise ValueError("stages hold what is no name of a segment")
    for entry in plan.certificate.meshes:
        for name, kind in _CANDIDATE.items():
            if not isinstance(entry[name], kind):
                raise ValueError(f"{name} of a candidate is {shown(entry[name])}")
        if any(not isinstance(entry.get(name), int | float | None) for name in ("time_s", "bound_s", "shard")):
            raise ValueError("times or ranks of a candidate are no numbers")
        MeshShape(**entry["mesh"])
    for entry in plan.certificate.ledger:
        if not isinstance(entry, dict) or not isinstance(entry.get("part"), str):
            raise ValueError(f"an entry of the certificate's ledger is {shown(entry)}")
        for name, value in entry.items():
            if name.endswith(("_s", "_bytes")) and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} in the certificate's ledger is {shown(value)}, which is no number")


def _check_numbers(plan: Plan) -> None:
    """ValueError if a prediction or a proof is no number, or a stage has nothing."""
    predicted, proof = plan.predicted, plan.certificate
    numbers = {"step_time_s": predicted.step_time_s, "tokens_per_s": predicted.tokens_per_s, "mfu": predicted.mfu,
               "host_bytes": predicted.host_bytes}  # fmt: skip
    numbers |= {"objective_s": proof.objective_s, "bound_s": proof.bound_s, "gap": proof.gap}
    numbers |= {f"breakdown {part}": seconds for part, seconds in predicted.breakdown.items()}
    numbers |= {f"memory {part}": size for part, size in predicted.memory.items()}
    numbers |= {f"peak memory of stage {stage}": size for stage, size in enumerate(predicted.peak_memory_bytes)}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ValueError(f"{name} is {shown(value)}, which is no number")
        if value < 0:
            raise ValueError(f"{name} is {shown(value)}, which is less than 0")
    if predicted.step_time_s <= 0 or not predicted.peak_memory_bytes or not all(plan.stages):
        raise ValueError("its step takes no time, or it has stages without blocks or memory")


def _block_from_data(data: dict) -> BlockPlan:
    def choice(axis: str, entry: list) -> AxisChoice:
        if axis not in LAYOUT_AXES:
            raise ValueError(f"{shown(axis)} is not a mesh axis")
        strategy, inputs, outputs = entry
        if not isinstance(strategy, str):
            raise ValueError(f"strategy {shown(strategy)} is no name")
        return AxisChoice(strategy, tuple(map(parse_layout, inputs)), tuple(map(parse_layout, outputs)))

    def ordered(axes: dict) -> dict[str, AxisChoice]:
        found = {axis: choice(axis, entry) for axis, entry in axes.items()}
        return {axis: found[axis] for axis in LAYOUT_AXES if axis in found}

    ops = {name: ordered(axes) for name, axes in data["ops"].items()}
    return BlockPlan(data["name"], tuple(data["segments"]), data["recompute"], ops)
