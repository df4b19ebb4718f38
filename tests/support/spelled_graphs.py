"""A normalized graph against the model that it was captured from: values and gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from autopar.ops.dims import at_batch
from autopar.trace.capture import capture
from autopar.trace.normalize import normalize


def assert_computes_the_same(model: nn.Module, x: Tensor) -> Graph:
    """The normalized graph of a model without parameters, after checking its loss and the gradient of its input `x`."""
    captured = capture(model, {"x": x})
    graph, buffers = captured.graph, dict(model.named_buffers())
    normalize(graph)
    for node in graph.nodes:  # sizes of the batch become numbers, as they do on a rank
        node.args = torch.utils._pytree.tree_map(
            lambda a: at_batch(a, x.shape[0]) if isinstance(a, torch.SymInt) else a, node.args
        )
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    values = [
        (buffers | captured.constants)[captured.attributes[node.name]]
        if node.name in captured.attributes
        else ours
        for node in graph.nodes
        if node.op == "placeholder"
    ]
    (found,), expected = GraphModule(nn.Module(), graph)(*values), model(theirs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    found.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)
    return graph
