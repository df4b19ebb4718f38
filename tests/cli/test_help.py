"""What `--help` of each command shows, and the completion of shells."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from autopar.cli.help_texts import EXAMPLES
from autopar.cli.plan_commands import cli


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_help_has_examples_and_exit_codes(name: str) -> None:
    shown = CliRunner().invoke(cli, [name, "--help"]).output
    assert all(example in shown for example in EXAMPLES[name])
    assert "Exit codes:" in shown


def test_examples_are_of_commands_with_their_options() -> None:
    for name, examples in EXAMPLES.items():
        known = {option for p in cli.commands[name].params for option in p.opts}
        for example in examples:
            words = example.split()
            assert words[:2] == ["autopar", name]
            assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0
    assert "_AUTOPAR_COMPLETE" in done.output
