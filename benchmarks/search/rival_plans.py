"""What a planner's choice is compared with: plans that somebody else would have made, by the pins that make them.

- runner-up: the fastest of the three other meshes with the lowest times or bounds in the
  certificate, each planned again with its mesh pinned.
- Megatron rule: the smallest tensor parallelism inside a node with which some plan fits, then the
  fewest pipeline ranks, and data parallelism for the rest. It uses sequence parallelism, the
  distributed optimizer and even stages under 1F1B (Narayanan et al., SC 2021, takeaways of section 3;
  Korthikanti et al., arXiv:2205.05198). The planner chooses micro-batch and recomputation.
- pure DP and FSDP: no model parallelism, ZeRO stage 0 and 3.
- random: pins drawn from a seed, until the asked number of plans fits.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from benchmarks.tasks import PlanUnder

Pins = dict[str, Any]
DRAWS_PER_PLAN = 6
"""How many random pins are tried for each plan that is wanted."""
DRAWS_IN_VAIN = 200
"""Drawing ends after this number of draws without new pins, since a small cluster has few."""
REASON_WIDTH = 160
RUNNERS_UP = 3
"""The number of other meshes that are planned. A candidate that was ruled out has a bound and no
time, so that the best bound need not be the best mesh.
"""


@dataclass(frozen=True, slots=True)
class Rival:
    """A named plan with the pins that made it. `plan` is None if there is none, and `reason` says
    why. `same_as` names an earlier rival with the same decisions, or is ''.
    """

    name: str
    pin: Pins
    plan: Plan | None
    reason: str = ""
    same_as: str = ""


def rivals(
    plan_under: PlanUnder, cluster: ClusterSpec, runnable: bool, count: int, seed: int
) -> list[Rival]:
    """The chosen plan first, then its rivals. Random ones, drawn from `seed`, are tried until
    `count` fit, at most `DRAWS_PER_PLAN` for each. Rivals that do not fit are in the list too.
    `runnable`: only pins that the engine can run. Raises AutoparError if there is no plan without
    pins.
    """
    chosen = Rival("chosen", {}, plan_under({}))
    found = [
        chosen,
        _fastest("runner-up", plan_under, islice(other_meshes(chosen.plan), RUNNERS_UP)),
        _first_feasible("Megatron rule", plan_under, megatron_pins(cluster, runnable)),
        planned("pure DP", plan_under, {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0}),
        planned("FSDP", plan_under, {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 3, "shard": 0}),
    ]
    fits = 0
    for number, pin in enumerate(
        islice(random_pins(cluster, runnable, seed), DRAWS_PER_PLAN * count)
    ):
        if fits == count:
            break
        found.append(planned(f"random {number}", plan_under, pin))
        fits += found[-1].plan is not None
    return _marked(found)


def planned(name: str, plan_under: PlanUnder, pin: Pins) -> Rival:
    """The plan under pins, or the shortened reason why there is none."""
    try:
        return Rival(name, pin, plan_under(pin))
    except AutoparError as error:
        return Rival(
            name, pin, None, textwrap.shorten(str(error), REASON_WIDTH, placeholder=" ...")
        )


def other_meshes(plan: Plan) -> Iterator[Pins]:
    """Yields, as pins, the degrees (and the deal, if any) of the other meshes in the plan's
    certificate. They ascend by the least time of a solved candidate or bound of an unsolved one.
    Candidates that are infeasible or too large do not count; a mesh with only these is left out.
    """
    best: dict[tuple, float] = {}
    own = _degrees(plan.mesh.as_dict())
    for entry in plan.certificate.meshes:
        seconds = entry["time_s"] if entry["outcome"] == "solved" else entry["bound_s"]
        if (
            entry["outcome"] not in ("infeasible", "too large")
            and seconds is not None
            and _degrees(entry["mesh"]) != own
        ):
            mesh = tuple(_degrees(entry["mesh"]).items())
            best[mesh] = min(best.get(mesh, seconds), seconds)
    return (dict(mesh) for mesh in sorted(best, key=best.get))


def _degrees(mesh: Pins) -> Pins:
    """The degrees of a mesh, without the order of its ranks."""
    return {name: value for name, value in mesh.items() if name != "order"}


def megatron_pins(cluster: ClusterSpec, runnable: bool) -> list[Pins]:
    """The pins that the Megatron rule tries, in order: growing tp inside a node, then growing pp
    with the largest tp. With `runnable`, no pipelines.
    """
    degrees = [
        tp for tp in _powers(cluster.topology.devices_per_node) if cluster.num_devices % tp == 0
    ]
    found = [_megatron(tp, 1, cluster) for tp in degrees]
    if not runnable:
        deep = [
            pp
            for pp in _powers(cluster.num_devices // degrees[-1])[1:]
            if cluster.num_devices // degrees[-1] % pp == 0
        ]
        found += [_megatron(degrees[-1], pp, cluster) for pp in deep]
    return found


def _megatron(tp: int, pp: int, cluster: ClusterSpec) -> Pins:
    shards = cluster.num_devices > tp * pp
    pin: Pins = {"tp": tp, "pp": pp, "cp": 1, "zero": int(shards)}
    pin |= {"sequence_parallel": True} if tp > 1 else {}
    return pin | ({"schedule": "1f1b", "stages": "even"} if pp > 1 else {})


def random_pins(cluster: ClusterSpec, runnable: bool, seed: int) -> Iterator[Pins]:
    """Yields random pins of mesh, micro-batch, ZeRO stage, recomputation and schedule, each once,
    until hardly any new ones are drawn. With `runnable`, no pipelines.
    """
    draw, seen, in_vain = random.Random(seed), set(), 0
    while in_vain < DRAWS_IN_VAIN:
        pin = _drawn(draw, cluster, runnable)
        in_vain += 1
        if cluster.num_devices % (pin["tp"] * pin["pp"]) == 0 and tuple(pin.items()) not in seen:
            seen.add(tuple(pin.items()))
            in_vain = 0
            yield pin


def _drawn(draw: random.Random, cluster: ClusterSpec, runnable: bool) -> Pins:
    tp = draw.choice(_powers(cluster.topology.devices_per_node))
    pp = 1 if runnable else draw.choice((1, *_powers(min(cluster.num_devices, 16))))
    pin: Pins = {"tp": tp, "pp": pp, "micro_batch": draw.choice((1, 2, 4, 8))}
    pin["zero"] = 0 if cluster.num_devices == tp * pp else draw.choice((0, 1, 3))
    pin["recompute"] = draw.choice(("none", "full") if runnable else ("none", "selective", "full"))
    pin |= {"sequence_parallel": draw.random() < 0.5} if tp > 1 else {}
    return pin | (
        {
            "stages": "even",
            **draw.choice(({"schedule": "1f1b"}, {"schedule": "zero_bubble"}, {"vpp": 2})),
        }
        if pp > 1
        else {}
    )


def _fastest(name: str, plan_under: PlanUnder, pins: Iterable[Pins]) -> Rival:
    """Plan under each of the pins, and return the fastest plan as a rival; without a plan if none
    fits.
    """
    found = [planned(name, plan_under, pin) for pin in pins]
    fits = [rival for rival in found if rival.plan is not None]
    return (
        min(fits, key=lambda rival: rival.plan.predicted.step_time_s)
        if fits
        else Rival(name, {}, None, "no other mesh fits")
    )


def _first_feasible(name: str, plan_under: PlanUnder, pins: Iterable[Pins]) -> Rival:
    """Plan under the pins in turn, up to the first that has a plan, and return it. If none has, the
    last one's reason.
    """
    found = Rival(name, {}, None, "there is none")
    for pin in pins:
        found = planned(name, plan_under, pin)
        if found.plan is not None:
            break
    return found


def _marked(found: list[Rival]) -> list[Rival]:
    """The rivals, with `same_as` set on those whose decisions equal those of an earlier one."""
    marked: list[Rival] = []
    for rival in found:
        same = next(
            (
                other.name
                for other in marked
                if rival.plan is not None and decides_the_same(rival.plan, other.plan)
            ),
            "",
        )
        marked.append(Rival(rival.name, rival.pin, rival.plan, rival.reason, same))
    return marked


def decides_the_same(one: Plan, other: Plan | None) -> bool:
    decided = ("mesh", "micro_batch", "schedule", "stages", "zero", "recompute", "blocks")
    return other is not None and all(getattr(one, name) == getattr(other, name) for name in decided)


def _powers(most: int) -> list[int]:
    """The powers of two up to `most`, from 1."""
    return [2**k for k in range(most.bit_length())]
