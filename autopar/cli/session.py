"""The planner of the command line. It traces one model once per sequence length, and plans it under
different pins and clusters.

torch is loaded when the first `Planner` is made, after the cluster was read, so an error in the
cluster is reported at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from shlex import quote
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError, NoPlanFits
from autopar.ir.cluster import Cluster, ClusterSpec, reading_note
from autopar.ir.deadline import Deadline
from autopar.ir.plan import Plan
from autopar.planning.searches import Searches
from autopar.request.options import TIME_LIMIT_S, TOLERANCE
from autopar.request.pins import Pins
from autopar.request.software import Software

if TYPE_CHECKING:
    from autopar.ir.traced import TracedModel
    from autopar.planning.outside import Outside
    from autopar.planning.remedies import Ask, Remedies
    from autopar.recheck.audit import Audit
    from autopar.recheck.replay import Replay
    from autopar.report.report import Report
    from autopar.request.plan_request import PlanRequest
    from autopar.request.restriction import Restriction


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command was asked for: its arguments and options as text and numbers. `seq=None` means
    the sequence length of the model's own design, or 512. `time_limit_s` is that of the whole
    command, `price` in dollars per device-hour. `headroom` and `tolerance` are as for `autopar.plan`.
    `target` is the framework whose limits plans keep, or None. `framework` is the one whose software
    was asked for by name, or None.
    """

    model: str
    cluster: str | Cluster
    global_batch: int
    seq: int | None = None
    precision: str | None = None
    time_limit_s: float = TIME_LIMIT_S
    allow_micro_batch_mean: bool = False
    price: float | None = None
    software: Software = field(default_factory=Software)
    headroom: str | None = None
    tolerance: float = TOLERANCE
    target: str | None = None
    framework: str | None = None


_REPORT_SHARE, _REPORT_S, _REPORT_MOST = 0.1, 2.5, 0.4
"""What the searches of a command leave for its report: a fraction of the time that is left, but at
least these seconds, and at most the second fraction.
"""


class Planner:
    """Makes and checks plans of one model for the request of a command; its methods may override
    parts of the request. `tell(text)` is called with progress messages. Making one parses model and
    cluster, and raises AutoparError if they are not known.
    """

    def __init__(self, asked: Asked, tell: Callable[[str], None]) -> None:
        self.searches = Searches(Deadline.after(asked.time_limit_s))
        self.notes = notes_on(asked.model, asked.cluster)
        self.cluster = priced_cluster(asked.cluster, asked.price).kept_free(asked.headroom)
        from autopar.foreign.limits.frameworks import limits_of
        from autopar.models import parse_model
        from autopar.request.plan_request import PlanRequest

        self.spec = parse_model(asked.model)
        self.asked = asked = self._as_read(asked)
        self.seq = asked.seq or self.spec.max_seq or 512
        self.tell = tell
        self.request = PlanRequest(
            self.cluster,
            asked.global_batch,
            Pins(),
            asked.precision or self._default_precision(),
            self.spec.name,
            software=asked.software,
            micro_batch_mean=asked.allow_micro_batch_mean,
            model_text=asked.model,
            tolerance=asked.tolerance,
        )
        self.target = asked.target
        self._traced: dict[tuple[int, str | None], TracedModel] = {}
        if self.target:
            limits_of(self.target)  # an unknown target is an error at once

    def _default_precision(self) -> str:
        """The model's own, as for `autopar.plan`. Only a user's function makes models that are not
        fp32, so that no other model is built for it.
        """
        from autopar.models.function import FunctionSpec
        from autopar.request.plan_request import choose_precision
        from autopar.runtime.state.precision import default_precision

        of_fp32 = choose_precision(self.cluster)
        if not isinstance(self.spec, FunctionSpec):
            return of_fp32
        return default_precision(self.spec.build("meta"), of_fp32)

    def _as_read(self, asked: Asked) -> Asked:
        """The request with its model and cluster in the words in which commands are printed."""
        if not self.notes:
            return asked
        from autopar.models.names import model_named

        given, model = asked.cluster, model_named(asked.model) or asked.model
        read = isinstance(given, str) and reading_note(given)
        return replace(asked, model=model, cluster=self.cluster.name if read else given)

    @property
    def deadline(self) -> Deadline:
        """When the command has to answer."""
        return self.searches.deadline

    def expect(self, searches: int) -> None:
        """Says how many searches are still to come, which share the time that is left."""
        self.searches.to_come = max(searches, 1)

    def traced(self, seq: int | None = None, runs_here: bool | None = None) -> TracedModel:
        """The traced model on sequences of `seq` tokens, by default the length of the request. It is
        captured as the engine runs it if it `runs_here`, or else as prices of other software take it;
        by default as for the request. Each is traced once.
        """
        from autopar.runtime.state.precision import captured_in

        seq = seq or self.seq
        here = self.request.runs_here if runs_here is None else runs_here
        captured = captured_in(self.request.precision, here)
        if (seq, captured) not in self._traced:
            from autopar import api

            self.tell(f"tracing {self.spec.name} on sequences of {seq} tokens")
            # the first capture includes its imports
            start = time.perf_counter() if self._traced else self.deadline.start_s
            with self.deadline.ends_capture(f"tracing {self.spec.name} on {seq} tokens"):
                self._traced[seq, captured] = api.trace_spec(self.spec, seq, captured)
            taken_s = time.perf_counter() - start
            self.searches.deadline = self.deadline.captured(taken_s)
        return self._traced[seq, captured]

    def plan(
        self,
        pin: Mapping[str, Any],
        cluster: Cluster | None = None,
        global_batch: int | None = None,
        seq: int | None = None,
        time_limit_s: float = inf,
        runners_up: bool = False,
        within_target: bool = True,
        keeps_tp_inside: bool = True,
    ) -> Plan:
        """The best plan under the pins `pin`. Other arguments override the request where they are
        not None. `runners_up`: with the best plan of each family. `within_target=False` leaves out
        the limits of the command's target. `keeps_tp_inside` is as for `PlanRequest`. The search
        takes at most `time_limit_s` seconds, and its share of the command's time. Raises
        AutoparError like `api.plan_traced`.
        """
        from autopar import api

        request = replace(
            self.request,
            pin=Pins.of(pin),
            cluster=cluster or self.cluster,
            global_batch=global_batch or self.request.global_batch,
            runners_up=runners_up,
            keeps_tp_inside=keeps_tp_inside,
        )
        if self.target and within_target:
            request = request.within(self._restriction(seq))
        traced = self.traced(seq)
        left_s = min(self.searches.next_s(self._search_share()), time_limit_s)
        plan = api.plan_traced(traced, request, left_s, self.tell)
        return replace(plan, notes=(*self.notes, *plan.notes))

    def _search_share(self) -> float:
        """The fraction of the time that is left for searches, and not for the report."""
        least = _REPORT_S / max(self.deadline.left_s, _REPORT_S)
        return 1 - min(max(_REPORT_SHARE, least), _REPORT_MOST)

    def pins_within(self, pin: Mapping[str, Any]) -> Mapping[str, Any]:
        """The pins under which plans are made: the user's, and those of the command's target."""
        return self._restriction().pins_with(pin) if self.target else pin

    def compared_with_free(self, plan: Plan, pin: Mapping[str, Any]) -> Plan:
        """The plan with a note on what the limits of the command's target cost, against the best plan
        without them; unchanged without a target.
        """
        if not self.target:
            return plan
        self.tell("planning without the limits of the target")
        step_s, name = plan.predicted.step_time_s, self._restriction().name
        try:
            free = self.plan(pin, within_target=False)
        except NoPlanFits as error:
            words = f"what {name} can run was not compared with the best plan of autopar: {error}"
            return replace(plan, notes=(f"target {self.target}: {words}", *plan.notes))
        free_s = min(free.predicted.step_time_s, step_s)
        words = f"what {name} can run takes {step_s / free_s - 1:.1%} more than the best plan of autopar, {free_s * 1e3:.4g} ms"
        return replace(plan, notes=(f"target {self.target}: {words}", *plan.notes))

    def _restriction(self, seq: int | None = None) -> Restriction:
        """What the command's target can run of the model."""
        from autopar.foreign.limits.frameworks import restriction_of
        from autopar.ir.model_shape import ModelShape
        from autopar.models.shapes import shape_of_spec
        from autopar.ops.work import tokens_per_row

        shape = shape_of_spec(self.spec) or ModelShape()
        return restriction_of(self.target or "", shape, tokens_per_row(self.traced(seq)))

    def plan_for(self, ask: Ask, time_limit_s: float) -> Plan:
        """A plan for the request `ask`, searched for at most `time_limit_s` seconds."""
        return self.plan(ask.pin, ask.cluster, ask.global_batch, ask.seq, time_limit_s)

    def remedies(self, error: NoPlanFits, pin: Mapping[str, Any]) -> Remedies:
        """As `Remedies`: the smallest changes of the request with which a plan fits, after planning
        under the pins `pin` raised `error`.
        """
        from autopar.planning.remedies import BUDGET_S, Ask, remedies

        self.expect(1)  # each has the time that is left, and `remedies` shares it out
        return remedies(
            error,
            self.plan_for,
            Ask(pin, self.cluster, self.request.global_batch, self.seq),
            budget_s=self.deadline.at_most_s(BUDGET_S),
            tell=self.tell,
        )

    def outside(self, pin: Mapping[str, Any], cluster: Cluster) -> list[Outside]:
        """What the search space under the pins `pin` leaves out on a cluster, each priced by a short
        search.
        """
        from autopar.planning.outside import QUICK_S, outside_of, priced

        request = replace(self.request, pin=Pins.of(pin), cluster=cluster)
        if self.target:
            request = request.within(self._restriction())
        found = outside_of(request, self.traced())
        self.expect(len(found) + 1)  # and the report
        plan_on = partial(self.plan, time_limit_s=QUICK_S)
        return [priced(one, pin, plan_on, cluster) for one in found]

    def report(
        self,
        plan: Plan,
        pin: Mapping[str, Any],
        cluster: Cluster | None = None,
        is_drawn: bool = True,
    ) -> Report:
        """The report (`Report`) on a plan that was made under the pins `pin` for `cluster`
        (default: that of the request), with its simulated step if it `is_drawn`.
        """
        from autopar.explaining.run_lines import command_line
        from autopar.report.explained import full_report
        from autopar.text.plan_words import cluster_of_plan

        self.tell("simulating the step" if is_drawn else "pricing other software")
        request = self._made_for(plan, pin, cluster)
        traced = self.traced(runs_here=not plan.framework)
        is_part = cluster is not None and cluster.name != self.cluster.name
        given = self.asked.cluster
        on, words = plan.cluster_name, ""
        if isinstance(given, str) and not is_part:
            on = given
        elif cluster_of_plan(plan) is None:
            on = ""  # no text names it
        options = self._options(plan, on) if on else None
        if options is not None:
            words = command_line(plan, self.asked.model, on, self.asked.seq, options)
        return full_report(
            plan, traced, request, command=words, is_drawn=is_drawn, deadline=self.deadline
        )

    def _options(self, plan: Plan, cluster: str) -> str | None:
        """The options of this request's software, headroom and target for a command with the plan's
        choices as pins. None if no options give the software.
        """
        from autopar.cli.options import software_words
        from autopar.request.pins import pins_of

        asked = self.asked
        at = cluster, pins_of(plan), plan.precision, asked.target, asked.framework
        if (words := software_words(asked.software, *at)) is None:
            return None
        more = [f"--target {asked.target}"] if asked.target else []
        more += [f"--headroom {quote(asked.headroom)}"] if asked.headroom else []
        return " ".join([words, *more]).strip()

    def replay(self, plan: Plan, pin: Mapping[str, Any], cluster: Cluster | None = None) -> Replay:
        """The result (`Replay`) of simulating a plan that was made under the pins `pin` for
        `cluster` (default: that of the request). Raises AutoparError if it is for another model or
        cluster.
        """
        from autopar.recheck.replay import replay

        self.tell("replaying")
        return replay(
            plan, self.traced(runs_here=not plan.framework), self._made_for(plan, pin, cluster)
        )

    def audit(self, plan: Plan, pin: Mapping[str, Any], cluster: Cluster | None = None) -> Audit:
        """The result (`Audit`) of pricing again every block and edge of a plan that was made under
        the pins `pin` for `cluster` (default: that of the request). Raises AutoparError if it is
        for another model or cluster.
        """
        from autopar.recheck.audit import audit

        self.tell("auditing")
        return audit(
            plan, self.traced(runs_here=not plan.framework), self._made_for(plan, pin, cluster)
        )

    def check(self, plan: Plan) -> Plan:
        """Returns `plan` itself, a saved plan. Raises AutoparError if it is for another batch,
        precision, model or cluster than the request.
        """
        if plan.global_batch != self.request.global_batch:
            raise AutoparError(
                f"the saved plan is for {plan.global_batch} sequences a step; ask with --global-batch {plan.global_batch}"
            )
        if plan.precision != self.request.precision:
            raise AutoparError(
                f"the saved plan is for {plan.precision}; ask with --precision {plan.precision}"
            )
        try:
            self._made_for(plan, {}, None)
        except AutoparError as error:
            if plan.model_name != self.spec.name:
                raise
            raise AutoparError(
                f"{error}; or ask with the --seq that the plan was made with"
            ) from None
        return plan

    def hash_for(self, plan: Plan) -> str:
        """The hash of the command's model as it is captured for the software of a plan."""
        return self.traced(runs_here=not plan.framework).model_hash

    def _made_for(self, plan: Plan, pin: Mapping[str, Any], cluster: Cluster | None) -> PlanRequest:
        """The command's request with the pins `pin` and this cluster (default: its own), for which
        the plan was made. Raises AutoparError if the plan is for another model or cluster.
        """
        from autopar import api
        from autopar.planning.model_facts import as_planned

        at = cluster or self.cluster
        traced = self.traced(runs_here=not plan.framework)
        api.check_plan(plan, as_planned(traced, plan), at)
        return replace(self.request, pin=Pins.of(pin), cluster=at)


def asked_of(
    plan: Plan, model: str | None, cluster: str | None, seq: int | None, precision: str | None
) -> Asked:
    """The request for which a saved plan was made. Arguments that are not None replace what the
    plan says.

    Raises AutoparError if the plan's file says no model or cluster, and none is given.
    """
    from autopar.request.arguments import check_again
    from autopar.text.plan_words import cluster_of

    made_for = plan.made_for
    model = model or made_for.model
    check_again(plan, "precision", precision, plan.precision)
    at = cluster_of(plan, cluster)
    if not model or at is None:
        missing = "MODEL" if not model else "CLUSTER"
        raise AutoparError(
            f"the plan's file does not say {'what names its model' if not model else 'its whole cluster'}: give {missing}, as in "
            f"autopar audit plan.json {plan.model_name} {plan.cluster_name}"
        )
    return Asked(
        model=model,
        cluster=at,
        global_batch=plan.global_batch,
        seq=seq or (made_for.seq if model == made_for.model else None) or None,
        precision=precision or plan.precision,
        allow_micro_batch_mean=plan.micro_batch_mean,
        software=Software.from_data(made_for.software),
    )


def asked_about(plan: Plan, asked: Asked) -> Asked:
    """The request `asked` of a command about a saved plan, with what the plan was made for in place
    of what the command does not say. Pins are choices, and are not taken from the plan.

    Raises AutoparError if it says other software, another headroom or another cluster. Files of
    earlier versions say nothing.
    """
    from autopar.ir.cluster_parts import headroom_of, headroom_words
    from autopar.request.arguments import check_again
    from autopar.text.plan_words import cluster_of

    made_for = plan.made_for
    if not made_for.cluster:
        return asked
    software = Software.from_data(made_for.software)
    given = asked.software
    if asked.framework is None:  # parts, which replace those of the plan
        given = replace(software, **{name: getattr(given, name) for name in given.as_data()})
    fields = (given.as_data() | software.as_data()).keys()
    differ = [name for name in fields if getattr(given, name) != getattr(software, name)]
    both = ({name: getattr(each, name) for name in differ} for each in (given, software))
    check_again(plan, "software", *both)
    at = cluster_of(plan, asked.cluster)
    if asked.headroom is not None and at is not None:
        kept = dict.fromkeys(headroom_words(group.headroom or 0.0) for group in at.groups)
        again = headroom_words(headroom_of(asked.headroom))
        check_again(plan, "a headroom of", again, ", ".join(kept))
    return replace(
        asked,
        cluster=at or asked.cluster,
        seq=asked.seq or (made_for.seq if asked.model == made_for.model else None) or None,
        precision=asked.precision or plan.precision,
        allow_micro_batch_mean=asked.allow_micro_batch_mean or plan.micro_batch_mean,
        software=software,
        headroom=None,
        target=made_for.target or None,
    )


def notes_on(model: str, cluster: str | Cluster) -> tuple[str, ...]:
    """Notes on what the texts of a model and a cluster are taken as, where they are spelled
    otherwise.
    """
    from autopar.models.names import model_note

    read = reading_note(cluster) if isinstance(cluster, str) else ""
    return tuple(note for note in (model_note(model), read) if note)


def priced_cluster(text: str | Cluster, price: float | None) -> Cluster:
    """The cluster that a text names, such as 'dgx-h100:8' or a YAML file, or itself. `price`, in dollars per
    device-hour, replaces its own unless it is None.
    """
    spec = ClusterSpec.parse(text) if isinstance(text, str) else text
    return spec if price is None else spec.with_price(price)
