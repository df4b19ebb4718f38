"""What the actions of a pipeline consist of: work of each segment, and the collectives between.

Segments run in order in forward, and in the opposite order in backward. Inside a segment, a layout
change comes before the first op that reads its result. Times are exposed times: what overlaps with
compute is not counted twice. If one op communicates over several axes, its time is divided evenly
among them, since a plan prices only the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.annotated import AnnotatedOp, Conversion, Strategy
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import BlockPlan
from autopar.ir.sharding import COLLECTIVE_PRIMITIVES, RP, AxisLayout, transition
from autopar.recheck.plan_costs import PricedSegment
from autopar.report.timeline import ActionPart
from autopar.text.layout_words import is_attention_name, is_experts

_SHARING = ("dp", "ep", "cp")
"""Axes whose ranks may share out a parameter."""


@dataclass(frozen=True, slots=True)
class _Costed:
    """A strategy or layout change of a segment, with the names of its collectives in forward and in
    backward. `together`: they travel with those of the segment's other parameters.
    """

    cost: Strategy | Conversion
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    together: bool = False


@dataclass(slots=True)
class _Pieces:
    """Parts under construction: neighbours of one kind and segment are joined."""

    segment: str
    found: list[ActionPart] = field(default_factory=list)

    def work(self, kind: str, seconds: float) -> None:
        if seconds <= 0:
            return
        if self.found and self.found[-1].kind == kind:
            seconds += self.found.pop().seconds
        self.found.append(ActionPart(self.segment, kind, kind, seconds))

    def send(self, names: Sequence[str], seconds: float, together: bool = False) -> None:
        """Collectives that share `seconds`. If `together`, one of a name is joined with those before
        that have this name.
        """
        for name in names if seconds > 0 else ():
            share_s, axis = seconds / len(names), name.rpartition(" ")[2]
            known = [k for k, part in enumerate(self.found) if together and part.name == name]
            if known:
                share_s += self.found[known[0]].seconds
                self.found[known[0]] = ActionPart(self.segment, name, axis, share_s)
            else:
                self.found.append(ActionPart(self.segment, name, axis, share_s))


class SegmentParts:
    """The parts of one segment's forward, backward and update. `name` is the segment's, `block` its
    block of the plan.
    """

    def __init__(self, plan: Plan, name: str, block: BlockPlan, segment: PricedSegment) -> None:
        self.plan, self.name, self.block, self.segment = plan, name, block, segment
        self._paid: set[tuple[str, str, AxisLayout]] = set()
        self._made: Mapping[tuple[str, str], AxisLayout] = {
            (value, axis): layout
            for op in segment.block.ops
            for axis, choice in block.ops.get(op.name, {}).items()
            for value, layout in zip(op.outputs, choice.outputs, strict=False)
        }
        self.forward_names: dict[str, tuple[str, ...]] = {}
        """The collectives that each op runs itself in forward, by its name."""
        self.costed = list(self._costed())

    def forward(self) -> list[ActionPart]:
        """The parts of the forward of a micro-batch. Changes of what arrives come before the
        segment itself.
        """
        arriving, pieces = _Pieces(""), _Pieces(self.name)
        for number, item in enumerate(self.costed):
            cost, into = item.cost, arriving if number < len(self.segment.arrivals) else pieces
            into.send(item.forward, cost.forward_comm_s, item.together)
            into.work("forward", cost.forward_s - cost.forward_comm_s)
        return arriving.found + pieces.found

    def backward(self, weights: bool | None = None) -> list[ActionPart]:
        """The parts of the backward of a micro-batch. `weights` chooses one of two parts of a split
        backward: gradients of parameters, or all but those. None is the whole.
        """
        pieces = _Pieces(self.name)
        if weights:
            pieces.work("weights", sum(map(_weight_s, self.costed)))
            return pieces.found
        for item in self.costed:
            again_s = self._again_comm_s(item.cost)
            # what an op without collectives keeps in shards is gathered again
            pieces.send(item.forward or ("all_gather over tp",), again_s, item.together)
            pieces.work("recompute", item.cost.rerun_s - again_s)
        for item in reversed(self.costed):
            cost, again_s = item.cost, self._again_comm_s(item.cost)
            sent_s = cost.backward_comm_s - again_s
            work_s = cost.backward_s - cost.rerun_s - sent_s
            if weights is False:
                work_s -= _weight_s(item)
            pieces.work("backward", work_s)
            pieces.send(item.backward, sent_s, item.together)
        return pieces.found

    def around(self) -> tuple[str, ...]:
        """The collectives of all parameters in each micro-batch, as words: gathers and reductions of
        ZeRO, which do not wait for the update.
        """
        found: dict[str, None] = {}
        for way in ("forward", "backward"):
            for item in self.costed:
                if item.together and getattr(item.cost, f"{way}_comm_s") > 0:
                    names = (name.replace("_", "-") for name in getattr(item, way))
                    found |= dict.fromkeys(f"{name} in {way}" for name in names)
        return tuple(found)

    def update(self) -> list[ActionPart]:
        """The parts of its share of the update after the last micro-batch: what reduces gradients,
        the optimizer, and what gathers updated parameters.
        """
        sent: dict[str, float] = {}
        work_s = 0.0
        for op in self._ops("parameter"):
            strategy, names = self.segment.chosen[op.name], self._update_names(op)
            work_s += strategy.step_s - strategy.step_comm_s
            for name in names:
                sent[name] = sent.get(name, 0.0) + strategy.step_comm_s / len(names)
        pieces = _Pieces("")
        for name in (name for name in sent if "gather" not in name):
            pieces.send((name,), sent[name])
        pieces.work("optimizer", work_s)
        for name in (name for name in sent if "gather" in name):
            pieces.send((name,), sent[name])
        return pieces.found

    def _ops(self, *kinds: str) -> Iterator[AnnotatedOp]:
        return (op for op in self.segment.block.ops if op.kind in kinds)

    def _costed(self) -> Iterator[_Costed]:
        """All that takes time in a micro-batch, in the order of forward."""
        for change in self.segment.arrivals:
            yield _Costed(change.price, *_over_tp(*transition(change.have, change.need)))
        for op in self._ops("input", "parameter"):
            yield self._parameter(op)
        waiting = {(change.value, change.need): change for change in self.segment.changes}
        for op in self._ops("op", "output"):
            strategy = self.segment.chosen[op.name]
            for read in zip(op.inputs, strategy.inputs, strict=True):
                if read in waiting:
                    change = waiting.pop(read)
                    yield _Costed(change.price, *_over_tp(*transition(change.have, change.need)))
            sent = self._sent_by(op)
            self.forward_names[op.name] = sent[0]
            yield _Costed(strategy, *sent)

    def _parameter(self, op: AnnotatedOp) -> _Costed:
        """A parameter, or an input: under ZeRO-3 it is gathered for each pass and its gradient
        reduced.
        """
        strategy, axes = self.segment.chosen[op.name], self._copies(op)
        gathers = tuple(f"all_gather over {axis}" for axis in axes)
        reduces = tuple(f"reduce_scatter over {axis}" for axis in axes)
        if op.kind == "input":
            return _Costed(strategy, ("all_gather over tp",), ("all_gather over tp",))
        both = gathers + reduces if self.plan.zero == 3 else reduces
        return _Costed(strategy, gathers, both, together=True)

    def _update_names(self, op: AnnotatedOp) -> tuple[str, ...]:
        """The collectives of a parameter's update."""
        zero, pipelined = self.plan.zero, self.plan.mesh.pp > 1
        kinds = [] if zero >= 2 and not pipelined else ["reduce_scatter" if zero else "all_reduce"]
        kinds += ["all_gather"] if zero and not (zero == 3 and not pipelined) else []
        found = [f"{kind} over {axis}" for kind in kinds for axis in self._copies(op)]
        partial = self.plan.mesh.tp > 1 and RP in self.segment.chosen[op.name].outputs
        return (*found, *(["all_reduce over tp"] if partial else []))

    def _copies(self, op: AnnotatedOp) -> tuple[str, ...]:
        """The axes whose ranks hold copies of a parameter."""
        choices = self.block.ops.get(op.name, {})
        return tuple(
            axis
            for axis in _SHARING
            if axis in choices and not any(x.is_shard for x in choices[axis].outputs)
        )

    def _sent_by(self, op: AnnotatedOp) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The collectives that an op runs itself, forward and backward: those of its lowering, and
        layout changes over dp, ep and cp that it is the first to need.
        """
        choices = self.block.ops.get(op.name, {})
        forward: list[str] = []
        backward: list[str] = []
        if op.kind == "op":
            there, back = _inside(op, {a: c.strategy for a, c in choices.items()})
            forward, backward = list(there), list(back)
        for axis in (*BATCH_AXES, "cp"):
            if axis not in choices:
                continue
            for value, need in zip(op.inputs, choices[axis].inputs, strict=True):
                have = self._made.get((value, axis))
                if have is None or have == need or (value, axis, need) in self._paid:
                    continue
                self._paid.add((value, axis, need))
                names = transition(have, need)
                forward += [f"{names[0]} over {axis}"] * (names[0] in COLLECTIVE_PRIMITIVES)
                backward += [f"{names[1]} over {axis}"] * (names[1] in COLLECTIVE_PRIMITIVES)
        return tuple(forward), tuple(backward)

    def _again_comm_s(self, cost: Strategy | Conversion) -> float:
        """Seconds of communication in what backward runs again."""
        if self.block.recompute == "gather":
            return cost.rerun_s
        return min(cost.forward_comm_s, cost.rerun_s)


def _weight_s(item: _Costed) -> float:
    return item.cost.backward_weight_s if isinstance(item.cost, Strategy) else 0.0


def _over_tp(forward: str, backward: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    there, back = (
        (f"{name} over tp",) if name in COLLECTIVE_PRIMITIVES else ()
        for name in (forward, backward)
    )
    return there, back


def _inside(op: AnnotatedOp, strategies: Mapping[str, str]) -> tuple[Sequence[str], Sequence[str]]:
    """The collectives inside an op's lowering, forward and backward. `strategies` has the name of
    its strategy on each axis.
    """
    if "ep" in strategies and is_experts(op.name):
        return ["all_to_all over ep"] * 3, ["all_to_all over ep"] * 2
    context = strategies.get("cp", "").partition(" ")[0]
    if is_attention_name(op.name) and context in ("ring", "ulysses"):
        names = ["ring over cp"] if context == "ring" else ["all_to_all over cp"] * 4
        return names, names
    if strategies.get("tp", "").partition(" ")[0] == "v":
        own = "autopar" in op.target
        return (["all_gather over tp"] if own else ["all_reduce over tp"] * 3), []
    return [], []
