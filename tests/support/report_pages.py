"""Pages that are not of one plan, for the tests of pictures: of jobs, and of questions about plans."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from autopar.cli.session import Asked, Planner
from autopar.explaining.compare import compare, compare_reply
from autopar.explaining.sweep import points_of, sweep, sweep_reply
from autopar.explaining.why_not import why_not, why_not_reply
from autopar.foreign.checking.check import Answer, check_job
from autopar.foreign.checking.page import check_page
from autopar.foreign.frameworks.registry import read_job
from autopar.report import page as pages
from autopar.report.page import Page

SMALL = "gpt:layers=4,hidden=256,heads=8,vocab=1024,seq=256"
_JOB = """
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --seq-length 1024 --bf16
 --max-position-embeddings 1024 --position-embedding-type rope --swiglu --vocab-size 32000
 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
 --micro-batch-size 2 --global-batch-size 64 """
_DIMS = "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 "
_WIDE = "--num-layers 36 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
JOBS = {
    "a job": f"{_DIMS} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
    "a refused job": f"{_DIMS} --tensor-model-parallel-size 3",
    "a job that does not fit": f"{_WIDE} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2",
}
QUESTIONS = ("compare", "why-not", "why-not of what does not fit", "sweep")


@cache
def answer_of(name: str) -> Answer:
    """The answer to a job of `JOBS`, measured at 0.9 s, on 8 H100."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.sh"
        path.write_text(f"{_JOB}{JOBS[name]}".replace("\n ", " "))
        return check_job(read_job(path), "h100:8", measured_s=0.9, time_limit_s=10.0)


@cache
def page_of(name: str) -> Page:
    """The page of a job of `JOBS`, or of one of `QUESTIONS`."""
    if name in JOBS:
        return check_page(answer_of(name))
    asked = Asked(model=SMALL, cluster="h100:4", global_batch=32, time_limit_s=20.0)
    if name == "why-not of what does not fit":
        asked = replace(asked, model="gpt:layers=16,hidden=8192,heads=64,vocab=1024,seq=256")
    planner = Planner(asked, lambda text: None)
    cluster = planner.cluster
    if name == "compare":
        pins = [{"tp": 2}, {"pp": 2}, {"tp": 3}]
        return pages.page_of(compare_reply(compare(planner.plan, cluster, pins, []), cluster))
    if name == "sweep":
        points = points_of(cluster, (2, 4), (), (32,), ())
        plans = lambda at, seq, batch, pin: planner.plan(pin, at, batch, seq)  # noqa: E731
        return pages.page_of(sweep_reply(sweep(plans, cluster, points, print), SMALL, cluster))
    pin = {"tp": 4} if name == "why-not" else {"dp": 4, "zero": 0}
    return pages.page_of(why_not_reply(why_not(planner.plan, cluster, pin)))
