"""The table of options of a request for a plan. Keyword checks of the API, defaults, options of the
command line with their help and completion, and the table of the documentation follow from it.

A new option is a row here, an argument of `api.plan` if it has a keyword, and a field of `Asked` in
`cli/session.py` if it has a flag. `tests/request/test_options.py` compares all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from autopar.ir.plan_checks import PRECISIONS
from autopar.request.framework_names import FRAMEWORKS, TARGET_NAMES
from autopar.request.software import NAMED

TOLERANCE = 0.02
"""The default tolerance. In 19 groups of measured layouts, the one that is predicted to be fastest
takes 2.2 % longer than the fastest, in the mean (docs/accuracy.md).
"""
TIME_LIMIT_S = 60.0
"""The default time limit, in seconds."""
OBJECTIVES = ("time", "cost", "gpus", "memory")
"""What a plan may be best at."""

Kind = Literal["count", "number", "share", "chance", "room", "switch", "name", "choice", "pins"]
"""What values an option takes.

- count: a whole number of at least 1. number: a number above 0.
- share: a fraction from 0 to less than 1. chance: one from 0.5 to less than 1.
- room: a fraction of memory, or GiB. switch: True or False.
- name: a name that is checked where it is used. choice: one of the names. pins: choices by name.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a request.

    Attributes:
        name: its name in Python, also where only commands have it.
        kind: what values it takes.
        help: what it is, as the command line and the documentation say it.
        flag: its name on the command line; '' if only Python has it.
        keyword: whether `autopar.plan` has it. If not, only commands do.
        default: its value if it is left out.
        metavar: how its value is written in help.
        names: known names, of a name or a choice.
        excludes: options that may not be given beside it.
    """

    name: str
    kind: Kind
    help: str
    flag: str = ""
    keyword: bool = True
    default: Any = None
    metavar: str | None = None
    names: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """Its flag, or in Python its name."""
        return self.flag or self.name


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("global_batch", "count", "Sequences per step over all devices.", "--global-batch"),
        Option("seq", "count", "Tokens per sequence (default: what the model was designed for).", "--seq", keyword=False),
        Option("pin", "pins", "Choices to fix; an unknown one lists all that there are.", "--pin", metavar="tp=8,zero=1,..."),
        Option("objective", "name", "What the plan is to be best at.", "--objective", default=OBJECTIVES[0],
               metavar="|".join(OBJECTIVES), names=OBJECTIVES),
        Option("deadline_s", "number", "Seconds that a step may take, for --objective gpus.", "--deadline"),
        Option("tokens_per_s", "number", "Throughput to reach, for --objective gpus.", "--tokens-per-second", keyword=False),
        Option("price", "number", "Dollars a device and hour (default: what the cluster file says).", "--price", keyword=False),
        Option("tokens", "number", "Tokens to train on, such as 1.4e12: adds days, GPU-hours and dollars.", "--tokens", keyword=False),
        Option("target", "name", "Only what another framework can run, for autopar export.", "--target", metavar="megatron|...",
               names=TARGET_NAMES),
        Option("precision", "choice", "Default: bf16 on GPUs, fp16 on those without bf16, fp32 on CPUs.", "--precision",
               names=PRECISIONS),
        Option("headroom", "room", "Memory of a device to keep free, 0.1 or 8GiB (default: 16.5 % on GPUs, by --fit).", "--headroom",
               metavar="FRACTION|GiB", excludes=("fit",)),
        Option("fit", "chance", "Least chance to fit, 0.99: the headroom that it takes (default: 0.95 on GPUs).", "--fit",
               keyword=False, metavar="CHANCE"),
        Option("tolerance", "share", "Fraction by which a simpler plan may take longer than the fastest; a much simpler one 2.5 times it.",
               "--tolerance", default=TOLERANCE),
        Option("time_limit_s", "number", "Seconds for the whole command; what follows the capture of the model has at least half of them.",
               "--time-limit", default=TIME_LIMIT_S),
        Option("allow_micro_batch_mean", "switch", "Split batches though the mean of micro-batch losses is another loss.",
               "--allow-micro-batch-mean", default=False),
        Option("runners_up", "switch", "The certificate has the best plan of each family of layouts; commands always ask for it.",
               default=False),
        Option("software", "name", "How this framework runs the plan: torchtitan, megatron-core, nemo, deepspeed, nanotron, transformers "
               "and others (default: that of --target, or autopar).", "--software", metavar="NAME", names=FRAMEWORKS),
    )
}  # fmt: skip
"""Every option of a request by its name, in the order of the documentation."""

PARTS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("compiled", "switch", "Predict for torch.compile.", "--compile", default=False),
        Option("fp8_scaling", "choice", "Linear layers multiply in fp8, scaled by this recipe.", "--fp8",
               names=tuple(NAMED["fp8_scaling"])),
        Option("attention_kernel", "choice", "Default: the fastest that was measured on the device.", "--attention-kernel",
               names=tuple(NAMED["attention_kernel"])),
        Option("loss_kernel", "choice", "Of the cross-entropy.", "--loss-kernel", names=tuple(NAMED["loss_kernel"])),
        Option("state_recipe", "choice", "Precisions of gradients and optimizer state (default: fp32).", "--state-recipe",
               names=tuple(NAMED["state_recipe"])),
    )
}  # fmt: skip
"""Options for parts of the software, by field of `Software`; in Python, `software=` has them."""

OF_REPORTS = ("price", "tokens")
"""Options that say nothing about the plan, so that a saved plan is explained with them too."""
