"""One table of options: signatures, commands, completion and defaults say what it says."""

from __future__ import annotations

import inspect
from dataclasses import fields

import click
import pytest
from click.testing import CliRunner
from support.effort import every

import autopar
from autopar.cli.plan_commands import cli
from autopar.cli.session import Asked
from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import TARGETS
from autopar.planning.objectives import Goal
from autopar.request.arguments import check_arguments
from autopar.request.options import OPTIONS, PARTS
from autopar.request.software import Software

OBJECTS = {"model", "cluster", "example_inputs", "loss_fn", "traced", "progress", "batch_dims"}
"""Arguments of `autopar.plan` that are no options: what a text cannot say."""
SEARCHES = ("explain", "why-not", "compare", "sweep", "robust")


def default_of(parameter: click.Parameter) -> object:
    """Its default; None if it has none."""
    default = parameter.to_info_dict()["default"]
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    return False if is_flag and default is None else default


def test_the_api_has_the_options_of_the_table_and_their_defaults():
    signature = inspect.signature(autopar.plan).parameters
    keywords = {name: row for name, row in OPTIONS.items() if row.keyword}
    assert set(signature) - OBJECTS == set(keywords)
    assert {name: signature[name].default for name in keywords} == {
        n: r.default for n, r in keywords.items()
    }
    documented = inspect.getdoc(autopar.plan) or ""
    assert all(f"\n    {name}: " in documented for name in signature)


def test_explain_has_every_flag_of_the_table():
    options = {p.name: p for p in cli.commands["explain"].params if isinstance(p, click.Option)}
    for name, row in (OPTIONS | PARTS).items():
        if row.flag:
            found = options[name]
            assert found.opts == [row.flag] and found.help == row.help
            default = default_of(found)
            assert default == ("" if row.kind == "pins" else row.default)


@pytest.mark.parametrize("command", SEARCHES)
def test_an_option_of_a_request_is_the_same_in_every_command(command):
    flags = {row.flag: row for row in (OPTIONS | PARTS).values() if row.flag}
    for parameter in cli.commands[command].params:
        row = flags.get(parameter.opts[0])
        if row is not None and not parameter.multiple:
            assert parameter.name == row.name
            default = default_of(parameter)
            assert default in (row.default, "", ())


def test_what_commands_ask_has_the_defaults_of_the_table():
    known = {field.name: field.default for field in fields(Asked)}
    shared = known.keys() & OPTIONS.keys() - {"global_batch", "software"}
    assert {"tolerance", "time_limit_s", "target"} <= shared
    assert {name: known[name] for name in shared} == {
        name: OPTIONS[name].default for name in shared
    }
    assert Goal().objective == OPTIONS["objective"].default


def test_parts_are_fields_of_the_software():
    assert PARTS.keys() <= {field.name for field in fields(Software)}
    assert OPTIONS["target"].names == tuple(TARGETS)


@pytest.mark.parametrize(
    ("name", "value"),
    every(3, [("tolerance", "much"), ("allow_micro_batch_mean", 1), ("precision", 16), ("pin", "tp=2"), ("time_limit_s", None),
              ("deadline_s", -1), ("target", 3), ("software", 8), ("runners_up", "yes")], unpacked=True),
)  # fmt: skip
def test_keywords_are_checked_by_kind(name, value):
    with pytest.raises(AutoparError, match=name):
        check_arguments({name: value})


def test_the_shell_completes_names():
    def completed(name: str, begin: str) -> list[str]:
        command = cli.commands["explain"]
        parameter = next(p for p in command.params if p.name == name)
        found = parameter.shell_complete(click.Context(command), begin)
        return [item.value for item in found]

    assert completed("target", "meg") == ["megatron"]
    assert completed("objective", "") == ["time", "cost", "gpus", "memory"]
    assert "torchtitan" in completed("software", "t") and "tp=" in completed("pin", "t")


@pytest.mark.parametrize(
    "given",
    every(2, [["--precision", "fp16"], ["--headroom", "0.2"], ["--compile"], ["--tolerance", "0"]]),
)
def test_a_saved_plan_decides_every_option_of_its_request(given, tmp_path):
    result = CliRunner().invoke(cli, ["explain", "--plan", str(tmp_path / "plan.json"), *given])
    assert result.exit_code == 2 and f"leave out {given[0]}" in result.output


def test_headroom_and_fit_exclude_each_other():
    asked = ["explain", "llama-tiny", "h100:2", "--global-batch", "4"]
    result = CliRunner().invoke(cli, [*asked, "--headroom", "0.1", "--fit", "0.99"])
    assert result.exit_code == 2 and "--headroom and --fit both say" in result.output
