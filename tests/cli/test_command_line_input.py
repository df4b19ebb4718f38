"""The command line under bad values, full disks and outputs that cannot be written: one message, a code that is not 0, no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from autopar.cli.plan_commands import cli

ASKED = ["llama-tiny", "cpu:2", "--global-batch", "4", "--seq", "16"]
LONG, HUGE, DIGITS = "x" * 100_000, str(10**300), "9" * 5000
ODD = [LONG, HUGE, DIGITS, "-1", "nan", "inf", "", " ", "\\", "💥" * 1000, "a=b=c", "1e400", "[]"]


def told(*args: str) -> str:
    """The message of a command that is refused."""
    result = CliRunner().invoke(cli, list(args))
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, (
        args,
        result.exception,
        result.output[:500],
    )
    assert "Traceback" not in result.stderr and 0 < len(result.stderr) < 4500
    return result.stderr


@pytest.mark.parametrize("value", ODD, ids=[str(number) for number in range(len(ODD))])
def test_an_odd_value_anywhere_is_one_message(value):
    for option in (
        "--global-batch",
        "--seq",
        "--precision",
        "--objective",
        "--deadline",
        "--tokens-per-second",
        "--price",
        "--time-limit",
    ):
        if not (
            option in ("--time-limit", "--price", "--deadline")
            and value in (HUGE, "inf", DIGITS, "1e400")
        ):
            told("explain", *ASKED, option, value)
    told("explain", value, "cpu:2", "--global-batch", "4")
    told("explain", "llama-tiny", value, "--global-batch", "4")
    told("explain", f"hf:{value}", "cpu:2", "--global-batch", "4")
    told("explain", f"{value}.mod:f", "cpu:2", "--global-batch", "4")
    told("explain", f"gpt:layers={value},hidden=8,heads=2,vocab=8", "cpu:2", "--global-batch", "4")
    told("sweep", "llama-tiny", "cpu:2", "--global-batch", value)
    told("verify", "llama-tiny", "--nproc", value)
    told("verify", value)
    for command in (
        ["diff", value, value],
        ["explain", "--plan", value],
        ["predict", value],
        ["replay", value, *ASKED[:2]],
    ):
        told(*command)
    told("compare", *ASKED, "--plan", value)
    told("robust", *ASKED, "--off", value if value not in ("1e400",) else "100")
    told(value or "x")
    told(f"--{value.strip() or 'x'}")


NAMES = [
    "tp",
    "order",
    "deal",
    "schedule",
    "recompute",
    "zero",
    "shard",
    "context_method",
    "offload",
    "stages",
    "vpp",
]


@pytest.mark.parametrize("pin", NAMES)
@pytest.mark.parametrize("value", [LONG, HUGE, DIGITS, "-1", "1.5", "💥", "every-" + DIGITS, "1x99999999"],
                         ids=[str(number) for number in range(8)])  # fmt: skip
def test_odd_pins(pin, value):
    assert pin in told("explain", *ASKED, "--pin", f"{pin}={value}")


@pytest.mark.parametrize(("args", "words"), [
    (["explain", *ASKED, "--pin", "tp=2,tp=2"], "tp is given twice, as 2 and 2"),
    (["why-not", *ASKED, "--pin", "tp=2,zero=1,tp=1"], "tp is given twice, as 2 and 1"),
    (["explain", *ASKED, "--pin", "tp=2", "--pin", "tp=1"], "--pin is given 2 times and taken once"),
    (["robust", *ASKED, "--pin", "tp=2", "--pin", "zero=1"], "write all choices in one, as in --pin tp=8,zero=1"),
    (["verify", "llama-tiny", "--pin", "tp=2", "--pin", "tp=2"], "--pin is given 2 times"),
    (["compare", *ASKED, "--pin", "tp=2", "--pin", "tp=2"], "twice"),
    (["explain", *ASKED, "--global-batch", "8"], "--global-batch is given 2 times and taken once"),
])  # fmt: skip
def test_an_option_given_twice_is_told(args, words):
    assert words in told(*args)


HEADER = "id,model_family,layers,hidden,heads,vocab,seq,gpu,gpus,tp,pp,dtype,global_batch_seqs,step_time_s"


@pytest.mark.parametrize(("rows", "words"), [
    ("", "has no runs"), ("a,gpt,x,8,2,8,8,h100,8,1,1,bf16,8,1\n", "none of the 1 runs of .* could be predicted; the first, a: layers='x'"),
    (f"a,gpt,{HUGE},8,2,8,8,h100,8,1,1,bf16,8,1\n", "layers="), (f"a,gpt,{LONG},8,2,8,8,h100,8,1,1,bf16,8,1\n", "layers='xxx"),
    ("a,gpt,2,8,2,8,8,z100,8,1,1,bf16,8,1\n", "z100|can be predicted"), ("a,gpt,2,8,2,8,8,h100,8,3,1,bf16,8,1\nb\n", "none of the 2 runs"),
    ("a,gpt,-2,8,2,8,8,h100,8,1,1,bf16,8,1\n", "layers='-2'"), ("a,gpt,2,7,2,8,8,h100,8,1,1,bf16,8,1\n", "none of the 1"),
])  # fmt: skip
@pytest.mark.parametrize("options", [[], ["--json"], ["--loso"], ["--ablate"]], ids=" ".join)
def test_predict_fails_where_nothing_could_be_predicted(tmp_path, rows, words, options):
    import re

    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{rows}")
    result = CliRunner().invoke(cli, ["predict", str(path), *options])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert re.search(words, " ".join(result.stderr.split())) and len(result.stderr) < 1500


@pytest.mark.parametrize(("redirect", "code", "words"), [
    (">/dev/full", 74, "standard output cannot be written (No space left on device)"), (">&-", 74, "standard output is closed"),
    pytest.param("2>&- >/dev/full", 74, "", marks=pytest.mark.slow), pytest.param("2>/dev/full >/dev/null", 0, "", marks=pytest.mark.slow),
    ("| true", 141, ""),
])  # fmt: skip
@pytest.mark.parametrize(
    "command", [pytest.param("--help", marks=pytest.mark.slow), "diff A A --json"]
)
def test_outputs_that_cannot_be_written(tmp_path, command, redirect, code, words):
    from autopar import Plan

    path = tmp_path / "plan.json"
    path.write_text(saved_plan())
    assert Plan.load(path)
    line = (
        f"set -o pipefail; {sys.executable} -m autopar {command.replace('A', str(path))} {redirect}"
    )
    found = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert found.returncode in ((code, 0) if "|" in redirect else (code,)), found.stderr
    assert (
        "Traceback" not in found.stderr
        and words in found.stderr
        and len(found.stderr.splitlines()) <= 1
    )


def saved_plan() -> str:
    result = CliRunner().invoke(cli, ["explain", *ASKED, "--pin", "tp=2", "--json"])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_a_full_disk_leaves_the_saved_plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("before")
    line = f"ulimit -f 1; trap '' XFSZ; {sys.executable} -m autopar explain {' '.join(ASKED)} --save {path} >/dev/null"
    found = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert "File too large; the file that was there is as before" in found.stderr
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["plan.json"]
