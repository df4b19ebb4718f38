"""Captures the model and its loss with torch.export, on fake tensors and with a dynamic batch
size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.errors import AutoparError
from autopar.ir.traced import MICRO_BATCH_SHARE, ParameterSpec
from autopar.models.rows import BatchDims, in_groups, row_dims, rows_first
from autopar.ops.values import output_nodes
from autopar.trace.assigned_state import AssignedState
from autopar.trace.batches import ExampleInputs, batch_entries, form_of
from autopar.trace.captured import Captured
from autopar.trace.changed_state import check_changes, rounding_notes
from autopar.trace.constants import Aliases, Registered, read_as_attributes
from autopar.trace.copying import copy_with, in_the_copy, meta_copy
from autopar.trace.edit import call
from autopar.trace.frozen_state import StateRecord, check_state
from autopar.trace.functionalize import functional
from autopar.trace.known_values import UserTensors
from autopar.trace.loss_of_output import arguments_of, loss_of, target_name
from autopar.trace.nested import rebuilt
from autopar.trace.one_process import OneProcess, check_kept_sizes
from autopar.trace.python_state import Functions, Snapshot, torch_seeded
from autopar.trace.refusals import (
    check_loss_trains,
    check_symbols,
    check_values,
    own_generator,
    why_not_captured,
)
from autopar.trace.refused_hooks import refuse_wrappers
from autopar.trace.running_statistics import cumulative_averages
from autopar.trace.user_lines import line_of_nodes
from autopar.trace.watched import values_unread, watched_forward

__all__ = ["Captured", "capture", "meta_copy", "parameter_specs"]


class _LossModule(nn.Module):
    """A module that calls the user's model, kept as `model`. Its forward takes the inputs by name
    and returns a tuple: the scalar loss, then the tensors that `record` asks for.
    """

    def __init__(
        self,
        model: nn.Module,
        form: ExampleInputs,
        loss_fn: Callable | None,
        aliases: Aliases,
        record: StateRecord,
        moved: Mapping[str, int],
        joined: Collection[str],
        own: UserTensors,
    ) -> None:
        """`form` is a batch nested like the user's, of which tensors are replaced. `aliases` are
        refreshed before each call, and `record` watches it. `moved`: by input, the dim to which dim
        0, the rows, is moved before the model is called. `joined`: inputs whose dims 0 and 1 are
        rows, which are flattened before. `own` is of the user's model.
        """
        super().__init__()
        self.model, self.form = model, form
        self.loss_fn, self.aliases, self.record = loss_fn, aliases, record
        self.moved, self.joined, self.own = moved, joined, own
        self.notes: list[str] = []

    def forward(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        batched = {name: tensor for name, tensor in tensors.items() if _is_batched(tensor)}
        first, *others = [tensor.shape[0] for tensor in batched.values()] or [0]
        for rows in others:
            torch._check(rows == first)  # one batch, though forward may never relate its inputs
        self.aliases.refresh(self.model)
        record = self.record
        record.assigned = AssignedState(
            self.model, record.functions.buffers, self.aliases.names, self.own
        )
        with (
            record.around_call(),
            record.process.seen_by(record.functions, record.before.functions),
            values_unread(record.loops, batched) as record.notes,
        ):
            loss = record.assigned.run(partial(self._loss, tensors))
        return (loss, *self.record.tensors())

    def _loss(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        tensors = tensors | {name: tensors[name].flatten(0, 1) for name in self.joined}
        tensors = tensors | {
            name: tensors[name].movedim(0, dim) for name, dim in self.moved.items()
        }
        batch, keyword = rebuilt(self.form, tensors), isinstance(self.form, Mapping)
        entries = dict(batch if keyword else {f"arg{k}": part for k, part in enumerate(batch)})
        target = "" if self.loss_fn is None else target_name(tuple(entries))
        call = arguments_of(self.model, entries, keyword, target)
        output = self.model(**call) if keyword else self.model(*call.values())
        source = f"forward of {type(self.model).__name__}"
        if self.loss_fn is not None:
            output, source = self.loss_fn(output, entries[target]), "loss_fn"
        trains = any(p.requires_grad for p in self.model.parameters())
        self.notes.clear()
        return loss_of(output, source, self.loss_fn is not None, self.notes, trains)


def _is_batched(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and isinstance(tensor.shape[0], torch.SymInt)


def capture(
    model: nn.Module,
    example_inputs: ExampleInputs,
    loss_fn: Callable | None = None,
    dtype: torch.dtype | None = None,
    batch_dims: BatchDims | None = None,
    together: int = 1,
) -> Captured:
    """Export `model` and its loss as one ATen graph with a symbolic batch size, in a `Captured`.

    The model is not touched: a copy of its structure with fake tensors is exported, so that no
    memory is needed. They are fake CPU tensors, not meta ones, so that constants that forward makes
    from Python numbers keep their values. Python state that forward changes outside of the model,
    generators of random numbers among it, is put back.

    `loss_fn(output, target)` makes the loss if given; else the model returns it. `dtype` casts
    floating parameters, buffers and inputs first. `batch_dims` says where the rows of an input are
    that are not dim 0, or that it has none (None). `together` consecutive rows are one row of the
    graph.

    Raises AutoparError when the model cannot be captured, with the cause.
    """
    tensors, plain = batch_entries(example_inputs)
    if MICRO_BATCH_SHARE in tensors:
        raise AutoparError(
            f"an input is called {MICRO_BATCH_SHARE!r}, as what autopar gives graphs itself: rename it"
        )
    dims = row_dims(tensors, batch_dims)
    without = [name for name, dim in dims.items() if dim is None]
    tensors = in_groups(rows_first(tensors, dims), together, without)
    _refuse_hooks(model)
    refuse_wrappers(model)
    _refuse_own_tensors(loss_fn)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=False)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=_cast(tensor, dtype), device="cpu")

    copies: dict[int, Any] = {}
    structure = copy_with(model, fake, copies)
    batch = next(tensors[name].shape[0] for name, dim in dims.items() if dim is not None)
    hint = max(batch, 2)  # torch.export specializes batch sizes 0 and 1
    with mode:
        sizes = {
            n: t.shape if dims[n] is None else (hint, *t.shape[1:]) for n, t in tensors.items()
        }
        examples = {
            name: torch.empty(tuple(size), dtype=_cast(tensors[name], dtype), device="cpu")
            for name, size in sizes.items()
        }
    record = StateRecord(structure, Functions.of(structure, loss_fn))
    with torch_seeded(), in_the_copy(model, record.functions, copies):
        start = Snapshot.of(structure, record.functions)
        check_kept_sizes(start, record.functions, structure)
        aliases = Aliases(structure, start)
        how: dict[str, Any] = {
            "dims": dims,
            "form": form_of(example_inputs),
            "loss_fn": loss_fn,
            "together": together,
        }
        to_capture = _Call(model, structure, copies, aliases, examples, **how)
        try:
            captured = to_capture.capture(record)
            check_values(captured)
            check_symbols(captured)
            check_loss_trains(captured)
            notes = check_state(captured, record, to_capture.capture)
        finally:
            start.restore()
    notes = (*captured.notes, *notes, *rounding_notes(captured))
    return replace(captured, notes=notes, plain=plain)


@dataclass(frozen=True, slots=True)
class _Call:
    """What is captured, as data: the user's model, a copy (`structure`) with fake tensors, fake
    inputs by name with their rows first, and the user's dims of rows.

    `copies` is the memo of the copy. `form`: a batch nested like the user's, without its tensors.
    `together`: dim 1 of an input has this number of rows, if it is more than one.
    """

    model: nn.Module
    structure: nn.Module
    copies: dict[int, Any]
    aliases: Aliases
    examples: dict[str, torch.Tensor]
    dims: dict[str, int | None]
    form: ExampleInputs
    loss_fn: Callable | None
    together: int

    def capture(self, record: StateRecord) -> Captured:
        """Export the call in the current Python state as a `Captured` graph. `record` watches what
        forward changes outside of the model. Raises AutoparError if torch.export fails.
        """
        names = tuple(self.examples)
        moved = {name: dim for name, dim in self.dims.items() if dim}
        skeleton = _LossModule(
            self.structure,
            form=self.form,
            loss_fn=self.loss_fn,
            aliases=self.aliases,
            record=record,
            moved=moved,
            joined=[n for n in names if self.dims[n] is not None] if self.together > 1 else (),
            own=UserTensors.of(self.model),
        )
        shapes = {
            "tensors": {
                name: None if self.dims[name] is None else {0: torch.export.Dim.DYNAMIC}
                for name in names
            }
        }
        registered = Registered(self.model, self.structure, self.copies, record.made)
        state = partial(Snapshot.of, self.structure, record.functions)
        try:
            with watched_forward(state) as notes, cumulative_averages():
                exported = _exported(skeleton, self.examples, shapes)
                _list_users(exported.graph_module)
                read_as_attributes(exported, registered)
                exported = functional(exported)
        except AutoparError:
            raise
        except Exception as error:  # torch.export raises many types; all of them mean that this model cannot be captured
            raise AutoparError(why_not_captured(error, self.model, self.examples)) from error
        found = check_changes(_collect(exported, self.model, names), record.assigned)
        notes = [*notes, *record.process.notes(), *record.notes, *skeleton.notes]
        if record.assigned is not None:
            known = record.assigned.known
            found = replace(found, parameters=_read_as_numbers(found.parameters, known.read))
            notes += known.notes()
        return replace(found, notes=tuple(notes), row_dims=moved, together=self.together)


def _read_as_numbers(
    specs: dict[str, ParameterSpec], names: Collection[str]
) -> dict[str, ParameterSpec]:
    """`specs` in which those of `names`, of which forward has read numbers, are marked."""
    return {
        name: replace(spec, read_as_number=True) if {name, *spec.aliases} & set(names) else spec
        for name, spec in specs.items()
    }


def _exported(
    skeleton: _LossModule, examples: dict[str, torch.Tensor], shapes: dict[str, Any]
) -> torch.export.ExportedProgram:
    """The exported program. If forward fails where torch.distributed is not initialized, it is
    called again as if it was, with one process.
    """
    record = skeleton.record
    export = partial(
        torch.export.export, skeleton, (examples,), dynamic_shapes=shapes, strict=False
    )
    try:
        return export()
    except AutoparError:
        raise
    except Exception:
        if not record.process.asked:
            raise
        record.before.restore()
        record.process = OneProcess(initialized=True)
        return export()


def _list_users(program: nn.Module) -> None:
    """Add each node of the program's graphs to the users of its operands. torch.export 2.13 forgets
    some where forward has a region without gradients.
    """
    for module in program.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for operand in node.all_input_nodes:
                    operand.users.setdefault(node)


def _refuse_own_tensors(loss_fn: Callable | None) -> None:
    """Raise AutoparError if `loss_fn` is a module with parameters or buffers."""
    if isinstance(loss_fn, nn.Module) and (
        own := [name for name, _ in (*loss_fn.named_parameters(), *loss_fn.named_buffers())]
    ):
        raise AutoparError(
            f"loss_fn is a module with tensors of its own ({own[0]}), which the model lacks: make it a part of the model"
        )


def _refuse_hooks(model: nn.Module) -> None:
    """Raise AutoparError if a module of the model has backward hooks, or a parameter gradient
    hooks, since export would drop them.
    """
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise AutoparError(
                f"module {name or 'model'!r} has backward hooks, which torch.export drops. Remove them: engine.register_gradient_hook "
                "changes gradients of parameters, and an op of its own (torch.library.custom_op and register_autograd) those of activations"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise AutoparError(
                f"parameter {name!r} has gradient hooks, which the engine's own tensors would lack. Remove them: after parallelize, "
                f'engine.register_gradient_hook("{name}", hook) sets a hook of a name and the whole gradient'
            )


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def parameter_specs(model: nn.Module) -> dict[str, ParameterSpec]:
    """A spec (shape, dtype, whether it is trained or a buffer) for each parameter and buffer, by
    its first name. Other names of tied tensors are in `aliases`.
    """
    specs: dict[str, ParameterSpec] = {}
    for is_buffer, named in ((False, model.named_parameters), (True, model.named_buffers)):
        groups: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in named(remove_duplicate=False):
            groups.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        for key, names in groups.items():
            t = tensors[key]
            specs[names[0]] = ParameterSpec(
                names[0],
                tuple(t.shape),
                str(t.dtype).removeprefix("torch."),
                t.requires_grad and not is_buffer,
                is_buffer,
                tuple(names[1:]),
            )
    return specs


def _collect(
    exported: torch.export.ExportedProgram, model: nn.Module, names: tuple[str, ...]
) -> Captured:
    specs = parameter_specs(model)
    first_name = {
        alias: spec.name for spec in specs.values() for alias in (spec.name, *spec.aliases)
    }
    attributes: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    for spec in exported.graph_signature.input_specs:
        kind, placeholder = spec.kind.name, spec.arg.name
        if kind == "USER_INPUT":
            inputs.append(placeholder)
        elif kind in ("PARAMETER", "BUFFER") and spec.target.removeprefix("model.") in first_name:
            attributes[placeholder] = first_name[spec.target.removeprefix("model.")]
        elif kind in ("CONSTANT_TENSOR", "BUFFER"):  # a buffer that forward registered
            attributes[placeholder], constants[spec.target] = (
                spec.target,
                (exported.constants | exported.state_dict)[spec.target],
            )
        else:
            node = next(
                n for n in exported.graph.find_nodes(op="placeholder") if n.name == placeholder
            )
            where = line_of_nodes(node.users)
            raise (
                own_generator(where)
                if "Generator" in str(spec)
                else AutoparError(
                    f"forward uses an object that is no tensor{where or f' ({placeholder})'}, which autopar cannot run; pass its "
                    "tensors in as inputs"
                )
            )
    graph = exported.graph_module.graph
    graph.owning_module = exported.graph_module
    first: dict[str, torch.fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if (
            node.name in attributes
            and (one := first.setdefault(attributes[node.name], node)) is not node
        ):
            node.replace_all_uses_with(one)
            del attributes[node.name]
            graph.erase_node(node)
    updates = _return_updates(graph, exported.graph_signature.output_specs, first_name, attributes)
    return Captured(
        graph,
        inputs=names,
        input_nodes=tuple(inputs),
        attributes=attributes,
        parameters=specs,
        constants=constants,
        updates=updates,
    )


def _return_updates(
    graph: torch.fx.Graph,
    output_specs: list,
    first_name: dict[str, str],
    attributes: dict[str, str],
) -> tuple[str, ...]:
    """Change the graph to return the loss and then the detached new value of each buffer and
    parameter that forward changes. Returns their names, in that order.

    `output_specs` are torch.export's. `first_name` maps every name of a tensor to its first, and
    `attributes` placeholders to names.

    Reads of a changed one are wrapped in `autopar::in_training`: in evaluation it does not change.
    Raises AutoparError if forward changes another tensor that is no input.
    """
    output = graph.output_node()
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    before = {name: nodes[placeholder] for placeholder, name in attributes.items()}
    outputs, changed = [], {}
    for spec, node in zip(output_specs, output_nodes(graph), strict=True):
        kind = spec.kind.name
        if kind == "USER_OUTPUT":
            outputs.append(node)
        elif kind in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            name = first_name[spec.target.removeprefix("model.")]
            if node.op != "call_function":  # the buffer becomes another tensor as it is
                with graph.inserting_before(output):
                    node = call(graph, node, torch.ops.aten.clone.default, node)
            readers = [user for user in node.users if user is not output]
            if readers:
                with graph.inserting_after(node):
                    read = call(
                        graph, node, torch.ops.autopar.in_training.default, node, before[name]
                    )
                for user in readers:
                    user.replace_input_with(node, read)
            with graph.inserting_before(output):
                changed[name] = call(graph, node, torch.ops.aten.detach.default, node)
        elif (
            kind != "USER_INPUT_MUTATION"
        ):  # what becomes of the caller's tensor is the caller's affair
            raise AutoparError(
                f"forward changes {spec.target!r} in place ({kind.lower()}), which autopar cannot run: make it a buffer"
            )
    output.args = ((outputs[0], *changed.values(), *outputs[1:]),)
    return tuple(changed)
