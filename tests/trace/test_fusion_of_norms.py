"""Norms in every spelling become one op whose attributes carry the numerics; what only looks like one stays, with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import every, examples
from support.fusion_graphs import WIDTH, calls, fused_from, traced

from autopar.ir.fusion import Fusion
from autopar.trace.fusion import fused as fusing
from autopar.trace.fusion.fused import fused
from autopar.trace.fusion.matches import Match
from autopar.trace.fusion.norms import match_norm

EPS = 1e-5
SQUARES = (lambda x: x * x, lambda x: x.pow(2), lambda x: x.square(), lambda x: x**2.0)
ROOTS = (
    lambda m: torch.rsqrt(m),
    lambda m: m.pow(-0.5),
    lambda m: 1 / m.sqrt(),
    lambda m: m.sqrt().reciprocal(),
    lambda m: (1.0 / m).sqrt(),
)
SCALES = (
    lambda x, r, w: x * r * w,
    lambda x, r, w: w * (r * x),
    lambda x, r, w: (w * r) * x,
    lambda x, r, w: -x * (-r) * w,
)


def written(square, root, scale, eps=EPS):
    def norm(x, w, v):
        mean = square(x).mean(-1, keepdim=True)
        return scale(x, root(eps + mean), w)

    return norm


@given(
    st.sampled_from(SQUARES),
    st.sampled_from(ROOTS),
    st.sampled_from(SCALES),
    st.sampled_from([1e-6, 1e-5, 0.5]),
)
@settings(max_examples=examples(5, 50))
def test_every_spelling_is_one_op(square, root, scale, eps):
    model = fused_from(written(square, root, scale, eps))
    assert [op.op for op in model.fusion.fused] == ["autopar::rms_norm"], model.fusion
    assert model.fusion.fused[0].attributes == {"eps": eps, "offset": 0.0, "cast": "none"}
    assert not {"aten::rsqrt", "aten::mul"} & set(calls(model))


def llama(x, w, v):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return w * h.to(x.dtype)


def gemma(x, w, v):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h * (1.0 + w.float())).type_as(x)


def scaled_in_fp32(x, w, v):
    h = x.to(torch.float32)
    return (w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


def t5(x, w, v):
    mean = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(mean + EPS)).to(w.dtype)


def unweighted(x, w, v):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def half_alone(x, w, v):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def root_rounded(x, w, v):
    """As DeepSeek-V4 writes it: what x is multiplied by is rounded before."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype)


def root_rounded_and_weighted(x, w, v):
    return w * root_rounded(x, w, v)


def of_torch(x, w, v):
    return F.rms_norm(x, (WIDTH,), w, EPS)


BODIES = {
    llama: ("before", 0.0),
    gemma: ("after", 1.0),
    scaled_in_fp32: ("after", 0.0),
    t5: ("before", 0.0),
    unweighted: ("after", 0.0),
    half_alone: ("none", 0.0),
    root_rounded: ("after", 0.0),
    root_rounded_and_weighted: ("before", 0.0),
}


@pytest.mark.parametrize("body", every(2, BODIES), ids=lambda body: body.__name__)
def test_where_a_norm_rounds_is_an_attribute(body):
    model = fused_from(body, torch.bfloat16)
    (op,) = model.fusion.fused
    cast, offset = BODIES[body]
    assert op.attributes == {"eps": EPS, "offset": offset, "cast": cast}
    assert not model.fusion.missed


def test_norms_of_torch():
    model = fused_from(of_torch, torch.bfloat16)
    assert model.fusion.fused[0].attributes == {"eps": EPS, "cast": "after"}
    default = fused_from(lambda x, w, v: F.rms_norm(x, (WIDTH,), w), torch.bfloat16)
    assert default.fusion.fused[0].attributes["eps"] == torch.finfo(torch.float32).eps
    layer = fused_from(lambda x, w, v: F.layer_norm(x, (WIDTH,), w, v, EPS), torch.bfloat16)
    assert layer.fusion.fused[0].op == "autopar::layer_norm"
    both = fused_from(lambda x, w, v: F.layer_norm(x, (3, WIDTH)))
    assert not both.fusion.fused and "2 dims" in both.fusion.missed[0].reason


def to_another_power(x, w, v):
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).pow(-0.45) * w


def of_a_cube(x, w, v):
    return x * (x.pow(3).mean(-1, keepdim=True) + EPS).rsqrt() * w


def of_another_square(x, w, v):
    return x * ((x * v).pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * w


def scaled_besides(x, w, v):
    return 1.01 * x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * w


def negative(x, w, v):
    return x * (x.pow(2).mean(-1, keepdim=True) - EPS).rsqrt() * w


def learned(x, w, v):
    return x * (x.pow(2).mean(-1, keepdim=True) + v.abs().sum()).rsqrt() * w


NEAR = {
    to_another_power: "raised to -0.45",
    of_a_cube: "of no square",
    of_another_square: "not what is squared",
    scaled_besides: "scaled by 1.01",
    negative: "may be negative",
    learned: "is no number",
}


@pytest.mark.parametrize("body", every(2, NEAR), ids=lambda body: body.__name__)
def test_a_near_miss_stays_and_says_why(body):
    model = fused_from(body)
    assert not model.fusion.fused and unlike_ours(model)
    assert [NEAR[body] in miss.reason for miss in model.fusion.missed] == [True], model.fusion


def unlike_ours(model) -> bool:
    """Whether all ops of a model are torch's."""
    return all(name.startswith("aten::") for name in calls(model))


def off_by_a_constant(x, w, v):
    """The mean is over one element more."""
    return x * (x.pow(2).sum(-1, keepdim=True) / (WIDTH + 1) + EPS).rsqrt() * w


def outside_of_the_root(x, w, v):
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + EPS) * w


def over_another_dim(x, w, v):
    return x * (x.pow(2).mean(1, keepdim=True) + EPS).rsqrt() * w


def over_no_root(x, w, v):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS) * w


def detached(x, w, v):
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt().detach() * w


OTHERS = (off_by_a_constant, outside_of_the_root, over_another_dim, over_no_root, detached)


@pytest.mark.parametrize("body", every(2, OTHERS), ids=lambda body: body.__name__)
def test_what_differs_in_a_constant_or_a_dim_stays(body):
    model = fused_from(body)
    assert not model.fusion.fused and unlike_ours(model)


def test_values_inside_that_are_used_elsewhere_forbid_a_match():
    def root_used(x, w, v):
        root = (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
        return x * root * w + root

    model = fused_from(root_used)
    assert not model.fusion.fused and "used elsewhere" in model.fusion.missed[0].reason

    def unscaled_used(x, w, v):
        normed = x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
        return normed * w + torch.sin(normed)

    model = fused_from(unscaled_used)
    assert [op.op for op in model.fusion.fused] == ["autopar::rms_norm"]
    assert "aten::mul" in calls(model), "the weight stays outside"


def residual_used_before(x, w, v):
    total = x + torch.tanh(x)
    early = torch.sin(total)
    return llama(total, w, v) + early + total


def test_a_sum_before_a_norm_is_a_second_result():
    model = fused_from(residual_used_before)
    (op,) = model.fusion.fused
    assert op.op == "autopar::add_rms_norm" and op.replaced[0] == "add"
    names = calls(model)
    assert names.index("autopar::add_rms_norm") < names.index("aten::sin")


def summed_twice(x, w, v):
    y = torch.tanh(x)
    return w * (x + y) * (EPS + (y + x).square().mean(-1, keepdim=True)).rsqrt()


def layer_summed_twice(x, w, v):
    y = torch.tanh(x)
    return F.layer_norm(x + y, (WIDTH,), w, v) * (x + y)


@pytest.mark.parametrize("body", [summed_twice, layer_summed_twice])
def test_a_sum_that_is_written_twice_is_the_same_sum(body):
    (op,) = fused_from(body).fusion.fused
    assert op.op in ("autopar::add_rms_norm", "autopar::add_layer_norm")


def plain(x, w, v):
    return w * x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


FORGETFUL = {
    "in eps": lambda x, w, v: (
        plain(x, w, v) - (0 * v.sum() + x.square().mean(-1, keepdim=True)).rsqrt() * x
    ),
    "in the weight": lambda x, w, v: plain(x, w + 0 * v, v),
    "in what is normalised": lambda x, w, v: plain(x + 0 * v.sum(), w, v),
    "added and taken away": lambda x, w, v: plain(x + v - v, w, v),
    "multiplied and divided": lambda x, w, v: plain(x, w * v / v, v),
    "to the power of 0": lambda x, w, v: plain(x, w, v) * v**0,
}


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_parameter_without_effect_is_still_read(name):
    """It has a gradient of 0, decays, and passes NaN on."""
    model = fused_from(FORGETFUL[name])
    for block in model.classes:
        read = {node.target for node in block.graph.nodes if node.op == "get_attr"}
        assert read == set(block.slots)


@pytest.mark.parametrize(
    "total",
    [lambda x: x + 1.0, lambda x: torch.add(x, x.tanh(), alpha=2), lambda x: x + x[:1].sum()],
    ids=["a number", "a multiple", "a scalar"],
)
def test_other_sums_stay_outside(total):
    model = fused_from(lambda x, w, v: llama(total(x), w, v))
    assert [op.op for op in model.fusion.fused] == ["autopar::rms_norm"]


def test_the_program_computes_the_same_in_fp64():
    for body in (llama, gemma, residual_used_before, of_torch):
        before = traced(body, torch.float64)
        after = fused(before, "norms")
        assert before.fusion == Fusion() and unlike_ours(before), "the model itself stays"
        generator = torch.Generator().manual_seed(1)
        for old, new in zip(before.classes, after.classes, strict=True):
            values = {
                node.name: torch.randn(
                    [4 if isinstance(n, torch.SymInt) else n for n in node.meta["val"].shape],
                    generator=generator,
                    dtype=torch.float64,
                )
                for node in old.graph.nodes
                if node.op in ("placeholder", "get_attr")
            }
            results = [run(each.graph, values) for each in (old, new)]
            for one, other in zip(*results, strict=True):
                assert (one - other).abs().max() <= 1e-12 * one.abs().max()


def run(graph, values):
    """What a graph of a class returns."""
    env = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            env[node] = values[node.name]
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
    return [env[node] for node in graph.output_node().args[0]]


def in_fp32(x, w, v):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * w).to(v.dtype)


@pytest.mark.parametrize(
    ("attributes", "words"), [({"eps": 2 * EPS}, "in fp64"), ({"cast": "weight"}, "the op gives")]
)
def test_a_wrong_matcher_is_found_out(monkeypatch, attributes, words):
    """The evaluation refuses what the algebra lets pass, in fp64 and in the dtype of the graph."""

    def wrong(algebra, node):
        found = match_norm(algebra, node)
        ours = isinstance(found, Match) and "weight" in found.operands
        return replace(found, attributes=found.attributes | attributes) if ours else None

    monkeypatch.setattr(fusing, "_MATCHERS", {"norms": (wrong,)})
    model = fused_from(lambda x, w, v: torch.sin(in_fp32(x, w, v.float())), torch.bfloat16)
    assert not model.fusion.fused and words in model.fusion.missed[0].reason


def test_modes():
    model = traced(llama)
    assert fused(model, "off") is model
    assert fused(fused(model, "norms"), "norms") is fused(model, "norms")
    with pytest.raises(ValueError, match="fuse=norms, not all"):
        fused(fused(model, "norms"), "all")
    with pytest.raises(ValueError, match="off, norms, all"):
        Fusion("some")


def gated_after(x, w, v):
    """Qwen3-Next: the gate in fp32, after the weight."""
    gate, h = torch.sin(x), x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (w * h.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


def gated_before(x, w, v):
    """Mamba 2."""
    h = x.float() * F.silu(torch.sin(x).float())
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


@pytest.mark.parametrize("mode", ["norms", "all"])
@pytest.mark.parametrize("dtype", every(2, [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("body", [gated_after, gated_before])
def test_a_gate_before_or_after_a_norm(body, dtype, mode):
    (only,) = fused_from(body, dtype, mode).fusion.fused
    assert only.op == "autopar::rms_norm"
    assert only.attributes["gate_first"] is (body is gated_before)


def test_other_gates_stay_outside():
    def by_a_vector(x, w, v):
        return llama(x, w, v) * F.silu(v)

    def by_another_activation(x, w, v):
        return llama(x, w, v) * F.gelu(torch.sin(x))

    for body in (by_a_vector, by_another_activation):
        (only,) = fused_from(body).fusion.fused
        assert "gate_first" not in only.attributes
