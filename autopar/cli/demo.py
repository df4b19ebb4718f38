"""`autopar demo`: a plan for 64 GPUs, then a real run on 4 CPU processes, compared with the same
training on one device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.api import parallelize
from autopar.api import plan as make_plan
from autopar.explaining.plan_report import PlanFacts, plan_reply
from autopar.ir.plan import Plan
from autopar.models import ModelSpec, parse_model
from autopar.runtime.ranks.launch import run_workers
from autopar.text.layout_words import describe, interesting
from autopar.text.replies import Reply, Styled
from autopar.text.tables import Table
from autopar.verify.verify import TOLERANCES, compare_training

TEXT_FILES = ("argparse.py", "ast.py", "asyncio/base_events.py", "datetime.py", "decimal.py", "difflib.py", "inspect.py", "pathlib.py",
              "pickle.py", "random.py", "statistics.py", "subprocess.py", "tarfile.py", "threading.py", "typing.py")  # fmt: skip
"""Source files of Python's standard library that serve as training text, read as bytes. Files that
this Python lacks are left out.
"""

LEARNING_RATE, MOMENTUM, SEED = 0.02, 0.9, 0
Progress = Callable[[str], AbstractContextManager[Callable[[str], None]]]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The results of training under a plan (`losses`, one a step) and on one device
    (`reference_losses`). `time_s` and `reference_time_s` are the seconds of both; `time_s` includes
    the start of processes and tracing.

    `worst_error` is the largest update-relative difference of a parameter, in the parameter
    `worst_tensor`. `replanned`: tp=2 was pinned, because the search alone chose a mesh without both
    tp and dp.
    """

    plan: Plan
    replanned: bool
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    worst_error: float
    worst_tensor: str
    time_s: float
    reference_time_s: float

    @property
    def tolerance(self) -> float:
        """The largest relative error that counts as rounding, for losses and parameters: the fp32
        tolerance of `verify`.
        """
        return TOLERANCES["fp32"][0]

    @property
    def agrees(self) -> bool:
        """Whether each loss and all parameters are within the tolerance of those of one device."""
        close = all(
            abs(a - b) <= self.tolerance * abs(b)
            for a, b in zip(self.losses, self.reference_losses, strict=True)
        )
        return close and self.worst_error <= self.tolerance


def run(show: Callable[[Any], None], progress: Progress) -> bool:
    """Runs the whole demo and shows its parts with `show`: a plan for 64 GPUs, then a small
    training on CPU processes. `progress(text)` is a context for a part, which yields a function
    that takes messages. Returns whether the parallel run agrees with one device.
    """
    show(
        "1. Llama-3-8B on 8 nodes of 8 H100 (global batch 512, sequences of 8192).  No GPU is needed: the model is on the meta device.\n"
    )
    with progress("planning Llama-3-8B"):
        start = time.perf_counter()
        spec = parse_model("llama3-8b")
        plan = make_plan(
            spec.build("meta"), "dgx-h100:8", spec.example_inputs(2, 8192), global_batch=512
        )
        took_s = time.perf_counter() - start
    show(plan_reply(PlanFacts(plan)))
    show(f"\nBuilt, traced and planned in {took_s:.1f} s.\n")
    show(
        "2. A small Llama, trained on the source of Python's standard library by 4 CPU processes (gloo) and by one device.\n"
    )
    with progress("training on 1 device, then on 4 processes") as tell:
        result = train_both(tell=tell)
    show(demo_reply(result))
    return result.agrees


def train_both(
    model: str = "llama-small",
    nproc: int = 4,
    steps: int = 10,
    seq: int = 64,
    rows: int = 8,
    tell: Callable[[str], None] = lambda text: None,
) -> TrainResult:
    """Trains the model named `model` for `steps` steps on one device, and under a plan on `nproc`
    CPU processes, with `rows` sequences of `seq` bytes a step. Returns both results. `tell` gets
    messages. The text is bytes, so the model needs a vocabulary of at least 256.
    """
    spec = parse_model(model)
    batches = text_batches(steps, rows, seq)
    tell(f"planning {model} for cpu:{nproc}")
    plan, replanned = _plan(spec, nproc, rows, seq)
    tell(f"training {model} on one device")
    start = time.perf_counter()
    before, after, reference_losses = train_alone(spec, batches)
    middle = time.perf_counter()
    tell(f"training {model} on {nproc} processes: {plan.mesh}")
    ranks = run_workers(_rank, nproc, (spec, plan.to_json(), batches))
    end = time.perf_counter()
    errors = [compare_training(before, after, state, "fp32") for _, state in ranks]
    worst, tensor = max(errors, key=lambda error: error[0])
    return TrainResult(
        plan=plan,
        replanned=replanned,
        losses=tuple(ranks[0][0]),
        reference_losses=tuple(reference_losses),
        worst_error=worst,
        worst_tensor=tensor,
        time_s=end - middle,
        reference_time_s=middle - start,
    )


def _plan(spec: ModelSpec, nproc: int, rows: int, seq: int) -> tuple[Plan, bool]:
    """(a plan for `nproc` CPU processes and batches of `rows` x `seq` tokens, whether tp=2 was
    pinned). It is autopar's own choice if that has both tp and dp above 1, or if `nproc` is odd or
    2. Otherwise tp=2 is pinned, so that the demo shows two axes.
    """
    inputs = spec.example_inputs(rows, seq)
    model = spec.build("meta")
    plan = make_plan(model, f"cpu:{nproc}", inputs, global_batch=rows)
    if nproc % 2 or nproc == 2 or (plan.mesh.tp > 1 and plan.mesh.dp > 1):
        return plan, False
    return make_plan(model, f"cpu:{nproc}", inputs, global_batch=rows, pin={"tp": 2}), True


def text_batches(steps: int, rows: int, seq: int) -> list[dict[str, Tensor]]:
    """`steps` batches of rows x seq bytes of Python's standard library, the same on every call. A
    batch is {'input_ids', 'labels'} of shape (rows, seq).

    Labels are the same bytes, but -100 at the start of a row. How many differs between rows (none
    in the first), so that ranks hold different numbers of valid targets.
    """
    folder = Path(os.__file__).parent
    text = b"".join(
        (folder / name).read_bytes() for name in TEXT_FILES if (folder / name).is_file()
    )
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(
        0, len(tokens) - seq, (steps, rows), generator=torch.Generator().manual_seed(SEED)
    )
    batches = []
    for row_starts in starts:
        ids = torch.stack([tokens[start : start + seq] for start in row_starts])
        labels = ids.clone()
        for row in range(rows):
            labels[row, : 5 * row % (seq // 2)] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """torch's SGD with momentum over `parameters`. Its update is proportional to the gradient,
    unlike Adam's, so it shows a wrong gradient in full.
    """
    return torch.optim.SGD(parameters, LEARNING_RATE, momentum=MOMENTUM)


def _build(spec: ModelSpec) -> torch.nn.Module:
    torch.manual_seed(SEED)
    return spec.build("cpu")


def train_alone(
    spec: ModelSpec, batches: list[dict[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """(initial parameters, trained parameters, loss of each step) of plain PyTorch on one device
    and one thread. Parameters are by name. `batches` has one batch for each step.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = _build(spec)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        sgd, losses = optimizer(model.parameters()), []
        for batch in batches:
            loss = model(**batch)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses.append(loss.item())
        return before, {name: p.detach() for name, p in model.named_parameters()}, losses
    finally:
        torch.set_num_threads(threads)


def _rank(
    rank: int, spec: ModelSpec, plan_text: str, batches: list[dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains as one process of the parallel run, with a step for each of `batches` (whole batches).
    Returns (loss of each step, whole parameters by name after training). `plan_text` is the plan as
    JSON.
    """
    plan = Plan.from_json(plan_text)
    engine = parallelize(
        _build(spec), plan.cluster_name, batches[0], optimizer=optimizer, plan=plan
    )
    losses = [engine.step(engine.local_batch(batch)).item() for batch in batches]
    return losses, engine.full_state_dict()


def demo_reply(result: TrainResult) -> Reply:
    """The plan, the losses of the parallel run and of one device by step, times, and whether they
    agree.
    """
    plan = result.plan
    choices = [
        (op, describe(op, axes["tp"]))
        for op, axes in plan.blocks[len(plan.blocks) // 2].ops.items()
        if "tp" in axes
    ]
    wanted = interesting(plan.blocks[len(plan.blocks) // 2])
    words = ", ".join(f"{op} {how}" for op, how in choices if op in wanted)
    whose = (
        "its own choice had one axis only, so tp=2 was pinned"
        if result.replanned
        else "autopar's own choice"
    )
    head = f"Plan for {plan.cluster_name}: {plan.mesh}, micro-batch {plan.micro_batch} ({whose})."
    rows = [
        (str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
        for step, (a, b) in enumerate(zip(result.losses, result.reference_losses, strict=True), 1)
    ]
    on = f"loss on {plan.mesh.num_devices} processes"
    table = Table(("step", on, "loss on one device", "difference"), rows, (0, 1, 2, 3))
    verdict = "agree" if result.agrees else "DO NOT AGREE"
    tail = (
        f"Parameters and losses {verdict}: the largest update-relative difference of a parameter is {result.worst_error:.1e} "
        f"({result.worst_tensor}); fp32 tolerance {result.tolerance:g}."
    )
    times = (
        f"{result.time_s:.1f} s on {plan.mesh.num_devices} processes, their start and tracing included; "
        f"{result.reference_time_s:.1f} s on one device."
    )
    chosen = f"In a block: {words}." if words else "Every op runs whole."
    return Reply([head, chosen, table, times, Styled(tail, "bold")])
