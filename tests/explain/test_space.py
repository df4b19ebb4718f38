"""The search space in words: another program lists the same candidates from the printed rules alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from autopar import api
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError, NoLayout
from autopar.foreign.limits.frameworks import restriction_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.models.shapes import shape_of_spec
from autopar.planning.candidates import PP_INSIDE_DP, layouts_within
from autopar.planning.outside import outside_of
from autopar.planning.space import space_rules
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from benchmarks.search.printed_space import divisors, layouts

Key = tuple[MeshShape, int, int, int]
"""The mesh, micro-batch, ZeRO stage and ranks that share (0: all)."""


def listed(rules: Mapping[str, str]) -> Iterator[Key]:
    """Every candidate that the words of rules allow, by choice."""
    for one in layouts(rules):
        mesh = MeshShape(one.pp, one.dp, one.cp, one.tp, one.ep, one.order)
        yield mesh, one.micro_batch, one.zero, one.shard


@cache
def traced(name: str, seq: int) -> TracedModel:
    return api.trace_spec(parse_model(name), seq)


def request_of(name: str, cluster: str, batch: int, **pin: object) -> PlanRequest:
    return PlanRequest(ClusterSpec.parse(cluster), batch, Pins.of(pin), "bf16", name)


CLUSTERS = ("h100:1", "h100:6", "h100:8", "dgx-h100:2", "dgx-h100:3", "dgx-a100-80g:16")
PINNED = st.fixed_dictionaries({}, optional={
    "tp": st.sampled_from([1, 2, 3, 4]), "pp": st.sampled_from([1, 2]), "dp": st.sampled_from([1, 2, 4]), "cp": st.sampled_from([1, 2]),
    "ep": st.sampled_from([1, 2]), "micro_batch": st.sampled_from([1, 3, 96]), "zero": st.sampled_from([0, 1, 2, 3]),
})  # fmt: skip


@given(
    st.sampled_from(["llama-tiny", "moe-tiny"]),
    st.sampled_from(CLUSTERS),
    st.sampled_from([1, 6, 8, 96, 4096]),
    st.one_of(st.just({}), PINNED),
)
def test_another_program_lists_the_same_candidates_from_the_words(name, cluster, batch, pin):
    request, model = request_of(name, cluster, batch, **pin), traced(name, 16)
    try:
        found = layouts_within(request, model)
    except NoLayout:
        found = []
    rules = {rule.choice: rule.values for rule in space_rules(request, model)}
    keys = [(one.mesh, one.micro_batch, one.zero, one.shard) for one in found]
    assert set(keys) == set(listed(rules)) and len(keys) == len(set(keys))


def test_what_a_rule_leaves_out_is_not_listed_and_can_be_pinned():
    model = traced("llama-tiny", 16)
    request = request_of("llama-tiny", "dgx-h100:2", 64)
    listed_pins = [dict(one.pin) for one in outside_of(request, model)]
    assert {"cp": 2} in listed_pins and {"pp": 2, "dp": 8, "order": PP_INSIDE_DP} in listed_pins
    assert {"pp": 2, "zero": 2} in listed_pins and {"offload": "optimizer"} in listed_pins
    assert not any("micro_batch" in pin for pin in listed_pins)
    pinned = outside_of(request_of("llama-tiny", "dgx-h100:2", 64, cp=1), model)
    assert pinned and not any("cp" in one.pin for one in pinned)


@pytest.mark.parametrize("cluster", ["h100:1", "h100:4", "dgx-h100:2", "h100:2+a100-80g:2"])
@pytest.mark.parametrize("name", ["llama-tiny", "moe-tiny"])
def test_what_lies_outside_is_not_inside(name, cluster):
    request, model = request_of(name, cluster, 64), traced(name, 16)
    inside = set(layouts_within(request, model))
    for one in outside_of(request, model):
        found = layouts_within(request_of(name, cluster, 64, **one.pin), model)
        assert found and inside.isdisjoint(found), one.pin


def test_a_target_drops_schedules_and_not_layouts():
    """Megatron's interleaved schedule wants rounds of pp micro-batches, its 1F1B does not."""
    spec = "llama:layers=4,hidden=32,heads=4,vocab=64,seq=16"
    restriction = restriction_of("megatron", shape_of_spec(parse_model(spec)), 16)
    request = request_of(spec, "h100:2", 3, pp=2, micro_batch=1)
    free = {pair for one in layouts_within(request, traced(spec, 16)) for pair in one.schedules}
    found = layouts_within(request.within(restriction), traced(spec, 16))
    assert ("interleaved_1f1b", 2) in free
    assert {pair for one in found for pair in one.schedules} == {("1f1b", 1)}
    assert all((one.schedule, one.stages_per_rank) == ("1f1b", 1) for one in found)


def test_micro_batches_reach_the_batch():
    found = layouts_within(request_of("llama-tiny", "h100:4", 4096, dp=1), traced("llama-tiny", 16))
    assert {one.micro_batch for one in found} == set(divisors(4096))


def test_the_command_prices_what_lies_outside():
    asked = "explain llama-tiny h100:2 --global-batch 4 --seq 16 --time-limit 30"
    args = [*asked.split(), "--pin", "pp=1,recompute=none,offload=none", "--space"]
    shown = CliRunner().invoke(cli, args)
    assert shown.exit_code == 0, shown.output
    assert "Outside of the space" in shown.output and "cp=2" in shown.output
    data = json.loads(CliRunner().invoke(cli, [*args, "--json"]).stdout)
    rules = data["certificate"]["rules"]
    assert [rule["choice"] for rule in rules][:3] == ["devices", "model", "batch"]
    priced = {one["choice"]: one for one in data["outside"]}
    assert priced["cp"]["pin"] == {"cp": 2} and priced["cp"]["time_s"] > 0


@pytest.mark.parametrize("wrong", [{"choice": "tp"}, "tp", {"choice": 1, "values": "", "why": ""}])
def test_rules_of_a_damaged_file_are_refused(wrong):
    plan = api.plan_traced(traced("llama-tiny", 16), request_of("llama-tiny", "h100:1", 1))
    data = json.loads(plan.to_json())
    data["certificate"]["rules"][0] = wrong
    with pytest.raises(AutoparError):
        type(plan).from_json(json.dumps(data))
