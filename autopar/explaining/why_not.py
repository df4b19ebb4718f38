"""Why a choice was not made: its cost by part, or the constraint that forbids it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from autopar.text.plan_words import MEMORY_WORDS, TIME_WORDS, PlanOn, layout_words
from autopar.text.tables import grid
from autopar.text.units import gap_words, gib, ms, percent

if TYPE_CHECKING:
    from rich.console import Group

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


def why_not_data(answer: WhyNot) -> dict[str, Any]:
    """The answer as a dict for JSON, in seconds and bytes. Plans have the format of plan files;
    None where there is none. Times and memory by part are present if there is a plan under the
    pins.
    """
    doubt = not_proved_words(answer.chosen)
    data = ({"not_proved": doubt} if doubt else {}) | {
        "pin": answer.pin,
        "answer": answer.verdict,
        "reason": answer.reason,
        "difference_s": answer.difference_s,
        "first_difference": None,
    }
    if answer.differs:
        chosen = choices_of(answer.chosen).get(answer.differs)
        data["first_difference"] = {
            "pin": answer.differs,
            "pinned": answer.pin[answer.differs],
            "chosen": chosen,
        }
    if answer.pinned is not None:
        data["time_s"] = {
            p: {"chosen": a, "pinned": b} for p, a, b in time_parts(answer.chosen, answer.pinned)
        }
        data["memory_bytes"] = {
            p: {"chosen": a, "pinned": b} for p, a, b in memory_parts(answer.chosen, answer.pinned)
        }
    if answer.least is not None:
        data["least_memory"] = {
            "capacity_bytes": answer.capacity_bytes,
            "plan": plan_data(answer.least),
        }
    plans = {"chosen": answer.chosen, "pinned": answer.pinned}
    return data | {name: None if plan is None else plan_data(plan) for name, plan in plans.items()}


def why_not_table(answer: WhyNot) -> Group:
    """The answer as a rich renderable: its sentences, then tables of the parts of both plans, or of
    the plan that needs the least memory.
    """
    from rich.console import Group
    from rich.text import Text

    chosen, pinned = answer.chosen, answer.pinned
    doubt = not_proved_words(chosen)
    title = f"{chosen.model_name} on {chosen.cluster_name}: why not {pin_text(answer.pin)}?"
    first, second, *others = why_not_lines(answer)
    parts: list[Any] = [Text(doubt, style="yellow")] if doubt else []
    parts += [Text(title, style="bold"), Text(first)]
    parts.append(Text(second, style="" if pinned is not None else "yellow"))
    parts += map(Text, others)
    if answer.least is not None:
        parts.append(_least_table(answer.least))
    return Group(*parts, *(_compared(chosen, pinned) if pinned and not answer.same else ()))


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


def _compared(chosen: Plan, pinned: Plan) -> Iterator[Any]:
    """Tables of time by part and of memory by part."""
    rows = [(TIME_WORDS.get(p, p), a, b) for p, a, b in time_parts(chosen, pinned) if a or b]
    rows.append(("step", chosen.predicted.step_time_s, pinned.predicted.step_time_s))
    yield _beside("Time of a step", rows, ms)
    rows = [(MEMORY_WORDS.get(p, p), a, b) for p, a, b in memory_parts(chosen, pinned)]
    most, pinned_most = (max(plan.predicted.peak_memory_bytes) for plan in (chosen, pinned))
    yield _beside("Memory of the fullest device", [*rows, ("peak", most, pinned_most)], gib)


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


def _least_table(plan: Plan) -> Any:
    """Memory by part of the plan that needs least."""
    peak = max(plan.predicted.peak_memory_bytes)
    rows = [
        (MEMORY_WORDS.get(part, part), gib(size), percent(size / peak))
        for part, size in plan.predicted.memory.items()
    ]
    title, heads = "The least memory under the pins", ("part", "size", "share")
    return grid(title, heads, [*rows, ("peak", gib(peak), "")], right=(1, 2))


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


def _beside(title: str, rows: list[tuple[str, float, float]], words: Any) -> Any:
    def signed(value: float) -> str:
        return ("+" if value > 0 else "-" if value < 0 else "") + words(abs(value))

    cells = [(what, words(a), words(b), signed(b - a)) for what, a, b in rows]
    return grid(title, ("part", "chosen", "pinned", "difference"), cells, right=(1, 2, 3))
