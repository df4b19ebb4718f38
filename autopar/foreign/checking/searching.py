"""The best plan for a job within its framework and its file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from autopar.errors import AutoparError, NoLayout, NoPlanFits
from autopar.foreign.checking.pricing import JobSetting
from autopar.foreign.checking.written import has_verdict
from autopar.foreign.target import NotExpressible
from autopar.ir.deadline import Deadline
from autopar.ir.layout import Layout, like
from autopar.ir.plan import Plan
from autopar.planning.searches import Searches
from autopar.request.options import TOLERANCE
from autopar.request.restriction import Limit, Restriction
from autopar.request.software import Software

_Kind = tuple[int, bool, bool]
"""(ZeRO stage, whether tp is above 1, whether pp is above 1): what software depends on."""


def best_within(setting: JobSetting, deadline: Deadline) -> tuple[Plan, float]:
    """(the best plan, the lower bound of all plans in seconds, 0 if nothing is proved). Plans are
    those that the framework of a setting can run and the file of its job can say. The step of the
    plan has the time in which devices wait for the host; the bound has not. Layouts with the same
    software are searched at once, and others each for themselves. Raises AutoparError if there is no
    such plan, or if none was found in time.
    """
    restriction = in_file(setting)
    groups = _groups(setting)
    searches = Searches(deadline, len(groups))
    if len(groups) == 1:
        return _bounded(setting.best(restriction, searches.next_s()))
    found, bounds, errors = list[Plan](), list[float](), list[AutoparError]()
    for kinds, of in groups.items():
        try:
            plan, bound_s = _bounded(of.best(_within(restriction, kinds), searches.next_s()))
        except NoLayout:
            continue
        except AutoparError as error:
            errors.append(error)
            bounds += [] if _none_fits(error) else [0.0]
        else:
            found.append(plan)
            bounds.append(bound_s)
    if errors and not found:
        raise next((error for error in errors if not _none_fits(error)), errors[0])
    if not found:  # which says why
        return _bounded(setting.best(restriction, searches.next_s()))
    least_s = min(plan.predicted.step_time_s for plan in found)
    alike = [p for p in found if p.predicted.step_time_s <= (1 + TOLERANCE) * least_s]
    return min(alike, key=lambda plan: (plan.zero, plan.mesh.pp, plan.mesh.tp)), min(bounds)


def _none_fits(error: AutoparError) -> bool:
    """Whether an error is the proof that no plan fits."""
    return isinstance(error, NoPlanFits) and error.proven


def _bounded(plan: Plan) -> tuple[Plan, float]:
    return plan, plan.certificate.bound_s


def _groups(setting: JobSetting) -> dict[frozenset[_Kind], JobSetting]:
    """Settings by the kinds of layouts that have their software."""
    job, held = setting.job, setting.held
    zeros = [held["zero"]] if "zero" in held else [0, *(s for s in setting.target.limits.zero if s)]
    found: list[tuple[Software, list[_Kind]]] = []
    for zero, split, piped in product(zeros, (False, True), (False, True)):
        schedule = "1f1b" if piped else "none"
        by = Layout(1 + split, 1 + piped, zero=zero, global_batch=setting.gpus, schedule=schedule)
        software = setting.of(replace(job, layout=by)).software
        kinds = next((kinds for known, kinds in found if known == software), None)
        if kinds is None:
            kinds = list[_Kind]()
            found.append((software, kinds))
        kinds.append((zero, split, piped))
    return {frozenset(kinds): setting.running(software) for software, kinds in found}


def _within(restriction: Restriction, kinds: frozenset[_Kind]) -> Restriction:
    """A restriction to layouts of some kinds. If devices share out nothing, the stage is 0."""

    def allows(choice: Any) -> bool:
        return (choice.zero, choice.mesh.tp > 1, choice.mesh.pp > 1) in kinds

    limit = Limit("is searched in parts", "another layout", allows)
    return replace(restriction, limits=(*restriction.limits, limit))


def in_file(setting: JobSetting) -> Restriction:
    """What the framework of a setting can run, and the file of its job can say."""
    job, target = setting.job, setting.target
    restriction = target.limits.restriction(job.shape, setting.seq)
    if target.within is not None:
        restriction = target.within(job, restriction)
    limit = Limit("has no words in this file for others", "another layout", _Words(setting, restriction).say)  # fmt: skip
    return replace(restriction, limits=(*restriction.limits, limit))


@dataclass(slots=True)
class _Words:
    """What the file of a setting's job can say of the layouts of a search."""

    setting: JobSetting
    restriction: Restriction
    counted: dict[tuple[object, ...], bool] = field(default_factory=dict)

    def say(self, choice: Any) -> bool:
        """Whether the file can say a choice of the search, and can have a verdict then."""
        layout = self._layout(choice)
        return self._is_said(layout) and self._has_verdict(layout)

    def _layout(self, choice: Any) -> Layout:
        """The layout of a choice, whose stages are as even as possible."""
        mesh, job = choice.mesh, self.setting.job
        pinned = {**self.restriction.pin, **self.setting.held}
        positions = pinned.get("sequence_parallel", self.setting.target.limits.sequence_parallel)
        ranks = mesh.dp * mesh.cp
        layout = Layout(
            tp=mesh.tp,
            pp=mesh.pp,
            cp=mesh.cp,
            dp=mesh.dp,
            ep=mesh.ep,
            micro_batch=choice.micro_batch,
            global_batch=choice.micro_batch * choice.num_microbatches * mesh.dp,
            zero=choice.zero,
            copies=ranks // choice.shard if choice.shard and choice.zero else 1,
            recompute=choice.recompute
            if choice.recompute in self.restriction.recompute
            else "none",
            sequence_parallel=mesh.tp > 1 and bool(positions),
            offload=pinned.get("offload", "none"),
            order=mesh.order,
        )
        vpp = choice.stages_per_rank
        sizes = choice.stage_sizes or _spread(job.shape.layers, mesh.pp * vpp)
        stages = sizes if len(set(sizes)) > 1 else ()
        schedule = choice.schedule if mesh.pp > 1 else "none"
        return like(replace(layout, schedule=schedule, vpp=vpp, stages=stages), job.layout)

    def _is_said(self, layout: Layout) -> bool:
        job, target = self.setting.job, self.setting.target
        try:
            (target.words or target.flags)(replace(job, layout=layout))
        except NotExpressible:
            return False
        return not target.refusals(replace(job, layout=layout, flags={}), self.setting.gpus)

    def _has_verdict(self, layout: Layout) -> bool:
        """Whether the file can have a verdict with a layout. One that can be written into the file
        answers for all of its kind.
        """
        degrees = (layout.tp, layout.pp, layout.cp, layout.ep)
        key = (*(degree > 1 for degree in degrees), layout.zero, layout.recompute == "none")
        if key not in self.counted:
            found = self.setting.job.file is None or has_verdict(self.setting, layout)
            if found is None:
                return False
            self.counted[key] = found
        return self.counted[key]


def _spread(layers: int, stages: int) -> tuple[int, ...]:
    """The layers of each stage, as even as possible."""
    each, more = divmod(layers, stages)
    return (each + 1,) * more + (each,) * (stages - more)
