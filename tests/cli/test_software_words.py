"""The options that a page prints for the software give that software."""

from __future__ import annotations

from itertools import pairwise

import click
import pytest
from click.testing import CliRunner

from autopar.cli.options import search_options, software_words
from autopar.request.software import Software

PINS = "tp=2,dp=2,pp=1,zero=1"


def software_of(*words: str) -> Software:
    """The software that a command gets with these options, on H100s in bf16."""
    found: list[Software] = []

    @click.command()
    @click.option("--cluster")
    @click.option("--pin")
    @click.option("--target")
    @search_options
    def command(software, framework, **_):
        assert framework == dict(pairwise(words)).get("--software")
        found.append(software)

    at = ["--cluster", "h100:4", "--pin", PINS, "--precision", "bf16"]
    CliRunner().invoke(command, [*at, *words], catch_exceptions=False)
    return found[0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ""),
        ("--compile", "--compile"),
        ("--fp8 block", "--fp8 block"),
        ("--compile --fp8 delayed --loss-kernel fused", None),
        ("--software torchtitan --compile", "--software torchtitan --compile"),
        ("--software megatron-core", "--software megatron-core"),
        ("--software deepspeed --fp8 current", None),
        ("--target megatron", ""),
        ("--target megatron --state-recipe bf16_moments", None),
    ],
)
def test_options_give_the_software(given, expected):
    wanted = software_of(*given.split())
    target = "megatron" if "--target" in given else None
    pins = {"tp": 2, "dp": 2, "pp": 1, "zero": 1}
    asked = given.split()
    named = asked[asked.index("--software") + 1] if "--software" in asked else None
    words = software_words(wanted, "h100:4", pins, "bf16", target, named)
    assert words is not None and (expected is None or words == expected)
    again = [*words.split(), *(["--target", target] if target else [])]
    assert software_of(*again) == wanted


def test_software_that_no_options_give_has_none():
    assert software_words(Software(workspace_bytes=12345), "h100:4", {}, "bf16", None) is None
