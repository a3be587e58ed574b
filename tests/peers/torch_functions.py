"""PyTorch's own functions, each composed as a practitioner would."""

import torch
import torch.nn.functional as F

softmax = torch.softmax
silu = F.silu
linear = F.linear
scaled_dot_product_attention = F.scaled_dot_product_attention  # takes the flash path where it can


def embedding(token_ids, weight):
    return F.embedding(token_ids, weight)


def rmsnorm(x, gain, eps):
    return F.rms_norm(x, gain.shape, gain, eps)


def swiglu(x, w1, w2, w3):
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def rope(x, positions, theta, max_seq_len):
    """Complex products: pair i is one complex number, turned by exp(i angle)."""
    if x.shape[-1] % 2 or int(positions.max()) >= max_seq_len:
        raise ValueError("odd d_k, or a position past max_seq_len")
    frequencies = theta ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    turns = torch.polar(torch.ones((), dtype=torch.float64), positions[..., None] * frequencies)
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.complex(x[..., 0::2].to(wide), x[..., 1::2].to(wide))
    return torch.view_as_real(pairs * turns.to(pairs.dtype)).flatten(-2).to(x.dtype)


def multihead_self_attention(x, w_q, w_k, w_v, w_o, num_heads):
    """One product for Q, K and V, and the fused causal kernel."""
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, lambda heads: heads)


def multihead_self_attention_with_rope(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    positions = torch.arange(x.shape[-2]) if positions is None else positions
    turned = positions[..., None, :]
    return _attend(x, w_q, w_k, w_v, w_o, num_heads, lambda heads: rope(heads, turned, theta, max_seq_len))


def _attend(x, w_q, w_k, w_v, w_o, num_heads, rotate):
    if w_q.shape[0] % num_heads:
        raise ValueError("num_heads does not divide d_model")
    projected = F.linear(x, torch.cat([w_q, w_k, w_v])).chunk(3, -1)
    query, key, value = (t.unflatten(-1, (num_heads, -1)).transpose(-2, -3) for t in projected)
    heads = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
    return F.linear(heads.transpose(-2, -3).flatten(-2), w_o)


def transformer_block(x, weights, num_heads, theta, max_seq_len):
    q, k, v, o = (weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output"))
    normed = rmsnorm(x, weights["ln1.weight"], 1e-5)
    x = x + multihead_self_attention_with_rope(normed, q, k, v, o, num_heads, theta, max_seq_len)
    return x + swiglu(rmsnorm(x, weights["ln2.weight"], 1e-5), *(weights[f"ffn.w{i}.weight"] for i in (1, 2, 3)))


def transformer_lm(token_ids, weights, num_heads, theta, context_length):
    if token_ids.shape[-1] > context_length:
        raise ValueError("longer than context_length")
    x = F.embedding(token_ids, weights["token_embeddings.weight"])
    for i in range(sum(key.endswith("ln1.weight") for key in weights)):
        prefix = f"layers.{i}."
        layer = {key.removeprefix(prefix): w for key, w in weights.items() if key.startswith(prefix)}
        x = transformer_block(x, layer, num_heads, theta, context_length)
    return F.linear(rmsnorm(x, weights["ln_final.weight"], 1e-5), weights["lm_head.weight"])
