"""Modules as students of a course write them, behind the adapter interface: each call builds one and loads its weights.

Under no_grad throughout; rotary tables are a buffer of float32, the causal mask is made anew.
"""

import math

import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self, d_in, d_out, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in, dtype=dtype))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, vocab_size, d_model, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, dtype=dtype))

    def forward(self, token_ids):
        return self.weight[token_ids]


class RMSNorm(nn.Module):
    def __init__(self, d_model, dtype, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, dtype=dtype))

    def forward(self, x):
        in_dtype = x.dtype
        x = x.to(torch.promote_types(in_dtype, torch.float32))
        rms = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + self.eps)
        return (x / rms * self.weight).to(in_dtype)


def silu(x):
    return x * torch.sigmoid(x)


class SwiGLU(nn.Module):
    def __init__(self, d_model, d_ff, dtype):
        super().__init__()
        self.w1 = Linear(d_model, d_ff, dtype)
        self.w2 = Linear(d_ff, d_model, dtype)
        self.w3 = Linear(d_model, d_ff, dtype)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class RoPE(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, theta, d_k, max_seq_len):
        super().__init__()
        if d_k % 2:
            raise ValueError("d_k must be even")
        frequencies = 1.0 / theta ** (torch.arange(0, d_k, 2).float() / d_k)
        angles = torch.outer(torch.arange(max_seq_len).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x, token_positions):
        cos, sin = self.cos[token_positions], self.sin[token_positions]
        even, odd = x[..., ::2].float(), x[..., 1::2].float()
        turned = torch.empty_like(x)
        turned[..., ::2] = even * cos - odd * sin
        turned[..., 1::2] = even * sin + odd * cos
        return turned


def softmax(x, dim):
    shifted = x - x.max(dim=dim, keepdim=True).values
    exponentials = torch.exp(shifted)
    return exponentials / exponentials.sum(dim=dim, keepdim=True)


def attention(query, key, value, mask=None):
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax(scores, dim=-1) @ value


class MultiHeadSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, dtype, rope=None):
        super().__init__()
        if d_model % num_heads:
            raise ValueError("num_heads must divide d_model")
        self.num_heads, self.rope = num_heads, rope
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (Linear(d_model, d_model, dtype) for _ in range(4))

    def forward(self, x, token_positions=None):
        batch, sequence, d_model = x.shape
        query, key, value = (
            proj(x).view(batch, sequence, self.num_heads, -1).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rope is not None:
            positions = torch.arange(sequence) if token_positions is None else token_positions.unsqueeze(-2)
            query, key = self.rope(query, positions), self.rope(key, positions)
        causal = torch.tril(torch.ones(sequence, sequence, dtype=torch.bool))
        heads = attention(query, key, value, causal)
        return self.output_proj(heads.transpose(1, 2).reshape(batch, sequence, d_model))


class TransformerBlock(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, max_seq_len, theta, dtype):
        super().__init__()
        self.ln1, self.ln2 = RMSNorm(d_model, dtype), RMSNorm(d_model, dtype)
        self.attn = MultiHeadSelfAttention(d_model, num_heads, dtype, RoPE(theta, d_model // num_heads, max_seq_len))
        self.ffn = SwiGLU(d_model, d_ff, dtype)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, theta, dtype):
        super().__init__()
        self.context_length = context_length
        self.token_embeddings = Embedding(vocab_size, d_model, dtype)
        self.layers = nn.ModuleList(
            TransformerBlock(d_model, num_heads, d_ff, context_length, theta, dtype) for _ in range(num_layers)
        )
        self.ln_final = RMSNorm(d_model, dtype)
        self.lm_head = Linear(d_model, vocab_size, dtype)

    def forward(self, token_ids):
        if token_ids.shape[-1] > self.context_length:
            raise ValueError("the sequence is longer than context_length")
        x = self.token_embeddings(token_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_final(x))


def _run(module, weights, *inputs):
    module.load_state_dict(weights, strict=True)
    with torch.no_grad():
        return module(*inputs)


def run_softmax(in_features, dim):
    return softmax(in_features, dim)


def run_silu(in_features):
    return silu(in_features)


def run_linear(d_in, d_out, weights, in_features):
    return _run(Linear(d_in, d_out, weights.dtype), {"weight": weights}, in_features)


def run_embedding(vocab_size, d_model, weights, token_ids):
    return _run(Embedding(vocab_size, d_model, weights.dtype), {"weight": weights}, token_ids)


def run_rmsnorm(d_model, eps, weights, in_features):
    return _run(RMSNorm(d_model, weights.dtype, eps), {"weight": weights}, in_features)


def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    weights = {"w1.weight": w1_weight, "w2.weight": w2_weight, "w3.weight": w3_weight}
    return _run(SwiGLU(d_model, d_ff, w1_weight.dtype), weights, in_features)


def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    return RoPE(theta, d_k, max_seq_len)(in_query_or_key, token_positions)


def run_scaled_dot_product_attention(Q, K, V, mask=None):
    return attention(Q, K, V, mask)


def _projections(q, k, v, o):
    return {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "output_proj.weight": o}


def run_multihead_self_attention(
    d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight, in_features
):
    weights = _projections(q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    return _run(MultiHeadSelfAttention(d_model, num_heads, in_features.dtype), weights, in_features)


def run_multihead_self_attention_with_rope(
    d_model,
    num_heads,
    max_seq_len,
    theta,
    q_proj_weight,
    k_proj_weight,
    v_proj_weight,
    o_proj_weight,
    in_features,
    token_positions=None,
):
    rope = RoPE(theta, d_model // num_heads, max_seq_len)
    weights = _projections(q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    attend = MultiHeadSelfAttention(d_model, num_heads, in_features.dtype, rope)
    return _run(attend, weights, in_features, token_positions)


def run_transformer_block(d_model, num_heads, d_ff, max_seq_len, theta, weights, in_features):
    block = TransformerBlock(d_model, num_heads, d_ff, max_seq_len, theta, in_features.dtype)
    return _run(block, weights, in_features)


def run_transformer_lm(
    vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, weights, in_indices
):
    dtype = weights["lm_head.weight"].dtype
    model = TransformerLM(vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, dtype)
    return _run(model, weights, in_indices)
