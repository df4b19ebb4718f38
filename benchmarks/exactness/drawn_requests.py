"""Random requests for plans, of every option that there is, in the words of Python and of the command line."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

from autopar_cost_models import OFFLOADS, SCHEDULES
from autopar_cost_models.memory_error import headroom_for

import autopar
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.fusion import AUTO, FUSE_MODES
from autopar.models import parse_model
from autopar.models.base import ModelSpec
from autopar.planning.model_facts import divisors
from autopar.request.framework_names import FRAMEWORKS, TARGET_NAMES
from autopar.request.options import OPTIONS, PARTS
from autopar.request.pins import pin_text
from autopar.request.software import NAMED, Software
from benchmarks.exactness import own_modules
from benchmarks.exactness.model_zoo import CONFIGS, SEQ, SHORT

TIME_LIMIT_S = 900.0
"""Far more than a search takes, so that none is cut."""
NAMES = ("llama-tiny", "gpt-tiny", "moe-tiny")
LARGE = ("gpt2-small", "smollm2-135m", "qwen2.5-0.5b", "llama3.2-1b", "bert-base", "vit-b-16", "resnet-50", "dit-b-2",
         "olmoe-1b-7b", "llama3-8b", "pythia-1b", "whisper-small")  # fmt: skip
"""Named models that are planned and not run."""
NODES = (
    "dgx-h100",
    "dgx-a100-40g",
    "aws-p3dn",
    "mi300x-8",
    "aws-g5",
    "gcp-a2-high",
    "gb200-nvl72",
    "rtx3090-pair",
    "dgx-b200",
)
MIXED = ("l4:2+t4:2", "dgx-h100:1+dgx-a100-80g:1", "v100-32g:2+a100-40g:2", "h100:4+h200:4")
SPELLED = ("8xH100", "NVIDIA A100-SXM4-80GB:4", "p5.48xlarge:2", "4 x rtx-4090")
"""Clusters as they are spelled elsewhere, and are read."""
_PIN_VALUES: Mapping[str, Sequence[Any]] = {
    "zero": (0, 1, 2, 3), "shard": (0, 2), "micro_batch": (1, 2, 4), "vpp": (1, 2), "schedule": tuple(SCHEDULES),
    "stages": ("even", "1-1", "2-2"), "recompute": ("none", "full", "gather", "selective", "op", "every-2"),
    "sequence_parallel": (True, False), "context_method": ("gather", "ring", "ulysses"), "offload": OFFLOADS,
    "fuse": (*FUSE_MODES, AUTO), "order": ("dp-pp-tp", "pp-dp-cp-tp", "tp-dp-pp"), "deal": ("1x1-0x1", "0x1-1x1"),
}  # fmt: skip
"""Values of pins that are no degrees of a mesh."""


@dataclass(frozen=True)
class Request:
    """A request for a plan: MODEL and CLUSTER as texts, sequences and tokens, pins, and further
    options by their name in Python. `runs` tells whether its plan is for CPU processes.
    """

    model: str
    cluster: str
    global_batch: int
    seq: int | None
    pin: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    runs: bool = False

    @cached_property
    def spec(self) -> ModelSpec:
        return parse_model(self.model)

    @property
    def tokens(self) -> int:
        """Tokens of a sequence, those of the model's own design by default."""
        return self.seq or self.spec.max_seq or 512

    @property
    def words(self) -> list[str]:
        """The arguments of `autopar explain`."""
        words = [self.model, self.cluster, "--global-batch", str(self.global_batch)]
        words += ["--seq", str(self.seq)] if self.seq else []
        words += ["--pin", pin_text(self.pin)] if self.pin else []
        rows = OPTIONS | PARTS
        for name, value in ({"time_limit_s": TIME_LIMIT_S} | dict(self.options)).items():
            if rows[name].flag and value is not False:
                words += [rows[name].flag, *([] if value is True else [str(value)])]
        return words

    @property
    def line(self) -> str:
        """The command that asks for it."""
        return f"autopar explain {shlex.join(self.words)}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `autopar.plan`. Options that only commands have are said by others."""
        asked = dict(self.options)
        cluster: Any = self.cluster
        if (price := asked.pop("price", None)) is not None:
            cluster = ClusterSpec.parse(cluster).with_price(price)
        asked.pop("tokens", None)
        if (fit := asked.pop("fit", None)) is not None:
            asked["headroom"] = f"{ceil(1e4 * headroom_for(fit)) / 1e4:.4f}"
        if (rate := asked.pop("tokens_per_s", None)) is not None:
            asked["deadline_s"] = self.global_batch * self.tokens / rate
        parts = {name: asked.pop(name) for name in PARTS if name in asked}
        if "fp8_scaling" in parts:
            parts["matmul_dtype"] = "fp8"
        if parts:
            asked["software"] = Software(**parts)
        by_time = asked.get("objective", "time") == "time"
        return {
            "model": self.spec.build("meta"),
            "cluster": cluster,
            "example_inputs": self.spec.example_inputs(2, self.tokens),
            "global_batch": self.global_batch,
            "pin": dict(self.pin),
            "batch_dims": dict(self.spec.batch_dims()),
            "time_limit_s": TIME_LIMIT_S,
            "runners_up": by_time,
        } | asked

    def planned(self) -> autopar.Plan:
        """The plan of `autopar.plan`."""
        return autopar.plan(**self.arguments)


def text_of(name: str) -> str:
    """The MODEL text of a model of the zoo."""
    config = CONFIGS[name]
    return config if isinstance(config, str) else f"hf:{json.dumps(config)}"


class Draw:
    """Draws requests from a seed."""

    def __init__(self, seed: int | str, share_run: float = 0.5, cluster_file: str = "") -> None:
        """`share_run` of the requests are for CPU processes. `cluster_file` is the path of a cluster
        file, which is drawn too if it is given.
        """
        self.random, self.share_run, self.cluster_file = (
            random.Random(seed),
            share_run,
            cluster_file,
        )

    def maybe(self, share: float) -> bool:
        return self.random.random() < share

    def request(self) -> Request:
        """The next request."""
        runs = self.maybe(self.share_run)
        model, seq = self._model(runs)
        cluster, devices = self._cluster(runs)
        asked = Request(model, cluster, self._batch(devices), seq, runs=runs)
        asked = replace(asked, pin=self._pins(devices, runs, "+" in cluster))
        return replace(asked, options=self._options(asked))

    def _model(self, runs: bool) -> tuple[str, int | None]:
        kind = self.random.random()
        if kind < 0.4:
            return self.random.choice(own_modules.TEXTS), None
        if kind < 0.55:
            name = self.random.choice(tuple(CONFIGS))
            return text_of(name), SHORT.get(name, self.random.choice((8, 12, SEQ)))
        if kind < 0.97 or runs:
            return self.random.choice((*NAMES, self._dims())), self.random.choice((16, 32, None))
        return self.random.choice(LARGE), self.random.choice((128, 256))

    def _dims(self) -> str:
        choice, family = self.random.choice, self.random.choice(("gpt", "llama", "moe"))
        dims = {"layers": choice((2, 3, 4, 6)), "hidden": choice((32, 48, 64)), "heads": choice((2, 4)), "vocab": choice((96, 99, 128)),
                "seq": 64}  # fmt: skip
        if family == "gpt":
            dims |= {"positions": choice(("learned", "alibi", "none"))}
            dims |= {"parallel_block": "true"} if self.maybe(0.3) else {}
        else:
            dims |= {"kv_heads": 2, "ffn": choice((48, 64, 96))}
        dims |= {"experts": 4, "top_k": choice((1, 2))} if family == "moe" else {}
        dims |= {"shared_ffn": 32, "first_dense": 1} if family == "moe" and self.maybe(0.3) else {}
        dims |= {"tied": choice(("true", "false"))} if self.maybe(0.5) else {}
        dims |= {"window": 8} if family != "moe" and self.maybe(0.2) else {}
        return f"{family}:" + ",".join(f"{key}={value}" for key, value in dims.items())

    def _cluster(self, runs: bool) -> tuple[str, int]:
        """(the text of a cluster, its number of devices)."""
        if runs:
            count = self.random.choice((2, 2, 2, 3, 4, 4))
            return f"cpu:{count}", count
        kind = self.random.random()
        if kind < 0.55:
            from autopar_cost_models import DEVICES

            count = self.random.choice((1, 2, 2, 4))
            return f"{self.random.choice(tuple(DEVICES))}:{count}", count
        if kind < 0.75:
            text = f"{self.random.choice(NODES)}:{self.random.choice((1, 1, 2))}"
        elif kind < 0.85:
            text = self.random.choice(MIXED)
        elif kind < 0.92 or not self.cluster_file:
            text = self.random.choice(SPELLED)
        else:
            text = self.cluster_file
        return text, ClusterSpec.parse(text).num_devices

    def _batch(self, devices: int) -> int:
        whole = devices * self.random.choice((1, 2, 4))
        return whole if self.maybe(0.8) else self.random.choice((3, 4, 6, 10, 12))

    def _pins(self, devices: int, runs: bool, mixed: bool) -> dict[str, Any]:
        pin: dict[str, Any] = {}
        if self.maybe(0.6 if runs else 0.4):  # degrees that multiply to the devices
            left = devices
            for axis in self.random.sample(("tp", "pp", "cp"), k=self.random.choice((1, 1, 2))):
                pin[axis] = self.random.choice(divisors(left))
                left //= pin[axis]
            if self.maybe(0.4):
                pin["dp"] = left
            if left > 1 and self.maybe(0.15):
                pin["ep"] = self.random.choice(divisors(left))
        if devices > 2 and self.maybe(0.9 if devices > 4 else 0.5):
            pin.setdefault("pp", 1)  # a space without pipelines is searched in seconds
            pin.setdefault("tp", self.random.choice(divisors(min(devices, 8))))
            if devices > 4:
                pin.setdefault("cp", 1)
        pipelined = pin.get("pp", 1) > 1
        if pipelined and self.maybe(0.7):
            pin["schedule"] = self.random.choice(tuple(SCHEDULES))
            pin |= {"micro_batch": 1} if self.maybe(0.5) else {}
        for name in self.random.sample(tuple(_PIN_VALUES), k=self.random.choice((0, 0, 1, 1, 2))):
            needs = {"deal": mixed, "stages": pipelined, "schedule": pipelined, "vpp": pipelined}
            if needs.get(name, True) or self.maybe(0.05):
                pin[name] = self.random.choice(_PIN_VALUES[name])
        return pin

    def _options(self, asked: Request) -> dict[str, Any]:
        choice, maybe, runs = self.random.choice, self.maybe, asked.runs
        values: dict[str, tuple[float, Any]] = {
            "precision": (0.75 if runs else 0.3, choice(("fp64",) * 5 + ("fp32", "bf16", "fp16") if runs else ("fp32", "bf16", "fp16"))),
            "headroom": (0.15, choice(("0.1", "2GiB", "0", "1.5"))),
            "fit": (0.08, choice((0.9, 0.99))),
            "tolerance": (0.2, choice((0.0, 0.05, 0.3))),
            "objective": (0.15, choice(("cost", "gpus", "memory", "time"))),
            "target": (0.08 if runs else 0.3, choice(TARGET_NAMES)),
            "allow_micro_batch_mean": (0.3, True),
            "software": (0.1, choice(FRAMEWORKS)),
            "price": (0.2, choice((0.5, 2.0))),
            "tokens": (0.15, choice((1e9, 1.4e12))),
            "runners_up": (0.1, False),
            "compiled": (0.04 if runs else 0.12, True),
            "attention_kernel": (0.02 if runs else 0.06, choice(tuple(NAMED["attention_kernel"]))),
            "loss_kernel": (0.06, choice(tuple(NAMED["loss_kernel"]))),
            "state_recipe": (0.02 if runs else 0.06, choice(tuple(NAMED["state_recipe"]))),
            "fp8_scaling": (0.02 if runs else 0.06, choice(tuple(NAMED["fp8_scaling"]))),
        }  # fmt: skip
        known = OPTIONS | PARTS
        found = {name: value for name, (share, value) in values.items() if maybe(share)}
        found = {name: value for name, value in found.items() if name in known}
        if found.get("objective") == "gpus":
            found |= {"deadline_s": 10.0} if maybe(0.5) else {"tokens_per_s": 100.0}
        if found.get("objective") == "cost" and maybe(0.9):
            found.setdefault("price", 2.0)
        if "headroom" in found and maybe(0.9):
            found.pop("fit", None)  # which is refused beside it
        if self.maybe(0.9):  # parts that the devices or the precision do not have
            for name in _refused_parts(asked, found.get("precision")):
                found.pop(name, None)
        if "software" in found:  # Python says parts by a `Software` alone
            for name in PARTS:
                found.pop(name, None)
        return found


def _refused_parts(asked: Request, precision: str | None) -> Iterator[str]:
    """Parts of the software that are refused on the cluster, or in the precision."""
    try:
        devices = [group.device for group in ClusterSpec.parse(asked.cluster).groups]
    except AutoparError:  # which both doors say
        return
    if precision not in (None, "bf16") or not all("fp8" in device.flops for device in devices):
        yield "fp8_scaling"
    if asked.runs or precision == "fp32":
        yield from ("state_recipe", "attention_kernel")


NEVER_DRAWN = frozenset({"global_batch", "seq", "pin", "time_limit_s"})
"""Options that every request says, or that are the same in all."""
