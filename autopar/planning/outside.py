"""What the rules of a search space leave out: for each choice, the nearest layout that no rule lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError, NoLayout
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.planning.candidates import (
    MAX_STAGES_PER_RANK,
    PP_INSIDE_DP,
    candidates_for,
    layouts_within,
)
from autopar.planning.model_facts import divisors
from autopar.request.pins import Pins, PinValue, pin_text
from autopar.request.plan_request import PlanRequest
from autopar.solve.costs.candidate import Candidate
from autopar.text.plan_words import PlanOn
from autopar.text.replies import Field, Reply, field_table, records
from autopar.text.units import PROVED, ms, percent

QUICK_S = 5.0
"""The most seconds of search for each layout that is priced."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A layout that the rule of a choice leaves out, as `pin`, and the best plan that a short search
    found there. Without one, `why` says what was found instead.
    """

    choice: str
    pin: Mapping[str, PinValue]
    plan: Plan | None = None
    why: str = ""

    @property
    def time_s(self) -> float | None:
        """Step seconds of the fastest plan that was found there, which `plan` may be simpler than."""
        return None if self.plan is None else self.plan.certificate.fastest_s


def outside_of(request: PlanRequest, traced: TracedModel) -> list[Outside]:
    """For each choice that is not pinned, the nearest layout that its rule leaves out and that can be
    planned if it is pinned, unpriced. Choices whose rule leaves out nothing are not listed.
    """
    listed, found = candidates_for(request, traced), dict[str, Outside]()
    inside, asked = set(listed), request.pin if request.asked is None else request.asked
    for choice, pin in _nearest(listed, request, len(traced.layers)):
        if choice in found or any(name in request.pin for name in pin):
            continue
        more = replace(
            request, pin=Pins.of({**request.pin, **pin}), asked=Pins.of({**asked, **pin})
        )
        try:
            if inside.isdisjoint(layouts_within(more, traced)):
                found[choice] = Outside(choice, pin)
        except NoLayout:
            continue
    return list(found.values())


def _nearest(
    listed: list[Candidate], request: PlanRequest, layers: int
) -> Iterator[tuple[str, dict[str, PinValue]]]:
    """(choice, pins of a layout that its rule leaves out), the nearest first."""
    meshes = list(dict.fromkeys(one.mesh for one in listed))
    least_pp = min((mesh.pp for mesh in meshes if mesh.pp > 1), default=0)
    for axis in ("tp", "cp"):
        here = {getattr(mesh, axis) for mesh in meshes}
        for count in divisors(request.cluster.num_devices):
            if count not in here:
                yield axis, {axis: count}
    for mesh in meshes:
        if mesh.pp > 1 and mesh.dp > 1 and not request.is_mixed:  # whose ranks lie outermost
            yield "order", {"pp": mesh.pp, "dp": mesh.dp, "order": PP_INSIDE_DP}
    if least_pp:
        yield "zero", {"pp": least_pp, "zero": 2}
        for vpp in range(MAX_STAGES_PER_RANK + 1, layers // least_pp + 1):
            yield "vpp", {"pp": least_pp, "vpp": vpp}
    groups = {one.shard for one in listed}
    for shard in divisors(request.cluster.num_devices):
        if shard > 1 and shard not in groups:
            yield "shard", {"pp": 1, "tp": 1, "cp": 1, "zero": 3, "shard": shard}
    for k in range(2, layers + 1):
        yield "recompute", {"recompute": f"every-{k}"}
    yield "offload", {"offload": "optimizer"}


def priced(outside: Outside, pins: Mapping[str, Any], plan_on: PlanOn, cluster: Cluster) -> Outside:
    """`outside` with the best plan that `plan_on` finds under its pins and the user's `pins`."""
    try:
        return replace(outside, plan=plan_on({**pins, **outside.pin}, cluster))
    except AutoparError as error:
        return replace(outside, why=str(error))


def outside_reply(found: list[Outside], plan: Plan) -> Reply:
    """What each layout outside of the space takes, beside the fastest plan that was found inside."""
    own_s = plan.certificate.fastest_s

    def than_inside(one: Outside) -> str:
        if one.time_s is None:
            return one.why
        more = one.time_s / own_s - 1
        words = f"{percent(abs(more))} {'longer' if more > 0 else 'less: pin it'}"
        return words if abs(more) > PROVED else "as long"

    fields = (
        Field("choice", lambda one: one.choice, "choice"),
        Field("", lambda one: pin_text(one.pin), "the nearest left out"),
        Field("pin", lambda one: dict(one.pin)),
        Field("time_s", lambda one: one.time_s, "step time", ms),
        Field("", than_inside, "than the fastest inside"),
        Field("why", lambda one: one.why),
    )
    title = f"Outside of the space, each searched for at most {QUICK_S:g} s"
    return Reply([field_table(fields, found, title)], records(fields, found))
