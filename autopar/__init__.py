"""autopar: plans, rewrites and runs PyTorch training on many devices.

    engine = autopar.parallelize(model, "dgx-h100:8", example_inputs=batch)

Importing this package is light: torch is loaded when a name that needs it is first used.
"""

from importlib import import_module
from typing import Any

from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan

__version__ = "0.1.0"
__all__ = [
    "AutoparError", "ClipNorm", "ClipValue", "ClusterSpec", "MeshShape", "Plan", "Software", "check_job", "diff", "explain", "export",
    "parallelize", "plan", "read_job", "register_rule", "software_of",
]  # fmt: skip

_LAZY = {
    "ClipNorm": "autopar.runtime.state.clipping",
    "ClipValue": "autopar.runtime.state.clipping",
    "check_job": "autopar.foreign.checking.check",
    "diff": "autopar.explaining.diff",
    "explain": "autopar.report.explained",
    "export": "autopar.foreign.writers.export",
    "read_job": "autopar.foreign.frameworks.registry",
    "Software": "autopar.request.software",
    "software_of": "autopar.request.frameworks",
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "register_rule": "autopar.ops.rules",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")
