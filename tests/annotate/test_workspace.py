"""Workspace of backward, by hand; what software changes of what is kept."""

from __future__ import annotations

import pytest

import autopar
from autopar.annotate.activations import BackwardOp, backward_workspace
from autopar.errors import AutoparError
from autopar.models.base import NativeSpec
from autopar.models.gpt import GPTConfig
from autopar.request.software import Software

SPEC = NativeSpec.of(
    "gpt",
    GPTConfig(
        vocab=512, hidden=256, layers=4, heads=4, max_seq=128, fused_attention=False, dropout=0.1
    ),
)
PIN = {
    "tp": 2,
    "dp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "micro_batch": 2,
    "zero": 0,
    "recompute": "none",
    "sequence_parallel": True,
}


def test_gradients_replace_what_was_kept():
    """In x (10) -a-> h (40) -b-> y (10), a keeps x, b keeps h: at b the gradients of y and h (50); at a those of h and x, h being freed."""
    sizes = {"x": 10, "h": 40, "y": 10}
    a, b = BackwardOp(("h",), ("x",), {"x": 10}), BackwardOp(("y",), ("h",), {"h": 40})
    assert backward_workspace([a, b], sizes, ["y"]) == 50
    assert (
        backward_workspace([BackwardOp(("h",), ("x",), {"x": 10}, own=45), b], sizes, ["y"])
        == 40 + 10 + 45 - 40
    )
    wide = BackwardOp(("y",), ("h",), {})
    assert backward_workspace([a, wide], sizes, ["y"]) == 50, (
        "at a, h and x are as much as y and h were before"
    )


def test_a_sum_hands_its_gradient_on():
    """In y = x + f(x) the gradient of x is that of y, to which f's is added."""
    sizes = {"x": 10, "f": 10, "y": 10}
    f, add = BackwardOp(("f",), ("x",), {"x": 10}), BackwardOp(("y",), ("x", "f"), {}, passes=True)
    assert backward_workspace([f, add], sizes, ["y"]) == 10


def memory(recompute: str = "none", **software) -> dict[str, int]:
    inputs, pin = SPEC.example_inputs(2, 128), PIN | {"recompute": recompute}
    return autopar.plan(
        SPEC.build("meta"),
        "h100:2",
        inputs,
        4,
        pin,
        precision="bf16",
        software=Software(**software),
    ).predicted.memory


@pytest.mark.slow
def test_what_software_changes():
    eager, megatron = memory(), memory(gathers_again=True)
    tokens, h = 2 * 128, 256
    # inputs of qkv and up of each layer and of the head: half of each
    gathered = (4 * (1 + 1) + 1) * 2 * tokens * h // 2
    assert eager["kept"] - megatron["kept"] == pytest.approx(1.14 * gathered, rel=1e-3)
    state = memory(state_recipe="deepspeed_bf16")
    assert state["gradients"] == 2 * eager["gradients"] and state["optimizer"] == eager["optimizer"]
    assert memory(workspace_bytes=1000)["fixed"] == eager["fixed"] + 1000
    assert memory(loss_kernel="fused")["kept"] <= eager["kept"] - 2 * tokens * 512 // 2, (
        "16 bits a logit less, vocabulary sharded or not"
    )


@pytest.mark.parametrize(("options", "message"), [
    ({"loss_kernel": "quick"}, "loss_kernel='quick' is not known"),
    ({"state_recipe": "fsdpp"}, "state_recipe='fsdpp' is not known"),
    ({"workspace_bytes": -1}, "must be a whole number"),
    ({"keeps_fp8": 1}, "must be True or False"),
])  # fmt: skip
def test_errors(options, message):
    with pytest.raises(AutoparError, match=message):
        Software(**options)
