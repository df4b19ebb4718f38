"""Models from a user's own function, named `module:function`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from autopar_kernels.routed_experts import FLOP_FORMULAS
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.errors import AutoparError

from .base import ModelSpec
from .hf import hf_example_inputs, is_hf_model, prepare_hf
from .rows import row_dims


@dataclass(frozen=True, slots=True)
class FunctionSpec(ModelSpec):
    """A spec of the model that the user's function `function` of module `module` makes. The
    function returns an nn.Module, (module, dict of example inputs), or (module, example inputs,
    batch_dims).

    The function is called anew for each `build` and `example_inputs`, inside
    `torch.device(device)`, and for each `batch_dims` on the meta device. So weights have values
    only where they are asked for.
    """

    module: str
    function: str

    @classmethod
    def of(cls, text: str) -> FunctionSpec:
        """The spec of a text `module:function`. Imports the function and does not call it. Raises
        AutoparError if that fails.
        """
        module, _, function = text.partition(":")
        spec = cls(name=text, vocab=0, max_seq=0, num_layers=0, module=module, function=function)
        spec._resolve()
        return spec

    def _resolve(self) -> Any:
        if not self.module or not self.function:
            raise AutoparError(
                f"'{self.name}' is not module:function; write both names, as in my_package.my_model:build."
            )
        if (here := os.getcwd()) not in sys.path:
            # as `python -m` does, so that a module beside the user is found
            sys.path.insert(0, here)
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise AutoparError(
                f"Cannot import module '{self.module}' of '{self.name}': {error}"
            ) from error
        except (Exception, SystemExit) as error:  # the user's module runs arbitrary code
            raise AutoparError(
                f"Importing module '{self.module}' of '{self.name}' failed: {type(error).__name__}: {error}"
            ) from error
        function = getattr(module, self.function, None)
        if function is None:
            public = (name for name, value in vars(module).items() if callable(value))
            names = sorted(name for name in public if not name.startswith("_"))
            raise AutoparError(
                f"Module '{self.module}' has no function '{self.function}'; it has {', '.join(names) or 'none'}."
            )
        if not callable(function):
            raise AutoparError(f"'{self.name}' is a {type(function).__name__}, not a function.")
        return function

    def _call(self) -> tuple[nn.Module, dict[str, Tensor] | None, dict[str, int | None]]:
        function = self._resolve()
        try:
            result = function()
        except (Exception, SystemExit) as error:
            reason = f"it failed with {type(error).__name__}: {error}"
            raise AutoparError(
                f"'{self.name}' must be callable without arguments; {reason}"
            ) from error
        if isinstance(result, nn.Module):
            return result, None, {}
        if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module):
            model, inputs, *rest = result
            dims = rest[0] if rest else {}
            if not isinstance(dims, dict):
                raise AutoparError(
                    f"'{self.name}' must return batch_dims as a dict of name -> dim or None; it returned {_kind(dims)}."
                )
            named = isinstance(inputs, dict) and inputs
            if named and all(isinstance(value, Tensor) for value in inputs.values()):
                return model, inputs, dims
            raise AutoparError(
                f"'{self.name}' must return example inputs as a dict of name -> tensor; it returned {_kind(inputs)}."
            )
        raise AutoparError(
            f"'{self.name}' must return an nn.Module, (nn.Module, example_inputs) or (nn.Module, example_inputs, batch_dims); "
            f"it returned {_kind(result)}."
        )

    def _make(self) -> nn.Module:
        return prepare_hf(self._call()[0])

    def build(
        self, device: torch.device | str = "meta", dtype: torch.dtype | None = None
    ) -> nn.Module:
        """A new module from the user's function, in training mode on `device`. With `dtype=None`,
        parameters keep their dtype.

        Raises AutoparError if the function fails or returns something else. Also if it makes meta
        tensors and `device` is not meta.
        """
        with torch.device(device):
            model = self._make()
        has_values = not any(parameter.is_meta for parameter in model.parameters())
        if torch.device(device).type != "meta" and not has_values:
            raise AutoparError(
                f"'{self.name}' returns a model on the meta device, so it cannot be built with values on {device}."
            )
        return model.to(device=device, dtype=dtype).train()

    def example_inputs(
        self, batch: int, seq: int, device: torch.device | str = "meta"
    ) -> dict[str, Tensor]:
        """The function's own example inputs with `batch` rows, repeated or cut, and copied to
        `device`. A tensor without rows is only copied. `row_dims` says where rows are.

        `seq` applies only to a Hugging Face model without example inputs, which gets those of
        `hf_example_inputs`. Raises AutoparError for other models without them. Also for sizes below
        1, and for inputs on meta if `device` is not meta.
        """
        self._check_inputs(batch, seq)
        with torch.device(device):
            model, inputs, named = self._call()
        if inputs is None:
            if is_hf_model(model):
                return hf_example_inputs(model, batch, seq, device)
            raise AutoparError(
                f"'{self.name}' returns no example inputs: return (model, {{'name': tensor, ...}}), batch first."
            )
        dims, result = row_dims(inputs, named), {}
        for name, value in inputs.items():
            dim = dims[name]
            if dim is not None and value.shape[dim]:
                rows = torch.arange(batch, device=value.device) % value.shape[dim]
                value = value.index_select(dim, rows)
            if value.is_meta and torch.device(device).type != "meta":
                raise AutoparError(
                    f"'{self.name}' returns input '{name}' on the meta device, so it has no values on {device}."
                )
            result[name] = value.clone().to(device)
        return result

    def batch_dims(self) -> Mapping[str, int | None]:
        """The third result of the user's function: by input, the dim that is the batch, or None for
        no rows. {} if it returns none. Calls the function.
        """
        with torch.device("meta"):
            return self._call()[2]

    def shrunk(self) -> ModelSpec:
        """The spec itself, since only the user's function can make a smaller model."""
        return self

    def model_flops_per_token(self, seq: int) -> float:
        """Three times the forward FLOPs of one row of the example inputs, by torch's
        FlopCounterMode, divided by the number of elements of the first input.
        """
        inputs = self.example_inputs(1, seq)
        counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
        with counter, torch.no_grad():
            self.build("meta")(**inputs)
        return 3.0 * counter.get_total_flops() / next(iter(inputs.values())).numel()


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(type(item).__name__ for item in value)})"
    return f"a {type(value).__name__}"
