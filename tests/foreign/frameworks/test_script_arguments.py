"""Launch scripts that read their arguments: given by the user, taken as a shell takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import autopar
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import read_job
from autopar.foreign.job import Job
from autopar.foreign.texts.shell import read_script

MODEL = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 1024 --seq-length 256 --bf16 "
LAUNCH = (
    f"torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py {MODEL} --max-position-embeddings 256 "
)
SIZES = """
case $1 in
  7B) MICRO=2;;
  *) MICRO=1;;
esac
TP=${2}
PP=${3:-1}
"""
TAIL = "--micro-batch-size $MICRO --global-batch-size 64 --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP "
LOOP = """
shift 3
while [[ $# -gt 0 ]]; do
  case "$1" in
    --cp) CP=$2; shift 2;;
    --sp) SP="--sequence-parallel"; shift;;
    --) break;;
    *) echo "unknown $1"; exit 1;;
  esac
done
"""


def job_of(folder: Path, text: str, *args: str) -> Job:
    path = folder / "run.sh"
    path.write_text("#!/bin/bash\n" + text)
    return read_job(path, args=args or None)


def unknown(job: Job) -> list[str]:
    return [str(finding) for finding in job.findings if finding.kind == "unknown"]


def test_what_the_arguments_fix(tmp_path) -> None:
    job = job_of(tmp_path, SIZES + LAUNCH + TAIL, "7B", "4", "2")
    assert (job.layout.micro_batch, job.layout.tp, job.layout.pp) == (2, 4, 2)
    assert unknown(job) == []
    job = job_of(tmp_path, SIZES + LAUNCH + TAIL, "1B", "4")
    assert (job.layout.micro_batch, job.layout.tp, job.layout.pp) == (1, 4, 1)


def test_without_arguments_they_are_asked_for(tmp_path) -> None:
    found = unknown(job_of(tmp_path, SIZES + LAUNCH + TAIL))
    assert any(
        "tensor_model_parallel_size is $2" in text and "arguments of the script behind --" in text
        for text in found
    )
    assert unknown(job_of(tmp_path, SIZES + LAUNCH + TAIL, "7B"))  # of $2, which is not given


@pytest.mark.parametrize(
    ("args", "cp", "sp"),
    [((), 1, False), (("--cp", "2"), 2, False), (("--sp", "--cp", "2"), 2, True), (("--sp", "--", "--cp", "4"), 1, True)],
)  # fmt: skip
def test_a_loop_that_takes_options(tmp_path, args: tuple[str, ...], cp: int, sp: bool) -> None:
    text = SIZES + LOOP + LAUNCH + TAIL + "--context-parallel-size ${CP:-1} $SP"
    job = job_of(tmp_path, text, "7B", "2", "1", *args)
    assert (job.layout.cp, job.layout.sequence_parallel) == (cp, sp)
    assert unknown(job) == []


def test_a_loop_that_ends_the_script(tmp_path) -> None:
    with pytest.raises(AutoparError, match=r"it ends with the exit in line 1[0-9]"):
        job_of(tmp_path, SIZES + LOOP + LAUNCH + TAIL, "7B", "2", "1", "--new")


@pytest.mark.parametrize(
    ("text", "args", "words"),
    [
        ("run $#", ("a", "b"), ("run", "2")),
        ("run $@", ("a b", "c"), ("run", "a", "b", "c")),
        ('run "$@"', ("a b", "c"), ("run", "a b", "c")),
        ("f() { run $1; }\nf 4", ("8",), ("run", "4")),
        ("shift\nrun $1", ("a", "b"), ("run", "b")),
        ("shift 2\nrun $1", ("a",), ("run", "a")),  # which the shell refuses
        ("while true; do sleep 1; done\nrun $1", ("a",), ("run", "a")),
        ('until [ -z "$1" ]; do shift; done\nrun $#', ("a", "b"), ("run", "0")),
        ("i=0\nwhile [ $i -lt 4 ]; do i=4; done\nrun $i", ("a",), ("run", "0")),
        ("break\nrun $1", ("a",), ("run", "a")),
    ],
)  # fmt: skip
def test_as_the_shell_takes_them(text: str, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert read_script(text, args=args).programs()[-1][1] == words


def test_arguments_are_never_run(tmp_path) -> None:
    mark = tmp_path / "ran"
    for text in (f"$(touch {mark})", f"`touch {mark}`", f"; touch {mark};", f"8 && touch {mark}"):
        for script in (LAUNCH + TAIL, f'eval "{LAUNCH}{TAIL}"', f'bash -c "{LAUNCH}{TAIL}"'):
            job_of(tmp_path, SIZES + script, "7B", text, text)
    assert not mark.exists()


def test_arguments_that_a_file_does_not_read(tmp_path) -> None:
    with pytest.raises(
        AutoparError, match=r"run.sh reads no arguments, such as \$1, and was given '8 4'"
    ):
        job_of(tmp_path, LAUNCH, "8", "4")
    with pytest.raises(AutoparError, match="must be a list of texts"):
        read_job(tmp_path / "run.sh", args="8")
    with pytest.raises(AutoparError, match="private use area"):
        job_of(tmp_path, SIZES + LAUNCH + TAIL, "\ue000")


def test_the_command(tmp_path) -> None:
    job_of(tmp_path, SIZES + LAUNCH + TAIL)
    path = str(tmp_path / "run.sh")
    asked = ["check", path, "--cluster", "h100:8", "--time-limit", "5"]
    done = CliRunner().invoke(cli, [*asked, "--", "7B", "2", "2"])
    assert done.exit_code == 0, done.output
    assert "tp=2" in done.output and "Cannot be determined" not in done.output
    done = CliRunner().invoke(cli, ["convert", path, "--to", "torchtitan", "--", "7B", "2", "2"])
    assert "--parallelism.tensor_parallel_degree 2" in done.output, done.output
    assert autopar.read_job(path, args=["7B", "4"]).layout.tp == 4
