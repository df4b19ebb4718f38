"""Calls of a Python file that is read. Functions and classes of the files are followed. What libraries
are known to return is written down, and any other value is not known.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from autopar.foreign.texts.python_builtins import BUILTINS, NotComputed, computed
from autopar.foreign.texts.python_expressions import Expressions
from autopar.foreign.texts.python_values import (
    UNSET,
    Choice,
    Class,
    Module,
    Named,
    PythonFunction,
    Record,
    is_certain,
    text_of,
)

_MOST_DEPTH = 40
"""The most calls within each other that are followed."""
LIBRARIES = frozenset(
    "megatron nemo nemo_run torch torchtitan transformers trl peft accelerate deepspeed lightning pytorch_lightning datasets "
    "numpy omegaconf hydra yaml wandb tyro simple_parsing huggingface_hub bitsandbytes unsloth nemo_automodel verl".split()
) | set(sys.stdlib_module_names)
"""Modules that do not belong to a job."""
_STAND = re.compile(
    r"(.*\.)?(AutoBridge|model_registry|get_model_spec|default_\w*(config|log|resume)|MockDataModule)(\..*)?"
)
"""Functions that are not followed: they read models, or set nothing of weight."""
_HARMLESS = re.compile(
    r"(.*\.)?(print|pprint|pretrain|finetune|train|fit|main|run|validate|vars|asdict|dump|dumps|save\w*|info|debug|warning|"
    r"error|log|exit|add|isinstance|type|id|repr|register\w*|seed\w*|set_seed|init\w*|makedirs|to_yaml|print_yaml|"
    r"apply_(determinism_overrides|flex_dispatcher_backend)|get_\w+|from_\w+|load_\w+|build_\w+|\w*tokenizer\w*)"
)
"""Functions that leave the configurations that they get as they are."""
_CUTS = re.compile(r"set_\w*pipeline_model_parallel_layout$")
"""Functions that cut a pipeline, by the layout that they may be given."""
_PRECISION = re.compile(r"\w*(bf16|fp16)\w*mixed\w*|bf16_with_\w+|fp16_with_\w+")
_FP8 = {
    "current": "tensorwise",
    "subchannel": "blockwise",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
}


class Returned(Exception):
    """A function returns a value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def precision_record(name: str) -> Record:
    """The mixed precision that a name such as `bf16_with_fp8_current_scaling_mixed` says."""
    plain = name.replace("-", "_")
    found: dict[str, Any] = {"fp16" if plain.startswith("fp16") else "bf16": True, "fp8": None}
    if "fp8" in plain:
        recipe = next((recipe for word, recipe in _FP8.items() if word in plain), "delayed")
        found |= {"fp8": "hybrid", "fp8_recipe": recipe}
    if "fp4" in plain:
        found |= {"fp4": "e2m1"}
    return Record(name, found | {"grad_reduce_in_fp32": True})


class Calls(Expressions):
    """Evaluates calls."""

    def is_library(self, path: str) -> bool:
        """Whether a module is none of the job's own."""
        return path.partition(".")[0] in LIBRARIES

    def call(self, node: ast.Call, scope: dict[str, Any], module: Module) -> Any:
        """The value of a call."""
        if isinstance(node.func, ast.Attribute):
            holder = self.value(node.func.value, scope, module)
            if isinstance(holder, Choice):
                holder = self.likely(holder)
            if isinstance(holder, dict | list | tuple | str | set):
                return self.of_container(holder, node, scope, module)
            function = self.field(holder, node.func.attr)
        else:
            holder, function = None, self.value(node.func, scope, module)
        args, named = self.arguments(node, scope, module)
        if isinstance(function, Record) and isinstance(node.func, ast.Attribute):
            return self._of_object(holder, node.func.attr, args, named)
        return self.called(function, args, named, ast.unparse(node.func))

    def called(self, function: Any, args: list[Any], named: dict[str, Any], text: str) -> Any:
        """The value of a function or class with arguments."""
        self.count()
        match function:
            case Choice():
                return self.called(self.likely(function), args, named, text)
            case PythonFunction():
                return self._follow(function, args, named)
            case Class():
                return self.instance(function, args, named)
            case Named():
                return self._of_library(function, args, named)
            case Record() if function.kind == "partial" and "0" in function.fields:
                bound = {k: v for k, v in function.fields.items() if not k.isdigit()}
                return self.called(function.fields["0"], args, bound | named, text)
        return Record(text, dict(named), missing=text, level=self.unsure)

    def _of_object(self, holder: Any, name: str, args: list[Any], named: dict[str, Any]) -> Any:
        """The value of a method of an object that is not in the files."""
        if isinstance(holder, Record):
            if name == "__init__":  # of a base that has none in the files
                holder.fields.pop("__init__", None)
                holder.fields |= named
                return None
            if name == "add_argument" and args:
                self._adds_option(holder, args, named)
            elif name in ("parse_args", "parse_known_args"):
                options = holder.fields.get("@options", Record("arguments"))
                return options if name == "parse_args" else (options, [])
            elif name in ("add_argument_group", "add_mutually_exclusive_group", "copy"):
                return holder
            elif name in (
                "to_megatron_provider",
                "get_model_config",
                "from_hf_pretrained",
                "from_hf_config",
            ):
                model = next(
                    (a for a in args if isinstance(a, str)),
                    holder.fields.get("@model", holder.fields.get("0")),
                )
                return Record("provider", {"@model": model}, level=self.unsure)
        missing = holder.missing if isinstance(holder, Record) else ""
        fields = {str(n): arg for n, arg in enumerate(args)} | named
        return Record(name, fields, missing=missing or name, level=self.unsure)

    def _adds_option(self, parser: Record, args: list[Any], named: dict[str, Any]) -> None:
        """Takes over an option of argparse with its default, which counts if it is not given."""
        names = [arg for arg in args if isinstance(arg, str)]
        longest = next((n for n in names if n.startswith("--")), names[0] if names else "")
        name = str(named.get("dest", longest.lstrip("-").replace("-", "_")))
        options = parser.fields.setdefault("@options", Record("arguments"))
        switch = str(named.get("action", ""))
        value = named.get("default", {"store_true": False, "store_false": True}.get(switch))
        if named.get("required") is True or not longest.startswith("-"):
            value = Record(name, missing=f"the argument {name}")
        options.fields[name] = value
        self.note(f"{name} is taken to have its default, {text_of(value)[:40]}", value)

    def _of_library(self, named: Named, args: list[Any], given: dict[str, Any]) -> Any:
        """What a function or class gives that is not in the files."""
        if named.path in ("nemo_run.Config", "nemo_run.Partial", "nemo_run.config.Config"):
            return _configured(self, args, given)
        if named.path == "os.environ.get":
            return _environment(self, args, given)
        path = named.path.removesuffix(".Config")
        name = path.rpartition(".")[2]
        if (known := KNOWN.get(name)) is not None and not named.ours:
            return known(self, args, given)
        if path in BUILTINS and all(map(is_certain, [*args, *given.values()])):
            try:
                return computed(BUILTINS[path], *args, **given)
            except NotComputed:
                return Record(name, missing=name)
        if _PRECISION.fullmatch(name):
            return precision_record(name)
        if (
            name in ("get_mixed_precision_config", "_perf_precision")
            and args
            and isinstance(args[0], str)
        ):
            return precision_record(args[0])
        fields = {str(n): arg for n, arg in enumerate(args)} | given
        if _STAND.fullmatch(path) or (name[:1].isupper() and not named.ours):
            return self.made(Record(name, fields, level=self.unsure))
        if name[:1].isupper():
            return self.made(Record(name, fields, missing=path, level=self.unsure))
        records = [arg for arg in [*args, *given.values()] if isinstance(arg, Record)]
        if records and _CUTS.search(path):  # such as set_deepseek_v3_pipeline_model_parallel_layout
            cut = args[1] if len(args) > 1 and isinstance(args[1], str) else Choice((None,), path)
            self.set_field(records[0], "pipeline_model_parallel_layout", cut)
            return None
        if records and not _HARMLESS.fullmatch(path):
            for record in records:
                self.doubt(record, path)
            return records[0]
        weak = frozenset(given)
        return self.made(Record(name, fields, missing=path, level=self.unsure, weak=weak))

    def doubt(self, record: Record, why: str) -> None:
        """A function that is not in the files may have changed a configuration."""
        if record.kind == "arguments":
            return
        waiting, seen = [record], set[int]()
        while waiting:
            item = waiting.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            item.missing = item.missing or why
            for name, value in list(item.fields.items()):
                inner = self.likely(value) if isinstance(value, Choice) else value
                if isinstance(inner, Record):
                    waiting.append(inner)
                elif not isinstance(value, Choice):
                    item.fields[name] = Choice((value,), why)

    def _follow(self, function: PythonFunction, args: list[Any], named: dict[str, Any]) -> Any:
        """The value that a function of the files returns."""
        if self.depth >= _MOST_DEPTH:
            return Record("", missing="calls that are nested too deep")
        scope: dict[str, Any] = {
            "@outer": function.scope,
            "@level": self.unsure,
            "@class": function.cls,
        }
        scope |= self.bound(function, args, {**function.bound, **named})
        if isinstance(function.node, ast.Lambda):
            return self.value(function.node.body, scope, function.module)
        before, self.depth = self.unsure, self.depth + 1
        self.scopes.append(scope)
        returned: Any = UNSET
        try:
            self.run(function.node.body, scope, function.module)
        except Returned as value:
            returned = value.value
        finally:
            self.unsure, self.depth = before, self.depth - 1
            self.scopes.pop()
            self.last = scope
        values = [*scope.get("@returned", ()), *([] if returned is UNSET else [returned])]
        if not values:
            return None
        same = all(value is values[-1] for value in values)
        return values[-1] if same else Choice(tuple(values))

    def bound(
        self, function: PythonFunction, args: list[Any], named: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of a call by name. One that is not given is not known."""
        of = function.node.args
        names = [a.arg for a in (*of.posonlyargs, *of.args)]
        given = [function.self_, *args] if function.self_ is not None else args
        found = dict(zip(names, given, strict=False))
        if of.vararg:
            found[of.vararg.arg] = list(given[len(names) :])
        defaults = dict(zip(names[len(names) - len(of.defaults) :], of.defaults, strict=True))
        defaults |= {a.arg: d for a, d in zip(of.kwonlyargs, of.kw_defaults, strict=True) if d}
        for name in [*names, *(a.arg for a in of.kwonlyargs)]:
            if name in named:
                found[name] = named[name]
            elif name not in found and name in defaults:
                found[name] = self.value(defaults[name], dict(function.scope), function.module)
            elif name not in found:
                found[name] = Record(name, missing=f"the argument {name}", level=self.unsure)
        if of.kwarg:
            found[of.kwarg.arg] = {k: v for k, v in named.items() if k not in found}
        return found

    def instance(self, cls: Class, args: list[Any], named: dict[str, Any]) -> Record:
        """A new object of a class of the files, with the defaults of its body and its bases."""
        record = self.made(Record(cls.name, level=self.unsure, cls=cls))
        ours = [base.path for base in cls.foreign() if base.ours]
        record.missing = ours[0] if ours else ""
        for part in reversed(list(cls.order())):
            for name, value in list(part.body.items()):
                if not isinstance(value, PythonFunction | Class | Module) and not name.startswith(
                    "__"
                ):
                    record.fields[name] = self._default(value)
        made = cls.find("__init__")
        if isinstance(made, PythonFunction):
            self._follow(replace_self(made, record), args, named)
            return record
        names = [n for part in reversed(list(cls.order())) for n, v in part.body.items()
                 if not isinstance(v, PythonFunction | Class)]  # fmt: skip
        record.fields |= dict(zip(dict.fromkeys(names), args, strict=False)) | named
        record.fields = {n: v for n, v in record.fields.items() if v is not UNSET}
        after = cls.find("__post_init__")
        if isinstance(after, PythonFunction):
            self._follow(replace_self(after, record), [], {})
        return record

    def _default(self, value: Any) -> Any:
        """The default of a field of a dataclass."""
        if isinstance(value, Record) and value.kind == "field":
            factory = value.fields.get("default_factory", UNSET)
            if factory is not UNSET:
                return self.called(factory, [], {}, "default_factory")
            return value.fields.get("default", UNSET)
        return self.copied(value)


def replace_self(function: PythonFunction, self_: Any) -> PythonFunction:
    """A method of an object."""
    return PythonFunction(function.node, function.module, function.scope, self_, function.cls)


def _replaced(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    value = reader.likely(args[0]) if args else None
    if not isinstance(value, Record):
        return Record("replace", dict(named), missing="dataclasses.replace")
    copied = Record(
        value.kind, dict(value.fields), value.missing, reader.unsure, value.weak, value.cls
    )
    copied.fields |= named
    return reader.made(copied)


def _copied(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    return reader.copied(args[0]) if args else None


def _configured(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    """`run.Config(Class, name=value)` of NeMo."""
    cls = args[0] if args else None
    if isinstance(cls, Class):
        return reader.instance(cls, args[1:], named)
    if isinstance(cls, PythonFunction) and isinstance(cls.node, ast.FunctionDef):
        return reader.made(Record(cls.node.name, dict(named), level=reader.unsure))
    name = text_of(cls).rpartition(".")[2] if cls is not None else "Config"
    return reader.made(Record(name, dict(named), level=reader.unsure))


def _partial(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    return Record("partial", {str(n): arg for n, arg in enumerate(args)} | named)


def _optimizer(name: str) -> Callable[[Calls, list[Any], dict[str, Any]], Any]:
    def made(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
        return Record("optimizer", {"optimizer": name, "use_distributed_optimizer": True})

    return made


def _environment(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    name = args[0] if args and isinstance(args[0], str) else "a variable"
    default = args[1] if len(args) > 1 else named.get("default", UNSET)
    if default is UNSET:
        return Record(str(name), missing=f"${name}")
    reader.note(f"${name} is taken to be unset, so that it is {text_of(default)[:60]}", default)
    return default


def _set(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    if len(args) == 3 and isinstance(args[1], str):
        reader.set_field(args[0], args[1], args[2])
    elif args and isinstance(args[0], Record):
        reader.doubt(args[0], "setattr")
    return None


def _got(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    if len(args) < 2 or not isinstance(args[1], str):
        return Record("", missing="getattr")
    has = _has(reader, args, named)
    if has is True or len(args) == 2:
        return reader.field(args[0], args[1])
    return args[2] if has is False else Record(args[1], missing=f"the field {args[1]}")


def _has(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    holder = reader.likely(args[0]) if args else None
    if isinstance(holder, Record) and len(args) > 1 and isinstance(args[1], str):
        value = holder.fields.get(args[1], UNSET)
        if value is not UNSET and not (isinstance(value, Record) and not value.fields):
            return True
        if holder.cls is not None and not holder.missing and not any(holder.cls.foreign()):
            return holder.cls.find(args[1]) is not UNSET
    elif holder is None or isinstance(holder, dict | list | str | int):
        return False
    return Record("", missing="hasattr")


def _is_instance(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    """Whether a value is of a class of Python itself, or of the files."""
    value, cls = [*args, None, None][:2]
    types: dict[str, type] = {
        "str": str,
        "int": int,
        "dict": dict,
        "list": list,
        "bool": bool,
        "float": float,
    }
    if isinstance(cls, Named) and cls.path in types:
        if isinstance(value, Record) and (value.cls or value.fields) and not value.missing:
            return False
        if is_certain(value) or isinstance(value, dict | list | tuple):
            return isinstance(value, types[cls.path])
    if isinstance(cls, Class) and isinstance(value, Record) and value.cls is not None:
        return cls in list(value.cls.order())
    return Record("", missing="isinstance")


def _above(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    """`super()`: the object, as an object of the bases of the class whose method is read."""
    scope = reader.scopes[-1] if reader.scopes else {}
    self_ = next((value for name, value in scope.items() if not name.startswith("@")), None)
    cls = scope.get("@class") or (self_.cls if isinstance(self_, Record) else None)
    if not isinstance(self_, Record) or cls is None:
        return Record("super", missing="super")
    bases = Class("super", cls.module, cls.bases, {})
    return Record("super", self_.fields, self_.missing, self_.level, self_.weak, bases)


def _dict(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    first = reader.likely(args[0]) if args else {}
    if isinstance(first, Record):
        return {**first.fields, **named}
    try:
        return {**computed(dict, first), **named}
    except NotComputed:
        return Record("dict", dict(named), missing="dict")


def _field(reader: Calls, args: list[Any], named: dict[str, Any]) -> Any:
    return Record("field", dict(named))


KNOWN: dict[str, Callable[[Calls, list[Any], dict[str, Any]], Any]] = {
    "replace": _replaced,
    "deepcopy": _copied,
    "copy": _copied,
    "Partial": _configured,
    "partial": _partial,
    "getenv": _environment,
    "distributed_fused_adam_with_cosine_annealing": _optimizer("adam"),
    "distributed_fused_adam_with_cosine_annealing_samples": _optimizer("adam"),
    "distributed_muon_with_cosine_annealing": _optimizer("dist_muon"),
    "setattr": _set,
    "getattr": _got,
    "hasattr": _has,
    "isinstance": _is_instance,
    "super": _above,
    "dict": _dict,
    "field": _field,
    "cast": lambda reader, args, named: args[-1] if args else None,
}
"""What functions of libraries give, by their last name."""
