"""Gated activations, rotary positions and cross-entropies become ops of ours in their spellings; what differs stays, with a reason."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.effort import every
from support.fusion_graphs import WIDTH, calls, fused_from

from autopar.ir.calls import op_name

GATED = {
    "silu": lambda x, w, v: F.silu(x) * (x * w),
    "gelu": lambda x, w, v: (x * w) * F.gelu(x),
    "gelu_tanh": lambda x, w, v: F.gelu(x, approximate="tanh") * (x * w),
    "relu": lambda x, w, v: F.relu(x) * (x * w),
}


def only(model, op):
    """The attributes of the one op that is fused."""
    assert [each.op for each in model.fusion.fused] == [op], model.fusion
    return model.fusion.fused[0].attributes


@pytest.mark.parametrize("act", GATED)
def test_gated_activations(act):
    assert only(fused_from(GATED[act], mode="all"), "autopar::glu")["act"] == act


def spelled_silu(x, w, v):
    return x * torch.sigmoid(x) * torch.sin(x)


def halves(x, w, v):
    gate, up = torch.cat([x, torch.sin(x)], -1).chunk(2, -1)
    return F.silu(gate) * up


def halves_the_other_way(x, w, v):
    up, gate = torch.cat([x, torch.sin(x)], -1).chunk(2, -1)
    return up * F.gelu(gate)


def raised(x, w, v):
    return F.silu(x) * (torch.sin(x) + 1)


def wide(x, w, v):
    return (F.silu(x.float()) * torch.sin(x).float()).to(x.dtype)


def rounded_between(x, w, v):
    return F.silu(x.float()).to(x.dtype) * torch.sin(x)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (spelled_silu, {"act": "silu", "shift": 0.0}),
        (halves, {"act": "silu", "shift": 0.0, "layout": "gate_up"}),
        (halves_the_other_way, {"act": "gelu", "shift": 0.0, "layout": "up_gate"}),
        (raised, {"act": "silu", "shift": 1.0}),
        (wide, {"act": "silu", "shift": 0.0}),
        (rounded_between, {"act": "silu", "shift": 0.0}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_spellings_of_gated_activations(body, expected):
    assert only(fused_from(body, torch.bfloat16, "all"), "autopar::glu") == expected


OTHERS = {
    "another sigmoid": lambda x, w, v: x * torch.sigmoid(1.702 * x) * torch.sin(x),
    "a vector": lambda x, w, v: F.silu(x) * w,
    "a square": lambda x, w, v: F.relu(x) * F.relu(x),
    "a leaky gate": lambda x, w, v: F.leaky_relu(x) * torch.sin(x),
}


@pytest.mark.parametrize("factor", [0, 1e200, 1e-200])
def test_factors_without_a_finite_inverse_or_square(factor):
    """Such as a term that is switched off."""

    def body(x, w, v):
        return F.silu(x) * torch.sin(x) + (x * factor) * (x * factor) / (x * factor)

    only(fused_from(body, mode="all"), "autopar::glu")


@pytest.mark.parametrize("name", every(2, OTHERS))
def test_what_is_no_gated_activation_stays(name):
    model = fused_from(OTHERS[name], mode="all")
    assert not model.fusion.fused and all(op.startswith("aten::") for op in calls(model))


def layer(x, w, v):
    """x passes a square matrix that is no parameter, with the vector w added."""
    return F.linear(x, torch.outer(v, v), w)


def joint_layer(x, w, v):
    """As transformers' Conv1D writes it."""
    return torch.addmm(w, x.view(-1, WIDTH), torch.outer(v, v)).view(x.shape)


def gelu_by_tanh(x, slope=0.044715):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + slope * torch.pow(x, 3.0))))


def bent_and_read(x):
    return gelu_by_tanh(x) + torch.sin(x)


BIASED = {
    "a sum": (lambda x, w, v: F.gelu(v + torch.sin(x)), "gelu"),
    "relu": (lambda x, w, v: F.relu(torch.sin(x) + v), "relu"),
    "a product": (lambda x, w, v: gelu_by_tanh(layer(x, w, v)), "gelu_tanh"),
    "a reshaped product": (lambda x, w, v: gelu_by_tanh(joint_layer(x, w, v)), "gelu_tanh"),
}


@pytest.mark.parametrize("dtype", every(2, [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("name", BIASED)
def test_activations_after_a_bias(name, dtype):
    body, act = BIASED[name]
    model = fused_from(body, dtype, "all")
    assert only(model, "autopar::bias_activation") == {"act": act}


def test_the_product_before_loses_its_bias():
    for body, product in ((layer, "aten::linear"), (joint_layer, "aten::mm")):
        model = fused_from(lambda x, w, v, body=body: gelu_by_tanh(body(x, w, v)), mode="all")
        nodes = [n for c in model.classes for n in c.graph.nodes if op_name(n) == product]
        assert "aten::addmm" not in calls(model)
        assert [len(n.args) for n in nodes].count(2) == 1


ALONE = {
    "one op after a product": lambda x, w, v: F.relu(layer(x, w, v)),
    "a product that others read": lambda x, w, v: bent_and_read(layer(x, w, v)),
    "a product without a bias": lambda x, w, v: gelu_by_tanh(F.linear(x, torch.outer(v, w))),
    "a vector of another length": lambda x, w, v: F.relu(x + w[:1]),
    "another slope": lambda x, w, v: gelu_by_tanh(layer(x, w, v), 0.0447),
    "an activation of its own kind": lambda x, w, v: F.leaky_relu(layer(x, w, v)),
}


@pytest.mark.parametrize("name", every(2, ALONE))
def test_other_activations_stay(name):
    assert not fused_from(ALONE[name], mode="all").fusion.fused


def angles(x, neighbours=False):
    places = torch.arange(x.shape[1], dtype=torch.float32).unsqueeze(1)
    table = places * torch.linspace(0.1, 1, WIDTH // 2)
    table = table.repeat_interleave(2, -1) if neighbours else torch.cat([table, table], -1)
    return table.cos().to(x.dtype), table.sin().to(x.dtype)


def turned_halves(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def turned_slices(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def turned_neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def turned_back(x):
    first, second = x.chunk(2, -1)
    return torch.cat((second, -first), -1)


def rotated(turn, neighbours=False, sign=1.0, scale=1.0):
    """x (b, t, c) as one head."""

    def body(x, w, v):
        cos, sin = angles(x, neighbours)
        heads = x.unsqueeze(1)
        return (heads * cos + sign * scale * turn(heads) * sin).squeeze(1)

    return body


def attributes(interleaved=False, **others):
    return {
        "interleaved": interleaved,
        "heads_last": False,
        "promote": True,
        "parted": False,
    } | others


@pytest.mark.parametrize("sign", every(2, [-1.0, 1.0]))
@pytest.mark.parametrize("turn", [turned_halves, turned_slices, turned_neighbours, turned_back])
def test_rotary_positions(turn, sign):
    neighbours = turn is turned_neighbours
    model = fused_from(rotated(turn, neighbours, sign), mode="all")
    assert only(model, "autopar::rotary_single") == attributes(neighbours)
    assert ("aten::neg" in calls(model)) is ((sign < 0) != (turn is turned_back))


def by_columns(read, write, sign=1.0, upper=1.0):
    """low cos - high sin and high cos + low sin, from halves or neighbours to halves or neighbours."""

    def body(x, w, v):
        cos, sin = (table[..., : WIDTH // 2] for table in angles(x))
        heads = x.unsqueeze(1)
        halves = heads.chunk(2, -1) if read == "halves" else (heads[..., ::2], heads[..., 1::2])
        low, high = halves
        parts = low * cos - sign * high * sin, high * cos * upper + sign * low * sin
        out = torch.cat(parts, -1) if write == "halves" else torch.stack(parts, -1).flatten(-2)
        return out.squeeze(1)

    return body


@pytest.mark.parametrize("columns", [False, True])
def test_scaled_tables(columns):
    """As YaRN scales them: the products are scaled by what the tables were."""

    def body(x, w, v):
        cos, sin = (1.2 * table for table in angles(x))
        heads = x.unsqueeze(1)
        if not columns:
            return (heads * cos - turned_halves(heads) * sin).squeeze(1)
        (a, b), half = heads.chunk(2, -1), WIDTH // 2
        cos, sin = cos[..., :half] * 0.5, sin[..., :half] * 0.5
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).squeeze(1)

    assert only(fused_from(body, mode="all"), "autopar::rotary_single") == attributes()


def test_tables_with_a_dim_for_heads_after_positions():
    def body(x, w, v):
        cos, sin = (table.unsqueeze(1) for table in angles(x))
        heads = x.unsqueeze(2)
        return (heads * cos + turned_halves(heads) * sin).squeeze(2)

    found = only(fused_from(body, mode="all"), "autopar::rotary_single")
    assert found == attributes(heads_last=True)


def test_tables_of_no_dim_stay():
    def body(x, w, v):
        cos, sin = (table[1, 1] for table in angles(x))
        heads = x.unsqueeze(1)
        return (heads * cos + turned_halves(heads) * sin).squeeze(1)

    model = fused_from(body, mode="all")
    assert not model.fusion.fused and "tables of shape ()" in model.fusion.missed[0].reason


@pytest.mark.parametrize("sign", every(2, [-1.0, 1.0]))
@pytest.mark.parametrize(
    ("read", "write"),
    [("halves", "halves"), ("neighbours", "neighbours"), ("neighbours", "halves")],
)
def test_rotary_positions_by_columns(read, write, sign):
    found = only(fused_from(by_columns(read, write, sign), mode="all"), "autopar::rotary_single")
    assert found == attributes(read == "neighbours", parted=read != write)


def test_rotary_positions_of_pairs_of_elements():
    """As complex numbers are spelled: pairs of neighbours are a dim of their own."""

    def body(x, w, v):
        cos, sin = (table.float() for table in angles(x))
        heads = torch.cat([x, torch.sin(x)], -1).unsqueeze(1)
        pairs = heads.float().reshape(*heads.shape[:-1], -1, 2)
        low, high = pairs[..., 0], pairs[..., 1]
        parts = torch.stack((low * cos - high * sin, low * sin + high * cos), -1)
        return parts.flatten(3).type_as(x).squeeze(1)[..., :WIDTH]

    found = only(fused_from(body, torch.bfloat16, "all"), "autopar::rotary_single")
    assert found == attributes(interleaved=True, promote=False)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("cut", ["slices", "split"])
def test_rotary_positions_of_some_columns(last, cut):
    def body(x, w, v):
        cos, sin = (table[..., 1:5] for table in angles(x))
        heads = x.unsqueeze(1)
        sizes = [2, 4] if last else [4, 2]
        parts = heads[..., : sizes[0]], heads[..., sizes[0] :]
        parts = heads.split(sizes, -1) if cut == "split" else parts
        middle = parts[last]
        done = middle * cos + turned_halves(middle) * sin
        return torch.cat([parts[0], done] if last else [done, parts[1]], -1).squeeze(1)

    found = only(fused_from(body, mode="all"), "autopar::rotary_single")
    assert found == attributes(rotated=4, last=last)


def test_what_passes_by_of_another_value_is_no_part_of_a_rotation():
    def body(x, w, v):
        cos, sin = (table[..., :4] for table in angles(x))
        heads, others = x.unsqueeze(1), torch.sin(x).unsqueeze(1)
        middle = heads[..., :4]
        done = middle * cos + turned_halves(middle) * sin
        return torch.cat([done, others[..., 4:]], -1).squeeze(1)

    assert only(fused_from(body, mode="all"), "autopar::rotary_single") == attributes()


def test_rotary_positions_in_a_wider_dtype():
    """As olmo and cohere write it: the op reads what was widened, and rounds."""

    def body(x, w, v):
        cos, sin = (table.float() for table in angles(x))
        heads = x.unsqueeze(1).float()
        return (heads * cos + turned_halves(heads) * sin).to(x.dtype).squeeze(1)

    model = fused_from(body, torch.bfloat16, "all")
    assert only(model, "autopar::rotary_single") == attributes(promote=False)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (rotated(turned_halves, scale=1.01), "it is scaled"),
        (by_columns("neighbours", "halves", upper=-1.0), "it is scaled"),
        (by_columns("halves", "neighbours"), "reads halves, writes neighbours"),
    ],
)
def test_what_is_no_rotation_stays(body, reason):
    model = fused_from(body, mode="all")
    assert not model.fusion.fused and reason in model.fusion.missed[0].reason


def test_tables_that_learn_stay():
    def body(x, w, v):
        heads = x.unsqueeze(1)
        tables = w.expand(1, 3, WIDTH).unsqueeze(1)
        return (heads * tables + turned_halves(heads) * tables).squeeze(1)

    model = fused_from(body, mode="all")
    assert not model.fusion.fused and "need a gradient" in model.fusion.missed[0].reason


def loss(reduction="mean", half=True, **options):
    def body(x, w, v):
        logits = x.float() if half else x
        targets = torch.arange(3).expand(x.shape[0], 3) % WIDTH
        return F.cross_entropy(
            logits.view(-1, WIDTH), targets.reshape(-1), reduction=reduction, **options
        ).to(x.dtype).view(-1, 1) * w  # fmt: skip

    return body


@pytest.mark.parametrize("half", [True, False])
def test_cross_entropy_reads_the_logits_as_they_came(half):
    model = fused_from(loss(half=half, label_smoothing=0.1), torch.bfloat16, "all")
    attributes = {"ignore_index": -100, "label_smoothing": 0.1, "reduction": "sum"}
    assert only(model, "autopar::cross_entropy") == attributes
    assert (model.fusion.fused[0].replaced[0] == "to") is half


def test_probabilities_are_no_classes():
    def body(x, w, v):
        return F.cross_entropy(x.view(-1, WIDTH), torch.softmax(x, -1).view(-1, WIDTH).detach()) * w

    model = fused_from(body, mode="all")
    assert not model.fusion.fused and "probabilities" in model.fusion.missed[0].reason


def hidden(x):
    """A mask that is added, of the shape (3, WIDTH)."""
    places = torch.arange(3).unsqueeze(1) + 3 >= torch.arange(WIDTH)
    return torch.zeros(places.shape, dtype=x.dtype).masked_fill(~places, torch.finfo(x.dtype).min)


SOFTMAXES = {
    "scaled": (lambda x: (x * 0.3).softmax(-1), {"scale": 0.3}),
    "divided": (lambda x: torch.softmax(x / 4, 2), {"scale": 0.25}),
    "masked": (lambda x: (x + hidden(x)).softmax(-1), {}),
    "masked by a product": (
        lambda x: (0.3 * x + (1 - (hidden(x) == 0).to(x.dtype)) * -1e4).softmax(-1),
        {"scale": 0.3},
    ),
    "both": (lambda x: (0.3 * x + hidden(x)).softmax(-1), {"scale": 0.3}),
    "capped": (
        lambda x: (2.0 * torch.tanh(0.3 * x / 2.0) + hidden(x)).softmax(-1),
        {"scale": 0.3, "soft_cap": 2.0},
    ),
    "hidden": (
        lambda x: (0.3 * x).masked_fill(hidden(x) < 0, -torch.inf).softmax(-1),
        {"scale": 0.3},
    ),
    "seen": (lambda x: x.masked_fill(~(hidden(x) == 0), -torch.inf).softmax(-1), {}),
    "in fp32": (
        lambda x: torch.softmax(x * 0.3 + hidden(x), -1, dtype=torch.float32).to(x.dtype),
        {"scale": 0.3},
    ),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_attention_probabilities(name):
    body, expected = SOFTMAXES[name]
    model = fused_from(lambda x, w, v: body(torch.sin(x)), torch.bfloat16, "all")
    found = {key: value for key, value in only(model, "autopar::softmax").items() if value}
    assert found == pytest.approx(expected)


def test_a_model_in_fp64_has_the_same_ops():
    """There the subgraph is exact by definition, and the op may differ from it by its own rounding."""
    for body in (SOFTMAXES["masked"][0], SOFTMAXES["both"][0], lambda x: F.layer_norm(x, (WIDTH,))):
        model = fused_from(lambda x, w, v, body=body: body(torch.sin(x)), torch.float64, "all")
        assert len(model.fusion.fused) == 1, model.fusion.missed


PLAIN = {
    "of scores as they are": lambda x, w, v: x.softmax(-1),
    "of another dim": lambda x, w, v: (0.3 * x).softmax(1),
    "with a mask that learns": lambda x, w, v: (x + w).softmax(-1),
    "with a mask of another number": lambda x, w, v: x.masked_fill(hidden(x) < 0, -1e4).softmax(-1),
}


@pytest.mark.parametrize("name", every(2, PLAIN))
def test_other_softmaxes_stay(name):
    assert not fused_from(PLAIN[name], mode="all").fusion.fused
