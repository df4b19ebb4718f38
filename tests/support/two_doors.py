"""Random requests for a plan, each said to `autopar.plan` and to `autopar explain`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from hypothesis import strategies as st

import autopar
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.request.options import OPTIONS
from autopar.request.pins import pin_text
from autopar.request.software import Software

TIME_LIMIT_S = 300.0
"""Far more than a search takes, so that none is cut."""
MODELS = (
    "llama-tiny",
    "gpt:layers=4,hidden=64,heads=4,vocab=512",
    "llama:layers=6,hidden=128,heads=8,vocab=1024",
    "moe:layers=2,hidden=64,heads=4,vocab=256,experts=4,ffn=128",
    'hf:{"model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, '
    '"head_dim": 16, "intermediate_size": 96, "vocab_size": 256}',
)
CLUSTERS = ("t4:2", "v100-32g:4", "h100:4", "dgx-h100:1", "a100-40g:8", "cpu:2", "l4:2+t4:2")
SOFTWARE: Mapping[str, Software | str | None] = {
    "": None,
    "--compile": Software(compiled=True),
    "--loss-kernel fused": Software(loss_kernel="fused"),
    "--fp8 current": Software(matmul_dtype="fp8", fp8_scaling="current"),
    "--software torchtitan": "torchtitan",
    "--software megatron-core": "megatron-core",
}
"""Options of the software, and what they are in Python."""
PINS: tuple[Mapping[str, Any], ...] = (
    *({}, {"tp": 2}, {"zero": 1}, {"pp": 2, "schedule": "1f1b"}, {"micro_batch": 1}),
    *({"recompute": "full"}, {"dp": 2, "zero": 3}, {"tp": 2, "sequence_parallel": True}, {"fuse": "head"}, {"tp": 1, "pp": 1}),
)  # fmt: skip
SAID: Mapping[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "headroom": ("0.1", "2GiB", "0"),
    "tolerance": (0.0, 0.1),
    "target": ("megatron", "torchtitan", "deepspeed"),
    "objective": ("memory",),
    "allow_micro_batch_mean": (True,),
}
"""Further options and values that are not their defaults."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `software` is a key of `SOFTWARE`, and `said` has options by their name in Python."""

    model: str
    cluster: str
    global_batch: int
    seq: int
    pin: Mapping[str, Any] = field(default_factory=dict)
    software: str = ""
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> list[str]:
        """The arguments of `autopar explain`."""
        words = [self.model, self.cluster, "--global-batch", str(self.global_batch)]
        words += ["--seq", str(self.seq), "--time-limit", str(TIME_LIMIT_S), *self.software.split()]
        words += ["--pin", pin_text(self.pin)] if self.pin else []
        for name, value in self.said.items():
            words += [OPTIONS[name].flag, *([] if value is True else [str(value)])]
        return words

    def by_api(self) -> Plan | str:
        """The plan of `autopar.plan`, or its error."""
        spec = parse_model(self.model)
        batch, dims = spec.example_inputs(2, self.seq), spec.batch_dims()
        try:
            return autopar.plan(
                spec.build("meta"),
                self.cluster,
                batch,
                self.global_batch,
                self.pin,
                time_limit_s=TIME_LIMIT_S,
                batch_dims=dims,
                software=SOFTWARE[self.software],
                runners_up="objective" not in self.said,
                **self.said,
            )
        except AutoparError as error:
            return str(error)

    def by_command(self, path: Path) -> Plan | str:
        """The plan that `autopar explain` saves at `path`, or its error."""
        done = CliRunner().invoke(cli, ["explain", *self.line, "--save", str(path)])
        if done.exit_code == 0:
            return Plan.load(path)
        assert isinstance(done.exception, SystemExit), done.exception
        return done.output.rpartition("Error: ")[2].strip()


REQUESTS = st.builds(
    Asked,
    st.sampled_from(MODELS),
    st.sampled_from(CLUSTERS),
    st.sampled_from((8, 16, 24)),
    st.sampled_from((16, 64)),
    st.sampled_from(PINS),
    st.sampled_from(tuple(SOFTWARE)),
    st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in SAID.items()}
    ),
)
"""Random requests."""


def facts_of(plan: Plan) -> Any:
    """All that a plan says, besides how its model is called, notes on the dtype of a module and on
    a comparison that commands add, and which candidates a search happened to open.
    """
    own = tuple(note for note in plan.notes if not note.startswith(("the model ", "target ")))
    named = replace(plan.made_for, model="")
    proof = replace(plan.certificate, solve_time_s=0.0, meshes=())
    plan = replace(plan, model_name="", made_for=named, notes=own, certificate=proof)
    return json.loads(json.dumps(asdict(plan), default=str))


def differences(one: Any, other: Any, where: str = "plan") -> list[str]:
    """The places in which two trees of data differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(f"{where}.{key}", one.get(key), other.get(key)) for key in {**one, **other}]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{where}[{n}]", a, b) for n, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return [] if one == other else [f"{where}: {one} != {other}"]
    return [found for at, a, b in pairs for found in differences(a, b, at)]
