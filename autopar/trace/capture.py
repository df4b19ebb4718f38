"""Capture: torch.export of the model and its loss, on fake tensors, with a dynamic batch."""

from __future__ import annotations

import contextlib
import copy
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.batches import ExampleInputs, batch_tensors
from autopar.errors import AutoparError
from autopar.ir.traced import MICRO_BATCH_SHARE, ParameterSpec
from autopar.trace.constants import Registered
from autopar.trace.edit import call
from autopar.trace.normalize import expand_feature_dropout, inline_no_grad_regions


@dataclass(frozen=True, slots=True)
class Captured:
    """A flat ATen graph.  `inputs` names the user's tensors, `input_nodes` their placeholders in that order; `attributes` maps the
    placeholder of a parameter, buffer or constant to its name in `parameters` or `constants`.  The graph returns the loss and then the new
    values of the buffers `updates`, which forward changes in place."""

    graph: torch.fx.Graph
    inputs: tuple[str, ...]
    input_nodes: tuple[str, ...]
    attributes: dict[str, str]
    parameters: dict[str, ParameterSpec]
    constants: dict[str, torch.Tensor]
    updates: tuple[str, ...] = ()


class _LossModule(nn.Module):
    """Calls the user's model and returns the scalar loss alone, with the user's modules kept under `model`."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], keyword: bool, loss_fn: Callable | None) -> None:
        super().__init__()
        self.model, self.names, self.keyword, self.loss_fn = model, names, keyword, loss_fn
        self.targets = _target_name(names) if loss_fn is not None else None

    def forward(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        first, *others = [tensor.shape[0] for tensor in tensors.values() if _is_batched(tensor)] or [0]
        for rows in others:
            torch._check(rows == first)  # one batch, though forward may never relate its inputs
        call = {name: tensors[name] for name in self.names if name != self.targets}
        output = self.model(**call) if self.keyword else self.model(*call.values())
        if self.loss_fn is None:
            loss, source = _find_loss(output), "the model"
            remedy = "pass labels in example_inputs so that the model computes its loss, or pass "
        else:
            loss, source, remedy = self.loss_fn(output, tensors[self.targets]), "loss_fn", "end it with .mean() or .sum(), as "
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            what = f"a tensor of shape ({_sizes(loss)})" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise AutoparError(f"{source} returned {what}, not a scalar loss: {remedy}loss_fn=lambda output, target: ...")
        if not loss.is_floating_point():
            raise AutoparError(f"{source} returned a loss of {loss.dtype}; a loss is a real floating-point number")
        if not loss.requires_grad and any(p.requires_grad for p in self.model.parameters()):
            raise AutoparError(f"{source} returned a loss without gradient: was it computed under no_grad, or detached?")
        return loss


def _is_batched(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and isinstance(tensor.shape[0], torch.SymInt)


def _target_name(names: tuple[str, ...]) -> str:
    for name in ("labels", "targets", "target", "label"):
        if name in names:
            return name
    return names[-1]


def _find_loss(output: Any) -> Any:
    """What a model returns as its loss: under that name, or first."""
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif getattr(output, "loss", None) is not None:
        loss = output.loss
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    return loss


def capture(model: nn.Module, example_inputs: ExampleInputs, loss_fn: Callable | None = None, dtype: torch.dtype | None = None) -> Captured:
    """Export `model` and its loss as one ATen graph with a symbolic batch size.

    The model is not touched: a copy of its structure with fake tensors is exported, so that no memory is needed.  (Fake CPU tensors,
    not meta ones: constants that forward makes from Python numbers keep their values.)
    `dtype` casts its floating parameters, buffers and inputs first.  Raises AutoparError when the model cannot be captured, with the cause.
    """
    tensors = batch_tensors(example_inputs)
    if MICRO_BATCH_SHARE in tensors:
        raise AutoparError(f"an input is called {MICRO_BATCH_SHARE!r}, as what autopar gives graphs itself: rename it")
    batch = _batch_size(tensors)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=False)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=_cast(tensor, dtype), device="cpu")

    _refuse_hooks(model)
    if isinstance(loss_fn, nn.Module) and (own := [name for name, _ in (*loss_fn.named_parameters(), *loss_fn.named_buffers())]):
        raise AutoparError(f"loss_fn is a module with tensors of its own ({own[0]}), which the model lacks: make it a part of the model")
    copies: dict[int, Any] = {}
    structure = _copy_with(model, fake, copies)
    skeleton = _LossModule(structure, tuple(tensors), isinstance(example_inputs, Mapping), loss_fn)
    dynamic = {name: t.dim() > 0 and t.shape[0] == batch for name, t in tensors.items()}
    hint = max(batch, 2)  # torch.export specializes batch sizes 0 and 1
    with mode:
        examples = {
            name: torch.empty((hint, *t.shape[1:]) if dynamic[name] else tuple(t.shape), dtype=_cast(t, dtype), device="cpu")
            for name, t in tensors.items()
        }
    shapes = {"tensors": {name: {0: torch.export.Dim.DYNAMIC} if dynamic[name] else None for name in tensors}}
    try:
        with _custom_gradients_refused():
            exported = torch.export.export(skeleton, (examples,), dynamic_shapes=shapes, strict=False)
        graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]  # no-grad regions are graphs too
        if any(_mutates(node) for graph in graphs for node in graph.nodes):
            exported.graph.owning_module = exported.graph_module
            inline_no_grad_regions(exported.graph)  # functionalization would forget them
            expand_feature_dropout(exported.graph)  # and make this a Bernoulli draw
            exported.graph_module.recompile()
            exported = exported.run_decompositions({})
    except AutoparError:
        raise
    except Exception as error:  # torch.export raises many types; all of them mean that this model cannot be captured
        raise AutoparError(_why_not_captured(error, model, tensors)) from error
    captured = _collect(exported, model, Registered(model, structure, copies), tuple(tensors))
    _check_values(captured)
    _check_symbols(captured)
    return captured


def _why_not_captured(error: Exception, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
    """The user's mistake in the words of the user: what is wrong, in which line of whose code, and the remedy."""
    name, reason = type(model).__name__, " ".join(str(error).strip().splitlines()[:3])[:600].rstrip(". ")
    where, kind = _line_of_user(error), type(error).__name__
    cause = reason.partition(").")[0]
    if kind in ("GuardOnDataDependentSymNode", "UserError", "DataDependentOutputException"):
        return (
            f"forward of {name} branches on the values of a tensor{where}: which ops run would depend on data ({cause}). Choose between "
            "tensors with torch.where, or decide outside of forward"
        )
    if "numpy" in reason or kind in ("Unsupported", "UnsupportedOperatorException"):
        return f"forward of {name} leaves PyTorch{where}, where its graph breaks: {reason}. Use torch ops only"
    if kind == "TypeError" and "argument" in reason:
        return f"example_inputs ({', '.join(tensors)}) are not the arguments of forward of {name}: {reason}"
    shapes = ", ".join(f"{key} {tuple(value.shape)} {value.dtype}" for key, value in tensors.items())
    return f"forward of {name} fails on example_inputs ({shapes}){where}: {kind}: {reason}. Check shapes and dtypes; does it run eagerly?"


def _line_of_user(error: Exception) -> str:
    """' (file.py:12: its text)' of the innermost frame outside of torch and autopar, or ''."""
    own = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)), contextlib.__file__, "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _batch_size(tensors: dict[str, torch.Tensor]) -> int:
    for tensor in tensors.values():
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise AutoparError("no input has a batch dim: every tensor in example_inputs is a scalar")


def _refuse_hooks(model: nn.Module) -> None:
    """Hooks that change gradients do not survive export; refuse them rather than drop them."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise AutoparError(f"module {name or 'model'!r} has backward hooks, which torch.export drops; remove them before parallelizing")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise AutoparError(f"parameter {name!r} has gradient hooks, which torch.export drops; remove them before parallelizing")


@contextlib.contextmanager
def _custom_gradients_refused() -> Iterator[None]:
    """While the model runs under export, raise where it defines gradients of its own: export keeps the forward and drops the backward."""
    apply, hook = torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook

    def checked_apply(cls, *args, **kwargs):
        if not cls.__module__.startswith("torch."):
            raise AutoparError(
                f"forward calls the custom autograd.Function {cls.__name__}, whose backward torch.export drops; make it an op "
                "with torch.library.custom_op and register_autograd"
            )
        return apply.__func__(cls, *args, **kwargs)

    def refused_hook(self, *args, **kwargs):
        raise AutoparError(
            "forward calls Tensor.register_hook, which torch.export drops; write the gradient as an op of its own "
            "(torch.library.custom_op and register_autograd)"
        )

    torch.autograd.Function.apply = classmethod(checked_apply)
    torch.Tensor.register_hook = refused_hook
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply
        torch.Tensor.register_hook = hook


def _sizes(tensor: torch.Tensor) -> str:
    """The shape for a message; sizes that follow the batch are called so."""
    sizes = ("batch" if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol else str(size) for size in tensor.shape)
    return ", ".join(sizes)


def _check_values(captured: Captured) -> None:
    """No tensor is complex, and no number is read out of a tensor."""
    for node in captured.graph.nodes:
        val = node.meta.get("val")
        name = captured.attributes.get(node.name, node.name)
        for tensor in val if isinstance(val, (list, tuple)) else (val,):
            if isinstance(tensor, torch.Tensor) and tensor.is_complex():
                raise AutoparError(
                    f"{name} is complex ({tensor.dtype}, shape ({_sizes(tensor)})), which autopar cannot distribute: keep real and "
                    "imaginary parts in real tensors (rotary embeddings: multiply by cos and sin)"
                )
        if node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            raise AutoparError(
                f"forward reads a number out of {node.args[0]} by .item(), int() or float(): every rank would read its own; keep it a "
                "tensor"
            )


def _check_symbols(captured: Captured) -> None:
    """Every size that is not a number must follow the one batch."""
    placeholders = {n.name: n for n in captured.graph.nodes if n.op == "placeholder"}
    batch: dict[str, str] = {}
    for name, node_name in zip(captured.inputs, captured.input_nodes, strict=True):
        node = placeholders[node_name]
        size = node.meta["val"].shape[0] if node.users and node.meta["val"].dim() else 0
        if isinstance(size, torch.SymInt):
            batch.setdefault(str(size), name)
    if len(batch) > 1:
        names = list(batch.values())
        raise AutoparError(
            f"inputs {names[0]!r} and {names[1]!r} both have the batch size in dim 0, but forward never relates the two: if one is "
            "not batched, plan with an example batch whose size differs from that dim"
        )
    for node in captured.graph.nodes:
        val = node.meta.get("val")
        for size in val.shape if isinstance(val, torch.Tensor) else ():
            unknown = {str(s) for s in size.node.expr.free_symbols} - set(batch) if isinstance(size, torch.SymInt) else None
            if unknown and node.op != "placeholder":
                raise AutoparError(
                    f"{node.name} has a shape that depends on data ({tuple(map(str, val.shape))}), as boolean indexing gives; use "
                    "arithmetic with the mask instead, for example (loss * mask).sum() / mask.sum()"
                )
    lost = [name for name, tensor in captured.constants.items() if tensor.is_meta]
    if lost:
        raise AutoparError(f"forward uses tensor {lost[0]!r}, which is on the meta device and has no values; register it as a buffer")


def _mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the module whose parameters and buffers are on the meta device; tied tensors stay tied."""
    return _copy_with(model, lambda tensor: torch.empty_like(tensor, device="meta"))


def _copy_with(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor], memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of the module with `make(tensor)` in place of each parameter and buffer; `memo` is then that of `copy.deepcopy`."""
    memo = {} if memo is None else memo
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = make(buffer)
    return copy.deepcopy(model, memo)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def parameter_specs(model: nn.Module) -> dict[str, ParameterSpec]:
    """Parameters and buffers by first name, tied names folded into `aliases`."""
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


def _collect(exported: torch.export.ExportedProgram, model: nn.Module, registered: Registered, names: tuple[str, ...]) -> Captured:
    specs = parameter_specs(model)
    first_name = {alias: spec.name for spec in specs.values() for alias in (spec.name, *spec.aliases)}
    attributes: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    for spec in exported.graph_signature.input_specs:
        kind, placeholder = spec.kind.name, spec.arg.name
        if kind == "USER_INPUT":
            inputs.append(placeholder)
        elif kind in ("PARAMETER", "BUFFER"):
            attributes[placeholder] = first_name[spec.target.removeprefix("model.")]
        elif kind == "CONSTANT_TENSOR":
            constant = exported.constants[spec.target]
            if (name := registered.name(constant)) is None:
                attributes[placeholder], constants[spec.target] = spec.target, constant
            else:
                attributes[placeholder] = first_name[name]
        else:
            raise AutoparError(f"the captured graph takes {kind.lower()} input {spec.target!r}, which autopar cannot distribute")
    graph = exported.graph_module.graph
    graph.owning_module = exported.graph_module
    first: dict[str, torch.fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.name in attributes and (one := first.setdefault(attributes[node.name], node)) is not node:
            node.replace_all_uses_with(one)
            del attributes[node.name]
            graph.erase_node(node)
    updates = _return_updates(graph, exported.graph_signature.output_specs, first_name, attributes)
    return Captured(graph, names, tuple(inputs), attributes, specs, constants, updates)


def _return_updates(graph: torch.fx.Graph, output_specs: list, first_name: dict[str, str], attributes: dict[str, str]) -> tuple[str, ...]:
    """Make the graph return the loss and then the detached new value of each buffer that forward changes; returns their names.

    What forward reads of a buffer after changing it is, in evaluation, the buffer as it is: `autopar::in_training` says so.
    """
    output = graph.output_node()
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    before = {name: nodes[placeholder] for placeholder, name in attributes.items()}
    loss, changed = None, {}
    for spec, node in zip(output_specs, output.args[0], strict=True):
        kind = spec.kind.name
        if kind == "USER_OUTPUT":
            loss = node
        elif kind == "BUFFER_MUTATION":
            name = first_name[spec.target.removeprefix("model.")]
            if node.op != "call_function":  # the buffer becomes another tensor as it is
                with graph.inserting_before(output):
                    node = call(graph, node, torch.ops.aten.clone.default, node)
            readers = [user for user in node.users if user is not output]
            if readers:
                with graph.inserting_after(node):
                    read = call(graph, node, torch.ops.autopar.in_training.default, node, before[name])
                for user in readers:
                    user.replace_input_with(node, read)
            with graph.inserting_before(output):
                changed[name] = call(graph, node, torch.ops.aten.detach.default, node)
        elif kind != "USER_INPUT_MUTATION":  # what becomes of the caller's tensor is the caller's affair
            raise AutoparError(f"forward changes {spec.target!r} in place ({kind.lower()}), which autopar cannot run: make it a buffer")
    output.args = ((loss, *changed.values()),)
    return tuple(changed)
