"""Which norms, rotations, gated activations and losses of transformers' architectures become ops of our own.

    python -m benchmarks.exactness.fusion_census [--only llama,gemma2] [--limit-s 60] [--train] [--log FILE.jsonl]

Each causal language model of transformers that builds from its default configuration is shrunk, traced in bf16 and fused with fuse=all.
Every match was compared with its subgraph in fp64 (`autopar/trace/fusion/validate.py`).  What is counted does not come from the matchers:

    rms_norm         modules whose class is called ...RMSNorm
    rotary           block classes that call a function apply_...rotary... or rotate_half
    gated            products of an activation and another value of its shape
    cross_entropy    cross-entropies
    head             cross-entropies, each with the product that makes its logits, under fuse=head

With `--train` each model also trains three steps in fp64 under dp=2, tp=2, cp=2 and pp=2, on two processes each (`fused_training.py`).
It does so unfused, with fuse=all, and with fuse=head if its head can be fused.  The first loss and the update of all steps are
compared with those of one device in eager mode, and with those of the unfused program of the mesh.  A mesh that the model does not
allow is listed.

A row of the log is one architecture at one commit.  The end prints the share that is fused, by kind, each miss with its reason, and
the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch.fx import Node

from autopar.api import trace
from autopar.ir.calls import op_name
from autopar.ir.fusion import LINEAR_LOSS
from autopar.ir.traced import BlockClass, TracedModel
from autopar.models.hf import HFSpec
from autopar.trace.fusion.fused import fused
from autopar.verify.verify import make_case
from benchmarks.exactness.fused_training import (
    FIRST_LOSS,
    MESHES,
    MODES,
    UPDATE,
    MeshRun,
    Trained,
    reason_of,
    setup_of,
    trained_under,
)

OPS = {
    "rms_norm": ("autopar::rms_norm", "autopar::add_rms_norm"),
    "rotary": ("autopar::rotary_single",),
    "gated": ("autopar::glu", "autopar::rms_norm"),
    "cross_entropy": ("autopar::cross_entropy",),
    "head": (LINEAR_LOSS,),
}
WANTED = {"rms_norm": 0.95, "rotary": 0.85, "gated": 0.90, "cross_entropy": 0.90}
"""The share of each kind that is to be fused; nothing is asked of heads."""
_PRODUCTS = ("aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm")
_ACTIVATIONS = ("aten::silu", "aten::gelu", "aten::relu")
SEQ, ROWS = 16, 2


@dataclass(frozen=True, slots=True)
class Row:
    """One architecture: by kind how many were found and fused, and the reason of each miss; or why it was not traced.

    `ops` counts the fused ops of the traced model, `runs` has by mesh what training gave, and `unmade` says why nothing was trained at
    all. `commit` is the last one that changed the planner or its kernels.
    """

    name: str
    found: dict[str, int] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)
    misses: dict[str, list[str]] = field(default_factory=dict)
    untraced: str = ""
    ops: int = 0
    runs: dict[str, MeshRun] = field(default_factory=dict)
    unmade: str = ""
    commit: str = ""

    @classmethod
    def of(cls, data: dict[str, Any]) -> Row:
        """The object that `dataclasses.asdict` made `data` of."""
        runs = {
            mesh: MeshRun(
                {mode: Trained.of(one) for mode, one in run["trained"].items()},
                run["untrained"],
                run["time_s"],
                run.get("one_step", {}),
            )
            for mesh, run in data["runs"].items()
        }
        return cls(**data | {"runs": runs})


def names() -> list[str]:
    """The model types of transformers' causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


class _OutOfTime(BaseException):
    """Ends what is limited; no handler of errors in between takes it for one of the model."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """A context that raises TimeoutError after `seconds`."""

    def stop(*_: object) -> None:
        raise _OutOfTime

    signal.signal(signal.SIGALRM, stop)
    # repeated, since Python drops what a handler raises inside a callback, such as after a fork
    signal.setitimer(signal.ITIMER_REAL, seconds, 10.0)
    try:
        yield
    except _OutOfTime:
        raise TimeoutError(f"not done in {seconds} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def census(name: str, limit_s: int, train: bool = False) -> Row:
    """The row of one model type; with `train`, its fused model is trained too. Tracing may take
    `limit_s` seconds, and so may each mesh. An error or a time-out becomes `untraced` or
    `untrained`.
    """
    try:
        with limited(limit_s):
            spec = HFSpec.from_dict(name, {"model_type": name}).shrunk()
            model = trace(spec.build("meta"), spec.example_inputs(ROWS, SEQ), None, "bf16")
            row = counted(name, model)
    except Exception as error:  # whatever a model or its capture raises is the answer
        return Row(name, untraced=reason_of(error), commit=commit())
    row = replace(row, commit=commit())
    return trained(row, limit_s) if train else row


@cache
def commit() -> str:
    """The short name of the last commit that changed the planner or its kernels."""
    command = ["git", "log", "-1", "--format=%h", "--abbrev=8", "--", "autopar", "kernels"]
    return subprocess.check_output(command, cwd=Path(__file__).parents[2], text=True).strip()


def trained(row: Row, limit_s: int) -> Row:
    """The row of a model that was traced, with what training it under each mesh gave. One device and
    each mesh may take `limit_s` seconds.
    """
    runs: dict[str, MeshRun] = {}
    try:
        with limited(limit_s):
            setup = setup_of(HFSpec.from_dict(row.name, {"model_type": row.name}).shrunk())
            make_case(setup)
    except Exception as error:  # what the model raises on one device, among others
        return replace(row, unmade=reason_of(error))
    for mesh in MESHES:
        try:
            with limited(limit_s):
                runs[mesh] = trained_under(setup, mesh)
        except Exception as error:
            runs[mesh] = MeshRun(untrained={"off": reason_of(error)})
    return replace(row, runs=runs)


def counted(name: str, model: TracedModel) -> Row:
    """Fuse a traced model with fuse=all, and with fuse=head for its heads. Count what should be fused
    and what is, by kind.
    """
    fusions = {kind: fused(model, "head" if kind == "head" else "all").fusion for kind in OPS}
    row = Row(name, dict.fromkeys(OPS, 0), dict.fromkeys(OPS, 0), {kind: [] for kind in OPS})
    row = replace(row, ops=len(fusions["rms_norm"].fused))
    for block in model.classes:
        replaced = {
            kind: {
                node
                for op in fusions[kind].fused
                if op.block == block.name and op.op in ops
                for node in op.replaced
            }
            for kind, ops in OPS.items()
        }
        reasons = {
            (miss.op, miss.name): miss.reason
            for fusion in fusions.values()
            for miss in fusion.missed
            if miss.block == block.name
        }
        for kind, what, nodes in subjects(block):
            row.found[kind] += 1
            if replaced[kind] & {node.name for node in nodes}:
                row.fused[kind] += 1
            else:
                own = {node.name for node in nodes}
                told = [
                    reason for (op, at), reason in reasons.items() if at in own and op in OPS[kind]
                ]
                row.misses[kind].append(f"{what}: {told[0] if told else spelled(nodes)}")
    return row


def subjects(block: BlockClass) -> Iterator[tuple[str, str, list[Node]]]:
    """Yields (kind, text that names it, its nodes) for each norm, rotation, gated product and loss
    of a block class that should be fused.
    """
    norms: dict[str, list[Node]] = {}
    kinds: dict[str, str] = {}
    rotary: list[Node] = []
    for node in block.graph.nodes:
        if node.op != "call_function":
            continue
        for path, module in reversed(node.meta.get("nn_module_stack", {}).values()):
            called = module if isinstance(module, str) else module.__name__
            if re.search(r"RMSNorm\w*$", called):
                norms.setdefault(path, []).append(node)
                kinds[path] = called.rpartition(".")[2]
                break
        if is_rotation(node):
            rotary.append(node)
        if op_name(node) == "aten::cross_entropy_loss":
            yield "cross_entropy", node.name, [node]
            yield "head", node.name, _back_to_product(node)
        if op_name(node) == "aten::mul" and gates(node):
            yield "gated", node.name, [node, *filter(_is_activation, node.all_input_nodes)]
    for path, nodes in norms.items():
        yield "rms_norm", f"{kinds[path]} {path}", nodes
    if rotary:
        yield "rotary", block.name, rotary


def _back_to_product(loss: Node) -> list[Node]:
    """A loss and the calls from which its logits are computed, back to a product of matrices; to the
    block's input if there is none.
    """
    found, node = [], loss
    while isinstance(node, Node):
        found.append(node)
        if op_name(node) in _PRODUCTS:
            break
        node = node.args[0] if node.args else None  # type: ignore[assignment]
    return found


def is_rotation(node: Node) -> bool:
    """Whether the line of the model that made the node calls a function that rotates queries and keys."""
    line = (node.meta.get("stack_trace") or "").rstrip().rpartition("\n")[2]
    return re.search(r"apply\w*(rotary|rope)\w*\(|rotate_(half|every)\w*\(", line) is not None


def gates(node: Node) -> bool:
    """Whether a product multiplies two values of one shape, of which at least one is an activation
    (silu, gelu or relu).
    """
    if len(node.all_input_nodes) != 2:
        return False
    shapes = {str(list(source.meta["val"].shape)) for source in node.all_input_nodes}
    return len(shapes) == 1 and any(map(_is_activation, node.all_input_nodes))


def _is_activation(node: Node) -> bool:
    while op_name(node) == "aten::to":
        node = node.args[0]  # type: ignore[assignment]  # its operand is a node
    return op_name(node) in _ACTIVATIONS


def spelled(nodes: Iterable[Node]) -> str:
    """A text with the ops of a subgraph (14 at most), for a miss without a reason."""
    ops = [op_name(node).removeprefix("aten::") for node in nodes if op_name(node)]
    return "no match of " + " ".join(ops[:14])


def report(rows: list[Row]) -> str:
    """A text: for each kind the share that is fused, then a line for each miss. The models that were
    not traced follow, and a line for each row with its commit.
    """
    traced = [row for row in rows if not row.untraced]
    lines = [f"{len(traced)} of {len(rows)} architectures traced"]
    for kind in OPS:
        having = [row for row in traced if row.found[kind]]
        found = sum(row.found[kind] for row in having)
        done = sum(row.fused[kind] for row in having)
        whole = sum(row.found[kind] == row.fused[kind] for row in having)
        share = done / found if found else 1.0
        wanted = f" (wanted {WANTED[kind]:.0%})" if kind in WANTED else ""
        lines.append(
            f"{kind:14} {done}/{found} = {share:.1%}{wanted}; "
            f"all of them in {whole} of {len(having)} architectures"
        )
    for row in traced:
        lines += [
            f"miss {row.name} {kind} {count} x {what}"
            for kind, misses in row.misses.items()
            for what, count in Counter(misses).items()
        ]
    lines += training(traced)
    lines += [f"untraced {row.name}: {row.untraced}" for row in rows if row.untraced]
    for row in rows:
        counts = (f"{kind} {row.fused[kind]}/{row.found[kind]}" for kind in OPS if not row.untraced)
        lines.append(f"row {row.name} at {row.commit}: {', '.join(counts) or 'untraced'}")
    return "\n".join(lines)


def training(rows: list[Row]) -> list[str]:
    """Lines of text: by mesh and mode how many programs trained as one device and as the unfused
    program do. Then those that did not, those that were refused and those that failed.
    """
    asked = [row for row in rows if row.runs or row.unmade]
    lines = [f"not trained on one device {row.name}: {row.unmade}" for row in asked if row.unmade]
    for mesh in MESHES:
        runs = {row.name: row.runs[mesh] for row in asked if mesh in row.runs}
        if not runs:
            continue
        reasons = [(n, mode, why) for n, run in runs.items() for mode, why in run.untrained.items()]
        refused = [f"refused {mesh} {n}: {why}" for n, mode, why in reasons if _refuses(mode, why)]
        failed = [
            f"failed {mesh} fuse={mode} {n}: {why}"
            for n, mode, why in reasons
            if not _refuses(mode, why)
        ]
        lines.append(
            f"{mesh}: {len(runs)} architectures, of which the mesh is refused for {len(refused)}; {len(failed)} programs failed"
        )
        for mode in MODES:
            ran = {n: run for n, run in runs.items() if mode in run.trained}
            lines += _agreement(mesh, mode, ran)
        lines += failed + refused
    fewer = [
        f"{row.name} {len_of}/{row.ops}"
        for row in asked
        for len_of in sorted(
            {run.trained["all"].ops for run in row.runs.values() if "all" in run.trained}
        )
        if len_of < row.ops
    ]
    if fewer:
        lines.append(f"fewer fused ops in fp64 than in bf16: {', '.join(fewer)}")
    if ran_ := [row.name for row in asked if any(run.trained for run in row.runs.values())]:
        lines.append(f"trained: {len(ran_)} architectures: {', '.join(ran_)}")
    return lines


def _refuses(mode: str, reason: str) -> bool:
    """Whether a reason is autopar's refusal of a mesh, which has nothing to do with fusion."""
    return mode == "off" and reason.startswith("AutoparError")


def _agreement(mesh: str, mode: str, runs: dict[str, MeshRun]) -> list[str]:
    """Lines of text on the programs of one mesh and mode, by architecture: how many agree, the
    largest errors, and those that do not agree.
    """
    if not runs:
        return []
    ran = {name: run.trained[mode] for name, run in runs.items()}
    texts, wrong = [], []
    for other, words in (("whole", "one device"), ("unfused", "the unfused program")):
        found = {n: errors for n, one in ran.items() if (errors := getattr(one, other)) is not None}
        if not found:
            continue
        first = max(errors.first_loss for errors in found.values())
        update = max(errors.update for errors in found.values())
        right = sum(errors.small for errors in found.values())
        texts.append(
            f"{right} of {len(found)} as {words} (largest errors {first:.1e}, {update:.1e})"
        )
        wrong += [
            f"trained otherwise {mesh} fuse={mode} {n}, against {words}: {e.first_loss:.1e}, {e.update:.1e} in {e.tensor}"
            + f"; one step of it against one device: {runs[n].one_step.get(mode, math.nan):.1e}"
            for n, e in found.items()
            if not e.small
        ]
    having = sum(one.ops > 0 for one in ran.values())
    fused_ops = "" if mode == "off" else f"; {having} have fused ops"
    tolerance = f"first loss to {FIRST_LOSS:.0e}, update to {UPDATE:.0e}"
    head = f"{mesh} fuse={mode}: trained in fp64 {', '.join(texts)}; {tolerance}{fused_ops}"
    return [head, *wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="model types, joined by commas")
    parser.add_argument("--limit-s", type=int, default=60, help="seconds for one architecture")
    parser.add_argument("--train", action="store_true", help="train each fused model as well")
    parser.add_argument("--log", type=Path, help="rows are added to this file, known ones kept")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    known: dict[str, Row] = {}
    if options.log and options.log.exists():
        for line in options.log.read_text().splitlines():
            row = Row.of(json.loads(line))
            known[row.name] = row
    for name in options.only.split(",") if options.only else names():
        if name not in known:
            known[name] = census(name, options.limit_s, options.train)
            if options.log:
                with options.log.open("a") as log:
                    log.write(json.dumps(asdict(known[name])) + "\n")
    print(report(list(known.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
