"""`autopar verify`: exact plans are called exact, a broken engine is not."""

from __future__ import annotations

import json
import re

import pytest
import torch
from click.testing import CliRunner
from support.effort import slow_but

from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.ir.mesh import COPIES
from autopar.models import parse_model
from autopar.runtime.engine import Engine
from autopar.runtime.state import gradients
from autopar.verify.verify import compare_training, verify
from autopar.verify.widened import Widened

CONFIGS = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 101,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 100,
    },
    "vit": {
        "model_type": "vit",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
        "num_labels": 10,
    },
}


@pytest.mark.parametrize("name", ["llama-tiny", pytest.param("gpt-tiny", marks=pytest.mark.slow)])
def test_every_mesh_of_two_processes_is_exact(name):
    report = verify(parse_model(name), 2)
    assert report.exact and report.moved >= 0.01
    meshes = [
        (mesh.mesh["dp"], mesh.mesh["cp"], mesh.mesh["tp"], mesh.zero) for mesh in report.meshes
    ]
    assert meshes == [(2, 1, 1, 0), (1, 1, 2, 0), (1, 2, 1, 0), (2, 1, 1, 3)]
    assert all(mesh.worst_error <= 1e-9 and mesh.worst_tensor for mesh in report.meshes)
    assert [bool(mesh.collectives) for mesh in report.meshes] == [
        False,
        True,
        True,
        False,
    ]  # over dp only gradients and the loss travel
    assert len(set(report.reference_losses)) == 3


@pytest.mark.parametrize("kind", slow_but([], CONFIGS))
def test_hugging_face_models_are_exact(kind, tmp_path):
    """transformers rounds to fp32 inside norms and the loss: both runs are widened, the tolerance is not."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[kind]))
    result = CliRunner().invoke(
        cli, ["verify", f"hf:{path}", "--nproc", "2", "--pin", "tp=2", "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (
        report["exact"]
        and report["meshes"][0]["mesh"]["tp"] == 2
        and report["meshes"][0]["worst_error"] <= 1e-9
    )


def test_ops_that_are_told_to_compute_in_fp32_are_widened():
    """DiffLlama sums so: gradients would be rounded to fp32."""
    x = torch.ones(3, dtype=torch.float64)
    with Widened():
        assert x.sum(dtype=torch.float32).dtype is torch.float64
        assert torch.softmax(x, 0, dtype=torch.float32).dtype is torch.float64
        assert torch.ones(3, dtype=torch.float32).dtype is torch.float32


@pytest.mark.slow
def test_fp32_has_its_own_tolerance():
    report = verify(parse_model("llama-tiny"), 2, {"tp": 2}, precision="fp32")
    assert report.exact and 1e-9 < report.meshes[0].worst_error <= 1e-4 == report.tolerance


@pytest.mark.slow
def test_micro_batches_and_recompute_are_exact():
    report = verify(parse_model("llama-tiny"), 2, {"dp": 2, "micro_batch": 1, "recompute": "full"})
    assert (
        report.exact and report.meshes[0].micro_batch == 1 and report.meshes[0].recompute == "full"
    )


def test_a_broken_engine_is_not_exact(monkeypatch):
    """Without the reduction of gradients each rank trains on its own rows.  The first loss does not show it."""
    monkeypatch.setattr(Engine, "reduce_gradients", lambda engine: None)
    result = CliRunner().invoke(cli, ["verify", "llama-tiny", "--nproc", "2", "--pin", "dp=2"])
    assert result.exit_code == 1
    assert "NOT EXACT" in result.stdout
    # what is wrong is no rounding, of which the report says how much there is
    rounding = re.search(r"in reverse order is off by (\S+)", " ".join(result.stdout.split()))
    assert rounding is not None and float(rounding[1]) < 1e-12


@pytest.mark.slow
def test_groups_that_share_out_are_exact_unless_they_forget_each_other(monkeypatch):
    pin = {"zero": 3, "shard": 2, "dp": 4}
    report = verify(parse_model("llama-tiny"), 4, pin)
    assert report.exact and (report.meshes[0].zero, report.meshes[0].shard) == (3, 2)
    real = gradients.partial_axes
    monkeypatch.setattr(
        gradients,
        "partial_axes",
        lambda layouts: tuple(axis for axis in real(layouts) if axis != COPIES),
    )
    command = [
        "verify",
        "llama-tiny",
        "--nproc",
        "4",
        "--pin",
        ",".join(f"{k}={v}" for k, v in pin.items()),
    ]
    result = CliRunner().invoke(cli, command, env={"COLUMNS": "120"})  # in fewer the column wraps
    assert (
        result.exit_code == 1 and "zero=3 over 2" in result.stdout and "NOT EXACT" in result.stdout
    )


def test_a_program_that_fails_is_not_exact(monkeypatch):
    def fail(engine, batch):
        raise RuntimeError("the engine is broken")

    monkeypatch.setattr(Engine, "step", fail)
    report = verify(parse_model("llama-tiny"), 2, {"dp": 2})
    assert not report.exact and "the engine is broken" in report.meshes[0].failure
    assert json.loads(json.dumps(report.as_dict()))["meshes"][0]["worst_error"] == "inf"


def test_compare_finds_wrong_missing_and_nan_tensors():
    before, after = (
        {"a": torch.zeros(2), "b": torch.zeros(2)},
        {"a": torch.ones(2), "b": torch.ones(2)},
    )
    assert compare_training(before, after, after, "fp64")[0] == 0.0
    wrong = {"a": torch.ones(2), "b": torch.full((2,), 1.5)}
    assert compare_training(before, after, wrong, "fp64") == (pytest.approx(0.5), "b")
    assert compare_training(before, after, {"b": torch.ones(2)}, "fp64") == (float("inf"), "a")
    assert compare_training(
        before, after, {"a": torch.full((2,), float("nan")), "b": torch.ones(2)}, "fp64"
    ) == (float("inf"), "a")


def test_a_model_from_a_function():
    def make():
        class Regression(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(6, 4)

            def forward(self, x, y):
                return torch.nn.functional.mse_loss(self.layer(x), y)

        generator = torch.Generator().manual_seed(0)
        return Regression(), {
            "x": torch.randn(4, 6, generator=generator),
            "y": torch.randn(4, 4, generator=generator),
        }

    assert verify(make, 2, rows=4).exact


@pytest.mark.parametrize(("pin", "words"), [({"tp": 3}, "tp=3 does not divide 2"), ({"zero": 2, "tp": 2}, "zero=2 shares out"),
                                        ({"speed": 1}, "unknown pin")])  # fmt: skip
def test_impossible_requests_are_errors(pin, words):
    with pytest.raises(AutoparError, match=words):
        verify(parse_model("llama-tiny"), 2, pin)
    text = ",".join(f"{key}={value}" for key, value in pin.items())
    result = CliRunner().invoke(cli, ["verify", "llama-tiny", "--nproc", "2", "--pin", text])
    assert result.exit_code == 2 and words in result.stderr


def with_dropout(batch: int = 4, seq: int = 8, device: str = "cpu"):
    """A model that drops, for `verify`."""
    torch.manual_seed(0)
    with torch.device(device):
        layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(32, 16)
        )
    return Dropping(layers), {"x": torch.randn(batch, seq, 16, device=device)}


class Dropping(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return torch.nn.functional.dropout(self.layers(x), 0.2, self.training).square().mean()


def test_a_model_that_drops_is_compared_with_the_engine_on_one_device(capsys):
    report = verify(with_dropout, 2)
    assert report.exact and report.drops and len(report.meshes) == 3, report


@pytest.mark.parametrize(
    ("name", "nproc", "pin"),
    [
        ("llama-tiny", 2, {"pp": 2, "recompute": "selective"}),
        pytest.param(  # one device runs the same micro-batches
            "moe-tiny",
            4,
            {"pp": 2, "dp": 2, "ep": 1, "schedule": "1f1b", "micro_batch": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pipelines_are_exact(name, nproc, pin):
    report = verify(parse_model(name), nproc, pin)
    assert report.exact and not report.skipped, [(m.worst_error, m.failure) for m in report.meshes]
    assert all(mesh.mesh["pp"] == 2 and mesh.schedule != "none" for mesh in report.meshes)


@pytest.mark.slow
def test_compiled_programs_are_exact():
    result = CliRunner().invoke(
        cli, ["verify", "llama-tiny", "--nproc", "2", "--pin", "tp=2,recompute=full", "--compile"]
    )
    assert result.exit_code == 0 and "2 processes, compiled" in result.output, result.output
    with pytest.raises(AutoparError, match=r"cannot run torch.compile under zero_bubble"):
        verify(parse_model("llama-tiny"), 2, {"pp": 2, "schedule": "zero_bubble"}, compile=True)
