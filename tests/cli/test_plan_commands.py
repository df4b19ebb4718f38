"""why-not, compare, sweep, diff and explain --plan: exit codes, JSON on stdout, one trace a command, tables of 80 columns."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.narrow import fits_a_terminal

import autopar
from autopar import Plan, api
from autopar.cli import terminal as terminal_module
from autopar.cli.plan_commands import cli
from autopar.models import parse_model
from autopar.text.tables import Table

TASK = ["llama-tiny", "h100:4", "--global-batch", "8", "--seq", "16"]
SOON = ["--time-limit", "4"]  # whatever is found by then


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def run(*args: str, code: int = 0) -> Result:
    with fits_a_terminal():
        result = CliRunner().invoke(cli, list(args))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    if "--json" not in args:
        assert all(len(line) <= 80 for line in result.stdout.splitlines())
    return result


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Two plans, and the first as an older cost model made it."""
    folder, spec = tmp_path_factory.mktemp("plans"), parse_model("llama-tiny")
    model, inputs = spec.build("meta"), spec.example_inputs(2, 16)
    plans = {
        f"tp{tp}": autopar.plan(model, "h100:4", inputs, global_batch=8, pin={"tp": tp, "pp": 1})
        for tp in (2, 4)
    }
    plans["stale"] = replace(plans["tp2"], cost_model_version="0")
    for name, plan in plans.items():
        plan.save(folder / f"{name}.json")
    return {name: folder / f"{name}.json" for name in plans}


def test_why_not_of_a_possible_choice():
    # as many tokens as it takes that devices do not wait for the host
    task = ["llama-tiny", "h100:4", "--global-batch", "2048", "--seq", "512"]
    shown = " ".join(run("why-not", *task, "--pin", "tp=4").stdout.split())
    for words in (
        "why not tp=4?",
        "Chosen: ",
        "Pinned: ",
        "longer a step",
        "Time of a step",
        "difference",
    ):
        assert words in shown, words
    data = json.loads(run("why-not", *task, "--pin", "tp=4", "--json").stdout)
    assert (
        data["answer"] == "slower"
        and data["first_difference"]["pin"] == "tp"
        and data["first_difference"]["pinned"] == 4
    )
    pinned, chosen = (Plan.from_json(json.dumps(data[name])) for name in ("pinned", "chosen"))
    assert data["difference_s"] == pinned.predicted.step_time_s - chosen.predicted.step_time_s > 0
    assert sum(
        part["pinned"] - part["chosen"] for part in data["time_s"].values()
    ) == pytest.approx(data["difference_s"])


def test_why_not_of_a_saved_plan(saved):
    """It is not planned again; the other plan is."""
    asked = ["why-not", *TASK, *SOON, "--plan", str(saved["tp2"])]
    data = json.loads(run(*asked, "--pin", "tp=4", "--json").stdout)
    assert autopar.diff(Plan.from_json(json.dumps(data["chosen"])), Plan.load(saved["tp2"])) == ()
    assert data["first_difference"] == {"pin": "tp", "pinned": 4, "chosen": 2}
    proved = ["why-not", *TASK, "--plan", str(saved["tp2"]), "--pin", "tp=2,pp=1", "--json"]
    assert json.loads(run(*proved).stdout)["answer"] == "chosen"
    stale = run(
        "why-not", *TASK, *SOON, "--plan", str(saved["stale"]), "--pin", "tp=4,pp=1", "--json"
    )
    assert "predicted by cost model 0" in stale.stderr


@pytest.fixture(scope="module")
def of_megatron(tmp_path_factory) -> Path:
    """A compiled plan for Megatron-LM that leaves a tenth of the memory free."""
    spec, path = parse_model("llama-tiny"), tmp_path_factory.mktemp("plans") / "megatron.json"
    software, given = autopar.Software(compiled=True), {"headroom": 0.1, "target": "megatron"}
    model, batch, pins = spec.build("meta"), spec.example_inputs(2, 16), {"tp": 2, "pp": 1}
    autopar.plan(model, "h100:4", batch, 8, pins, software=software, **given).save(path)
    return path


def test_why_not_asks_for_what_the_plan_was_made_for(of_megatron):
    asked = ["why-not", *TASK, *SOON, "--plan", str(of_megatron), "--pin", "tp=4"]
    data = json.loads(run(*asked, "--compile", "--json").stdout)  # what it says may be said again
    chosen, pinned = (data[name]["made_for"] for name in ("chosen", "pinned"))
    assert pinned["software"] == chosen["software"] and pinned["software"]["compiled"]
    assert pinned["target"] == chosen["target"] == "megatron"
    assert pinned["cluster"] == chosen["cluster"] and pinned["cluster"]["headroom"] == 0.1


@pytest.mark.parametrize(("again", "words"), [
    (["--fp8", "current"], "'matmul_dtype': None}, not {'fp8_scaling': 'current', 'matmul_dtype': 'fp8'}"),
    (["--headroom", "0.2"], "made for a headroom of '10.0 %', not '20.0 %'"),
])  # fmt: skip
def test_why_not_refuses_what_contradicts_the_plan(of_megatron, again, words):
    asked = ["why-not", *TASK, *SOON, "--plan", str(of_megatron), "--pin", "tp=4", *again]
    assert words in " ".join(run(*asked, code=2).stderr.split())


def test_compare_says_the_software_of_each_plan(of_megatron):
    asked = ["compare", *TASK, *SOON, "--plan", str(of_megatron)]
    shown = run(*asked).stdout
    assert "Software: eager" not in shown and "torch.compile" in shown
    assert any(line.split()[:1] == ["software"] for line in shown.splitlines())


@pytest.mark.parametrize(("asked", "words"), [
    (["llama-tiny", "h100:4", "--global-batch", "16", "--seq", "16"], "for 8 sequences a step; ask with --global-batch 8"),
    (["llama-tiny", "h100:8", "--global-batch", "8", "--seq", "16"], "they differ in devices_per_node 4 -> 8: plan again"),
    (["gpt-tiny", "h100:4", "--global-batch", "8", "--seq", "16"], "plan again"),
    (["llama-tiny", "h100:4", "--global-batch", "8", "--seq", "32"], "on sequences of 16 tokens, and this model reads 32"),
    ([*TASK, "--precision", "fp32"], "the saved plan is for bf16; ask with --precision bf16"),
])  # fmt: skip
def test_why_not_of_a_plan_for_something_else(saved, asked, words):
    found = run("why-not", *asked, *SOON, "--plan", str(saved["tp2"]), "--pin", "tp=4", code=2)
    assert words in " ".join(found.stderr.split())


def test_why_not_of_an_impossible_choice_ends_with_1():
    assert (
        "tp=3 is impossible: tp=3 does not divide 4 devices"
        in run("why-not", *TASK, *SOON, "--pin", "tp=3", code=1).stdout
    )
    data = json.loads(run("why-not", *TASK, *SOON, "--pin", "tp=4,dp=4", "--json", code=1).stdout)
    assert (
        data["answer"] == "impossible" and "16 devices" in data["reason"] and data["pinned"] is None
    )


@pytest.mark.slow
def test_why_not_of_what_does_not_fit(tmp_path):
    path = tmp_path / "small.yaml"  # holds one communicator, not two
    path.write_text("device: h100\nnodes: 1\ndevices_per_node: 4\nmemory_bytes: 2147483648\n")
    args = ["why-not", "llama-tiny", str(path), *TASK[2:], "--pin", "pp=1,tp=2"]
    shown = run(*args, code=1).stdout
    assert (
        "pp=1,tp=2 does not fit" in shown
        and "Memory binds" in shown
        and "The least memory under the pins" in shown
    )
    data = json.loads(run(*args, "--json", code=1).stdout)
    assert data["answer"] == "does not fit" and data["least_memory"]["capacity_bytes"] == 2**31


@pytest.mark.slow
def test_compare_with_a_saved_plan(saved):
    args = [
        "compare",
        *TASK,
        "--pin",
        "tp=4",
        "--pin",
        "tp=3",
        "--plan",
        str(saved["stale"]),
        "--price",
        "2",
    ]
    shown = " ".join(run(*args).stdout.split())
    for words in (
        "stale.json",
        "cost of a million tokens",
        "tp=3 is not possible",
        "predicted by cost model 0",
    ):
        assert words in shown, words
    data = json.loads(run(*args, "--json").stdout)
    assert [entry["name"] for entry in data] == ["best", "tp=4", "tp=3", "stale.json"]
    assert (
        data[2]["plan"] is None
        and data[0]["ratio"] == 1.0
        and all(data[k]["dollars_per_million_tokens"] > 0 for k in (0, 1, 3))
    )


def test_compare_with_saved_plans_alone(saved):
    assert "tp2.json" in run("compare", *TASK, "--plan", str(saved["tp2"])).stdout


@pytest.mark.parametrize("command", [["why-not", *TASK, "--pin", "tp=2"], ["compare", *TASK, "--pin", "tp=2", "--pin", "tp=4"],
                                     ["sweep", *TASK, "--gpus", "1,2,4"]])  # fmt: skip
@pytest.mark.slow
def test_a_command_traces_once(command, monkeypatch):
    traced, trace = [], api.trace
    monkeypatch.setattr(
        api, "trace", lambda *args, **options: traced.append(1) or trace(*args, **options)
    )
    run(*command)
    assert len(traced) == 1


@pytest.mark.slow
def test_sweep_over_gpus_and_sequences():
    args = [
        "sweep",
        "llama-tiny",
        "h100:4",
        "--gpus",
        "2,4",
        "--seq",
        "8,16",
        "--global-batch",
        "8",
        "--price",
        "2",
    ]
    shown = run(*args).stdout
    assert "4 points" in shown and "GPUs" in shown and "seq" in shown and "$/M" in shown
    data = json.loads(run(*args, "--json").stdout)
    assert data["axes"] == ["devices", "seq"] and [row["devices"] for row in data["rows"]] == [
        2,
        2,
        4,
        4,
    ]
    assert any(row["pareto"] for row in data["rows"]) and data["break_evens"] == []
    assert Plan.from_json(json.dumps(data["rows"][0]["plan"])).mesh.num_devices == 2


@pytest.mark.slow
def test_sweep_of_one_point_and_of_a_point_without_plan():
    assert "1 point" in run("sweep", *TASK).stdout
    shown = " ".join(
        run(
            "sweep", "llama-tiny", "h100:4", "--gpus", "1,124", "--global-batch", "3", "--seq", "16"
        ).stdout.split()
    )
    assert "none: see below" in shown and "124 GPUs: no mesh of 124 devices" in shown


@pytest.mark.slow
def test_sweep_over_bandwidths_shows_where_the_plan_changes(monkeypatch, tmp_path):
    path = tmp_path / "pairs.yaml"
    path.write_text("device: h100\nnodes: 2\ndevices_per_node: 2\n")
    # no bisection: it would plan a dozen times
    monkeypatch.setattr("autopar.explaining.sweep.BREAK_EVEN_RATIO", 1e6)
    args = [
        "sweep",
        "llama:layers=1,hidden=512,heads=4,vocab=4096",
        str(path),
        *TASK[2:],
        "--inter-bandwidth",
        "400,0.001",
    ]
    data = json.loads(run(*args, "--json").stdout)
    assert [row["inter_Bps"] for row in data["rows"]] == [1e6, 4e11] and data["axes"] == [
        "inter_Bps"
    ]
    (change,) = data["break_evens"]
    assert (change["below_Bps"], change["above_Bps"]) == (1e6, 4e11) and change["below"] != change[
        "above"
    ]


def test_diff_ends_with_1_where_plans_differ(saved, monkeypatch):
    monkeypatch.chdir(saved["tp2"].parent)  # names of files head the columns
    shown = run("diff", saved["tp2"].name, saved["tp4"].name, code=1).stdout
    assert "choices" in shown and "peak memory" in shown and "step time" in shown
    found = json.loads(run("diff", str(saved["tp2"]), str(saved["tp4"]), "--json", code=1).stdout)
    assert {
        "part": "choices",
        "what": "tp",
        "ours": 2,
        "theirs": 4,
        "words": "choices: tp 2 -> 4",
    } in found


def test_diff_of_equal_plans(saved):
    assert "The plans are equal." in run("diff", str(saved["tp2"]), str(saved["tp2"])).stdout
    assert json.loads(run("diff", str(saved["tp2"]), str(saved["tp2"]), "--json").stdout) == []


def test_a_stale_plan_is_noted_and_no_error(saved):
    result = run("diff", str(saved["tp2"]), str(saved["stale"]), "--json", code=1)
    assert [d["part"] for d in json.loads(result.stdout)] == [
        "cost model"
    ] and "predicted by cost model 0" in result.stderr
    assert "predicted by cost model 0" in run("explain", "--plan", str(saved["stale"])).stdout
    result = run("explain", "--plan", str(saved["stale"]), "--json")
    assert Plan.from_json(result.stdout) == Plan.load(saved["stale"]) and "stale" in result.stderr


def test_a_saved_plan_is_explained_without_its_model(saved):
    shown = run("explain", "--plan", str(saved["tp4"])).stdout
    assert "tp=4" in shown and "of 79.65 GiB" in shown and "predicted by cost model" not in shown


@pytest.mark.slow
def test_explain_shows_the_cost_where_the_cluster_has_a_price(tmp_path):
    path = tmp_path / "lab.yaml"
    path.write_text("device: h100\nnodes: 1\ndevices_per_node: 4\nprice_per_device_hour: 2\n")
    shown = run("explain", "llama-tiny", str(path), *TASK[2:], "--pin", "tp=2").stdout
    assert "cost of a million tokens" in shown and "of 79.65 GiB" in shown and "Lints" in shown


@pytest.mark.slow
def test_replay_of_a_new_plan_and_of_a_saved_one(saved, tmp_path):
    """Both find the same; a plan that predicts something else ends with 1."""
    text = run("explain", *TASK, "--pin", "tp=2", "--replay", "--json").stdout
    data = json.loads(text)["replay"]
    assert data["agrees"] and Plan.from_json(text).predicted == Plan.load(saved["tp2"]).predicted
    assert (
        json.loads(run("replay", str(saved["tp2"]), *TASK[:2], "--seq", "16", "--json").stdout)
        == data
    )
    plan = Plan.load(saved["tp2"])
    wrong = replace(
        plan, predicted=replace(plan.predicted, step_time_s=plan.predicted.step_time_s * 1.05)
    )
    wrong.save(tmp_path / "wrong.json")
    assert (
        "THE REPLAY DISAGREES"
        in run("replay", str(tmp_path / "wrong.json"), *TASK[:2], "--seq", "16", code=1).stdout
    )
    assert "plan again" in run("replay", str(saved["tp2"]), *TASK[:2], "--seq", "32", code=2).stderr
    assert (
        "autopar replay is for saved plans"
        in run("explain", "--plan", str(saved["tp2"]), "--replay", code=2).stderr
    )


@pytest.mark.slow
def test_audit_of_a_new_plan_and_of_a_saved_one(saved, tmp_path):
    """The same audit both ways; a plan that was altered fails and says where."""
    text = run("explain", *TASK, "--pin", "tp=2", "--audit", "--json").stdout
    data = json.loads(text)["audit"]
    assert data["passes"] and Plan.from_json(text).mesh.tp == 2
    assert (
        json.loads(run("audit", str(saved["tp2"]), *TASK[:2], "--seq", "16", "--json").stdout)
        == data
    )
    plan = Plan.load(saved["tp2"])
    name, axes = next((n, axes) for n, axes in plan.blocks[1].ops.items() if axes["tp"].inputs)
    ops = plan.blocks[1].ops | {
        name: axes | {"tp": replace(axes["tp"], inputs=axes["tp"].inputs[::-1] + axes["tp"].inputs)}
    }
    replace(plan, blocks=(plan.blocks[0], replace(plan.blocks[1], ops=ops), *plan.blocks[2:])).save(
        tmp_path / "altered.json"
    )
    words = " ".join(
        run(
            "audit", str(tmp_path / "altered.json"), *TASK[:2], "--seq", "16", code=1
        ).stdout.split()
    )
    assert "THE AUDIT FAILS" in words and f"{name} of {plan.blocks[1].name}" in words
    assert (
        "autopar audit is for saved plans"
        in run("explain", "--plan", str(saved["tp2"]), "--audit", code=2).stderr
    )


def test_progress_without_a_terminal_is_a_line_every_so_often(monkeypatch, capsys):
    monkeypatch.setattr(terminal_module, "PROGRESS_AFTER_S", 0.05)
    monkeypatch.setattr(terminal_module, "PROGRESS_EVERY_S", 0.1)
    with terminal_module.progress("planning") as tell:
        time.sleep(0.1)
        tell("candidate 1")
        tell("candidate 2")
        time.sleep(0.25)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "planning ... (0 s)" and 2 <= len(lines) <= 5
    assert set(lines[1:]) == {"candidate 2 (2 so far, 0 s)"}


def test_lines_end_without_blanks(capsys):
    terminal_module.show(Table(("a", "b"), [("x", "y"), ("long word", "z")], title="Title"))
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line == line.rstrip() for line in lines)
