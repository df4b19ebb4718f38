"""Our Llama is Hugging Face's Llama: same weights, same loss, logits and gradients in fp64."""

import pytest
import torch
import torch.nn.functional as F

from autopar.models.llama import LlamaConfig

transformers = pytest.importorskip("transformers")

NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm": "input_layernorm",
    "attention.": "self_attn.",
    "mlp_norm": "post_attention_layernorm",
}


def hf_name(name):
    if name in NAMES:
        return NAMES[name]
    for ours, theirs in NAMES.items():
        name = name.replace(f".{ours}", f".{theirs}")
    return f"model.{name}"


@pytest.fixture
def fp64_inside(monkeypatch):
    """transformers computes norms and rotary angles in fp32 whatever the dtype; let it use fp64 to compare all digits."""
    from transformers.models.llama import modeling_llama

    def norm(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)

    def rotary(self, x, position_ids):
        dim = self.config.head_dim
        inverse = 1.0 / self.config.rope_parameters["rope_theta"] ** (
            torch.arange(0, dim, 2, dtype=torch.float64) / dim
        )
        angles = position_ids[..., None].double() * inverse
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)


def pair(kv_heads, tie):
    ours_config = LlamaConfig(
        97, 48, 2, 4, kv_heads, 88, max_seq=64, rope_theta=5000.0, tie_embeddings=tie
    )
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=kv_heads, intermediate_size=88,
        max_position_embeddings=64, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tie, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    ours, theirs = ours_config.module().double(), transformers.LlamaForCausalLM(config).double()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, mean=0.3, std=0.2)
    theirs.load_state_dict({hf_name(name): value for name, value in ours.state_dict().items()})
    return ours, theirs


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tie", [False, True])
def test_same_logits_and_gradients_in_fp64(fp64_inside, kv_heads, tie):
    ours, theirs = pair(kv_heads, tie)
    ids = torch.randint(97, (3, 20))
    labels = ids.clone()
    labels[1, 7:] = -100
    logits = theirs(input_ids=ids).logits
    torch.testing.assert_close(ours(ids), logits, rtol=1e-12, atol=1e-12)
    # transformers' own loss casts the logits to fp32
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    ours(ids, labels).backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[hf_name(name)].grad, rtol=1e-10, atol=1e-12
        )


def test_same_loss_as_the_unmodified_model_to_fp32_accuracy():
    ours, theirs = pair(2, False)
    ids = torch.randint(97, (3, 20))
    labels = ids.clone()
    labels[1, 7:] = -100
    torch.testing.assert_close(
        ours(ids, labels), theirs(input_ids=ids, labels=labels).loss.double(), rtol=1e-5, atol=1e-6
    )
