"""`autopar predict`: its JSON, its tables, its errors; and today's evaluation on a small run."""

from __future__ import annotations

import json
from math import nan

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.published_rows import GPT, LLAMA, MOE, write

from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.published.command import predict_file, predict_files
from autopar.foreign.published.report import report_reply
from autopar.foreign.published.run import Run, RunPrediction

OOM = "OOM also published here for TP4 PP2 DP2 mb1"


def invented(run: Run) -> RunPrediction:
    if run.id == "refused":
        raise AutoparError("the moon is full")
    if run.id == "broken":
        raise KeyError("a defect")
    if run.id == "endless":
        return RunPrediction(nan, 1.0)
    return RunPrediction(2.0 * run.layout.tp, 1e9, {"forward": 1.0, "backward": 1.0})


@pytest.fixture
def predictions(tmp_path):
    rows = [
        GPT | {"notes": OOM, "mem_gib_per_gpu": "1", "mem_kind": "peak reserved"},
        GPT | {"id": "other", "step_time_s": "4"},
        LLAMA,
    ]
    rows += [GPT | {"id": name} for name in ("refused", "broken", "endless")]
    rows += [
        GPT | {"id": "partial", "config_complete": "0", "extra_opts": "[bold]odd"},
        GPT | {"id": "bad", "layers": "x"},
    ]
    return predict_file(write(tmp_path, *rows), invented)


def test_every_row_is_predicted_or_named(predictions):
    assert [r.run.id for r in predictions.results] == ["gpt", "other", "llama", "partial"]
    assert [r.run.id for r in predictions.scored] == ["gpt", "other", "llama"]
    assert [(p.id, p.reason) for p in predictions.problems if p.id != "endless"] == [
        ("bad", "layers='x' is not a number"),
        ("refused", "the moon is full"),
        ("broken", "internal error: KeyError: 'a defect'"),
    ]
    assert [r.run.id for r in predictions.out_of_memory] == ["gpt-tp4pp2dp2-mb1-oom"]


def test_several_files_are_one_set(tmp_path):
    (tmp_path / "b").mkdir()
    files = [write(tmp_path, GPT, LLAMA), write(tmp_path / "b", GPT, MOE)]
    found = predict_files(files, invented)
    assert [r.run.id for r in found.results] == ["gpt", "llama", "moe"]
    assert [p.reason for p in found.problems] == [
        f"the id 'gpt' is in {files[1]} and in a file before it"
    ]
    assert json.loads(report_reply(found).json())["files"] == list(map(str, files))


def test_an_unknown_option_makes_a_row_incomplete(tmp_path):
    found = predict_file(write(tmp_path, GPT | {"extra_opts": "telepathy"}), invented)
    assert found.results and not found.scored
    console = Console(width=200, record=True, force_terminal=False)
    console.print(report_reply(found))
    assert "telepathy" in console.export_text()


def test_json(predictions):
    data = json.loads(report_reply(predictions, "dtype").json())
    row = data["rows"][0]
    assert (
        row["id"] == "gpt"
        and row["predicted_step_time_s"] == 4.0
        and row["predicted_peak_memory_bytes"] == 1e9
    )
    assert (
        row["breakdown"] == {"forward": 1.0, "backward": 1.0}
        and row["measured_memory_bytes"] == 2**30
    )
    assert [r["scored"] for r in data["rows"]] == [True, True, True, False] and "vpp" in row[
        "defaulted"
    ]
    assert {problem["id"] for problem in data["not_predicted"]} == {
        "bad",
        "refused",
        "broken",
        "endless",
    }
    network = next(of for of in data["assumed"] if of["what"] == "network")
    assert network["runs"] == 5 and "no system is named" in network["reason"]
    assert any(text.startswith("network: ") for text in row["assumed"])
    assert data["scores"]["all"]["time"]["count"] == 3 and data["scores"]["all"]["memory"][
        "accepted"
    ] == ["gpt-tp4pp2dp2-mb1-oom"]
    assert (
        set(data["scores"]["groups"]) == {"fp16", "bf16"}
        and data["scores"]["selections"]["MoE"]["time"]["mape"] is None
    )


@pytest.mark.parametrize("gbps", ["25", "50", "100", "200"])
def test_no_rate_is_taken_for_a_system_and_the_network_is_printed(tmp_path, gbps):
    """25, 50 and 100 Gbit/s a GPU are those of presets of clouds and of Jean Zay."""
    rows = [
        GPT | {"id": gpu, "gpu": gpu, "nic_gbps_per_gpu": gbps}
        for gpu in ("A100-80G", "A100-40G", "H100", "L40S")
    ]
    data = json.loads(report_reply(predict_file(write(tmp_path, *rows), invented)).json())
    said = {row["id"]: row["assumed"] for row in data["rows"]}
    for gpu, words in {
        "A100-80G": "dgx-a100-80g",
        "A100-40G": "dgx-a100-40g",
        "H100": "dgx-h100",
        "L40S": "Ethernet",
    }.items():
        (network,) = (text for text in said[gpu] if text.startswith("network: "))
        assert f"kind and efficiency of {words}, at {gbps} Gbit/s a GPU" in network
        assert ("no node with l40s" in network) == (gpu == "L40S")


def test_tables(predictions):
    console = Console(width=200, record=True, force_terminal=False)
    console.print(report_reply(predictions, "source"))
    text = console.export_text()
    expected = [
        "tp2 pp2 dp4 mb2 recompute full",
        "partial (incomplete)",
        "the moon is full",
        "MAPE",
        "Spearman",
        "Step time by source",
    ]
    for words in [
        *expected,
        "[bold]odd",
        "out of memory",
        "rejects 0 of",
        "accepts 1 of 1",
        "Worst step times",
        "Assumed where rows do not say it",
        "kind and efficiency of dgx-a100-80g, at 200 Gbit/s a GPU",
    ]:
        assert words in text, words


def test_the_command_line_explains_mistakes(tmp_path):
    for path, words in [
        (tmp_path / "none.csv", "does not exist"),
        (write(tmp_path, {"a": "1"}), "lacks the columns id"),
    ]:
        result = CliRunner().invoke(cli, ["predict", str(path)])
        assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert CliRunner().invoke(cli, ["predict", "x.csv", "--by", "taste"]).exit_code == 2


def test_the_command_line_predicts(tmp_path):
    path = write(tmp_path, LLAMA, MOE | {"gpu": "abacus"}, GPT)
    result = CliRunner().invoke(cli, ["predict", str(path), "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["rows"][0]["id"] == "llama" and data["rows"][0]["predicted_step_time_s"] > 0
    assert (
        data["rows"][0]["predicted_peak_memory_bytes"] > 0
        and sum(data["rows"][0]["breakdown"].values()) > 0
    )
    reasons = {problem["id"]: problem["reason"] for problem in data["not_predicted"]}
    assert len(data["rows"]) + len(reasons) == 3 and "abacus" in reasons["moe"]
    assert "Step time" in CliRunner().invoke(cli, ["predict", str(path), "--by", "gpu"]).output
