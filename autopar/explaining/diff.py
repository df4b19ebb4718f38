"""The differences between two plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isclose
from typing import Any

from autopar.explaining.cost_parts import memory_parts, time_parts
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import BlockPlan
from autopar.request.pins import choices_of
from autopar.text.layout_words import describe, interesting
from autopar.text.plan_words import MEMORY_WORDS, TIME_WORDS, layout_words, staleness
from autopar.text.replies import Reply, Styled
from autopar.text.tables import Table
from autopar.text.units import gib, ms, percent

_WORDS = {f"{part}_s": words for part, words in TIME_WORDS.items()} | {
    f"{part}_bytes": words for part, words in MEMORY_WORDS.items()
}
_WORDS |= {
    "tokens_per_s": "tokens per second",
    "mfu": "model FLOPs utilization",
    "bound_s": "lower bound",
}
_WORDS["host_bytes"] = "host memory"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two plans differ. `part` is a group of fields, such as 'choices'. `what`
    is the field's name, which ends in the unit of the values if they have one (_s, _bytes). `ours`
    and `theirs` are the values in the first and the second plan.
    """

    part: str
    what: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.part}: {self.words} {self.value(self.ours)} -> {self.value(self.theirs)}{self.change}"

    @property
    def words(self) -> str:
        """The name of the field in words, without its unit; names of pins and ops stay as they
        are.
        """
        bare = self.what.removesuffix("_s").removesuffix("_bytes")
        return _WORDS.get(self.what) or (
            self.what if self.part in ("choices", "ops") else bare.replace("_", " ")
        )

    def value(self, value: Any) -> str:
        """A value of this field as text, in a readable unit; '-' if it is None or empty."""
        if value is None or value in ("", ()):
            return "-"
        if isinstance(value, tuple):
            return "; ".join(value)
        if self.part in ("choices", "ops"):
            return str(value)
        if self.what.endswith("_hash"):
            return value[:12]
        if self.what == "tokens_per_s":
            return f"{value:,.0f}"
        if self.what == "mfu":
            return percent(value)
        units = {"_s": ms, "_bytes": gib}
        return next(
            (convert(value) for end, convert in units.items() if self.what.endswith(end)),
            str(value),
        )

    @property
    def change(self) -> str:
        """The relative change from the first to the second plan as text, such as ` (+7.3 %)`. '' if
        the field is no prediction or was 0, or the change is below 0.05 %.
        """
        if self.part != "prediction" or not self.ours or abs(self.theirs / self.ours - 1) < 5e-4:
            return ""
        return f" ({100 * (self.theirs / self.ours - 1):+.1f} %)"


def diff(one: Plan, other: Plan) -> tuple[Difference, ...]:
    """The differences of two plans: first model and cluster, then choices, then predictions,
    certificates and notes. () if there is none.

    Not compared: statistics of the search (its time, the outcome of each candidate), stages if
    their numbers differ, and ops over an axis of one mesh only.
    """
    return (
        *_identity(one, other),
        *_choices(one, other),
        *_fusion(one, other),
        *_stages(one, other),
        *_blocks(one, other),
        *_prediction(one, other),
    )


def _fields(part: str, one: Any, other: Any, names: Sequence[str]) -> Iterator[Difference]:
    for name in names:
        ours, theirs = getattr(one, name), getattr(other, name)
        if ours != theirs:
            yield Difference(part, name, ours, theirs)


def _identity(one: Plan, other: Plan) -> Iterator[Difference]:
    yield from _fields("model", one, other, ("model_name", "model_hash"))
    yield from _fields("cluster", one, other, ("cluster_name", "cluster_hash"))
    yield from _fields("cost model", one, other, ("cost_model_version",))
    yield from _fields(
        "made for", one.made_for, other.made_for, ("model", "seq", "rows", "software", "target")
    )


def _choices(one: Plan, other: Plan) -> Iterator[Difference]:
    ours, theirs = choices_of(one), choices_of(other)
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            yield Difference("choices", name, ours.get(name), theirs.get(name))
    yield from _fields(
        "choices", one, other, ("num_microbatches", "global_batch", "precision", "devices")
    )


def _fusion(one: Plan, other: Plan) -> Iterator[Difference]:
    """A difference if other subgraphs are fused, and one if other ones are nearly fused; the values
    are their counts in words. Nothing if the fusion modes differ, which is a difference of choices.
    """
    if one.fusion.mode == other.fusion.mode:
        for name in ("fused", "missed"):
            ours, theirs = getattr(one.fusion, name), getattr(other.fusion, name)
            if ours != theirs:
                words = (f"{len(each)} subgraphs" for each in (ours, theirs))
                yield Difference("fusion", name, *words)


def _stages(one: Plan, other: Plan) -> Iterator[Difference]:
    if len(one.stages) != len(other.stages):
        return  # pp or vpp differ, which says it
    for number, (ours, theirs) in enumerate(zip(one.stages, other.stages, strict=True)):
        if ours != theirs:
            yield Difference(
                "stages", f"stage {number}", _segments_words(ours), _segments_words(theirs)
            )


_Pair = tuple[str, BlockPlan | None, BlockPlan | None]
"""A block name with the block of either plan, or None."""


def _blocks(one: Plan, other: Plan) -> Iterator[Difference]:
    """Differences of blocks in their segments, recompute mode and ops. Blocks are matched by name;
    by name and recompute mode if a plan has several blocks of one name.
    """
    ours, theirs = _by_name(one), _by_name(other)
    for name in {**ours, **theirs}:
        mine, yours = ours.get(name, []), theirs.get(name, [])
        if len(mine) == len(yours) == 1:
            pairs: list[_Pair] = [(name, mine[0], yours[0])]
        else:
            modes = [{block.recompute: block for block in blocks} for blocks in (mine, yours)]
            pairs = [
                (f"{name}, recompute {mode}", modes[0].get(mode), modes[1].get(mode))
                for mode in {**modes[0], **modes[1]}
            ]
        for words, own, their in pairs:
            if own is None or their is None or own.segments != their.segments:
                yield Difference("blocks", words, _block_words(own), _block_words(their))
            if own is not None and their is not None:
                if own.recompute != their.recompute:
                    yield Difference(
                        "blocks", f"recompute of {name}", own.recompute, their.recompute
                    )
                yield from _ops(own, their)


def _by_name(plan: Plan) -> dict[str, list[BlockPlan]]:
    found: dict[str, list[BlockPlan]] = {}
    for block in plan.blocks:
        found.setdefault(block.name, []).append(block)
    return found


def _block_words(block: BlockPlan | None) -> str | None:
    return None if block is None else _segments_words(block.segments)


def _segments_words(segments: Sequence[str]) -> str:
    return f"{len(segments)} segments, {segments[0]} ... {segments[-1]}"


def _ops(one: BlockPlan, other: BlockPlan) -> Iterator[Difference]:
    """One difference for each op and axis of a block on which strategies differ, in words. An axis
    of only one plan is left out, since the meshes already differ.
    """
    for op, axes in one.ops.items():
        for axis, ours in axes.items():
            theirs = other.ops.get(op, {}).get(axis)
            if theirs is not None and ours != theirs:
                words = [describe(op, choice) for choice in (ours, theirs)]
                if words[0] == words[1]:
                    words = [
                        f"{text} [{choice.strategy}]"
                        for text, choice in zip(words, (ours, theirs), strict=True)
                    ]
                yield Difference("ops", f"{one.name} {op} over {axis}", *words)


def _prediction(one: Plan, other: Plan) -> Iterator[Difference]:
    mine, yours = one.predicted, other.predicted
    pairs: list[tuple[str, float, float]] = [("step_time_s", mine.step_time_s, yours.step_time_s)]
    pairs += [(f"{part}_s", a, b) for part, a, b in time_parts(one, other)]
    peaks = [max(p.peak_memory_bytes, default=0) for p in (mine, yours)]
    pairs.append(("peak_memory_bytes", peaks[0], peaks[1]))
    pairs += [(f"{part}_bytes", a, b) for part, a, b in memory_parts(one, other)]
    pairs += [("host_bytes", mine.host_bytes, yours.host_bytes)]
    pairs += [("tokens_per_s", mine.tokens_per_s, yours.tokens_per_s), ("mfu", mine.mfu, yours.mfu)]
    for name, ours, theirs in pairs:
        if not isclose(ours, theirs, rel_tol=1e-9):  # the rounding of sums in another order
            yield Difference("prediction", name, ours, theirs)
    yield from _fields("certificate", one.certificate, other.certificate, ("status",))
    if not isclose(one.certificate.bound_s, other.certificate.bound_s, rel_tol=1e-9):
        yield Difference(
            "certificate", "bound_s", one.certificate.bound_s, other.certificate.bound_s
        )
    yield from _fields("notes", one, other, ("notes",))


def diff_reply(names: tuple[str, str], plans: tuple[Plan, Plan]) -> Reply:
    """The two plans by name and choices, then a table of differences for each part. Of the ops, only
    those worth showing are in the text; the others are counted.
    """
    found = diff(*plans)
    parts: list[str | Styled | Table] = [
        f"{name}: {plan.model_name} on {plan.cluster_name}, {layout_words(plan)}"
        for name, plan in zip(names, plans, strict=True)
    ]
    parts += [
        Styled(f"{name}: {note}", "yellow")
        for name, plan in zip(names, plans, strict=True)
        if (note := staleness(plan))
    ]
    if not found:
        parts.append(Styled("The plans are equal.", "bold"))
    wanted = {
        f"{block.name} {op}" for plan in plans for block in plan.blocks for op in interesting(block)
    }
    for part in dict.fromkeys(difference.part for difference in found):
        own = [d for d in found if d.part == part]
        shown = [d for d in own if part != "ops" or d.what.rpartition(" over ")[0] in wanted]
        rows = [(d.words, d.value(d.ours), d.value(d.theirs) + d.change) for d in shown]
        if len(shown) < len(own):
            rows.append((f"and {len(own) - len(shown)} more ops", "", ""))
        parts.append(Table(("", *names), rows, title=part))
    return Reply(parts, [asdict(each) | {"words": str(each)} for each in found])
