"""What is printed for a job starts there: written into its own file, it is read as meant, and is not
refused.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.effort import every
from support.job_files import FILES

from autopar.foreign.checking.check import Answer, check_job
from autopar.foreign.checking.pricing import JobSetting, job_setting
from autopar.foreign.checking.written import has_verdict, written
from autopar.foreign.frameworks.registry import read_job
from autopar.foreign.target import NotExpressible
from autopar.foreign.writers.applied import applied
from autopar.foreign.writers.wording import OptionDifference, differences
from autopar.ir.cluster import ClusterSpec
from autopar.ir.layout import Layout, unlike
from autopar.ir.mesh import MeshShape
from autopar.request.arguments import parsed_cluster

GPUS = 8
MODEL = "llama:layers=16,hidden=1024,heads=16,kv_heads=16,ffn=4096,vocab=32000,seq=1024"
DRAWN, LEAST = 120, 2
"""Random layouts for each file, and the fewest of them that it must be able to say."""


def setting(tmp_path: Path, name: str) -> JobSetting:
    file, text = FILES[name]
    path = tmp_path / file
    path.write_text(text)
    job = read_job(path)
    job = job.with_batches(2, 64) if "micro_batch" in job.unknown else job
    model = MODEL if job.shape.lacking or "layers" in job.unknown else None
    return job_setting(job, parsed_cluster("h100:8"), model, None if job.seq else 1024)


def layouts(by: Layout, held: dict[str, Any], number: int) -> list[Layout]:
    """Random layouts on 8 devices with the same batch."""
    draw = random.Random(number)
    found: list[Layout] = []
    batch = by.batch_on(GPUS)
    while len(found) < number:
        sizes = {"tp": (1, 1, 2, 4, 8), "pp": (1, 1, 1, 2, 4), "cp": (1, 1, 1, 2)}
        tp, pp, cp = (held.get(name, draw.choice(size)) for name, size in sizes.items())
        if GPUS % (tp * pp * cp):
            continue
        dp = GPUS // (tp * pp * cp)
        micro = draw.choice((1, 2, 4))
        if batch % (micro * dp) or batch // (micro * dp) < pp:
            number -= 1
            continue
        vpp = draw.choice((1, 2)) if pp > 1 and batch // (micro * dp) % pp == 0 else 1
        zero = draw.choice((0, 1, 2, 3)) if dp * cp > 1 else 0
        chosen: dict[str, object] = {
            "tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "micro_batch": micro, "zero": zero, "stages": (), "copies": 1, "order": "",
            "schedule": "none" if pp == 1 else "interleaved_1f1b" if vpp > 1 else "1f1b", "global_batch": batch, "accumulation": 1,
            "recompute": draw.choice(("none", "selective", "op", "full")), "recompute_layers": 0, "group": 0,
            "offload": draw.choice(("none", "none", "none", "optimizer", "parameters")),
            "sequence_parallel": tp > 1 and draw.random() < 0.6,
            "dp": None if by.dp is None else dp,
        }  # fmt: skip
        kept = {name: value for name, value in held.items() if name in chosen}
        found.append(replace(by, **(chosen | kept)))  # type: ignore[arg-type]
    return found


def runs(of: JobSetting, layout: Layout) -> bool:
    """Whether a search within the framework may choose a layout."""
    can = of.target.limits.restriction(of.job.shape, of.seq)
    pins = {name: value for name, value in can.pin.items() if hasattr(layout, name)}
    if layout.tp == 1:
        pins.pop("sequence_parallel", None)
    if any(getattr(layout, name) != value for name, value in pins.items()):
        return False
    if any(
        getattr(layout, name, only.values[0]) not in only.values for name, only in can.only.items()
    ):
        return False
    dp = layout.dp_on(GPUS)
    choice = SimpleNamespace(
        mesh=MeshShape(tp=layout.tp, pp=layout.pp, cp=layout.cp, dp=dp), zero=layout.zero, shard=0, recompute=layout.recompute,
        schedules=(), stages_per_rank=layout.vpp, num_microbatches=layout.micro_batches_on(GPUS),
    )  # fmt: skip
    if not all(limit.allows(choice) for limit in can.limits):
        return False
    return layout.recompute in can.recompute and layout.schedule in ("none", *can.schedules)


def can_say(of: JobSetting, layout: Layout) -> bool:
    """Whether the framework has words for a layout, and does not refuse it."""
    then = replace(of.job, layout=layout)
    try:
        (of.target.words or of.target.flags)(then)
    except NotExpressible:
        return False
    return not of.target.refusals(replace(then, flags={}), GPUS)


def cut(of: JobSetting, layout: Layout) -> Layout:
    """The layout with the stages that the framework cuts, if it cuts them itself."""
    if of.target.name != "nanotron" or layout.pp == 1 or of.target.stages is None:
        return layout
    return replace(layout, stages=of.target.stages(replace(of.job, layout=layout))[1])


@pytest.mark.parametrize("name", every(2, FILES))
def test_what_is_told_is_read_as_meant(tmp_path: Path, name: str) -> None:
    of = setting(tmp_path, name)
    assert not of.job.unmodelled and of.job.file is not None
    held = dict(of.target.held(of.job)) if of.target.held else {}
    told = 0
    for drawn in layouts(of.job.layout, held, DRAWN):
        layout = cut(of, drawn)
        if (
            not runs(of, layout)
            or not can_say(of, layout)
            or not unlike(of.job.layout, layout, GPUS)
        ):
            continue
        told += 1
        found = written(of, layout)
        assert found, f"{layout}\n{explained(of, layout)}"
    assert told >= LEAST


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_its_own_layout(tmp_path: Path, name: str) -> None:
    of = setting(tmp_path, name)
    assert has_verdict(of, of.job.layout)


def test_batches_that_the_command_gives_leave_a_file_its_plans(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    job = read_job(tmp_path / "a.json").with_batches(None, 16)
    found = check_job(job, parsed_cluster("h100:1"), model=MODEL, seq=1024, time_limit_s=10.0)
    assert not found.why_no_best and found.best is not None


def explained(of: JobSetting, layout: Layout) -> str:
    """What is told of a layout, the text with it, and how that is read."""
    assert of.job.file is not None
    found = differences(of.target, of.job, replace(of.job, layout=layout), True)
    text, others = applied(of.job.file, found)
    again = of.job.file.read(text, others)
    return f"{list(map(str, found))}\n{text}\n{again.layout}\n{of.target.refusals(again, GPUS)}"


QUICK = ("deepspeed",)
"""Files that are searched in each run; the others are slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FILES]
)
def test_the_best_plan_passes_check_in_the_file(tmp_path: Path, name: str) -> None:
    """On a device with little memory too, where more jobs do not fit."""
    of = setting(tmp_path, name)
    given = {"model": MODEL} if of.job.shape.layers == 16 else {}
    for memory in (80, 16) if name not in QUICK else (80,):
        cluster = ClusterSpec.make("h100", 1, 8, memory_bytes=memory * 2**30)
        found = check_job(of.job, cluster, seq=of.seq, time_limit_s=10.0, **given)  # type: ignore[arg-type]
        assert not found.withheld
        plans = [(c.differences, c.step_time_s, c.peak_bytes) for c in found.changes]
        if found.differences and found.best is not None:
            best = found.best.predicted
            plans.append((found.differences, best.step_time_s, max(best.peak_memory_bytes)))
        for told, step_s, peak in plans:
            again = of.job.file.read(*applied(of.job.file, told))  # type: ignore[union-attr]
            again = again.with_batches(*batches_of(found, told)) if again.unknown else again
            checked = check_job(again, cluster, seq=of.seq, advise=False, **given)  # type: ignore[arg-type]
            assert checked.fits and not checked.refused and not checked.withheld, list(
                map(str, told)
            )
            priced = checked.plan.predicted  # type: ignore[union-attr]
            assert priced.step_time_s == pytest.approx(step_s, rel=1e-9)
            assert max(priced.peak_memory_bytes) == pytest.approx(peak, rel=1e-9)
        if found.fits and not found.refused:
            assert found.best is not None
            assert found.best.predicted.step_time_s <= found.plan.predicted.step_time_s  # type: ignore[union-attr]


def batches_of(found: Answer, told: tuple[OptionDifference, ...]) -> tuple[int, int]:
    """(micro-batch, global batch) of a plan that says them for the training script."""
    said = {d.option: d.then for d in told if d.file}
    own = found.job.layout
    return int(said.get("per_device_train_batch_size", own.micro_batch)), own.batch_on(GPUS)
