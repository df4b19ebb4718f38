"""The reference models: export, loss, initialisation, and each against a formulation written another way."""

import pytest
import torch
import torch.nn.functional as F
from support.effort import every
from torch.export import Dim, export

from autopar.models import CONFIGS, parse_model
from autopar.models.common import shifted_loss
from autopar.models.gpt import GPTConfig
from autopar.models.moe import MoEConfig, RoutedMLP

TINY = ["llama-tiny", "gpt-tiny", "moe-tiny"]


def capture(spec, seq=16, **build):
    inputs = spec.example_inputs(4, seq)
    dynamic = {name: {0: Dim.DYNAMIC} for name in inputs}
    return export(spec.build("meta", **build), (), inputs, dynamic_shapes=dynamic, strict=False)


def targets(program):
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", every(3, [torch.bfloat16, torch.float32, torch.float64]))
def test_exports_on_meta_with_dynamic_batch(name, dtype):
    program = capture(parse_model(name), dtype=dtype)
    batch, seq = (
        program.graph_signature
        and next(n for n in program.graph.nodes if n.name == "input_ids").meta["val"].shape
    )
    assert isinstance(batch, torch.SymInt) and seq == 16
    attention = [
        n
        for n in program.graph.nodes
        if n.target == torch.ops.aten.scaled_dot_product_attention.default
    ]
    assert len(attention) == 2 and all(n.args[5] for n in attention)  # is_causal
    # no buffers
    assert not [n for n in program.graph.nodes if n.op == "placeholder" and n.name.startswith("b_")]


@pytest.mark.parametrize("name", every(3, TINY))
def test_exported_graph_runs_at_another_batch_size(name):
    spec = parse_model(name)
    torch.manual_seed(0)
    model = spec.build("cpu", torch.float64)
    inputs = spec.example_inputs(4, 13, "cpu")
    program = export(
        model, (), inputs, dynamic_shapes={key: {0: Dim.DYNAMIC} for key in inputs}, strict=False
    )
    other = spec.example_inputs(7, 13, "cpu")
    torch.testing.assert_close(program.module()(**other), model(**other))


@pytest.mark.parametrize("name", TINY)
def test_loss_equals_a_hand_written_sum_over_valid_targets(name):
    spec = parse_model(name)
    torch.manual_seed(0)
    model = spec.build("cpu", torch.float64)
    inputs = spec.example_inputs(3, 11, "cpu")
    labels = inputs["labels"]
    labels[0, 4:] = -100
    labels[2, ::3] = -100
    logits = model(inputs["input_ids"])
    assert logits.shape == (3, 11, spec.vocab)
    total, count = 0.0, 0
    for row in range(3):
        for position in range(10):
            if (target := labels[row, position + 1].item()) != -100:
                total, count = total - logits[row, position].log_softmax(0)[target], count + 1
    torch.testing.assert_close(shifted_loss(logits, labels), total / count)
    balance = 0.0 if "moe" not in name else model(**inputs) - shifted_loss(logits, labels)
    torch.testing.assert_close(model(**inputs), total / count + balance)
    if "moe" in name:  # alpha times 2 layers of a balance loss that is at least about 1
        assert 0.015 < balance.item() < 0.05


def test_half_precision_loss_is_computed_in_fp32():
    logits, labels = torch.randn(2, 5, 9, dtype=torch.bfloat16), torch.randint(9, (2, 5))
    assert shifted_loss(logits, labels).dtype == torch.float32


@pytest.mark.parametrize("name", TINY)
def test_future_tokens_do_not_reach_the_past(name):
    spec = parse_model(name)
    torch.manual_seed(0)
    model = spec.build("cpu", torch.float64)
    ids = spec.example_inputs(1, 9, "cpu")["input_ids"]
    changed = ids.clone()
    changed[0, 6] = (changed[0, 6] + 1) % spec.vocab
    difference = (model(ids) - model(changed)).abs().amax(dim=2)[0]
    # An expert multiplies the rows of its tokens at once: how many there are, which the future decides, may change the order of sums.
    assert difference[:6].max() <= (1e-14 if "moe" in name else 0) and difference[6:].min() > 1e-8


@pytest.mark.parametrize("name", TINY)
def test_every_module_with_parameters_can_reset_them(name):
    spec = parse_model(name)
    model = spec.build("meta").to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert 3.5 < model(**spec.example_inputs(2, 8, "cpu")).item() < 6.5  # about log(vocab)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_tied_embeddings_stay_tied(device, dtype):
    model = parse_model("gpt-tiny").build(device, dtype)
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.dtype == (dtype or torch.float32)


def test_gpt_dropout_only_when_asked():
    def ops(dropout):
        with torch.device("meta"):
            model = GPTConfig(
                vocab=64, hidden=32, layers=1, heads=2, max_seq=16, dropout=dropout
            ).module()
        ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
        return targets(export(model, (ids, ids.clone()), strict=False))

    dropout = torch.ops.aten.dropout.default
    assert dropout not in ops(0.0) and ops(0.1).count(dropout) == 3


@pytest.mark.parametrize("shared_ffn", [0, 6])
@pytest.mark.parametrize("capacity_factor", [0, 0.9])
def test_routed_mlp_equals_a_loop_over_tokens(shared_ffn, capacity_factor):
    torch.manual_seed(0)
    config = MoEConfig(
        16,
        8,
        1,
        2,
        1,
        ffn=12,
        experts=5,
        top_k=2,
        shared_ffn=shared_ffn,
        capacity_factor=capacity_factor,
    )
    mlp = RoutedMLP(config).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    mixed, balance = mlp(x)
    experts, counts, mean = (
        mlp.experts,
        torch.zeros(5, dtype=torch.float64),
        torch.zeros(5, dtype=torch.float64),
    )
    capacity = 6 if capacity_factor else 28  # ceil(0.9 * 14 * 2 / 5)
    dropped = 0
    for row in range(2):
        for position in range(7):
            token = x[row, position]
            expected = 0.0 if mlp.shared is None else mlp.shared(token)
            probabilities = (mlp.router.weight @ token).softmax(0)
            mean += probabilities / 14
            best = probabilities.argsort(descending=True)[:2]
            for index in best.tolist():
                counts[index] += 1 / 28
                if counts[index] * 28 > capacity + 0.5:  # this choice included
                    dropped += 1
                    continue
                gate, up = (experts.gate_up_proj[index] @ token).chunk(2)
                expected = expected + probabilities[index] / probabilities[best].sum() * (
                    experts.down_proj[index] @ (F.silu(gate) * up)
                )
            torch.testing.assert_close(mixed[row, position], torch.zeros(8).double() + expected)
    assert bool(dropped) == bool(capacity_factor)
    torch.testing.assert_close(balance, 5 * (counts * mean).sum())


def test_fused_qkv_is_ordered_by_head():
    torch.manual_seed(0)
    config = CONFIGS["gpt-tiny"]
    attention = config.module().double().blocks[0].attention
    x = torch.randn(2, 6, config.hidden, dtype=torch.float64)
    weight = attention.qkv.weight.view(config.heads, 3, config.head_dim, config.hidden)
    heads = []
    for head in range(config.heads):
        q, k, v = (x @ weight[head, index].T for index in range(3))
        heads.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    expected = attention.proj(torch.cat(heads, dim=2))
    torch.testing.assert_close(attention(x), expected)
