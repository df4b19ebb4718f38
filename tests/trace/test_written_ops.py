"""Ops that stand for those below autograd compute the same."""

import itertools

import pytest
import torch

from autopar.trace.written_ops import called

aten = torch.ops.aten
OPTIONS = [
    (spaces, transposed, stride, padding, dilation, groups, size)
    for spaces, transposed, stride, padding, dilation, groups, size in itertools.product(
        (1, 2, 3), (False, True), (1, 2, 3), (0, 1, 2), (1, 2), (1, 2), (6, 7, 9)
    )
    if size + 2 * padding > 2 * dilation and (spaces < 3 or size < 7)
]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("hop", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_gradients_of_convolutions(hop):
    for options in OPTIONS[::hop]:
        check_gradients(*options)


def check_gradients(spaces, transposed, stride, padding, dilation, groups, size):
    torch.manual_seed(0)
    x = draw(3, 6, *[size] * spaces)
    shape = (6, 4 // groups) if transposed else (4, 6 // groups)
    weight = draw(*shape, *[3] * spaces)
    more = int(transposed and stride > 1)
    how = ([stride] * spaces, [padding] * spaces, [dilation] * spaces, transposed, [more] * spaces)
    gradient = torch.randn_like(aten.convolution.default(x, weight, None, *how, groups))
    args = (gradient, x, weight, [4], *how, groups)
    op = aten.convolution_backward.default
    for wanted in ([True, True, True], [True, False, False], [False, True, True]):
        for found, expected in zip(called(op, (*args, wanted), {}), op(*args, wanted), strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("space", [(), (5,), (2, 3)])
def test_group_norm(affine, space):
    torch.manual_seed(0)
    x = draw(4, 6, *space)
    weights = (draw(6), draw(6)) if affine else (None, None)
    args = (x, *weights, 4, 6, x[0, 0].numel(), 3, 1e-5)
    found = called(aten.native_group_norm.default, args, {})
    torch.testing.assert_close(tuple(found), aten.native_group_norm.default(*args))
