"""Programs that autopar rewrote call the kernels: models train a step over two ranks in the interpreter."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from autopar_kernels.launching import LAUNCHES
from torch import Tensor, nn

import autopar
from autopar.models import parse_model
from autopar.models.gpt import GPT, GPTConfig
from autopar.models.hf import HFSpec
from autopar.runtime.ranks.launch import WorkerPool
from autopar.verify.verify import free_network

NORMS = {"norm_forward_kernel", "norm_backward_kernel", "sum_few_kernel"}
LOSS = {
    "cross_entropy_local_kernel",
    "cross_entropy_rows_kernel",
    "cross_entropy_gradient_kernel",
}
GATED = {"glu_forward_kernel", "glu_backward_kernel"}
SOFTMAX = {"softmax_forward_kernel", "softmax_backward_kernel"}
BIASED = {"bias_forward_kernel", "bias_backward_kernel"}
GPT2 = "transformers' GPT-2, whose gelu is written with tanh"
WRITTEN_OUT = "gpt with attention written out"
SIZES = "layers=1,hidden=16,heads=2,vocab=64,seq=8"
CALLED = {
    "llama:kv_heads=2,ffn=24": NORMS | LOSS | GATED | {"rotary_kernel"},
    "gpt:ffn=24": NORMS | LOSS,
    WRITTEN_OUT: NORMS | LOSS | SOFTMAX,
    GPT2: NORMS | LOSS | BIASED,
    "moe:kv_heads=2,ffn=24,experts=4,top_k=2": NORMS
    | LOSS
    | {"rotary_kernel", "gather_sum_kernel", "gather_dot_kernel"},
}
"""The kernels that the program of each model launches."""
HEAD = "gpt:ffn=24", {"tp": 2, "fuse": "head"}
RING = "llama:kv_heads=2,ffn=24", {"cp": 2, "context_method": "ring"}
SLOW = {"llama:kv_heads=2,ffn=24", "gpt:ffn=24", GPT2, WRITTEN_OUT}
"""The ring has all kernels of the first. Those of biases and of softmax have tests by themselves."""
ROWS, SEQ, VOCABULARY = 2, 4, 64


@cache
def model_of(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in fp32 and a batch, equal in every process."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (2, ROWS, SEQ))
    batch = {"input_ids": tokens[0], "labels": tokens[1]}
    if name == WRITTEN_OUT:
        config = GPTConfig(VOCABULARY, 16, 1, 2, max_seq=SEQ, fused_attention=False)
        return GPT(config), batch
    if name == GPT2:
        sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2}
        sizes |= {"bos_token_id": 0, "eos_token_id": 1}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = {"model_type": "gpt2", "n_positions": SEQ, **sizes, **dropout}
        return HFSpec.from_dict(name, config).build("cpu", torch.float32), batch
    return parse_model(f"{name},{SIZES}").build("cpu", torch.float32), batch


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.5)


def step_of(
    rank: int, name: str, pins: dict
) -> tuple[float, dict[str, Tensor], Counter[str], bool]:
    """On one rank: the loss, the parameters after a step, the launches of each kernel, and whether
    the plan keeps no logits.
    """
    model, batch = model_of(name)
    pins = {"dp": 1, "fuse": "all"} | pins
    engine = autopar.parallelize(
        copy.deepcopy(model), free_network(2), batch, optimizer=sgd, pin=pins, precision="fp32"
    )
    LAUNCHES.clear()
    loss = float(engine.step(engine.local_batch(batch)))
    chunked = engine.plan.fusion.keeps_no_logits
    return loss, engine.full_state_dict(), Counter(LAUNCHES), chunked


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as made:
        yield made


@pytest.mark.parametrize(
    ("name", "pins", "called"),
    [
        *(
            pytest.param(name, {"tp": 2}, called, marks=pytest.mark.slow if name in SLOW else ())
            for name, called in CALLED.items()
        ),
        (*RING, CALLED[RING[0]] | {"merge_kernel"}),
        # the head's product, in chunks of tokens, calls the same kernels
        (*HEAD, CALLED[HEAD[0]]),
    ],
)
def test_a_step_over_two_ranks(pool, name, pins, called):
    """fp32 against eager fp64: the loss, and every update relative to its size, to 1e-4."""
    model, batch = model_of(name)
    exact = copy.deepcopy(model).double()
    optimizer = sgd(exact.parameters())
    output = exact(**batch)
    expected = output if isinstance(output, Tensor) else output.loss
    expected.backward()
    optimizer.step()
    ranks = pool.run(step_of, name, pins)
    before = model.state_dict()
    for loss, after, launches, chunked in ranks:
        assert chunked is (pins.get("fuse") == "head")
        assert loss == pytest.approx(expected.item(), rel=1e-4)
        assert set(launches) == called and min(launches.values()) > 0
        for key, wanted in exact.state_dict().items():
            update = wanted - before[key].double()
            error = (after[key].double() - wanted).norm()
            assert error <= 1e-4 * update.norm() + 1e-6, key
