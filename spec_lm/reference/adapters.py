"""The reference behind the adapter interface of the assignment: one run_* function an operator, weights passed in."""

from torch import Tensor

from spec_lm.reference import functional

# fmt: off
# The interface reads as the table that it is. Sizes (d_in, vocab_size, ...) are taken from the tensors instead.
spec_lm_supports = {"dtype": ["float32", "float64", "bfloat16", "float16"]}
def run_linear(d_in: int, d_out: int, weights: Tensor, in_features: Tensor) -> Tensor:
    return functional.linear(in_features, weights)
def run_embedding(vocab_size: int, d_model: int, weights: Tensor, token_ids: Tensor) -> Tensor:
    return functional.embedding(token_ids, weights)
def run_silu(in_features: Tensor) -> Tensor:
    return functional.silu(in_features)
def run_softmax(in_features: Tensor, dim: int) -> Tensor:
    return functional.softmax(in_features, dim)
def run_rmsnorm(d_model: int, eps: float, weights: Tensor, in_features: Tensor) -> Tensor:
    return functional.rmsnorm(in_features, weights, eps)
def run_swiglu(
    d_model: int, d_ff: int, w1_weight: Tensor, w2_weight: Tensor, w3_weight: Tensor, in_features: Tensor,
) -> Tensor:
    return functional.swiglu(in_features, w1_weight, w2_weight, w3_weight)
def run_rope(d_k: int, theta: float, max_seq_len: int, in_query_or_key: Tensor, token_positions: Tensor) -> Tensor:
    return functional.rope(in_query_or_key, token_positions, theta, max_seq_len)
def run_scaled_dot_product_attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(Q, K, V, mask)
def run_multihead_self_attention(
    d_model: int, num_heads: int,
    q_proj_weight: Tensor, k_proj_weight: Tensor, v_proj_weight: Tensor, o_proj_weight: Tensor, in_features: Tensor,
) -> Tensor:
    projections = q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight
    return functional.multihead_self_attention(in_features, *projections, num_heads)
def run_multihead_self_attention_with_rope(
    d_model: int, num_heads: int, max_seq_len: int, theta: float,
    q_proj_weight: Tensor, k_proj_weight: Tensor, v_proj_weight: Tensor, o_proj_weight: Tensor,
    in_features: Tensor, token_positions: Tensor | None = None,
) -> Tensor:
    weights, turn = (q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight), (theta, max_seq_len, token_positions)
    return functional.multihead_self_attention_with_rope(in_features, *weights, num_heads, *turn)
def run_transformer_block(
    d_model: int, num_heads: int, d_ff: int, max_seq_len: int, theta: float,
    weights: functional.Weights, in_features: Tensor,
) -> Tensor:
    return functional.transformer_block(in_features, weights, num_heads, theta, max_seq_len)
def run_transformer_lm(
    vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int, d_ff: int, rope_theta: float,
    weights: functional.Weights, in_indices: Tensor,
) -> Tensor:
    return functional.transformer_lm(in_indices, weights, num_heads, rope_theta, context_length)
