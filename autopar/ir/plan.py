"""The Plan: the choices of autopar, their proof, and the predictions. It is read from and written
to JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, shown
from autopar.files import read_text, write_text
from autopar.ir.fusion import FusedOp, Fusion, NearMiss, Weighed
from autopar.ir.mesh import LAYOUT_AXES, MeshShape
from autopar.ir.plan_checks import HALF, check_consistent, listed_in, made
from autopar.ir.plan_fields import (
    EDITED,
    AxisChoice,
    BlockPlan,
    Certificate,
    MadeFor,
    PlanFields,
    Prediction,
)
from autopar.ir.sharding import parse_layout

FORMAT_VERSION = 4


@dataclass(frozen=True, slots=True)
class Plan(PlanFields):
    """A complete decision, read from and written to JSON.

    Attributes:
        mesh: a `MeshShape`, the ranks of each axis.
        micro_batch: sequences of a micro-batch on each data-parallel rank.
        num_microbatches: micro-batches of a step on each data-parallel rank.
        global_batch: sequences of a step over all devices.
        schedule: the order of work in a pipeline, such as '1f1b'.
        stages: for each stage of the pipeline, the names of its segments.
        zero: the ZeRO stage, 0 to 3.
        recompute: what is computed again in backward: 'none', 'selective', 'full', or the name of another mode.
        precision: 'bf16', 'fp16', 'fp32' or 'fp64'.
        blocks: the choices for each block class, a `BlockPlan` each.
        predicted: the predicted time and memory, a `Prediction`.
        certificate: what is proved, a `Certificate`.
        model_name: the name of the model.
        model_hash: a hash of the traced model; a plan runs only with an equal one.
        cluster_name: the name of the cluster.
        cluster_hash: a hash of the cluster, its price left out.
        cost_model_version: the version of the cost model.  Predictions of different versions do not compare.
        notes: what else a user should know, one text each.
        offload: 'none'; 'optimizer' if the optimizer's state is in host memory; 'parameters' if the parameters are there too.
        devices: if there are several kinds of devices, the kind of each rank of the pipeline.
        shard: the number of neighbouring data-parallel ranks that share out what ZeRO does.  0 means all ranks.
        micro_batch_mean: whether the mean of micro-batch losses may replace the loss of the batch.
        fusion: which subgraphs are ops of our own, and which nearly are, a `Fusion`.
        made_for: model, sequence, cluster, software and pins that the plan was made for, a `MadeFor`.
    """

    @property
    def framework(self) -> str:
        """The framework whose software or limits the plan is for; '' if it is for autopar's engine."""
        return self.made_for.target or self.made_for.software.get("framework", "")

    @property
    def lacks(self) -> str:
        """What autopar's engine lacks to run the plan; '' if it runs it, as every plan that is for it.
        Models are captured in half precision for the engine alone. Of other software, prices know
        what stays in fp32.
        """
        if not self.framework:
            return ""
        if self.splits_backward and self.recompute == "op":
            return f"recompute op under {self.schedule}"
        return f"a graph in {self.precision}" if self.precision in HALF else ""

    def __repr__(self) -> str:
        """The plan in five lines: what it is for, its batch, its choices, its prediction, and what
        is proved.
        """
        predicted, proof = self.predicted, self.certificate
        shares = (
            f"{self.num_microbatches} x {self.micro_batch} on {self.mesh.dp} data-parallel rank(s)"
        )
        pipeline = f"{self.schedule}, {len(self.stages)} stages, " if self.mesh.pp > 1 else ""
        step_ms = predicted.step_time_s * 1e3
        step = f"{step_ms:,.1f} ms" if step_ms >= 1000 else f"{step_ms:.4g} ms"
        time = f"{step}, {predicted.tokens_per_s:,.0f} tokens/s"
        peak = max(predicted.peak_memory_bytes, default=0) / 2**30
        lines = (
            f"Plan of {self.model_name} on {self.cluster_name}: {self.mesh}",
            f"batch: {self.global_batch} sequences, {shares}",
            f"choices: {pipeline}ZeRO-{self.zero}, recompute {self.recompute}, {self.precision}",
            f"predicted: {time}, {peak:.2f} GiB on the fullest device",
            f"certificate: {proof.status}, gap {100 * proof.gap:.2g} %, {len(proof.meshes)} candidates",
        )
        return "\n  ".join(lines)

    def to_json(self) -> str:
        """The plan as JSON text. `from_json` returns an equal plan."""
        data = asdict(self) | {"mesh": self.mesh.as_dict()}
        data["blocks"] = [_block_to_data(b) for b in self.blocks]
        return json.dumps(
            data | {"format_version": FORMAT_VERSION, "digest": _digest(data)}, indent=1
        )

    @staticmethod
    def from_json(text: str, origin: str = "plan") -> Plan:
        """Parse a plan from JSON text. Extra keys of `explain --json` (lints, objective, replay,
        audit, training, report) are ignored. If the file was edited since it was saved, the plan gets a
        note on that.

        Raises AutoparError with `origin` and the defect if the text is not a plan.
        """
        if not isinstance(text, str):
            raise AutoparError(f"{origin} is not a plan: the text to read is {shown(text)}")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise AutoparError(f"{origin} is not a plan: not valid JSON ({error})") from None
        if not isinstance(data, dict) or "format_version" not in data:
            raise AutoparError(
                f"{origin} is not a plan: it has no format_version; write plans with Plan.save"
            )
        version, digest = data.pop("format_version"), data.pop("digest", None)
        for added in ("lints", "objective", "replay", "audit", "training", "report"):
            data.pop(added, None)
        if version != FORMAT_VERSION:
            raise AutoparError(
                f"{origin} has plan format {version}; this autopar reads format {FORMAT_VERSION}: plan again"
            )
        try:
            raw = made(Plan, data, "the plan")
            plan = replace(
                raw,
                mesh=made(MeshShape, raw.mesh, "mesh"),
                stages=tuple(tuple(listed_in(stage, "an entry of stages")) for stage in raw.stages),
                blocks=tuple(map(_block_from_data, raw.blocks)),
                predicted=made(Prediction, raw.predicted, "predicted"),
                certificate=made(Certificate, raw.certificate, "certificate"),
                fusion=_fusion_from_data(raw.fusion),
                made_for=_made_for_from_data(raw.made_for),
            )
            check_consistent(plan)
        except (AutoparError, ValueError) as error:
            raise AutoparError(
                f"{origin} is not a complete plan: {error}; correct that, or plan again"
            ) from None
        edited = digest is not None and digest != _digest(data) and EDITED not in plan.notes
        return replace(plan, notes=(*plan.notes, EDITED)) if edited else plan

    def export(self, target: str | None = None, model: str | None = None) -> Any:
        """`autopar.export` of this plan: the plan in the words of another framework."""
        return import_module("autopar").export(self, target, model)

    def save(self, path: str | Path) -> None:
        """Write the plan to `path` as JSON. Raises AutoparError if that fails."""
        write_text(path, self.to_json() + "\n", "plan")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from `path`. Raises AutoparError if the file is missing or damaged."""
        return Plan.from_json(read_text(path, "plan"), origin=str(path))


def _digest(data: dict) -> str:
    """The first 16 hex digits of the sha256 of a plan's data; it reveals later edits."""
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _block_to_data(block: BlockPlan) -> dict:
    ops = {
        name: {
            axis: [c.strategy, [str(x) for x in c.inputs], [str(x) for x in c.outputs]]
            for axis, c in axes.items()
        }
        for name, axes in block.ops.items()
    }
    return {
        "name": block.name,
        "segments": list(block.segments),
        "recompute": block.recompute,
        "ops": ops,
    }


def _block_from_data(data: Any) -> BlockPlan:
    block = made(BlockPlan, data, "an entry of blocks")
    if not isinstance(block.ops, dict) or not all(
        isinstance(axes, dict) for axes in block.ops.values()
    ):
        raise ValueError(
            f"ops of block {shown(block.name)} do not map ops to axes, and these to choices"
        )
    return replace(block, ops={op: _axes_from_data(op, axes) for op, axes in block.ops.items()})


def _fusion_from_data(data: Any) -> Fusion:
    if isinstance(data, Fusion):  # a plan from before there was fusion
        return data
    raw = made(Fusion, data, "fusion")
    if missing := [name for name in ("mode", "fused", "missed") if name not in data]:
        raise ValueError(f"fusion lacks the field {missing[0]}")
    return replace(
        raw,
        fused=tuple(made(FusedOp, entry, "an entry of fused") for entry in raw.fused),
        missed=tuple(made(NearMiss, entry, "an entry of missed") for entry in raw.missed),
        weighed=tuple(made(Weighed, entry, "an entry of weighed") for entry in raw.weighed),
    )


def _made_for_from_data(data: Any) -> MadeFor:
    return data if isinstance(data, MadeFor) else made(MadeFor, data, "made_for")


def _axes_from_data(op: str, axes: dict) -> dict[str, AxisChoice]:
    if odd := [axis for axis in axes if axis not in LAYOUT_AXES]:
        raise ValueError(
            f"op {shown(op)} has a choice on {shown(odd[0])}, not a mesh axis; {', '.join(LAYOUT_AXES)} have layouts"
        )
    return {axis: _choice_from_data(op, axis, axes[axis]) for axis in LAYOUT_AXES if axis in axes}


def _choice_from_data(op: str, axis: str, entry: Any) -> AxisChoice:
    """The choice of an op on one mesh axis, from [strategy name, layouts of the operands, layouts
    of the results], all as texts. Raises ValueError for another form, and AutoparError for a wrong
    layout.
    """
    texts = (
        isinstance(entry, list)
        and len(entry) == 3
        and all(isinstance(part, list) for part in entry[1:])
    )
    if not texts or not all(isinstance(text, str) for text in (entry[0], *entry[1], *entry[2])):
        raise ValueError(
            f"op {shown(op)} has on {axis} the choice {shown(entry)}, not [strategy, [layouts], [layouts]]"
        )
    return AxisChoice(
        entry[0], tuple(map(parse_layout, entry[1])), tuple(map(parse_layout, entry[2]))
    )
