"""A conversion writes what its framework starts, on as many devices as the layout needs, and names
what it does not say.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples, slow_but

from autopar.errors import AutoparError
from autopar.foreign.checking.check import check_job
from autopar.foreign.frameworks.registry import TARGETS, read_job
from autopar.foreign.job import Exported, Facts, Job
from autopar.foreign.writers.export import convert
from autopar.foreign.writers.from_plan import layout_of
from autopar.ir.layout import Layout, unlike
from autopar.ir.model_shape import ModelShape

DENSE = ModelShape(layers=16, hidden=1024, heads=16, kv_heads=8, head_dim=64, ffn=4096, vocab=32000, gated=True)  # fmt: skip
SHAPES = (
    DENSE,
    replace(DENSE, kv_heads=16, gated=False, positions="learned", tied=True),
    replace(DENSE, experts=8, top_k=2, moe_ffn=2048),
    replace(DENSE, experts=8, top_k=2, moe_ffn=2048, shared_ffn=2048, first_dense=1),
    replace(DENSE, layers=15, mtp=1),
    ModelShape(),
)
DRAWN, LEAST = examples(60, 1500), 5
"""Jobs for each target, and the fewest of them that it must be able to say."""
LOST = {
    "sequence_parallel": "sequence parallelism",
    "zero": "ZeRO",
    "stages": "stages of",
    "recompute": "recomputation",
    "micro_batch": "batches",
    "batch": "batches",
    "micro_batches": "batches",
    "global_batch": "batches",
    "accumulation": "batches",
    "seq": "sequences of",
    "shape": "the model",
    "offload": "offloading",
    "precision": "precision",
    "fp8": "fp8",
    "grads": "the dtype of gradients",
    "dp_overlap": "gradients reduced beside compute",
    "compile": "compile",
    "optimizer": "the optimizer",
    "dropout": "dropout",
    "fused_loss": "a fused loss",
}
"""What of a job a text may leave out, and the words that must name it then."""


def drawn(draw: random.Random, simple: bool) -> Job:
    """A job at random; a simple one is data-parallel, which every framework can say."""
    tp, pp, cp = (1, 1, 1) if simple else tuple(draw.choice((1, 1, 1, 2, 4)) for _ in range(3))
    dp = draw.choice((1, 2, 4, 8, 3))
    shape = draw.choice(SHAPES)
    ep = draw.choice((1, 1, 2)) if shape.experts and dp % 2 == 0 and not simple else 1
    micro, accumulation = draw.choice((1, 2, 4)), draw.choice((1, 4, 8))
    vpp = draw.choice((1, 1, 2)) if pp > 1 else 1
    cuts = draw.choice(((), (), (7, 9))) if pp == 2 and vpp == 1 and shape.layers == 16 else ()
    whole = draw.random() < 0.5
    layout = Layout(
        tp=tp, pp=pp, cp=cp, ep=ep, vpp=vpp, stages=cuts, micro_batch=micro,
        dp=draw.choice((None, dp)),
        global_batch=micro * accumulation * dp if whole else None,
        accumulation=1 if whole else accumulation,
        zero=draw.choice((0, 1, 2, 3)) if dp * cp > 1 else 0,
        copies=draw.choice((1, 1, 1, 2)) if dp % 2 == 0 and not simple else 1,
        recompute=draw.choice(("none", "full") if simple else ("none", "selective", "op", "full")),
        recompute_layers=draw.choice((0, 0, 0, 1)) if pp > 1 else 0,
        schedule="none" if pp == 1 else draw.choice(("1f1b", "gpipe", "zero_bubble")) if vpp == 1 else "interleaved_1f1b",
        sequence_parallel=tp > 1 and draw.random() < 0.6,
        offload=draw.choice(("none", "none", "none", "optimizer", "parameters")),
        order=draw.choice(("", "", "", "dp-pp")) if pp > 1 else "",
    )  # fmt: skip
    layout = replace(
        layout, recompute_layers=layout.recompute_layers * (layout.recompute == "full")
    )
    facts = Facts(
        precision=draw.choice(("bf16", "bf16", "fp16", "fp32")),
        fp8=draw.choice(("", "", "", "delayed", "blockwise")),
        grads=draw.choice((None, "bf16", "fp32")),
        dp_overlap=draw.choice((None, True, False)),
        compile=draw.choice((None, True, False)),
        optimizer=draw.choice((None, "adam", "muon", "sgd")),
        dropout=draw.choice((None, 0.0, 0.1)),
        fused_loss=draw.choice((None, True, False)),
    )
    least = tp * pp * cp * dp
    gpus = draw.choice((None, least, 2 * least if layout.dp is None else least))
    per_node = draw.choice((None, 4, 8))
    return Job("megatron", shape, layout, gpus, per_node, draw.choice((1024, 4096)), facts)


def processes(written: Exported) -> int:
    """The processes that a text and its command start."""
    words = f"{written.launch}\n{written.text}"
    nodes = re.search(r"(?:--nnodes|--num_nodes|trainer\.nnodes|num_nodes)[ =:]+(\d+)", words)
    each = re.search(r"(?:--nproc-per-node|num_gpus|n_gpus_per_node)[ =:]+(\d+)", words)
    whole = re.search(r"^num_processes: (\d+)", words, re.MULTILINE)
    if whole:
        return int(whole[1])
    assert each, words
    return int(each[1]) * (int(nodes[1]) if nodes else 1)


def starts(job: Job, name: str, folder: Path) -> bool:
    """Whether a target can say a job. What it writes starts as many processes as the layout needs, is
    read as the same layout, and is not refused; all that it does not say is named.
    """
    try:
        written = convert(job, name)
    except AutoparError as error:
        assert str(error)
        return False
    gpus = job.gpus or job.layout.least_gpus
    assert processes(written) == gpus, (job.layout, written)
    path = folder / written.name
    path.write_text(written.text)
    again = read_job(path)
    assert again.framework == name and again.gpus in (None, gpus)
    lost = " ".join(written.losses)
    assert all(str(part) in lost for part in again.unmodelled), (written, again.unmodelled)
    unsaid = list(again.unknown)
    if unsaid:
        again = again.with_batches(job.layout.micro_batch, job.layout.batch_on(gpus))
    known = replace(again, shape=job.shape, seq=again.seq or job.seq, gpus=gpus)
    refused = [f for f in TARGETS[name].refusals(known, gpus) if f.kind == "refused"]
    assert not refused, (refused, job.layout, written.text)
    for field in (*unsaid, *unsaid_fields(job, again, gpus)):
        assert LOST[field] in lost, (field, job, written, again)
    return True


def unsaid_fields(job: Job, again: Job, gpus: int) -> Iterator[str]:
    """The fields of a job that are not in what was read again. Adam is the default."""
    yield from unlike(again.layout, job.layout, gpus)
    yield from ["seq"] * (again.seq != job.seq) + ["shape"] * (again.shape != job.shape)
    for fact in (fact.name for fact in fields(Facts)):
        before, after = getattr(job.facts, fact), getattr(again.facts, fact)
        if before not in (None, after, "adam") and (before or after):
            yield fact


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_written_starts(tmp_path: Path, name: str) -> None:
    jobs = [drawn(random.Random(number), number % 3 == 0) for number in range(DRAWN)]
    assert sum(starts(job, name, tmp_path) for job in jobs) >= LEAST


@settings(max_examples=examples(10, 1000), deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_layouts_at_random_start(
    tmp_path_factory: pytest.TempPathFactory, draw: random.Random, simple: bool
) -> None:
    job, folder = drawn(draw, simple), tmp_path_factory.getbasetemp()
    said = [name for name in TARGETS if starts(job, name, folder)]
    assert said or not simple


PRICED = ModelShape(layers=4, hidden=256, heads=8, kv_heads=8, head_dim=32, ffn=1024, vocab=1024, gated=True)  # fmt: skip
MODEL = "llama:layers=4,hidden=256,heads=8,ffn=1024,vocab=1024,seq=256"


@pytest.mark.parametrize("name", slow_but(("megatron", "accelerate"), TARGETS))
def test_check_prices_what_is_written(tmp_path: Path, name: str) -> None:
    said = 0
    for number in range(examples(40, 200)):
        job = drawn(random.Random(number), number % 3 == 0)
        gpus = job.gpus or job.layout.least_gpus
        if not job.shape.layers or job.shape.experts or gpus > 8:
            continue
        layout = replace(job.layout, stages=(), recompute_layers=0)
        job = replace(job, shape=PRICED, layout=layout, seq=256, facts=Facts(precision="bf16"))
        try:
            written = convert(job, name)
        except AutoparError:
            continue
        said += 1
        path = tmp_path / written.name
        path.write_text(written.text)
        again = read_job(path)
        if again.unknown:
            again = again.with_batches(layout.micro_batch, layout.batch_on(gpus))
        checked = check_job(again, f"h100:{gpus}", MODEL, 256, time_limit_s=600.0, advise=False)
        assert not checked.refused and checked.fits, (written.text, checked)
        assert layout_of(checked.plan).batch_on(gpus) == layout.batch_on(gpus)  # type: ignore[arg-type]
        if said >= examples(1, 20):
            break
    assert said
