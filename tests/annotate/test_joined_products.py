"""Linear layers of one input are joined where software does so: found in graphs, and priced as shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from autopar_cost_models import DEVICES
from torch.fx import Graph

from autopar.annotate.call_kernels import joined_outputs
from autopar.annotate.kernels import MatrixProduct, kernels_of
from autopar.request.software import Software


def linears(*sizes: int) -> tuple[list, set[str]]:
    """(linear layers of one input with these outputs, names of their weights)."""
    graph = Graph()
    x = graph.placeholder("x")
    found, weights = [], set()
    for number, size in enumerate(sizes):
        weight = graph.placeholder(f"w{number}")
        weight.meta["val"] = torch.empty(size, 8, device="meta")
        weights.add(weight.name)
        found.append(graph.call_function(torch.ops.aten.linear.default, (x, weight)))
    return found, weights


@pytest.mark.parametrize(
    ("sizes", "ratios"),
    [
        ((64, 64), (2, 2)),  # gate and up
        ((64, 16, 16), (1.5, 6, 6)),  # queries, keys and values
        ((64, 64, 64), (3, 3, 3)),
        ((8, 64, 64), (1, 1, 1)),  # a router beside gate and up
        ((48, 18), (1, 1)),  # latent queries and keys
        ((64,), (1,)),
        ((16, 16, 16, 16), (1, 1, 1, 1)),
    ],
)
def test_which_layers_are_joined(sizes, ratios):
    found, weights = linears(*sizes)
    assert [joined_outputs(node, weights) for node in found] == list(ratios)


def test_a_product_by_no_parameter_is_not_joined():
    (gate, up), weights = linears(64, 64)
    assert joined_outputs(gate, weights - {"w1"}) == 1.0 and joined_outputs(up, set()) == 1.0


@pytest.mark.parametrize("dtype", [None, "fp8"])
def test_parts_take_the_time_of_the_whole(dtype):
    """In fp8 that is less than apart, since the input is cast once."""
    software = Software(matmul_dtype=dtype)
    kernels = kernels_of(DEVICES["h100"], "bf16", software)
    whole = MatrixProduct(m=4096, n=6144, k=4096, parameter=1, fp8=dtype is not None)
    parts = [replace(whole, n=n, joined=6144 / n) for n in (4096, 1024, 1024)]
    times = [kernels.product(part) for part in parts]
    together = kernels.product(whole)
    for field in ("forward_s", "backward_s", "weight_s"):
        assert sum(getattr(t, field) for t in times) == pytest.approx(getattr(together, field))
    apart = sum(kernels.product(replace(part, joined=1.0)).forward_s for part in parts)
    assert together.forward_s < apart
