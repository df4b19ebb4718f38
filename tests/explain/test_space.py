"""The search space in words: another program lists the same candidates from the printed rules alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from autopar import api
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError, NoLayout
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import AXES
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.planning.candidates import PP_INSIDE_DP, layouts_within
from autopar.planning.outside import outside_of
from autopar.planning.space import space_rules
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from autopar.targets.model_shape import shape_of
from autopar.targets.registry import restriction_of

Key = tuple[int, int, int, int, int, str, int, int, int]
"""pp, tp, cp, dp, ep, order, micro-batch, ZeRO stage, ranks that share (0: all)."""


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def listed(rules: Mapping[str, str]) -> Iterator[Key]:
    """Every candidate that rules in words allow, by choice. It reads the words, and calls nothing of autopar."""
    devices, per_node = map(
        int, re.fullmatch(r"(\d+) \S+ in nodes of (\d+)", rules["devices"]).groups()
    )
    (batch,) = numbers(rules["batch"])
    (layers,), heads, (positions,), experts = (
        numbers(text)
        for text in re.fullmatch(
            r"(.*) layers, attention heads (.*), (.*) positions, experts (.*)", rules["model"]
        ).groups()
    )
    for pp, tp, cp in product(divisors(devices), repeat=3):
        dp = devices // (pp * tp * cp)
        kept = (
            dp * pp * tp * cp == devices,
            dp and batch % dp == 0,
            allows(rules["pp"], pp, r"divisors of the devices up to (\d+)", lambda pp, most: pp <= min(most, layers)),
            allows(rules["tp"], tp, r"divisors of devices / pp up to (\d+) that divide the attention heads",
                   lambda tp, most: tp <= most and all(count % tp == 0 for count in heads)),
            allows(rules["cp"], cp, r"1, and divisors of devices / \(pp x tp\) of which twice divides the positions, with at least "
                   r"(\d+) positions a rank or (\d+) in all",
                   lambda cp, share, long: cp == 1 or (positions % (2 * cp) == 0 and (positions >= long or positions >= share * cp))),
            allows(rules["dp"], dp, "what is left, if it divides the batch", bool),
        )  # fmt: skip
        if not all(kept):
            continue
        for ep, micro in product(divisors(dp), divisors(batch // dp)):
            kept = (
                ep == 1 or (experts and ep <= experts[0]),
                allows(rules["ep"], ep, "divisors of dp that divide the experts", lambda ep: ep == 1 or (experts and experts[0] % ep == 0)),
                allows(rules["micro_batch"], micro, "divisors of batch / dp", bool),
            )  # fmt: skip
            # of cp, ep and dp, which are around tp
            near = per_node // tp if per_node % tp == 0 else 0
            for zero in zeros(rules["zero"], pp, dp * cp) if all(kept) else ():
                for shard in shards(rules["shard"], zero, pp, near, dp * cp, ep * cp):
                    yield pp, tp, cp, dp, ep, rules["order"], micro, zero, shard


def allows(rule: str, value: int, words: str, keeps: Callable[..., object]) -> object:
    """Whether a rule allows a value: the pinned one, or one that `keeps` the numbers of the rule's words."""
    if rule.isdigit():
        return value == int(rule)
    return keeps(value, *map(int, re.fullmatch(words, rule).groups()))


def zeros(rule: str, pp: int, ranks: int) -> list[int]:
    if rule.isdigit():
        return [int(rule)] if ranks > 1 or rule == "0" else []
    found = re.fullmatch(r"([\d, ]+), not 2 with a pipeline, and 0 alone where dp x cp is 1", rule)
    return [0] if ranks == 1 else [zero for zero in numbers(found[1]) if pp == 1 or zero != 2]


def shards(rule: str, zero: int, pp: int, near: int, ranks: int, together: int) -> list[int]:
    also = "under ZeRO 3 without a pipeline also those within a node, if there are more nodes"
    assert rule == f"all ranks of dp x cp; {also}"
    fits = 1 < near < ranks and ranks % near == 0 and near % together == 0
    return [0, near] if zero == 3 and pp == 1 and fits else [0]


@cache
def traced(name: str, seq: int) -> TracedModel:
    return api.trace_spec(parse_model(name), seq)


def request_of(name: str, cluster: str, batch: int, **pin: object) -> PlanRequest:
    return PlanRequest(ClusterSpec.parse(cluster), batch, Pins.of(pin), "bf16", False, name)


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
    keys = {
        (m.pp, m.tp, m.cp, m.dp, m.ep, m.order or "-".join(AXES), one.micro_batch, one.zero, one.shard)
        for one in found
        for m in (one.mesh,)
    }  # fmt: skip
    if "pp" in pin:  # which of the two orders a mesh has is about nodes
        assert {(*key[:5], *key[6:]) for key in keys} == {(*k[:5], *k[6:]) for k in listed(rules)}
        assert {key[5].removesuffix("-tp") for key in keys} <= {"pp-dp-ep-cp", "dp-pp"}
    else:
        assert keys == set(listed(rules))


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
    restriction = restriction_of("megatron", shape_of(parse_model(spec)), 16)
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
