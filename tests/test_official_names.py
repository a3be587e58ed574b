"""The assignment's own commands, `pytest -k test_softmax` and so on, select these tests of the adapter interface.

Each compares one function of the reference with the oracle, on the sizes of the assignment, within the derived bound.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lm.conformance.bounds import bounded
from spec_lm.reference import adapters

D_MODEL, HEADS, D_FF, VOCAB, CONTEXT, LAYERS, THETA = 64, 4, 128, 100, 16, 3, 10000.0
BATCH, SEQUENCE = 4, 12


def randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def matrix(d_out: int, d_in: int, seed: int) -> Tensor:
    return randn(d_out, d_in, seed=seed, scale=d_in**-0.5)


def block_weights(seed: int) -> dict[str, Tensor]:
    square = {f"attn.{name}_proj.weight": (D_MODEL, D_MODEL) for name in ("q", "k", "v", "output")}
    wide = {"ffn.w1.weight": (D_FF, D_MODEL), "ffn.w2.weight": (D_MODEL, D_FF), "ffn.w3.weight": (D_FF, D_MODEL)}
    matrices = {name: matrix(*shape, seed + i) for i, (name, shape) in enumerate((square | wide).items())}
    return matrices | {f"ln{i}.weight": 1 + randn(D_MODEL, seed=seed + 10 + i, scale=0.1) for i in (1, 2)}


def projections() -> dict[str, Tensor]:
    return {f"{name}_proj_weight": matrix(D_MODEL, D_MODEL, seed) for seed, name in enumerate("qkvo", 20)}


def model_weights() -> dict[str, Tensor]:
    layers = [{f"layers.{i}.{name}": w for name, w in block_weights(100 * i).items()} for i in range(LAYERS)]
    weights = {"token_embeddings.weight": randn(VOCAB, D_MODEL, seed=1), "ln_final.weight": torch.ones(D_MODEL)}
    return (
        {k: w for layer in layers for k, w in layer.items()} | weights | {"lm_head.weight": matrix(VOCAB, D_MODEL, 2)}
    )


def agrees(got: Tensor, operator: str, *plain: Any) -> None:
    """Compare with the oracle's value of the plain arguments."""

    def array(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: array(item) for name, item in value.items()}
        return value.double().numpy() if isinstance(value, Tensor) and value.is_floating_point() else np.asarray(value)

    args = tuple(array(value) if isinstance(value, Tensor | Mapping) else value for value in plain)
    exact, bound = bounded(operator, args, "float32")
    assert got.dtype == torch.float32
    assert got.shape == exact.shape
    assert np.all(np.abs(got.double().numpy() - exact) <= bound)


X = randn(BATCH, SEQUENCE, D_MODEL, seed=0)


def test_linear():
    weight = matrix(D_FF, D_MODEL, 1)
    agrees(adapters.run_linear(d_in=D_MODEL, d_out=D_FF, weights=weight, in_features=X), "linear", X, weight)


def test_embedding():
    weight, ids = randn(VOCAB, D_MODEL, seed=1), torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE)
    got = adapters.run_embedding(vocab_size=VOCAB, d_model=D_MODEL, weights=weight, token_ids=ids)
    assert torch.equal(got, torch.nn.functional.embedding(ids, weight))
    agrees(got, "embedding", ids, weight)


def test_silu():
    agrees(adapters.run_silu(X), "silu", X)


def test_swiglu():
    weights = {f"w{i}_weight": block_weights(0)[f"ffn.w{i}.weight"] for i in (1, 2, 3)}
    got = adapters.run_swiglu(d_model=D_MODEL, d_ff=D_FF, **weights, in_features=X)
    agrees(got, "swiglu", X, *weights.values())


def test_rmsnorm():
    gain = randn(D_MODEL, seed=1)
    got = adapters.run_rmsnorm(d_model=D_MODEL, eps=1e-5, weights=gain, in_features=X)
    agrees(got, "rmsnorm", X, gain, 1e-5)


def test_rope():
    positions = torch.arange(SEQUENCE)
    got = adapters.run_rope(D_MODEL, theta=THETA, max_seq_len=CONTEXT, in_query_or_key=X, token_positions=positions)
    agrees(got, "rope", X, positions, THETA, CONTEXT)


def test_softmax_matches_pytorch():
    x = torch.tensor([[0.4655, 0.8303, 0.9608, 0.9656, 0.6840], [0.2583, 0.2198, 0.9334, 0.2995, 0.1722]])
    for shifted in (x, x + 100):
        torch.testing.assert_close(adapters.run_softmax(shifted, dim=-1), shifted.softmax(-1))
        agrees(adapters.run_softmax(shifted, dim=-1), "softmax", shifted, -1)


def test_scaled_dot_product_attention():
    query, key, value = (randn(BATCH, n, D_MODEL, seed=n) for n in (SEQUENCE, 16, 16))
    mask = randn(BATCH, SEQUENCE, 16, seed=3) > 0
    got = adapters.run_scaled_dot_product_attention(Q=query, K=key, V=value, mask=mask)
    agrees(got, "scaled_dot_product_attention", query, key, value, mask)


def test_4d_scaled_dot_product_attention():
    query, key, value = (randn(2, 2, n, D_MODEL, seed=n) for n in (SEQUENCE, 16, 16))
    mask = randn(2, 2, SEQUENCE, 16, seed=3) > 0
    got = adapters.run_scaled_dot_product_attention(Q=query, K=key, V=value, mask=mask)
    agrees(got, "scaled_dot_product_attention", query, key, value, mask)


def test_multihead_self_attention():
    weights = projections()
    got = adapters.run_multihead_self_attention(d_model=D_MODEL, num_heads=HEADS, **weights, in_features=X)
    agrees(got, "multihead_self_attention", X, *weights.values(), HEADS)


def test_multihead_self_attention_with_rope():
    weights, positions = projections(), torch.arange(SEQUENCE)[None]  # (1, sequence), as the assignment passes them
    got = adapters.run_multihead_self_attention_with_rope(
        d_model=D_MODEL,
        num_heads=HEADS,
        max_seq_len=CONTEXT,
        theta=THETA,
        **weights,
        in_features=X,
        token_positions=positions,
    )
    agrees(got, "multihead_self_attention_with_rope", X, *weights.values(), HEADS, THETA, CONTEXT, positions)


def test_transformer_block():
    weights, sizes = block_weights(0), {"d_model": D_MODEL, "num_heads": HEADS, "d_ff": D_FF, "max_seq_len": CONTEXT}
    got = adapters.run_transformer_block(**sizes, theta=THETA, weights=weights, in_features=X)
    agrees(got, "transformer_block", X, weights, HEADS, THETA, CONTEXT)


def run_model(ids: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return adapters.run_transformer_lm(
        vocab_size=VOCAB,
        context_length=CONTEXT,
        d_model=D_MODEL,
        num_layers=LAYERS,
        num_heads=HEADS,
        d_ff=D_FF,
        rope_theta=THETA,
        weights=weights,
        in_indices=ids,
    )


def test_transformer_lm():
    weights, ids = model_weights(), torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE)
    agrees(run_model(ids, weights), "transformer_lm", ids, weights, HEADS, THETA, CONTEXT)


def test_transformer_lm_truncated_input():
    weights, ids = model_weights(), torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE)[:, : SEQUENCE // 2]
    agrees(run_model(ids, weights), "transformer_lm", ids, weights, HEADS, THETA, CONTEXT)
