"""Where graphs without a list of layers are cut, and where changes of buffers go."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.api import trace
from autopar.ir.traced import TracedModel
from autopar.ops.values import ops
from autopar.planning.model_facts import shared_updates

CHANNELS = 4


class Plain(nn.Module):
    """A convolution and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Residual(Plain):
    """The same beside the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Bare(Plain):
    """A norm alone, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Identity(), nn.BatchNorm2d(CHANNELS, affine=False)


class Net(nn.Module):
    """Modules by name, or in a list where `listed`, between a norm and a head."""

    def __init__(self, kinds: list[type[Plain]], listed: bool = False) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(CHANNELS)
        blocks = [kind() for kind in kinds]
        self.blocks = nn.ModuleList(blocks) if listed else blocks
        for number, block in enumerate(blocks if not listed else ()):
            setattr(self, f"block{number}", block)
        self.middle, self.head = nn.BatchNorm2d(CHANNELS), nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.middle(x).mean((2, 3))), target)


def traced(kinds: list[type[Plain]], listed: bool = False) -> TracedModel:
    batch = {"x": torch.randn(4, CHANNELS, 5, 5), "target": torch.arange(4) % 3}
    return trace(Net(kinds, listed), batch)


@settings(max_examples=examples(1, 10), deadline=None)
@given(st.lists(st.sampled_from([Plain, Residual, Bare]), min_size=1, max_size=4), st.booleans())
def test_a_buffer_is_where_it_changes_and_one_value_crosses(kinds, listed):
    found = traced(kinds, listed)
    assert shared_updates(found) == []
    assert len({segment.name for segment in found.segments}) == len(found.segments)
    for name, source in found.updates.items():
        assert name in found.segments[source.segment].parameters
    if not listed:
        for number, segment in enumerate(found.segments[1:], 1):
            made = [source for source in segment.inputs if not source.name]
            assert [source.segment for source in made] == [number - 1]


def test_equal_modules_are_equal_pieces():
    found = traced([Residual] * 6)
    names = [segment.name for segment in found.segments]
    assert names == ["first", *(f"block{k}.conv" for k in range(6)), "head"]
    # the last convolution has the norm behind it in its piece
    assert len({segment.class_index for segment in found.segments[1:6]}) == 1
    assert found.layers == [1, 2, 3, 4, 5]


def test_modules_of_few_ops_stay_together():
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x))).square().mean()

    found = trace(Small(), {"x": torch.randn(2, 4)})
    assert [segment.name for segment in found.segments] == ["model"]


def test_no_cut_where_two_values_cross():
    class Beside(nn.Module):
        """Two chains that meet at the end."""

        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
            self.chain = [nn.LayerNorm(4) for _ in range(12)]
            for number, norm in enumerate(self.chain):
                setattr(self, f"norm{number}", norm)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.left(x), self.right(x)
            for norm in self.chain:
                left, right = norm(left).tanh(), right * left.sigmoid()
            return (left * right).mean()

    found = trace(Beside(), {"x": torch.randn(2, 4)})
    assert len(list(ops(found.classes[0].graph))) > 24 and len(found.segments) == 1
