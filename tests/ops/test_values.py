"""What a graph's nodes read and hold is returned as the type that callers expect, or refused by name."""

import pytest
import torch
from torch.fx import Graph

from autopar.ir.calls import called_function
from autopar.ops.values import fake_tensor, input_node

aten = torch.ops.aten


def test_operands_and_tensors_are_told_by_the_op_that_lacks_them():
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3)
    add = graph.call_function(aten.add.Tensor, (x, 2))
    assert input_node(add, 0) is x and fake_tensor(x).shape == (2, 3)
    assert called_function(add) is aten.add.Tensor
    for index, value in ((1, "2"), (2, "None")):
        with pytest.raises(
            TypeError, match=rf"argument {index} of aten::add \(\w+\) is {value}, not a node"
        ):
            input_node(add, index)
    for val, kind in ((None, "NoneType"), ((x.meta["val"],) * 2, "tuple")):
        add.meta["val"] = val
        with pytest.raises(
            TypeError, match=rf"aten::add \(\w+\) results in {kind}, not in a tensor"
        ):
            fake_tensor(add)
    with pytest.raises(TypeError, match=r"x \(placeholder\) calls no function"):
        called_function(x)
