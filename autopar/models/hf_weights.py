"""Published checkpoints of Hugging Face models: which tensors of the files make each parameter.

Published names differ from those of the module tree. A base model has no prefix, old names were
replaced, and the experts of a layer are tensors of their own where the model has one parameter.
transformers has tables of these conversions, which `recipes` applies to names and shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError

from .hf import hf_models

_Shape = tuple[int, ...]
Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How tensors of the model are made of tensors of the files.

    Attributes:
        sources: names in the files.
        shapes: the shapes of the tensors that it makes, by the model's names. A shape is None if
            only reading can tell it, as for quantized weights.
        rows: how many tensors in `sources` make one index along dim 0 of the result. 0 if an
            index needs all of them.
        convert: `convert(names, read)` makes the tensors, by the model's names, from the sources
            `names` (some or all). `read(name)` returns the tensor of one source.
    """

    sources: tuple[str, ...]
    shapes: Mapping[str, _Shape | None]
    rows: int
    convert: Callable[[Sequence[str], Read], Mapping[str, Tensor]]

    def sources_of_rows(self, rows: Sequence[int]) -> list[str]:
        """The sources that make the indices `rows` along dim 0 of the result, in the order of
        `sources`. Only if the recipe's own `rows` is not 0.
        """
        count = len(self.sources) // self.rows
        wanted = {kind * count + row for kind in range(self.rows) for row in rows}
        return [name for index, name in enumerate(self.sources) if index in wanted]


def recipes(model: nn.Module, shapes: Mapping[str, _Shape]) -> tuple[list[Recipe], list[str]]:
    """How a model's tensors are made of files that hold tensors of these shapes, by name.

    Tensors of transformers models inside `model` are found by transformers' conversion tables.
    Files of a single such model may leave out its path in `model`. All other names are the model's
    own.

    Returns:
        The recipes, and the names in the files of which no tensor of the model is made.

    Raises:
        AutoparError: quantized weights cannot be turned into plain ones, or tensors do not fit a
            conversion.
    """
    inner = {id(found) for found in hf_models(model)}
    paths = {path: module for path, module in model.named_modules() if id(module) in inner}
    own = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
    left, made = dict(shapes), []
    for path, module in paths.items():
        start = f"{path}." if path else ""
        starting = [name for name in left if name.startswith(start)]
        cut = len(start) if starting else 0
        alone = not starting and len(paths) == 1
        names = [name for name in left if name not in own] if alone else starting
        found, unknown = _of_transformers(module, {name[cut:]: left[name] for name in names})
        made += [_below(recipe, start, start[:cut]) for recipe in found]
        for name in names:
            if name[cut:] not in unknown:
                del left[name]
    direct = [name for name in left if name in own]
    made += [_as_is(name, name, left[name]) for name in direct]
    return made, [name for name in left if name not in own]


def _as_is(target: str, source: str, shape: _Shape) -> Recipe:
    return Recipe((source,), {target: shape}, 0, lambda names, read: {target: read(source)})


def _below(recipe: Recipe, start: str, start_in_files: str) -> Recipe:
    """The recipe of a module, as one of the model that has it below `start`. The files have it
    below `start_in_files`. Both are dotted prefixes, or ''.
    """

    def convert(names: Sequence[str], read: Read) -> Mapping[str, Tensor]:
        inside = [name.removeprefix(start_in_files) for name in names]
        found = recipe.convert(inside, lambda name: read(start_in_files + name))
        return {start + name: tensor for name, tensor in found.items()}

    return Recipe(
        tuple(start_in_files + name for name in recipe.sources),
        {start + name: shape for name, shape in recipe.shapes.items()},
        recipe.rows,
        convert,
    )


def _of_transformers(model: Any, shapes: Mapping[str, _Shape]) -> tuple[list[Recipe], set[str]]:
    """(recipes, unknown names) of one transformers model, after its loader
    `convert_and_load_state_dict_in_model`. `shapes` has the files' tensors by name. Names that
    transformers ignores are not unknown.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    own, quantizer = model.state_dict(), _dequantizer(model)
    transforms = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    groups: dict[str, list[tuple[str, str | None]]] = {}
    unknown: dict[str, str] = {}
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = _renamed(model, name, renamings, converters, own)
        if target in own:
            groups.setdefault(target, []).append((name, pattern))
        else:
            unknown[name] = target
    made = []
    for target, members in groups.items():
        if members[0][1] is None:
            name = members[0][0]  # of two names of one tensor, the loader takes the first
            made.append(_as_is(target, name, shapes[name]))
        else:
            patterns = {name: str(pattern) for name, pattern in members}
            converter = by_pattern[next(iter(patterns.values()))]
            made.append(_converted(model, quantizer, target, converter, patterns, shapes))
    ignored = _ignored(model, unknown.values())
    return made, {name for name, target in unknown.items() if target not in ignored}


def _renamed(
    model: Any, name: str, renamings: list, converters: list, own: dict[str, Any]
) -> tuple[str, str | None]:
    from transformers.core_model_loading import rename_source_key

    prefix = model.base_model_prefix
    target, pattern = rename_source_key(name, renamings, converters, prefix, own)
    if target not in own and name in own:
        return rename_source_key(name, [], [], prefix, own)
    return target, pattern


def _converted(
    model: Any,
    quantizer: Any,
    target: str,
    converter: Any,
    patterns: Mapping[str, str],
    shapes: Mapping[str, _Shape],
) -> Recipe:
    """The `Recipe` of one use of a converter of transformers, which makes the tensor `target` and
    perhaps others. `patterns` has the converter's pattern that each source matched; `shapes` the
    shapes of sources.
    """

    def convert(names: Sequence[str], read: Read) -> Mapping[str, Tensor]:
        fresh = deepcopy(converter)
        for name in names:
            fresh.add_tensor(target, name, patterns[name], lambda name=name: read(name))
        try:
            found = fresh.convert(target, model=model, config=model.config, hf_quantizer=quantizer)
        except Exception as error:  # each operation of transformers raises its own types
            raise AutoparError(
                f"{target} cannot be made of {len(names)} tensors, {names[0]} first: {type(error).__name__}: {str(error)[:200]}"
            ) from error
        return {name: t[0] if isinstance(t, list) else t for name, t in found.items()}

    known = {name: shapes[name] for name in patterns}
    if quantizer is not None:
        made: Mapping[str, _Shape | None] = {target: None}
    else:
        on_meta = convert(list(known), lambda name: torch.empty(known[name], device="meta"))
        made = {name: tuple(tensor.shape) for name, tensor in on_meta.items()}
    sources = sorted(known, key=lambda name: converter.source_patterns.index(patterns[name]))
    kinds = [list(patterns.values()).count(pattern) for pattern in dict.fromkeys(patterns.values())]
    rows = len(kinds) if _is_by_rows(converter) and len(set(kinds)) == 1 else 0
    return Recipe(tuple(sources), made, rows, convert)


def _is_by_rows(converter: Any) -> bool:
    """Whether a converter of transformers stacks tensors along a new dim 0, which no later
    operation touches.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *later = converter.operations
    stacks = type(first) is MergeModulelist and first.dim == 0
    return stacks and all(type(each) is Concatenate and each.dim > 0 for each in later)


def _dequantizer(model: Any) -> Any:
    """transformers' quantizer that turns the quantized weights of a model's config into plain ones.
    None if the config has none. Raises AutoparError for weights that it cannot turn.
    """
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(deepcopy(config), pre_quantized=True)
    if not hasattr(quantizer.quantization_config, "dequantize"):
        raise AutoparError(
            f"the model's config has weights quantized by {quantizer.quantization_config.quant_method}, which cannot be trained. "
            "Give weights that are not quantized, and remove quantization_config from the config"
        )
    quantizer.quantization_config.dequantize = True
    return quantizer


def _ignored(model: Any, names: Iterable[str]) -> set[str]:
    """Those of `names`, unknown to the model, that transformers knows to be superfluous."""
    info = SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
    before = set(info.unexpected_keys)
    model._adjust_missing_and_unexpected_keys(info)
    return before - info.unexpected_keys
