"""Why a choice was not made: its cost by part, or the constraint that forbids it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError, NoPlanFits
from autopar.explaining.certificate import not_proved_words
from autopar.explaining.cost_parts import memory_parts, time_parts
from autopar.explaining.diff import diff
from autopar.explaining.plan_report import plan_data
from autopar.explaining.runners_up import allowed_more, inside_words
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.planning.smallest_plan import smallest_plan
from autopar.request.pins import check_pin_names, choices_of, first_difference, pin_text
from autopar.text.numbers import Number, Numbers, Words
from autopar.text.plan_words import MEMORY_WORDS, TIME_WORDS, PlanOn, layout_words
from autopar.text.replies import Reply, StepBar, Styled, doubted
from autopar.text.tables import Table
from autopar.text.units import gap_words, gib, ms, percent

_MATTERS = 0.05
"""A part that changes by less than this fraction of the total difference is shown only in the
table.
"""
_UNPROVEN = 1e-5
"""The gap from which the answer says that the pinned plan is not proved best."""


@dataclass(frozen=True, slots=True)
class WhyNot:
    """The answer to a question why a choice was not made.

    Attributes:
        pin: the choice.
        chosen: the plan without it.
        pinned: the best plan under the choice, or None if there is none.
        differs: the first pinned key that the chosen plan decides otherwise or does not record, or ''.
        reason: why there is no plan under the choice; '' if there is one.
        least: if memory is the reason, the plan under the choice that needs the least memory, on devices that have just enough.
            None if it is unknown.
        capacity_bytes: if memory is the reason, bytes of a device's memory, of the kind that has least; otherwise 0.
        is_given: the chosen plan was given, so that others may be faster.
        is_cut: the time was over before a plan under the choice was found, so that one may fit.
    """

    pin: dict[str, Any]
    chosen: Plan
    pinned: Plan | None
    differs: str = ""
    reason: str = ""
    least: Plan | None = None
    capacity_bytes: int = 0
    is_given: bool = False
    is_cut: bool = False

    @property
    def same(self) -> bool:
        """Whether the plan under the pins makes the same choices as the chosen one: mesh, stages,
        strategies and so on. False if there is none.
        """
        if self.pinned is None:
            return False
        decided = ("choices", "stages", "blocks", "ops")
        return not any(difference.part in decided for difference in diff(self.chosen, self.pinned))

    @property
    def difference_s(self) -> float | None:
        """Seconds by which a step is longer under the pins, negative if it is shorter. None if
        there is no plan under them.
        """
        if self.pinned is None:
            return None
        return self.pinned.predicted.step_time_s - self.chosen.predicted.step_time_s

    @property
    def verdict(self) -> str:
        """The answer in a few words. 'chosen' if the plan under the choice is the chosen one
        (`same`); otherwise 'faster', or 'slower' if it is not. Without a plan 'does not fit' if
        none that fits was found, 'not found in time' if the time was over, else 'impossible'.
        """
        if self.is_cut:
            return "not found in time"
        if self.difference_s is None:
            return "does not fit" if self.capacity_bytes else "impossible"
        return "chosen" if self.same else "faster" if self.difference_s < 0 else "slower"


def check_asked(pin: Mapping[str, Any]) -> None:
    """Raises AutoparError if there is no pin, or an unknown one."""
    if not pin:
        raise AutoparError("why-not needs the choice to ask about: for example --pin tp=8")
    check_pin_names(pin)


def why_not(
    plan_on: PlanOn, cluster: Cluster, pin: Mapping[str, Any], chosen: Plan | None = None
) -> WhyNot:
    """What the choice `pin` would cost, as a `WhyNot`: plans without the pins (unless `chosen` is
    passed) and with them. `plan_on` plans under pins on a cluster.

    An impossible choice is an answer. Raises AutoparError if there is no plan even without pins.
    """
    is_given = chosen is not None
    chosen = plan_on({}, cluster) if chosen is None else chosen
    differs = first_difference(pin, chosen)
    # the best of all plans is the best of those that have the pins
    if not differs and not is_given:
        return WhyNot(dict(pin), chosen, chosen)
    answer = WhyNot(dict(pin), chosen, None, differs, is_given=is_given)
    try:
        return replace(answer, pinned=plan_on(pin, cluster))
    except NoPlanFits as error:
        if error.is_cut:
            return replace(answer, reason=str(error), is_cut=True)
        least = smallest_plan(plan_on, cluster, pin, error.least_bytes)
        return replace(
            answer,
            reason=str(error),
            least=least,
            capacity_bytes=min(group.device.memory_bytes for group in cluster.groups),
        )
    except AutoparError as error:
        return replace(answer, reason=str(error))


def why_not_reply(found: WhyNot) -> Reply:
    """The answer in sentences, then tables of the parts of both plans, or of the plan that needs the
    least memory. The page draws both steps.

    In JSON, plans have the format of plan files; None where there is none. Times and memory by part
    are present if there is a plan under the pins.
    """
    chosen, pinned, doubt = found.chosen, found.pinned, not_proved_words(found.chosen)
    data = doubted(doubt, dict(_facts(found)))
    n, plans = Numbers(data), {"chosen": chosen}
    first, second, *others = why_not_lines(found)
    parts: list[str | Styled | Table] = [
        first,
        second if pinned else Styled(second, "yellow"),
        *others,
    ]
    if found.least is not None:
        parts.append(_least_table(n, found.least))
    if pinned is not None and not found.same:
        plans["pinned"] = pinned
        parts.append(_beside("Time of a step", n, "time_s", TIME_WORDS, ("step", "step_time_s")))
        peak = ("peak", "peak_memory_bytes")
        parts.append(_beside("Memory of the fullest device", n, "memory_bytes", MEMORY_WORDS, peak))
    bars = [
        StepBar(
            f"{name}: {layout_words(plan)}",
            plan.predicted.breakdown,
            n.ms(f"{name}.predicted.step_time_s"),
        )
        for name, plan in plans.items()
    ]
    title = f"{chosen.model_name} on {chosen.cluster_name}: why not {pin_text(found.pin)}?"
    return Reply(parts, data, title, doubt, (bars, ""), "why-not", chosen.cost_model_version)


def _facts(found: WhyNot) -> Iterator[tuple[str, Any]]:
    """The JSON of the answer, in seconds and bytes."""
    chosen, pinned, key = found.chosen, found.pinned, found.differs
    yield from (("pin", found.pin), ("answer", found.verdict), ("reason", found.reason))
    yield "difference_s", found.difference_s
    theirs = {"pin": key, "pinned": found.pin.get(key), "chosen": choices_of(chosen).get(key)}
    yield "first_difference", theirs if key else None
    if pinned is not None:
        for name, parts in (("time_s", time_parts), ("memory_bytes", memory_parts)):
            yield name, {p: {"chosen": a, "pinned": b} for p, a, b in parts(chosen, pinned)}
    if found.least is not None:
        least = {"capacity_bytes": found.capacity_bytes, "plan": plan_data(found.least)}
        yield "least_memory", least
    yield "chosen", plan_data(chosen)
    yield "pinned", None if pinned is None else plan_data(pinned)


def why_not_lines(answer: WhyNot) -> list[str]:
    """The answer in sentences: the chosen plan, and how the pinned one differs or what forbids it.
    The second says the answer. One more sentence if both are the same.
    """
    name, pinned = pin_text(answer.pin), answer.pinned
    lines = [_plan_words("Chosen", answer.chosen)]
    if pinned is None:
        lines += _forbidden(answer)
    elif answer.same:
        lines.append(f"{name} is what the chosen plan does.")
    else:
        lines += [
            _plan_words("Pinned", pinned),
            _difference_words(answer, pinned),
            _first_words(answer),
            _others_words(answer, pinned),
            _unproven_words(answer, pinned),
        ]
    return [line for line in lines if line]


def _plan_words(name: str, plan: Plan) -> str:
    peak = gib(max(plan.predicted.peak_memory_bytes))
    return f"{name}: {layout_words(plan)}: {ms(plan.predicted.step_time_s)}, {peak}."


def _unproven_words(answer: WhyNot, pinned: Plan) -> str:
    """A sentence that the search under the pins did not prove the pinned plan best; '' if it
    did.
    """
    certificate = pinned.certificate
    if certificate.gap < _UNPROVEN:
        return ""
    most_s = certificate.bound_s - answer.chosen.predicted.step_time_s
    return (
        f"The search under {pin_text(answer.pin)} ended with a gap of {gap_words(certificate.gap)}: every plan under it takes at least "
        f"{ms(certificate.bound_s)}, {ms(abs(most_s))} {'more' if most_s > 0 else 'less'} than the chosen one."
    )


def _forbidden(answer: WhyNot) -> Iterator[str]:
    """What forbids the choice, in sentences. If memory does, also the plan that needs least, if
    known.
    """
    name = pin_text(answer.pin)
    if answer.is_cut:
        yield f"Whether {name} fits is not known: {answer.reason}."
        yield _first_words(answer)
        return
    if not answer.capacity_bytes:
        yield f"{name} is impossible: {answer.reason}."
        yield _first_words(answer)
        return
    yield f"{name} does not fit.  {answer.reason}"
    yield _first_words(answer)
    if answer.least is not None:
        peak, parts = max(answer.least.predicted.peak_memory_bytes), answer.least.predicted.memory
        most = max(parts, key=parts.__getitem__)
        yield (
            f"Memory binds: {layout_words(answer.least)} needs {gib(peak)} of {gib(answer.capacity_bytes)}, "
            f"{gib(peak - answer.capacity_bytes)} too much; most of it is {MEMORY_WORDS.get(most, most)} "
            f"({percent(parts[most] / peak)}).  "
            f"On devices with that much memory a step would take {ms(answer.least.predicted.step_time_s)}."
        )


def _least_table(n: Numbers, plan: Plan) -> Table:
    """Memory by part of the plan that needs least."""
    peak, at = max(plan.predicted.peak_memory_bytes), "least_memory.plan.predicted"
    rows: list[list[Words]] = [
        [MEMORY_WORDS.get(part, part), n.gib(f"{at}.memory.{part}"), percent(size / peak)]
        for part, size in plan.predicted.memory.items()
    ]
    rows.append(["peak", n.most_gib(f"{at}.peak_memory_bytes"), ""])
    return Table(("part", "size", "share"), rows, (1, 2), title="The least memory under the pins")


def _difference_words(answer: WhyNot, pinned: Plan) -> str:
    """A sentence on how much longer or shorter the pinned plan's step is, naming the parts that
    account for most of the change.
    """
    before_s, after_s = answer.chosen.predicted.step_time_s, pinned.predicted.step_time_s
    total_s, ratio = after_s - before_s, after_s / before_s
    changes = sorted(
        ((b - a, TIME_WORDS.get(p, p)) for p, a, b in time_parts(answer.chosen, pinned)),
        reverse=True,
    )
    more = [f"{words} {ms(s)}" for s, words in changes if s > _MATTERS * abs(total_s)]
    less = [f"{words} {ms(-s)}" for s, words in reversed(changes) if -s > _MATTERS * abs(total_s)]
    text = f"{pin_text(answer.pin)} takes {ms(abs(total_s))} {'longer' if total_s >= 0 else 'less'} a step ({ratio:.3f} x)."
    text += f"  More: {', '.join(more)}." if more else ""
    text += f"  Less: {', '.join(less)}." if less else ""
    if total_s < 0 and answer.is_given:
        text += "  The saved plan is not the fastest."
    elif total_s < 0 and answer.chosen.certificate.fastest:
        text += f"  {_preferred_words(answer.chosen)}"
    elif total_s < 0:
        text += "  It is outside of what is searched without pins, or the search stopped early: see the certificate that explain prints."
    return text


def _preferred_words(chosen: Plan) -> str:
    """Why the chosen plan is not the fastest, as a sentence."""
    if words := inside_words(chosen):
        return f"{words}."
    return f"The chosen plan is simpler, and within {percent(allowed_more(chosen))} of the fastest."


def _first_words(answer: WhyNot) -> str:
    key = answer.differs
    if not key:
        return ""
    chosen = choices_of(answer.chosen).get(key)
    what = (
        f"the chosen plan has {key}={chosen}"
        if chosen is not None
        else "its effect is in the layouts of ops"
    )
    return f"First pinned choice that differs: {pin_text({key: answer.pin[key]})}; {what}."


def _others_words(answer: WhyNot, pinned: Plan) -> str:
    """A sentence on the choices that changed besides the pins; '' if none did."""
    before, after = choices_of(answer.chosen), choices_of(pinned)
    changed = [
        f"{key} {before[key]} -> {after[key]}"
        for key in before
        if before[key] != after[key] and key not in answer.pin
    ]
    return f"What changes with it: {', '.join(changed)}." if changed else ""


def _beside(
    title: str, n: Numbers, key: str, words: Mapping[str, str], total: tuple[str, str]
) -> Table:
    """Both plans by part, as `key` of the JSON has them, and their `total`: its name, and its field of
    a prediction. Parts that take no time are left out.
    """
    show, whole = (n.ms, n.ms) if key == "time_s" else (n.gib, n.most_gib)
    rows: list[tuple[str, Number, Number]] = [
        (words.get(part, part), show(f"{key}.{part}.chosen"), show(f"{key}.{part}.pinned"))
        for part, sizes in n.value(key).items()
        if key != "time_s" or any(sizes.values())
    ]
    own, other = (whole(f"{name}.predicted.{total[1]}") for name in ("chosen", "pinned"))
    cells = [
        (*row, _signed(row[2].value - row[1].value, key)) for row in (*rows, (total[0], own, other))
    ]
    return Table(("part", "chosen", "pinned", "difference"), cells, (1, 2, 3), title=title)


def _signed(value: float, key: str) -> str:
    words = ms if key == "time_s" else gib
    return ("+" if value > 0 else "-" if value < 0 else "") + words(abs(value))
