"""Errors for pins that another framework cannot run: what it lacks, what it can run instead, and
which frameworks can run the pins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.errors import AutoparError, NoLayout, shown
from autopar.ir.mesh import MeshShape
from autopar.request.pins import Pins, stage_sizes
from autopar.request.plan_request import PlanRequest
from autopar.request.restriction import Limit, Only
from autopar.solve.costs.candidate import Candidate

_MOST_NAMED = 12
"""The most values of a pin that a message names."""

_Layouts = Callable[[PlanRequest], Sequence[Candidate]]


def check_target_pins(request: PlanRequest, layouts: _Layouts) -> None:
    """Raises AutoparError if a pin of the user has a value that the request's target cannot run, or
    if the target cuts pipelines otherwise than the pin `stages`. `layouts` returns the candidates
    of a request, or raises AutoparError.
    """
    restriction, asked = request.restriction, request.asked or Pins()
    if restriction is None:
        return
    for name, value in asked.items():
        only = restriction.possible(name)
        if only is not None and value not in only.values:
            raise AutoparError(
                f"{restriction.name} cannot run {name}={shown(value)}: it {only.why}; {_instead(name, only)}"
                f"{_others(request, layouts)}"
            )


def _instead(name: str, only: Only) -> str:
    if not only.values:
        return "drop the pin"
    values = [str(v).lower() if isinstance(v, bool) else str(v) for v in only.values]
    return f"pin {name}={' or '.join(values[:_MOST_NAMED])}, or drop the pin"


def none_within(request: PlanRequest, found: Sequence[Candidate], layouts: _Layouts) -> NoLayout:
    """The error if the request's target can run none of the layouts `found`, at least one, that the
    pins and the devices allow.
    """
    restriction = request.restriction
    if restriction is None:
        raise ValueError("the request is within no target")
    refusing = _refusing(restriction.rules, found)
    why = "; ".join(f"it {limit.why}" for limit in refusing)
    instead = " and ".join(dict.fromkeys(limit.instead for limit in refusing))
    pins = request.asked or request.pin
    under = f"the pins {pins} and the devices" if pins else "the devices"
    return NoLayout(
        f"{restriction.name} can run none of the {len(found)} layouts that {under} allow: {why}; "
        f"use {instead}, another number of devices or another batch{_others(request, layouts)}"
    )


def _refusing(limits: Sequence[Limit], found: Sequence[Candidate]) -> list[Limit]:
    """The limit that refuses all layouts, if one does; else limits that refuse them together, those
    that refuse most first.
    """
    refusing, left = list[Limit](), list(found)
    while left:
        most = max(limits, key=lambda limit: sum(not limit.allows(one) for one in left))
        kept = [one for one in left if most.allows(one)]
        if len(kept) == len(left):
            raise ValueError("the limits do not refuse all layouts")
        refusing, left = [*refusing, most], kept
    return refusing


def pinned_sizes(pin: Pins, pp: int, blocks: int) -> tuple[int, ...]:
    """The layers of each stage that the pin `stages` fixes; () if it deals them evenly and that is
    not possible. The pipeline has `pp` ranks, and the model `blocks` layers.
    """
    stages = pp * (pin.vpp or 1)
    even = (blocks // stages,) * stages if blocks % stages == 0 else ()
    return stage_sizes(pin.stages) or even


def uncut_words(request: PlanRequest, meshes: Sequence[MeshShape], blocks: int) -> str:
    """The reason, as text, why the request's target cuts no pipeline of these meshes as pinned; ''
    if it cuts one, or any. The model has `blocks` layers.
    """
    restriction, pin = request.restriction, request.pin
    cuts = None if restriction is None else restriction.cuts
    if restriction is None or cuts is None or not meshes or any(m.pp == 1 for m in meshes):
        return ""
    first = meshes[0]
    sizes = next((found for m in meshes if sum(found := cuts.sizes(m, pin.vpp or 1)) == blocks), ())
    if not sizes:
        return f"{restriction.name} cuts no pipeline of pp={first.pp} ranks from the {blocks} layers: it {cuts.how}; pin another pp"
    if pin.stages is None or pinned_sizes(pin, first.pp, blocks) == sizes:
        return ""
    return (
        f"{restriction.name} cannot run stages={pin.stages}: it cuts {blocks} layers into stages of {'-'.join(map(str, sizes))}; "
        "drop the pin"
    )


def _others(request: PlanRequest, layouts: _Layouts) -> str:
    """The end of a message: which other frameworks can run the user's pins; '' if none can."""
    restriction = request.restriction
    names = []
    for name, other in restriction.others().items() if restriction else ():
        try:
            layouts(request.within(other))
        except AutoparError:
            continue
        names.append(name)
    return f"; of other targets, {', '.join(names)} can run these pins" if names else ""
