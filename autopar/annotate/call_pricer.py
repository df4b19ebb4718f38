"""Prices every call of one block class under every tp strategy, given the propagated choices on the
other axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import ceil

from torch.fx import Node

from autopar.annotate.activations import held_bytes, kept_tensors, late_tensors, own_tensors
from autopar.annotate.call_kernels import PricedCall
from autopar.annotate.call_strategy import PaidMove, call_strategy
from autopar.annotate.local_class import LocalClass
from autopar.annotate.recomputed import NO_RERUN
from autopar.annotate.saved_tensors import rerun_ops
from autopar.annotate.setting import Setting
from autopar.annotate.transfers import Pricing
from autopar.ir.annotated import AnnotatedOp, Saved, Strategy
from autopar.ir.mesh import BATCH_AXES, MeshShape
from autopar.ir.sharding import COLLECTIVE_PRIMITIVES, AxisLayout, P, transition
from autopar.ops.dims import is_symbolic
from autopar.ops.strategies import OpStrategy, letter_of, replicated, replicated_partial
from autopar.ops.values import operand_names, ops, result_names


class CallPricer:
    """The priced calls (`ops`, in order) of one class (all segments with one structure), on the
    mesh and micro-batch of `local`.

    `plain` has the prices without selective recomputation, if the setting has it. `over_dp` has
    what each call sends over dp, by op name. That is priced for each mesh, so that meshes that
    differ only in dp share all other prices. `rerun_bytes` has the bytes of recomputed values by
    name, each under its smallest strategy.
    """

    def __init__(self, local: LocalClass, plain: CallPricer | None = None) -> None:
        self.local = local
        # without what is sent over dp, and without selective recomputation
        self._priced: dict[str, tuple[Strategy, ...]] = dict(plain._priced) if plain else {}
        self.over_dp: dict[str, list[PaidMove]] = dict(plain.over_dp) if plain else {}
        self.rerun_bytes: dict[str, int] = {}
        self._paid: set[tuple[str, str, AxisLayout]] = set()
        self._by_mesh: dict[tuple[bool, MeshShape], list[AnnotatedOp]] = {}
        self._nodes = ops(local.facts.graph)
        self.ops = [self._op(node) for node in self._nodes]
        self._least_s: dict[bool, tuple[float, float]] = {}

    def under(self, setting: Setting) -> list[AnnotatedOp]:
        """The priced calls under `setting`, including what they send over dp, and recomputed if the
        setting says so.
        """
        again = setting.recomputes(self.local.facts.block)
        calls = self.rerun if again else self.ops
        if not self.over_dp:
            return calls
        key = again, setting.mesh
        if key not in self._by_mesh:
            pricing = Pricing(setting)
            sending = {
                node.name: self._op(node, pricing)
                for node in self._nodes
                if node.name in self.over_dp
            }
            if again:
                sending |= {
                    name: _run_again(op) for name, op in sending.items() if name in self.run_again
                }
            self._by_mesh[key] = [sending.get(op.name, op) for op in calls]
        return self._by_mesh[key]

    @cached_property
    def run_again(self) -> frozenset[str]:
        """Names of the calls that backward runs again if the whole block is recomputed. Parameters
        need no second gather: backward has them gathered.
        """
        facts, early_stop = self.local.facts, self.local.setting.software.early_stop
        return rerun_ops(facts.graph, facts.saved, facts.roots, early_stop)

    @cached_property
    def rerun(self) -> list[AnnotatedOp]:
        """The priced calls if the whole block is recomputed: backward then also takes their
        forward's time.
        """
        return [_run_again(op) if op.name in self.run_again else op for op in self.ops]

    def least_s(self, again: bool) -> tuple[float, float]:
        """A lower bound on the compute seconds (forward, backward) of a segment under any
        strategies. `again` counts recomputation.
        """
        if again not in self._least_s:
            self._least_s[again] = least_compute_s(self.rerun if again else self.ops)
        return self._least_s[again]

    def _op(self, node: Node, sender: Pricing | None = None) -> AnnotatedOp:
        """The priced call of a node. `sender`, if given, also prices what is sent over dp before
        the call.
        """
        names, outs = operand_names(node), result_names(node)
        found = self._choices(node, names, outs)
        if node.name not in self._priced:
            paid = self._paid_moves(node, names)
            self._priced[node.name] = tuple(self._strategies(node, found, names, outs, paid))
            if sent := self._sent_over_dp(paid, names, outs):
                self.over_dp[node.name] = sent
        priced = self._priced[node.name]
        if sender is not None:
            sent = self.over_dp[node.name]
            priced = tuple(self._sending(sent, strategy, sender) for strategy in priced)
        if self.local.rerun is not NO_RERUN:
            priced = tuple(
                self._again(node, choice, strategy, names, outs)
                for choice, strategy in zip(found, priced, strict=True)
            )
        return AnnotatedOp(
            node.name, "op", str(node.target), names, outs, priced, over_dp=sender is not None
        )

    # ------------------------------------------------------------------------------------------------- which strategies

    def _choices(
        self, node: Node, names: tuple[str, ...], outs: tuple[str, ...]
    ) -> list[OpStrategy]:
        grads = self.local.facts.grads
        if self.local.facts.dims[node.name] is not None and self.local.pricing.tp > 1:
            return self._tensor_parallel(node, names, outs)
        found = [replicated(len(names), len(outs))]
        output_grads = [grads[name] for name in outs]
        if self.local.facts.dims[node.name] is None and any(output_grads):
            found.append(replicated_partial([grads[name] for name in names], output_grads))
        return found

    def _tensor_parallel(
        self, node: Node, names: tuple[str, ...], outs: tuple[str, ...]
    ) -> list[OpStrategy]:
        local, mesh = self.local, self.local.setting.mesh
        dims = local.facts.dims[node.name]
        sizes = dims.sizes if dims is not None else {}
        letters = (
            (letter_of(choice.strategy), axis)
            for axis, choice in local.choices.get(node.name, {}).items()
        )
        taken = {
            x: mesh.size(axis)
            for x, axis in letters
            if axis not in BATCH_AXES or not is_symbolic(sizes.get(x))
        }
        found = local.facts.tensor_parallel(node, mesh.tp, tuple(taken.items()))
        if local.setting.sequence_parallel is False:
            places = (*names, *outs)
            found = [
                s
                for s in found
                if not any(map(local.along_positions, places, (*s.inputs, *s.outputs)))
            ]
        # a program has one lowering an op, but grouped heads go with context parallelism
        if local.lowered(node):
            found = [s for s in found if s.lowering in ("", "grouped_heads")]
        return found

    # --------------------------------------------------------------------------------------------------- what is sent before

    def _paid_moves(self, node: Node, names: tuple[str, ...]) -> list[PaidMove]:
        """The layout changes over dp, ep and cp that this op is the first to request, and therefore
        pays for. Notes them as paid.
        """
        local, found = self.local, []
        for axis, choice in local.choices.get(node.name, {}).items():
            for i, (name, want) in enumerate(zip(names, choice.inputs, strict=True)):
                have = local.fixed[name][axis]
                if have == want or (name, axis, want) in self._paid:
                    continue
                self._paid.add((name, axis, want))
                others = {a: x for a, x in local.fixed[name].items() if a != axis}
                whole = local.pricing.size_bytes(local.facts.tensors[name], others)
                found.append(PaidMove(i, axis, *transition(have, want), whole))
        return found

    def _sent_over_dp(
        self, paid: Iterable[PaidMove], names: tuple[str, ...], outs: tuple[str, ...]
    ) -> list[PaidMove]:
        """Those of the layout changes `paid` that need a collective over dp. If no gradient flows,
        their backward is the identity.
        """
        grads = self.local.facts.grads
        differentiable = any(grads[name] for name in outs)
        return [
            one
            if differentiable and grads[names[one.operand]]
            else replace(one, backward="identity")
            for one in paid
            if one.axis == "dp"
            and not {one.forward, one.backward}.isdisjoint(COLLECTIVE_PRIMITIVES)
        ]

    def _sending(self, sent: Sequence[PaidMove], strategy: Strategy, sender: Pricing) -> Strategy:
        """The strategy with the time of its communication over dp added."""
        there_s, back_s = (
            sum(
                sender.move_s(
                    move, sender.sharded(one.size_bytes, strategy.inputs[one.operand]), "dp"
                )
                for one, move in moves
                if move in COLLECTIVE_PRIMITIVES
            )
            for moves in (
                [(one, one.forward) for one in sent],
                [(one, one.backward) for one in sent],
            )
        )
        return replace(
            strategy,
            forward_s=strategy.forward_s + there_s,
            backward_s=strategy.backward_s + back_s,
            forward_comm_s=strategy.forward_comm_s + there_s,
            backward_comm_s=strategy.backward_comm_s + back_s,
        )

    # --------------------------------------------------------------------------------------------------------- the prices

    def _strategies(
        self,
        node: Node,
        choices: Iterable[OpStrategy],
        names: tuple[str, ...],
        outs: tuple[str, ...],
        paid: Sequence[PaidMove],
    ) -> Iterator[Strategy]:
        """Yields the priced strategy (a way to shard over tp) for each of `choices`, in order.
        `names` and `outs` name the op's operands and results; `paid` are the layout changes that it
        pays for.
        """
        local, facts, pricing = self.local, self.local.facts, self.local.pricing
        fixed = local.choices.get(node.name, {})
        whole = [
            pricing.size_bytes(facts.tensors[n], {a: c.inputs[i] for a, c in fixed.items()})
            for i, n in enumerate(names)
        ]
        differentiable = any(facts.grads[n] for n in outs)
        grads = tuple(differentiable and facts.grads[n] for n in names)
        trains = any(grad and n in facts.weights for n, grad in zip(names, grads, strict=True))
        call_under = partial(
            PricedCall,
            node=node,
            dims=facts.dims[node.name],
            names=names,
            outs=outs,
            grads=grads,
            added=tuple(grad and (node.name, i) in facts.added for i, grad in enumerate(grads)),
            fixed=fixed,
            shares=local.shares.get(node.name),
        )
        more_s = self._framework_s(node)
        for choice in choices:
            read = [pricing.sharded(size, x) for size, x in zip(whole, choice.inputs, strict=True)]
            written = [
                pricing.sharded(local.bytes[n], x)
                for n, x in zip(outs, choice.outputs, strict=True)
            ]
            kept = kept_tensors(local, node, choice, names, outs, facts.saved)
            saved = own_tensors(local, kept)
            late: tuple[Saved, ...] = ()
            if trains:
                gradients = (
                    Saved(f"{name}:gradient", held_bytes(local, size))
                    for name, size in zip(outs, written, strict=True)
                )
                late = (*late_tensors(node, saved, written), *gradients)
            call = call_under(choice=choice, read=read, written=written, kept=kept)
            priced = call_strategy(local, call, paid, saved, late)
            if more_s:
                slower_s = priced.forward_s + more_s, priced.backward_s + more_s
                priced = replace(priced, forward_s=slower_s[0], backward_s=slower_s[1])
            yield priced

    def _framework_s(self, node: Node) -> float:
        """Seconds per pass that a framework adds to the first call of a layer; 0 for other
        calls.
        """
        software = self.local.setting.software
        slower = (
            software.deepspeed_passes and self.local.facts.block.is_layer and node is self._nodes[0]
        )
        return software.fitted.deepspeed_pass_s if slower else 0.0

    def _again(
        self,
        node: Node,
        choice: OpStrategy,
        strategy: Strategy,
        names: tuple[str, ...],
        outs: tuple[str, ...],
    ) -> Strategy:
        """A strategy under selective recomputation: with what it keeps then, and its forward time
        added to backward if the op runs again. Also notes in `rerun_bytes` what it no longer keeps.
        """
        local, rerun = self.local, self.local.rerun
        kept = kept_tensors(local, node, choice, names, outs, rerun.kept)
        again, eager = node.name in rerun.ops, not local.setting.software.compiled
        # the sum over tp is kept
        if rerun.sums and choice.outputs[0] == P and (again or (eager and strategy.saved)):
            size = local.bytes[outs[0]]
            if local.setting.sequence_parallel:
                size = ceil(size / local.pricing.tp)
            kept += (Saved(f"{outs[0]}/sum", size),)
            again &= eager
        kept = own_tensors(local, kept)
        # what is gathered again is part of the workspace
        for saved in set() if rerun.gathered else set(strategy.saved) - set(kept):
            root = saved.key.partition("/")[0]
            least = self.rerun_bytes.get(root, saved.size_bytes)
            self.rerun_bytes[root] = min(least, saved.size_bytes)
        gather_s = sum(map(local.gathered_again_s, outs, choice.outputs))
        return strategy.keeping(kept, again).gathering(gather_s)


def least_compute_s(calls: Iterable[AnnotatedOp]) -> tuple[float, float]:
    """A lower bound on the compute seconds (forward, backward) of these calls under any
    strategies.
    """
    least = [
        (
            min(s.forward_s - s.forward_comm_s for s in op.strategies),
            min(s.backward_s - s.backward_comm_s for s in op.strategies),
        )
        for op in calls
    ]
    return sum((forward_s for forward_s, _ in least), 0.0), sum(
        (backward_s for _, backward_s in least), 0.0
    )


def _run_again(op: AnnotatedOp) -> AnnotatedOp:
    return replace(op, strategies=tuple(s.rerun() for s in op.strategies))
