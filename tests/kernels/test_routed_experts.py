"""`autopar::routed_experts` against a loop over tokens, in fp64; its pieces; and what torch.library asks of an op."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from autopar_kernels import routed_experts as module
from autopar_kernels.routed_experts import (
    POINTWISE,
    activation_function,
    grouped_mm,
    grouped_outer,
    routed_experts,
    sort_by_expert,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.effort import every, examples
from support.naive_experts import ACTIVATIONS, make, naive, value_and_gradients
from torch.utils.flop_counter import FlopCounterMode

OP = torch.ops.autopar.routed_experts.default
ARGUMENTS = (
    "x",
    "index",
    "weights",
    "up",
    "up_bias",
    "down",
    "down_bias",
    "activation",
    "transposed",
    "capacity_factor",
)


def op(**arguments):
    return OP(*(arguments.get(name, 0.0) for name in ARGUMENTS))


def is_float(value) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


@settings(max_examples=examples(15, 60))
@given(
    sizes=st.tuples(
        st.integers(0, 9),
        st.integers(1, 3),
        st.integers(1, 6),
        st.integers(1, 5),
        st.integers(1, 4),
    ),
    activation=st.sampled_from(ACTIVATIONS),
    transposed=st.booleans(),
    bias=st.booleans(),
    capacity_factor=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    function=st.sampled_from([routed_experts, op]),
    seed=st.integers(0, 9),
)
@example((0, 2, 3, 4, 2), "gated:silu", False, True, 0.0, op, 0)  # no tokens
@example((0, 2, 3, 4, 2), "plain:sigmoid", True, False, 1.0, op, 0)
# every token goes to every expert
@example((5, 3, 3, 4, 2), "plain:sigmoid", True, True, 0.0, op, 0)
@example((1, 1, 6, 4, 2), "gated:gelu", False, True, 0.0, op, 0)  # five experts get nothing
def test_equals_a_loop_over_tokens(
    sizes, activation, transposed, bias, capacity_factor, function, seed
):
    tokens, choices, experts, hidden, ffn = sizes
    arguments = make(
        tokens, min(choices, experts), experts, hidden, ffn, activation, transposed, bias, seed
    )
    arguments["capacity_factor"] = capacity_factor
    assert_same(value_and_gradients(function, arguments), value_and_gradients(naive, arguments))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("capacity_factor", [0.0, 0.8])
def test_all_tokens_to_one_expert_and_choices_of_none(activation, capacity_factor):
    arguments = make(6, 2, 4, 5, 3, activation, False, True) | {"capacity_factor": capacity_factor}
    for index in (
        torch.full((6, 2), 2),
        torch.full((6, 2), 4),
        torch.tensor([[4, 1]] * 3 + [[1, 4]] * 3),
    ):
        arguments["index"] = index  # index 4 is no expert
        assert_same(value_and_gradients(op, arguments), value_and_gradients(naive, arguments))


def test_the_first_tokens_take_the_capacity():
    arguments = make(5, 1, 2, 3, 2, "gated:silu", False, False) | {
        "index": torch.tensor([[1], [0], [1], [1], [1]])
    }
    whole, capped = (
        op(**arguments),
        op(**arguments, capacity_factor=0.8),
    )  # ceil(0.8 * 5 / 2) = 2 choices an expert
    # products of fewer rows may round in another way
    torch.testing.assert_close(capped[:3], whole[:3], rtol=1e-12, atol=1e-12)
    assert whole[3:].all() and not capped[3:].any()


def test_sharded_width_gives_a_partial_sum():
    arguments = make(7, 2, 3, 4, 6, "gated:silu", False, True)
    up, bias, down = (arguments[k] for k in ("up", "up_bias", "down"))
    parts = []
    for rank in range(2):
        # of gate, and of up
        rows = torch.cat([half.chunk(2)[rank] for half in torch.arange(12).chunk(2)])
        mine = {"up": up[:, rows], "up_bias": bias[:, rows], "down": down.chunk(2, 2)[rank]}
        parts.append(op(**arguments | mine | ({"down_bias": None} if rank else {})))
    torch.testing.assert_close(parts[0] + parts[1], op(**arguments), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "wanted", [("x",), ("weights",), ("up",), ("down", "down_bias"), ("x", "up_bias")]
)
def test_gradients_of_some_operands_alone(wanted):
    arguments = make(5, 2, 3, 4, 2, "gated:silu", False, True)
    arguments = {
        k: v.detach().requires_grad_(k in wanted) if is_float(v) else v
        for k, v in arguments.items()
    }
    assert_same(value_and_gradients(op, arguments), value_and_gradients(naive, arguments))


@pytest.mark.parametrize(
    ("capacity_factor", "bias"), every(2, [(0.7, True), (0.0, False)], unpacked=True)
)
def test_torch_library_accepts_the_ops(capacity_factor, bias):
    arguments = make(5, 2, 3, 4, 2, "gated:silu", False, bias)
    torch.library.opcheck(
        OP, tuple({**arguments, "capacity_factor": capacity_factor}[name] for name in ARGUMENTS)
    )
    order, _, ends = sort_by_expert(arguments["index"], 3, capacity_factor)
    rows = arguments["x"].detach()[order // 2].requires_grad_()
    torch.library.opcheck(grouped_mm, (rows, arguments["up"], ends, False))
    torch.library.opcheck(grouped_outer, (rows.detach(), rows.detach(), ends))


@pytest.mark.parametrize("transposed", [False, True])
def test_torchs_grouped_kernel_gives_the_same(transposed, monkeypatch):
    """The path of bf16 on CUDA, on CPU: same calls, in fp32."""
    torch.manual_seed(0)
    ends = torch.tensor([3, 3, 9, 10])  # an empty expert, and two rows of none
    rows, weight, right = torch.randn(12, 8), torch.randn(4, 8, 16), torch.randn(12, 16)
    weight = weight if transposed else weight.transpose(1, 2).contiguous()
    expected = grouped_mm(rows, weight, ends, transposed), grouped_outer(rows, right, ends)
    monkeypatch.setattr(module, "_has_kernel", lambda *operands: True)
    found = grouped_mm(rows, weight, ends, transposed), grouped_outer(rows, right, ends)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not found[0][10:].any() and not found[1][1].any()


@pytest.mark.parametrize(
    ("dtype", "router", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 0.01),
        (torch.bfloat16, torch.float32, 0.01),
    ],
    ids=str,
)
def test_dtypes(dtype, router, tolerance):
    """Routing weights may be wider than the tokens, as transformers' routers give them."""
    arguments = make(6, 2, 3, 8, 4, "gated:silu", False, True)
    low = {
        k: v.to(router if k == "weights" else dtype) if is_float(v) else v
        for k, v in arguments.items()
    }
    out, exact = op(**low), naive(**{k: v.double() if is_float(v) else v for k, v in low.items()})
    assert out.dtype == dtype and (out - exact).norm() <= tolerance * exact.norm()


def test_on_meta_the_kept_tensors_are_those_of_a_run():
    def kept(device):
        arguments = make(6, 2, 3, 8, 4, "gated:silu", False, True)
        arguments = {
            k: v.detach().to(device).requires_grad_(v.requires_grad) if torch.is_tensor(v) else v
            for k, v in arguments.items()
        }
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: shapes.append((t.shape, t.dtype)) or t, lambda t: t
        ):
            out = op(**arguments)
        assert out.shape == (6, 8) and out.device.type == device
        return shapes

    assert kept("meta") == kept("cpu")


def test_flops_are_those_of_the_top_k():
    arguments = make(6, 2, 4, 8, 4, "gated:silu", False, False)
    with FlopCounterMode(display=False, custom_mapping=module.FLOP_FORMULAS) as counter:
        out = op(**arguments)
    forward = counter.get_total_flops()
    assert forward == 2 * 6 * 2 * (8 * 8 + 8 * 4)  # 2 T K (F' H + F H)
    with FlopCounterMode(display=False, custom_mapping=module.FLOP_FORMULAS) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * forward


@pytest.mark.parametrize(
    "text",
    [
        "",
        "silu",
        "gated",
        "gated:nothing",
        "plain:silu:1",
        "interleaved_clamp:7",
        "interleaved_clamp:a:b",
        "gated_clamp:silu:x",
    ],
)
def test_bad_activations(text):
    with pytest.raises(ValueError, match="activation"):
        activation_function(text)


def test_activations_are_those_of_transformers():
    activations = pytest.importorskip("transformers.activations")
    probe = 5 * torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, function in POINTWISE.items():
        torch.testing.assert_close(
            function(probe), activations.ACT2FN[name](probe), rtol=1e-12, atol=1e-12
        )


@pytest.mark.slow
def test_importing_needs_torch_alone():
    code = (
        "import sys, time, torch; t = time.process_time(); import autopar_kernels.routed_experts; s = time.process_time() - t\n"
        "print({'autopar', 'transformers', 'triton', 'sympy'} & set(sys.modules), torch.cuda.is_initialized(), s, sep=';')"
    )
    root = Path(module.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    found, initialized, seconds = done.stdout.split(";")
    assert (found, initialized) == ("set()", "False") and float(seconds) < 1.5


def test_compiles_without_a_graph_break():
    arguments = make(6, 2, 3, 8, 4, "gated:silu", False, False)
    compiled = torch.compile(
        lambda x, w: F.relu(op(**arguments | {"x": x, "weights": w})),
        backend="aot_eager",
        fullgraph=True,
    )
    torch.testing.assert_close(
        compiled(arguments["x"], arguments["weights"]), F.relu(op(**arguments))
    )
