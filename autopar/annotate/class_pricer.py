"""Prices one block class: every tp strategy of every op, including what propagation fixed on the
other axes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from torch.fx import Node

from autopar.annotate.activations import held_bytes, workspace_bytes
from autopar.annotate.call_pricer import CallPricer
from autopar.annotate.conversion_costs import boundary_layouts, conversion_costs
from autopar.annotate.local_class import LocalClass
from autopar.annotate.parameter_costs import ParameterCosts, TrainedByClass
from autopar.annotate.setting import Setting
from autopar.ir.annotated import AnnotatedBlock, AnnotatedOp, AnnotatedValue, Strategy
from autopar.ir.sharding import AxisLayout, R
from autopar.ops.values import output_nodes, value_name

LayoutsOf = dict[str, set[AxisLayout]]
"""The layouts over tp that each value may have, by value name."""


class ClassPricer:
    """One block class (all segments with one structure) with its prices: `inputs`, `parameters`,
    `calls`, `outputs`, and conversions of `values`.

    `trained` caches the costs of parameters by class and setting. `plain` has the class priced
    without selective recomputation, if the setting has it. `staying_bytes` is what the last segment
    still keeps for all segments when backward reaches this class.
    """

    def __init__(
        self, local: LocalClass, trained: TrainedByClass, plain: ClassPricer | None = None
    ) -> None:
        self.local, facts = local, local.facts
        self.staying_bytes = 0
        self.calls: CallPricer = CallPricer(local, plain.calls if plain else None)
        self.parameters = ParameterCosts(local, self.calls, trained)
        wanted: LayoutsOf = {}
        for op in self.calls.ops:
            for position, name in enumerate(op.inputs):
                wanted.setdefault(name, set()).update(s.inputs[position] for s in op.strategies)
        placeholders = [node for node in facts.graph.nodes if node.op == "placeholder"]
        self.inputs = [
            _input(local, position, node, wanted.get(node.name, set()))
            for position, node in enumerate(placeholders)
        ]
        produced = {name: set(layouts) for name, layouts in self.parameters.stored.items()}
        for op in (*self.inputs, *self.calls.ops):
            for k, name in enumerate(op.outputs):
                produced[name] = {s.outputs[k] for s in op.strategies}
        self.outputs = [
            _output(local, k, value_name(node), produced)
            for k, node in enumerate(output_nodes(facts.graph))
        ]
        for op in self.outputs:
            wanted.setdefault(op.inputs[0], set()).update(s.inputs[0] for s in op.strategies)
        self.values = self._values(plain, produced, wanted)
        self.common_bytes = {
            op.name: self._kept_bytes(op) for op in self.inputs if op.name in local.common
        }
        self.input_bytes = {
            op.name: dict.fromkeys(self.common_bytes[op.name], 0)
            if op.name in local.common
            else self._kept_bytes(op)
            for op in self.inputs
        }
        self._workspaces: dict[tuple[bool, bool], int] = {}

    def block(self, setting: Setting) -> AnnotatedBlock:
        """The priced class under `setting`, which must have the mesh and micro-batch for which this
        pricer was made.
        """
        block = self.local.facts.block
        recompute = setting.recomputes(block)
        workspace = self._workspace_bytes(setting.zero < 3, setting.mesh.pp == 1)
        parameters, calls = self.parameters.under(setting), self.calls.under(setting)
        return AnnotatedBlock(
            name=block.name,
            count=self.local.facts.place.count,
            ops=(*self.inputs, *parameters, *calls, *self.outputs),
            values=self._rerun_values if recompute else self.values,
            inputs=tuple(op.name for op in self.inputs),
            outputs=tuple(op.name for op in self.outputs),
            recompute=recompute,
            input_bytes=self.input_bytes,
            workspace_bytes=workspace + self.staying_bytes + self._adding_up_bytes(recompute),
            common_bytes=self.common_bytes,
            is_layer=block.is_layer,
        )

    def _values(
        self, plain: ClassPricer | None, produced: LayoutsOf, wanted: LayoutsOf
    ) -> dict[str, AnnotatedValue]:
        local, found = self.local, {}
        for name, have in produced.items():
            if plain is not None and name not in local.rerun.converted and name in plain.values:
                found[name] = plain.values[name]
            else:
                costs = conversion_costs(local, self.calls.ops, name, have, wanted.get(name, set()))
                found[name] = AnnotatedValue(name, local.bytes[name], costs)
        return found

    @cached_property
    def _rerun_values(self) -> dict[str, AnnotatedValue]:
        """By name, the values with the prices of their conversions, if the whole block is
        recomputed. Conversions of what the recomputed calls read then run again.
        """
        again = self.calls.run_again
        read = {name for op in self.calls.ops if op.name in again for name in op.inputs}
        return {
            name: replace(
                value, conversions={pair: c.rerun() for pair, c in value.conversions.items()}
            )
            if name in read
            else value
            for name, value in self.values.items()
        }

    def _kept_bytes(self, op: AnnotatedOp) -> dict[AxisLayout, int]:
        """Bytes of a segment input that is kept for recomputation, for each layout over tp in which
        it may arrive.
        """
        local, size = self.local, self.local.bytes[op.outputs[0]]
        return {
            s.outputs[0]: held_bytes(local, local.pricing.sharded(size, s.outputs[0]))
            for s in op.strategies
        }

    def _workspace_bytes(self, weights: bool, alone: bool) -> int:
        key, grads = (weights, alone), self.local.facts.grads
        if key not in self._workspaces:
            gradients = {
                name: self.parameters.least_bytes(name)
                for name in self.parameters.stored
                if grads[name]
            }
            self._workspaces[key] = workspace_bytes(
                self.local,
                self.inputs,
                self.calls.ops,
                self.outputs,
                gradients,
                weights=weights,
                alone=alone,
            )
        return self._workspaces[key]

    def _adding_up_bytes(self, recompute: bool) -> int:
        """Bytes of gradients of values common to all segments that later segments have accumulated
        when backward reaches this class, less the least bytes that such a segment has freed. At
        least 0.
        """
        grads = self.local.facts.grads
        gradients = sum(max(of.values()) for name, of in self.common_bytes.items() if grads[name])
        if not gradients:
            return 0
        if recompute:
            given_back = sum(min(of.values()) for of in self.input_bytes.values())
        else:
            kept = (
                min(sum(one.size_bytes for one in s.saved) for s in op.strategies)
                for op in self.calls.ops
            )
            given_back = max(kept, default=0)
        return max(gradients - given_back, 0)


def _input(local: LocalClass, position: int, node: Node, wanted: set[AxisLayout]) -> AnnotatedOp:
    """The priced input at `position`. It may arrive replicated or in any layout that an op of the
    class requests and the sequence-parallelism pin allows. Model inputs are replicated over tp.
    """
    layouts = {R}
    if position not in local.facts.place.from_model:
        layouts = boundary_layouts(local, node.name, {R} | wanted)
    strategies = tuple(
        Strategy(str(x), (), (x,)).gathering(local.gathered_again_s(node.name, x))
        for x in sorted(layouts, key=str)
    )
    return AnnotatedOp(node.name, "input", "", (), (node.name,), strategies)


def _output(local: LocalClass, k: int, name: str, produced: LayoutsOf) -> AnnotatedOp:
    """The priced output `k`. It may leave replicated or in any layout in which the class produces
    it and which the sequence-parallelism pin allows. The loss is replicated.
    """
    layouts = {R}
    if k or not local.facts.place.has_loss:
        layouts = boundary_layouts(local, name, {R} | produced[name])
    strategies = tuple(Strategy(str(x), (x,), ()) for x in sorted(layouts, key=str))
    return AnnotatedOp(f"output{k}", "output", "", (name,), (), strategies)
