"""explain --objective, explain where nothing fits, and robust: JSON, tables, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from autopar_cost_models.memory_error import headroom_for
from click.testing import CliRunner, Result

from autopar import Plan
from autopar.cli.plan_commands import cli

TASK = [
    "llama-tiny",
    "h100:4",
    "--global-batch",
    "8",
    "--seq",
    "16",
    "--pin",
    "recompute=none,pp=1",
]


def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, list(args))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


@pytest.mark.slow
def test_every_plan_states_its_objective():
    data = json.loads(run("explain", *TASK, "--json").stdout)
    plan = Plan.from_json(json.dumps(data))
    assert (
        data["objective"]["objective"] == "time"
        and data["objective"]["value"] == plan.predicted.step_time_s
    )
    assert data["objective"]["bound"] == plan.certificate.bound_s
    assert data["objective"]["proven"] == (plan.certificate.status == "optimal")
    assert "Objective: the fastest step.  A step takes" in run("explain", *TASK).stdout


@pytest.mark.slow
def test_cost_has_a_row_for_every_size(tmp_path):
    saved = tmp_path / "plan.json"
    args = ["explain", *TASK, "--objective", "cost", "--price", "2"]
    shown = run(*args).stdout
    assert (
        "Objective: the lowest cost per token." in shown
        and "$/M" in shown
        and "cost of a million tokens" in shown
    )
    data = json.loads(run(*args, "--json", "--save", str(saved)).stdout)
    tried = data["objective"]["tried"]
    assert [one["devices"] for one in tried] == [1, 2, 4] and data["objective"][
        "dollars_per_device_hour"
    ] == 2
    assert data["objective"]["value"] == min(
        one["device_hours_per_million_tokens"] for one in tried
    )
    plan = Plan.load(saved)
    assert plan == Plan.from_json(json.dumps(data)) and any(
        "objective cost: $" in note for note in plan.notes
    )
    assert plan.cluster_name == f"h100:4 with {plan.mesh.num_devices} devices" and "lints" in data


def test_a_deadline_that_is_missed_is_a_message_with_the_best():
    shown = run("explain", *TASK, "--objective", "gpus", "--deadline", "1e-6", code=2)
    assert "has a step of at most 0.001 ms: the best takes" in shown.stderr and shown.stdout == ""
    data = json.loads(
        run("explain", *TASK, "--objective", "gpus", "--tokens-per-second", "1", "--json").stdout
    )
    assert (
        data["objective"]["value"] == 1
        and data["objective"]["tokens_per_s"] == 1
        and data["mesh"]["dp"] == 1
    )


def test_the_least_memory():
    data = json.loads(
        run("explain", *TASK[:-2], "--pin", "tp=1,zero=0", "--objective", "memory", "--json").stdout
    )
    goal = data["objective"]
    assert (
        goal["value"] == max(data["predicted"]["peak_memory_bytes"]) <= 1.01 * goal["bound"]
        and goal["unit"] == "bytes"
    )


@pytest.fixture
def small(tmp_path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text("device: cpu\nnodes: 1\ndevices_per_node: 2\nmemory_bytes: 644245094\n")
    return path


def test_what_would_fit_is_said_where_nothing_does(small):
    args = ["explain", "gpt:layers=2,hidden=256,heads=4,vocab=1024", str(small), "--global-batch", "16", "--seq", "256",
            "--pin", "micro_batch=8,recompute=none,tp=1,dp=2,zero=0"]  # fmt: skip
    result = run(*args, "--json", code=2)
    data = json.loads(result.stdout)
    assert data["answer"] == "does not fit" and data["capacity_bytes"] == 644245094
    changes = {remedy["change"]: remedy for remedy in data["remedies"]}
    assert (
        changes["micro_batch"]["pin"]["micro_batch"] < 8
        and changes["recompute"]["pin"]["recompute"] == "full"
    )
    assert all(
        remedy["peak_memory_bytes"] <= 644245094 and remedy["step_time_s"] > 0
        for remedy in data["remedies"]
    )
    assert (
        "No plan fits: the smallest needs" in result.stderr
        and "It fits\n  with micro_batch=" in result.stderr
    )
    again = run(*args[:-1], "micro_batch=8,recompute=full,tp=1,dp=2,zero=0", "--json")
    assert json.loads(again.stdout)["predicted"]["step_time_s"] == pytest.approx(
        changes["recompute"]["step_time_s"]
    )


def test_other_commands_point_to_explain(small):
    args = [
        "gpt:layers=2,hidden=256,heads=4,vocab=1024",
        str(small),
        "--global-batch",
        "16",
        "--seq",
        "256",
    ]
    result = run("robust", *args, "--pin", "micro_batch=8,recompute=none,tp=1,dp=2,zero=0", code=2)
    assert "`autopar explain` with the same pins finds what would fit" in result.stderr


@pytest.mark.slow
def test_robust():
    args = ["robust", "llama-tiny", "h100:2", "--global-batch", "2", "--seq", "16", "--pin", "recompute=none,tp=1", "--near", "5",
            "--off", "10"]  # fmt: skip
    shown = run(*args).stdout
    for words in (
        "predictions off by 10.0 %",
        "compute rate -10 %",
        "memory need +10 %",
        "Plans within 5.0 %",
        "Most robust",
    ):
        assert words in shown, words
    data = json.loads(run(*args, "--json").stdout)
    assert [one["factors"] for one in data["scenarios"]][:2] == [
        {"compute rate": 0.9},
        {"compute rate": 1.1},
    ]
    assert len(data["scenarios"]) == 8
    assert (
        all(one["chosen_s"] >= one["best_s"] > 0 for one in data["scenarios"])
        and data["worst_regret"] >= 0
    )
    assert data["candidates"][0]["step_time_s"] == data["step_time_s"] and Plan.from_json(
        json.dumps(data["most_robust"])
    )


def test_headroom_and_tolerance_are_options_of_every_command_that_plans():
    args = [
        "llama-tiny",
        "h100:2",
        "--global-batch",
        "4",
        "--seq",
        "16",
        "--pin",
        "pp=1,recompute=none",
    ]
    data = json.loads(
        run("explain", *args, "--headroom", "50%", "--tolerance", "0", "--json").stdout
    )
    assert data["certificate"]["headroom"] == 0.5 and data["certificate"]["tolerance"] == 0.0
    assert [entry["family"] for entry in data["certificate"]["runners_up"]]
    for command in ("explain", "why-not", "compare", "robust"):
        pins = ["--pin", "tp=2"] if command == "compare" else args[-2:]
        shown = run(command, *args[:-2], *pins, "--headroom", "79.5GiB", code=2).output
        assert "leaves nothing" in shown
        both = run(command, *args[:-2], *pins, "--headroom", "0.1", "--fit", "0.9", code=2).output
        assert "--headroom and --fit both say" in both
    sure = json.loads(run("explain", *args, "--fit", "0.99", "--json").stdout)
    assert sure["certificate"]["headroom"] == pytest.approx(headroom_for(0.99), abs=1e-4)
    assert sure["certificate"]["headroom"] >= headroom_for(0.99)


@pytest.mark.slow
def test_two_runs_print_the_same_report():
    args = ["explain", "llama-tiny", "h100:2", "--global-batch", "4", "--seq", "16"]
    shown = run(*args).stdout
    assert "Runners-up" in shown and "kept free" in shown and "nothing simpler" in shown
    assert run(*args).stdout == shown


@pytest.mark.slow
def test_compare_without_pins_has_a_column_for_each_family():
    args = ["compare", "llama-tiny", "h100:2", "--global-batch", "4", "--seq", "16"]
    data = json.loads(run(*args, "--json").stdout)
    assert data[0]["name"] == "best" and len(data) >= 3
    assert all(one["plan"] or one["reason"] for one in data)
