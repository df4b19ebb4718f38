"""Examples and exit codes for the `--help` text of each command."""

from __future__ import annotations

EXAMPLES = {
    "explain": (
        "autopar explain llama3-8b dgx-h100:8 --global-batch 512 --seq 8192",
        "autopar explain llama3-8b h100:8 --global-batch 64 --pin tp=4,pp=1 --save plan.json",
        "autopar explain my_model:build cluster.yaml --global-batch 256",
        "autopar explain llama3-8b dgx-h100:2 --global-batch 64 --objective cost --price 2.5",
        "autopar explain llama3-8b dgx-h100:8 --global-batch 512 --html report.html --trace trace.json.gz",
        "autopar explain --plan plan.json",
    ),
    "why-not": ("autopar why-not llama3-8b dgx-h100:2 --global-batch 64 --seq 4096 --pin tp=8",),
    "compare": (
        "autopar compare llama3-8b dgx-h100:2 --global-batch 64 --pin tp=8 --pin tp=4,zero=1",
        "autopar compare llama3-8b dgx-h100:2 --global-batch 64 --plan plan.json",
    ),
    "sweep": (
        "autopar sweep llama3-8b dgx-h100:2 --gpus 16,64,128 --global-batch 128 --price 2.5",
        "autopar sweep llama3-8b dgx-h100:2 --global-batch 128 --inter-bandwidth 10,100",
    ),
    "robust": (
        "autopar robust llama3-8b dgx-h100:2 --global-batch 64 --pin pp=1",
        "autopar robust llama3-8b dgx-h100:2 --global-batch 64 --off 10 --near 3",
    ),
    "diff": ("autopar diff a.json b.json",),
    "replay": ("autopar replay plan.json llama3-8b dgx-h100:1 --seq 4096",),
    "audit": ("autopar audit plan.json llama3-8b dgx-h100:1 --seq 4096",),
    "trace-diff": (
        "autopar trace-diff trace.json.gz traces/rank-0.json",
        "autopar trace-diff trace.json.gz traces/rank-0.json --json",
    ),
    "check": (
        "autopar check train.sh --cluster dgx-h100:8",
        "autopar check train.sh --cluster dgx-h200:8 --model llama3-70b --measured 8.1s --html report.html",
        "autopar check accelerate.yaml --cluster h100:8 --model hf:config.json --seq 4096",
    ),
    "export": (
        "autopar export plan.json --to megatron --output train.sh",
        "autopar export plan.json --to accelerate --verify",
    ),
    "convert": ("autopar convert train.sh --to accelerate",),
    "verify": (
        "autopar verify llama-tiny --nproc 4",
        "autopar verify hf:config.json --nproc 4 --pin pp=2,schedule=1f1b",
    ),
    "predict": ("autopar predict runs.csv --by gpu", "autopar predict runs.csv --ablate"),
    "calibrate": (
        "autopar calibrate --nproc 4 --device cpu --output cluster.yaml",
        "autopar calibrate --from-run train.log --job train.sh --cluster dgx-h100:8",
        "autopar calibrate --from-run trace.json.gz --cluster dgx-h100:1 --output mine.yaml",
    ),
    "demo": ("autopar demo",),
    "models": ("autopar models", "autopar models qwen3"),
    "devices": ("autopar devices", "autopar devices rtx"),
    "clusters": ("autopar clusters", "autopar clusters aws"),
    "cluster": ("autopar cluster dgx-h100:4 > mine.yaml",),
    "init": ("autopar init llama3-8b dgx-h100:8 --global-batch 512 --dir run",),
    "completion": ("autopar completion bash >> ~/.bashrc",),
}
"""Example command lines, by command."""

ONE_IF = {
    "explain": "--replay or --audit disagrees with the plan",
    "why-not": "the choice is impossible or does not fit",
    "check": "the job is refused, or does not fit",
    "export": "the framework reads another layout (--verify)",
    "diff": "the plans differ",
    "replay": "the simulation disagrees with the plan",
    "audit": "the prices do not sum to the objective",
    "trace-diff": "the order of ranges differs",
    "verify": "a run is not exact",
    "demo": "the parallel run disagrees with one device",
}
"""The meaning of exit code 1, by command. Commands not listed do not use it."""

EXIT_CODES = (
    ("0", "done"),
    ("2", "a mistake in what was asked, or no plan fits"),
    ("3", "`check` gives no verdict: the file leaves values open, or has parts without a price"),
    ("74", "an output cannot be written"),
    ("130", "interrupted"),
    ("141", "the reader of a pipe closed it"),
)
"""Exit codes that all commands share, with their meanings."""
