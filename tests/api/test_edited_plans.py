"""A plan file that was edited by hand: refused with the field that is wrong, or still a plan that trains exactly as one device does."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
import torch
from click.testing import CliRunner
from exactness import update_errors  # noqa: F401  (the measure of this suite)

import autopar
from autopar.api import check_plan, trace_spec
from autopar.cli import cli
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import EDITED, Plan
from autopar.models import parse_model
