"""Complex numbers as pairs of real tensors: the same values and gradients, and no complex tensor left but buffers."""

from __future__ import annotations

import pytest
import torch
from support.effort import every
from support.spelled_graphs import assert_computes_the_same
from torch import Tensor, nn

import autopar
from autopar.trace.capture import capture
from autopar.trace.normalize import normalize

TABLE = torch.randn(6, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("table", TABLE)

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x.unflatten(-1, (4, 2)))
        found = self.function(numbers, self.table)
        found = torch.view_as_real(found) if found.is_complex() else found
        return (
            (found.sin() * torch.arange(1, 3, dtype=x.dtype)).sum()
            if found.shape[-1:] == (2,)
            else found.sin().sum()
        )


FUNCTIONS = {
    "product": lambda z, c: z * c,
    "sum with real numbers": lambda z, c: z + c.real + z.imag * 2 - c,
    "real minus complex": lambda z, c: c.real - z + 3,
    "a number": lambda z, c: z * 2j + (1 + 2j) * c - z / (0.5 - 1j),
    "quotient": lambda z, c: z / c + 2 / z,
    "quotient by real": lambda z, c: z / c.real.abs(),
    "conjugate": lambda z, c: z.conj() * z + torch.conj(c),
    "length and angle": lambda z, c: z.abs() * z.angle(),
    "exponential": lambda z, c: torch.exp(z * 0.3),
    "polar": lambda z, c: torch.polar(z.abs(), c.real * z.imag),
    "complex": lambda z, c: torch.complex(z.imag, c.real * z.real) * 1j,
    "powers": lambda z, c: z**3 + z.square() + c**0 + z.reciprocal(),
    "matmul": lambda z, c: z.transpose(1, 2) @ c,
    "einsum of three": lambda z, c: torch.einsum("bij,ij,bik->bk", z, c, z),
    "linear": lambda z, c: nn.functional.linear(z, c[:4], c[0, :4]),
    "moves": lambda z, c: torch.cat([z.flip(1)[:, :3], c[None, :3].expand(z.shape[0], 3, 4)], 1).permute(0, 2, 1),
    "stack and where": lambda z, c: torch.where(c.real > 0, z, c.real + 0j).unsqueeze(0).sum((0, 1)),
    "split and unbind": lambda z, c: z.chunk(2, -1)[1] * z.unbind(-1)[0].unsqueeze(-1),
    "cumulative": lambda z, c: z.cumsum(1).mean(1),
    "detach": lambda z, c: z.detach() * z,
    "constants": lambda z, c: z + torch.zeros(6, 4, dtype=z.dtype) + torch.ones_like(z) * torch.full((4,), 1 + 2j, dtype=z.dtype),
    "casts": lambda z, c: z.real.to(torch.complex128) * c,
    "fft": lambda z, c: torch.fft.fft(z, dim=1, norm="ortho") * torch.fft.ifft2(c),
    "irfft": lambda z, c: torch.fft.irfft(z * c, n=5),
    "irfftn": lambda z, c: torch.fft.irfft2(z, s=(4, 6)),
    "rfftn": lambda z, c: torch.fft.rfftn(z.real, dim=(1, 2)) + torch.fft.fftn(z, s=(6, 3), dim=(1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", every(2, FUNCTIONS))
def test_values_and_gradients_are_the_same(name):
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for node in assert_computes_the_same(Model(FUNCTIONS[name]), x).nodes:
        val = node.meta.get("val")
        values = val if isinstance(val, (list, tuple)) else [val]
        is_complex = any(isinstance(each, Tensor) and each.is_complex() for each in values)
        assert node.op == "placeholder" or not is_complex, node


def test_the_length_of_zero_has_no_gradient():
    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(x * self.scale, x).abs().sum()

    model, batch = Zero(), {"x": torch.zeros(2, 4, dtype=torch.float64)}
    sgd = lambda parameters: torch.optim.SGD(parameters, 0.5)  # noqa: E731
    engine = autopar.parallelize(model, "cpu:1", batch, sgd, precision="fp64")
    engine.step(batch)
    assert torch.equal(engine.full_state_dict()["scale"], torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda z, c: torch.tanh(z), "tanh.*of complex numbers .* has no spelling in pairs"),
        (lambda z, c: z**2.5, "whole exponents up to 8"),
    ],
)
def test_what_has_no_spelling_is_refused(function, words):
    captured = capture(Model(function), {"x": torch.ones(2, 6, 8, dtype=torch.float64)})
    with pytest.raises(autopar.AutoparError, match=words):
        normalize(captured.graph)


def test_a_complex_parameter_is_refused():
    model = Model(lambda z, c: z * c)
    del model.table
    model.table = nn.Parameter(TABLE.clone())
    with pytest.raises(autopar.AutoparError, match=r"parameter 'table' is complex .*view_as_real"):
        capture(model, {"x": torch.ones(2, 6, 8, dtype=torch.float64)})
