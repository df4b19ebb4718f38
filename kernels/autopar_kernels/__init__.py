"""Ops of our own, registered with torch.library, and their kernels.  Imports torch alone; each module registers what it defines.

    norms, layer_norms, norm_passes     RMSNorm and LayerNorm, after a residual too
    glu, bias_activations               gated activations, and activations after a bias
    rotary                              rotary position embedding
    losses, linear_losses               cross-entropy over whole and sharded vocabularies, and with the head's product in chunks
    softmax, partial_attention          attention probabilities, and the merge of a ring's partial attentions
    sums, expert_rows, routed_experts   sums over partial results, experts' rows, and mixtures of experts
    registration, launching, tiles      how ops are registered, where kernels run, and what kernels share

Triton kernels are in the modules `*_kernels` and `tiles`, which import triton and are imported where a kernel is launched.
"""
