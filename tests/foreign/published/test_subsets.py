"""Conditions pick runs by text, number and range; others are refused with what is known."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from support.published_rows import GPT, LLAMA, MOE, write

from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.published.runs import read_runs
from autopar.foreign.published.subsets import pick_of


@pytest.mark.parametrize(
    ("conditions", "picked"),
    [
        ([], ["gpt", "llama", "moe"]),
        (["family=llama"], ["llama"]),
        (["framework!=megatron"], ["llama", "moe"]),
        (["tp=1"], ["llama", "moe"]),
        (["tp=2..", "gpus=8..16"], ["gpt"]),
        (["tp=2..", "gpus=32,64"], []),
        (["memory=10..70"], ["gpt"]),
        (["memory=..10"], []),
        (["memory!=..10"], ["gpt"]),
        (["source=here,there", "ep=4"], ["moe"]),
    ],
)
def test_conditions(tmp_path, conditions, picked):
    runs, _ = read_runs(write(tmp_path, GPT | {"mem_gib_per_gpu": "70"}, LLAMA, MOE))
    pick = pick_of(conditions)
    assert [run.id for run in runs if pick(run)] == picked


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nanotron", "NAME=VALUES"),
        ("gpus=", "NAME=VALUES"),
        ("colour=red", "'colour' is not known"),
        ("gpus=many", "neither a number nor a range"),
        ("gpus=..", "neither a number nor a range"),
    ],
)
def test_other_text_is_refused(text, words):
    with pytest.raises(AutoparError, match=words):
        pick_of([text])


def test_the_command_line(tmp_path):
    path = str(write(tmp_path, GPT, LLAMA))
    found = CliRunner().invoke(cli, ["predict", path, "--only", "family=llama", "--by", "tp"])
    assert found.exit_code == 0, found.output
    assert "tp = 1" in found.output and "tp = 2" not in found.output
    for report in ([], ["--ablate"], ["--json"]):
        none = CliRunner().invoke(cli, ["predict", path, "--only", "tp=64", *report])
        assert none.exit_code == 2 and "none of the 2 runs" in none.output, report
