"""What became of the subgraphs of a plan's model that ops of our own compute, for readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.ir.fusion import Fusion
from autopar.text.tables import grid
from autopar.text.units import ms

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

_SHOWN = 4
"""The number of replaced ops whose names are shown."""


def fusion_table(fusion: Fusion) -> Group:
    """A rich renderable: a table of the subgraphs that are fused into one op, then one of those
    that nearly are, with the reason. One sentence if fusion is off.
    If the planner chose what to fuse, a table of what it compared comes last.
    """
    from rich.console import Group
    from rich.text import Text

    chosen = [_weighed_table(fusion)] if fusion.weighed else []
    if fusion.mode == "off":
        words = "Nothing is fused, since fuse=off.  --pin fuse=norms or fuse=all fuses."
        if chosen:
            words = "Nothing is fused, since the plan without fusion is the fastest."
        return Group(Text(words), *chosen)
    rows = [
        (op.block, op.name, op.op, _names(op.replaced), _attributes(op.attributes))
        for op in fusion.fused
    ]
    columns = ("block", "name", "op", "in the place of", "with")
    parts = [grid(f"Fused, fuse={fusion.mode}", columns, rows)]
    if fusion.missed:
        left = [(miss.block, miss.name, miss.op, miss.reason) for miss in fusion.missed]
        parts.append(grid("Nearly", ("block", "at", "op", "why not"), left))
    return Group(*parts, *chosen)


def _weighed_table(fusion: Fusion) -> RenderableType:
    """A table of the modes that the planner compared."""
    rows = [
        (entry.mode, ms(entry.step_s), ms(entry.host_s), "yes" if entry.mode == fusion.mode else "")
        for entry in fusion.weighed
    ]
    columns = ("fuse", "devices take", "the host takes to issue kernels", "chosen")
    return grid("Compared", columns, rows)


def _names(replaced: tuple[str, ...]) -> str:
    more = len(replaced) - _SHOWN
    return ", ".join(replaced[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _attributes(attributes: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in attributes.items())
