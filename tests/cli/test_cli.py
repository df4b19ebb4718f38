"""The command line: what it prints, that --json is the plan, and that every mistake is one message and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import click
import pytest
from click.testing import CliRunner, Result
from support.narrow import fits_a_terminal

import autopar
from autopar import Plan
from autopar.cli.plan_commands import cli, parse_pins
from autopar.errors import AutoparError
from autopar.explaining import plan_data, plan_text
from autopar.models import parse_model

EXPLAIN = ["explain", "llama-tiny", "dgx-h100:1", "--global-batch", "16", "--seq", "32"]
COMPARE, SWEEP, ROBUST = (
    ["compare", *EXPLAIN[1:]],
    ["sweep", *EXPLAIN[1:]],
    ["robust", *EXPLAIN[1:]],
)


def run(*args: str) -> Result:
    with fits_a_terminal():
        return CliRunner().invoke(cli, list(args))


def plan_of(pin: dict | None = None, runners_up: bool = False) -> Plan:
    spec = parse_model("llama-tiny")
    return autopar.plan(
        spec.build("meta"),
        "dgx-h100:1",
        spec.example_inputs(2, 32),
        global_batch=16,
        pin=pin,
        precision="bf16",
        runners_up=runners_up,
        traced=autopar.api.trace_spec(spec, 32, "bf16"),
    )


def without_time(plan: Plan) -> dict:
    data = plan_data(plan)
    del data["certificate"]["solve_time_s"], data["digest"]  # a hash over the first
    return data


def test_explain_prints_the_plan_and_its_reasons():
    brief = run(*EXPLAIN, "--pin", "tp=2,dp=4").stdout
    assert "Block layers.0" not in brief and "--layers" in brief and "what is searched" not in brief
    result = run(*EXPLAIN, "--pin", "tp=2,dp=4", "--layers", "--verbose")
    assert result.exit_code == 0, result.output
    expected = [
        "dp=4 tp=2",
        "predicted step time",
        "tokens per second",
        "memory per device",
        "of 79.65 GiB",
        "Certificate",
        "optimal, to within 0.1 %",
        "simplicity",
        "kept free",
    ]
    expected += [
        "candidates",
        "forward compute",
        "Block layers.0",
        "q_proj",
        "scaled_dot_product_attention",
        "cross_entropy_loss",
    ]
    for words in [*expected, "collectives forward", "collectives backward", "what is searched"]:
        assert words in result.stdout, words


def test_json_is_the_plan():
    result = run(*EXPLAIN, "--pin", "tp=2,pp=1", "--json")
    assert result.exit_code == 0
    printed = Plan.from_json(result.stdout)
    lints = json.loads(result.stdout)["lints"]
    assert "small micro-batch" in {lint["lint"] for lint in lints} and set(lints[0]) == {
        "lint",
        "text",
        "remedy",
        "numbers",
    }
    made = plan_of({"tp": 2, "pp": 1}, runners_up=True)
    made = replace(made, model_name=printed.model_name, made_for=printed.made_for)
    assert without_time(printed) == without_time(made)
    assert Plan.from_json(json.dumps(plan_data(printed))) == printed


def test_save_and_load(tmp_path):
    path = tmp_path / "plan.json"
    result = run(*EXPLAIN, "--pin", "tp=2,pp=1", "--json", "--save", str(path))
    assert result.exit_code == 0
    assert Plan.load(path) == Plan.from_json(result.stdout)


def test_plan_explain_names_strategies_in_plain_words():
    text = autopar.explain(plan_of({"tp": 4, "pp": 1, "recompute": "none"}))
    assert any(words in text for words in ("column-parallel", "sequence-sharded", "replicated"))
    assert "The other lines run it" in text or "These lines run the saved plan" in text


def test_explain_says_when_a_plan_runs():
    plan = Plan.from_json(
        run(
            "explain",
            "llama-tiny",
            "cpu:4",
            "--global-batch",
            "8",
            "--seq",
            "16",
            "--json",
        ).stdout
    )
    assert plan.lacks == "" and "lacks" not in plan_text(plan)
    with_target = run(*EXPLAIN, "--target", "megatron", "--json")
    framed = Plan.from_json(with_target.stdout)
    assert framed.framework == "megatron" and framed.lacks == "a graph in bf16"
    assert "autopar's engine lacks a graph in bf16 to run it" in plan_text(framed)


@pytest.mark.slow
def test_compare_puts_plans_side_by_side():
    args = [
        "compare",
        "llama-tiny",
        "dgx-h100:1",
        "--global-batch",
        "16",
        "--seq",
        "32",
        "--pin",
        "tp=2",
        "--pin",
        "tp=4,recompute=full",
    ]
    result = run(*args)
    assert result.exit_code == 0
    for words in ("best", "tp=2", "recompute=full", "of the best", "1.000 x"):
        assert words in result.stdout
    found = json.loads(run(*args, "--json").stdout)
    assert [entry["name"] for entry in found] == ["best", "tp=2", "tp=4,recompute=full"]
    plans = [Plan.from_json(json.dumps(entry["plan"])) for entry in found]
    assert [plan.mesh.tp for plan in plans[1:]] == [2, 4]
    assert plans[0].predicted.step_time_s == min(plan.predicted.step_time_s for plan in plans)


MISTAKES = [
    (["explain", "llama9-8b", "dgx-h100:1", "--global-batch", "8"], ["llama9-8b", "llama3-8b"]),
    (["explain", "llama-tiny", "dgx-z100:1", "--global-batch", "8"], ["dgx-z100", "dgx-h100"]),
    (
        ["explain", "llama-tiny", "missing.yaml", "--global-batch", "8"],
        ["missing.yaml", "does not exist"],
    ),
    (
        ["explain", "hf:/no/such/config.json", "dgx-h100:1", "--global-batch", "8"],
        ["/no/such/config.json"],
    ),
    ([*EXPLAIN, "--pin", "tp"], ["'tp' is not key=value", "tp=8"]),
    ([*EXPLAIN, "--pin", "tp=2,tp=4"], ["tp is given twice"]),
    ([*EXPLAIN, "--pin", "tq=2"], ["unknown pin 'tq'", "micro_batch"]),
    ([*EXPLAIN, "--pin", "tp=3"], ["tp=3 does not divide 8", "1, 2, 4, 8"]),
    ([*EXPLAIN, "--pin", "tp=two"], ["tp='two'", "whole number"]),
    ([*EXPLAIN, "--pin", "tp=-2"], ["tp=-2", "whole number"]),
    ([*EXPLAIN, "--pin", "pp=3"], ["pp=3", "does not divide"]),
    (
        [
            *EXPLAIN,
            "--precision",
            "fp32",
            "--pin",
            "pp=2,schedule=zero_bubble,recompute=op",
        ],
        ["op", "engine cannot run"],
    ),
    ([*EXPLAIN, "--pin", "schedule=gpipe,pp=1"], ["schedule=gpipe", "pp is 1"]),
    (
        [
            "explain",
            "llama-tiny",
            "dgx-h100:1",
            "--global-batch",
            "9",
            "--seq",
            "32",
            "--pin",
            "dp=8",
        ],
        ["9", "multiple of 8"],
    ),
    (["explain", "llama-tiny", "dgx-h100:1", "--global-batch", "-1"], ["--global-batch", "-1"]),
    (
        ["explain", "llama-tiny", "dgx-h100:1", "--global-batch", "9" * 26],
        ["9" * 26, "1<=x<=100000000"],
    ),
    (
        [
            "explain",
            "gpt:layers=1,hidden=99999999999999999999,heads=1,vocab=10",
            "h100:2",
            "--global-batch",
            "8",
        ],
        ["at most 100,000,000"],
    ),
    ([*EXPLAIN, "--time-limit", "nan"], ["--time-limit", "nan"]),
    ([*EXPLAIN, "--pin", "ep=3"], ["ep=3 does not divide 8", "1, 2, 4, 8"]),
    (["explain", "llama-tiny", "dgx-h100:1", "--global-batch", "8", "--seq", "0"], ["--seq", "0"]),
    (["explain", "llama-tiny", "dgx-h100:1", "--global-batch", "many"], ["--global-batch", "many"]),
    (["explain", "llama-tiny", "dgx-h100:1"], ["--global-batch"]),
    ([*EXPLAIN, "--precision", "fp4"], ["fp4", "bf16"]),
    ([*EXPLAIN, "--save", "/no/such/folder/plan.json"], ["/no/such/folder/plan.json"]),
    ([*COMPARE, "--pin", "tq=2"], ["unknown pin 'tq'"]),
    ([*COMPARE, "--plan", "/no/such/plan.json"], ["/no/such/plan.json"]),
    ([*COMPARE, "--plan", __file__], ["is not a plan", "test_cli.py"]),
    ([*COMPARE, "--pin", "tp=2", "--price", "0"], ["--price"]),
    (["why-not", *EXPLAIN[1:]], ["--pin tp=8"]),
    (["why-not", *EXPLAIN[1:], "--pin", "tq=2"], ["unknown pin 'tq'"]),
    (["why-not", *EXPLAIN[1:], "--pin", "tp=2,tp=4"], ["tp is given twice"]),
    (["why-not", "llama-tiny", "dgx-h100:1", "--pin", "tp=2"], ["--global-batch"]),
    ([*SWEEP, "--gpus", "8,12"], ["12 devices", "16 devices"]),
    ([*SWEEP, "--gpus", "8,many"], ["--gpus", "8,many", "64,128,256"]),
    ([*SWEEP, "--gpus", "8,-8"], ["--gpus", "positive"]),
    ([*SWEEP, "--gpus", ""], ["--gpus"]),
    ([*SWEEP, "--seq", "32,"], ["--seq"]),
    ([*SWEEP, "--inter-bandwidth", "0,10"], ["--inter-bandwidth"]),
    ([*SWEEP, "--inter-bandwidth", "25,50"], ["one node"]),
    (["sweep", "llama-tiny", "dgx-h100:1", "--gpus", "8,16"], ["--global-batch"]),
    (["sweep", "llama9", "dgx-h100:1", "--global-batch", "8"], ["llama9"]),
    (["diff", "/no/such/a.json", "/no/such/b.json"], ["/no/such/a.json"]),
    (["diff", __file__, __file__], ["is not a plan"]),
    (["diff", __file__], ["PLAN_B"]),
    (["explain", "--plan", "/no/such/plan.json"], ["/no/such/plan.json"]),
    (["explain", "llama-tiny", "dgx-h100:1", "--plan", "plan.json"], ["leave out MODEL, CLUSTER"]),
    (
        ["explain", "--plan", "plan.json", "--compile", "--fit", "0.9", "l4:4"],
        ["leave out MODEL or CLUSTER ('l4:4'), --fit, --compile"],
    ),
    ([*EXPLAIN, "--tolerance", "nan"], ["--tolerance", "'nan' is no number"]),
    ([*EXPLAIN, "--fit", "nan"], ["--fit", "'nan' is no number"]),
    ([*EXPLAIN, "--software", "foo"], ["software='foo' (--software) is not known"]),
    ([*EXPLAIN, "--objective", "speed"], ["'speed' is not known", "time, cost, gpus, memory"]),
    ([*EXPLAIN, "--objective", "gpus"], ["--deadline 2.5", "has 0"]),
    ([*EXPLAIN, "--objective", "gpus", "--deadline", "1", "--tokens-per-second", "9"], ["has 2"]),
    ([*EXPLAIN, "--objective", "cost", "--deadline", "1"], ["belongs to objective gpus"]),
    ([*EXPLAIN, "--objective", "gpus", "--deadline", "inf"], ["deadline inf", "finite"]),
    ([*EXPLAIN, "--objective", "gpus", "--deadline", "-3"], ["--deadline", "-3"]),
    ([*EXPLAIN, "--objective", "cost", "--price", "0"], ["--price"]),
    ([*EXPLAIN, "--objective", "cost", "--pin", "tq=2"], ["unknown pin 'tq'"]),
    (
        ["explain", "--plan", "plan.json", "--objective", "cost", "--deadline", "3"],
        ["leave out --objective, --deadline"],
    ),
    ([*ROBUST, "--off", "100"], ["--off", "100"]),
    ([*ROBUST, "--off", "0"], ["--off"]),
    ([*ROBUST, "--near", "-1"], ["--near"]),
    ([*ROBUST, "--pin", "tq=2"], ["unknown pin 'tq'"]),
    (["robust", "llama-tiny", "dgx-h100:1"], ["--global-batch"]),
    (["explain"], ["MODEL", "CLUSTER", "--global-batch"]),
    (["explode"], ["explode"]),
]


@pytest.mark.parametrize(("args", "words"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_one_message_and_exit_code_2(args, words):
    result = run(*args)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def test_parse_pins():
    assert parse_pins(" tp=8, zero=1 ,recompute=full") == {"tp": 8, "zero": 1, "recompute": "full"}
    assert parse_pins("") == {}
    for text in (",,", " ", " , "):
        with pytest.raises(AutoparError, match="has no choice in it"):
            parse_pins(text)


def console(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "autopar", *args],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_help_and_version_load_no_torch():
    code = "import sys; from autopar.cli.plan_commands import cli; cli.main(['--help'], standalone_mode=False)"
    code += "; sys.exit('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and "explain" in found.stdout
    assert console("--version").stdout.strip().endswith(autopar.__version__)


def test_the_console_script_shows_no_traceback():
    found = console("explain", "llama9", "cpu:1", "--global-batch", "1")
    assert (
        found.returncode == 2
        and "Traceback" not in found.stderr
        and "llama9" in found.stderr
        and found.stdout == ""
    )


@pytest.mark.slow
def test_a_closed_pipe_is_quiet():
    """The reader of the table is gone before the table comes. Every run has `diff` of two plans in a pipe."""
    command = (
        f"{sys.executable} -m autopar explain llama-tiny cpu:2 --global-batch 4 --seq 16 | true"
    )
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in found.stderr and "BrokenPipe" not in found.stderr


def test_an_interrupt_is_quiet():
    code = "import autopar.cli.console as c\ndef stop(*a, **k): raise KeyboardInterrupt\nc.cli.main = stop\nc.main()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 130 and found.stderr.strip() == "Interrupted"


def test_every_command_has_help():
    for name, command in cli.commands.items():
        assert isinstance(command, click.Command) and command.help
        assert run(name, "--help").exit_code == 0
