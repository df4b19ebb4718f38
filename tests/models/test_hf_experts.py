"""Hugging Face mixtures of experts: prepared, they compute what transformers' `eager` experts do, and trace with one op a block."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from autopar.annotate.saved_tensors import observe_saved
from autopar.api import prepared, trace
from autopar.models import prepare_hf
from autopar.models.hf import HFSpec
from autopar.models.hf_experts import EXPERTS_NAME
from autopar.verify.widened import Widened

transformers = pytest.importorskip("transformers")
OP = torch.ops.autopar.routed_experts.default

BASE = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
ROUTED = {"moe_intermediate_size": 24, "intermediate_size": 40, "num_experts_per_tok": 3}
# Model -> (config, blocks with experts, activation).
MODELS = {
    "mixtral": ({"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}, 2, "gated:silu"),
    "qwen2_moe": ({**ROUTED, "num_experts": 6, "norm_topk_prob": True, "shared_expert_intermediate_size": 40}, 2, "gated:silu"),
    "deepseek_v3": (
        {**ROUTED, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
         "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        1, "gated:silu",
    ),
    "gpt_oss": (
        {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        2, "interleaved_clamp:7.0:1.702",
    ),
    "nemotron_h": (
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 24, "head_dim": 8,
         "moe_shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1, "layers_block_type": ["attention", "moe"]},
        1, "plain:relu2",
    ),
}  # fmt: skip


def spec(name: str) -> HFSpec:
    return HFSpec.from_dict(name, {**BASE, "model_type": name, **MODELS[name][0]})


def prepared_and_plain(name: str) -> tuple[nn.Module, nn.Module]:
    """Equal models in fp64, the second with transformers' loop over experts; weights large enough that clamps and routing matter."""
    torch.manual_seed(0)
    ours = spec(name).build("cpu", torch.float64)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
    theirs = type(ours)(type(ours.config).from_dict(spec(name).config_dict)).double().train()
    theirs.load_state_dict(ours.state_dict())
    theirs.config.use_cache = False
    theirs.set_experts_implementation("eager")
    return ours, theirs


@pytest.mark.parametrize("name", MODELS)
def test_prepared_models_equal_transformers_eager_experts_in_fp64(name):
    ours, theirs = prepared_and_plain(name)
    experts = [m for m in ours.modules() if hasattr(m, "_autopar_activation")]
    assert [m._autopar_activation for m in experts] == [MODELS[name][2]] * MODELS[name][1]
    assert all(m.config._experts_implementation == EXPERTS_NAME for m in experts)
    batch = spec(name).example_inputs(3, 12, "cpu")
    batch["labels"][1, 5:] = -100
    with Widened():  # routers compute in fp32, whatever the dtype
        found, wanted = ours(**batch), theirs(**batch)
        found.loss.backward()
        wanted.loss.backward()
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-12, atol=1e-12)
    for (key, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, key
        torch.testing.assert_close(
            a.grad, b.grad, rtol=1e-10, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert all(m.gate_up_proj.grad.any() if m.has_gate else m.up_proj.grad.any() for m in experts)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in ("qwen2_moe", "nemotron_h", "mixtral", "deepseek_v3") else ()) for name in MODELS
])  # fmt: skip
def test_traces_with_one_op_a_block(name):
    config = transformers.AutoConfig.for_model(**spec(name).config_dict)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="eager"
        )
    traced = trace(model, spec(name).example_inputs(3, 12))
    assert model.config._experts_implementation == "eager" and not any(
        hasattr(m, "_autopar_activation") for m in model.modules()
    )
    found = Counter()
    for segment in traced.segments:
        found.update(
            n.target
            for n in traced.classes[segment.class_index].graph.nodes
            if n.op == "call_function"
        )
    assert found[OP] == MODELS[name][1]
    names = {target._schema.name for target in found if isinstance(target, torch._ops.OpOverload)}
    assert not {
        name
        for name in names
        if any(
            word in name for word in ("histc", "sort", "grouped", "index", "nonzero", "bincount")
        )
    }
    for (
        block
    ) in traced.classes:  # autograd keeps no tensor whose size is unknown: the op's are T K rows
        saved, _ = observe_saved(block.graph)
        assert all(
            s.extra_bytes_per_row > 0 for n, s in saved.items() if n.startswith("routed_experts")
        )


def test_the_users_choice_and_the_users_model_are_kept():
    model = spec("mixtral").build("meta")
    model.config._experts_implementation = "sonicmoe"
    assert prepare_hf(model).config._experts_implementation == "sonicmoe"
    model.config._experts_implementation = "grouped_mm"
    assert prepared(model).config._experts_implementation == EXPERTS_NAME
    assert model.config._experts_implementation == "grouped_mm"


def with_experts(**changes):
    """A prepared mixtral and a plain one whose experts modules got other attributes."""
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("mixtral", **{**BASE, **MODELS["mixtral"][0]})
    )
    for module in plain.modules():
        if hasattr(module, "_is_expert_parallel"):
            for key, value in changes.items():
                setattr(module, key, value)
    with torch.no_grad():
        ids = torch.arange(24).view(2, 12)
        return prepare_hf(plain), ids, plain(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    "changes",
    [
        {"act_fn": nn.Softplus()},
        {"_apply_gate": lambda both: both.chunk(2, -1)[0] + both.chunk(2, -1)[1]},
        {"has_post_expert_norm": True, "post_expert_norm": nn.RMSNorm(32)},
        {"act_fn": nn.PReLU()},
    ],
    ids=["activation", "gate", "norm", "parameters"],
)
def test_what_the_op_cannot_express_stays_transformers(changes):
    model, ids, _ = with_experts(**changes)
    experts = [m for m in model.modules() if hasattr(m, "_autopar_activation")]
    assert experts and all(m._autopar_activation is None for m in experts)
    found = model(input_ids=ids).logits
    for module in experts:
        module.config._experts_implementation = "grouped_mm"
    assert torch.equal(found, model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("module", "attributes", "expected"),
    [
        ("gpt_oss.modeling_gpt_oss.GptOssExperts", {"limit": 7.0, "alpha": 1.702}, "interleaved_clamp:7.0:1.702"),
        ("openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts", {"limit": 7.0, "alpha": 1.702},
         "concatenated_clamp:7.0:1.702"),
        ("minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts", {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
         "concatenated_clamp:7.0:1.702"),
        ("deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts", {"limit": 10.0, "act_fn": nn.SiLU()}, "gated_clamp:silu:10.0"),
        ("hy_v4.modeling_hy_v4.HYV4Experts", {"swiglu_limit": 10.0}, "gated_clamp:silu:10.0"),
        ("beam.modeling_beam.BeamExperts", {"act_fn": nn.SiLU()}, None),  # computes in fp32
    ],
)  # fmt: skip
def test_gates_of_transformers_are_recognized_by_what_they_compute(module, attributes, expected):
    from importlib import import_module

    from autopar.models.hf_experts import _find_activation

    path, name = module.rsplit(".", 1)
    experts = nn.Module.__new__(getattr(import_module(f"transformers.models.{path}"), name))
    nn.Module.__init__(experts)
    for key, value in {"has_gate": True, "has_post_expert_norm": False, **attributes}.items():
        setattr(experts, key, value)
    assert _find_activation(experts) == expected
