"""The adapter interface: twelve functions, the published argument names, each the operator of its name."""

import inspect

import pytest
import torch

from spec_lm.conformance.operators import OPERATORS
from spec_lm.reference import adapters, functional

PROJECTIONS = "q_proj_weight k_proj_weight v_proj_weight o_proj_weight"
INTERFACE = {
    "run_linear": "d_in d_out weights in_features",
    "run_embedding": "vocab_size d_model weights token_ids",
    "run_silu": "in_features",
    "run_softmax": "in_features dim",
    "run_rmsnorm": "d_model eps weights in_features",
    "run_swiglu": "d_model d_ff w1_weight w2_weight w3_weight in_features",
    "run_rope": "d_k theta max_seq_len in_query_or_key token_positions",
    "run_scaled_dot_product_attention": "Q K V mask",
    "run_multihead_self_attention": f"d_model num_heads {PROJECTIONS} in_features",
    "run_multihead_self_attention_with_rope": (
        f"d_model num_heads max_seq_len theta {PROJECTIONS} in_features token_positions"
    ),
    "run_transformer_block": "d_model num_heads d_ff max_seq_len theta weights in_features",
    "run_transformer_lm": ("vocab_size context_length d_model num_layers num_heads d_ff rope_theta weights in_indices"),
}
OPTIONAL = {
    "run_scaled_dot_product_attention": ["mask"],
    "run_multihead_self_attention_with_rope": ["token_positions"],
}


def weights_of_a_block(d_model: int, d_ff: int) -> dict[str, torch.Tensor]:
    square = {f"attn.{name}_proj.weight": torch.randn(d_model, d_model) for name in ("q", "k", "v", "output")}
    norms = {f"ln{i}.weight": torch.randn(d_model) for i in (1, 2)}
    wide = {f"ffn.{name}.weight": torch.randn(d_ff, d_model) for name in ("w1", "w3")}
    return square | norms | wide | {"ffn.w2.weight": torch.randn(d_model, d_ff)}


def plain_arguments(operator: str) -> tuple:
    """Arguments of the plain signature in which no two sizes are equal by chance."""
    torch.manual_seed(0)
    x, square = torch.randn(2, 5, 12), [torch.randn(12, 12) for _ in range(4)]
    block = weights_of_a_block(12, 20)
    ends = {"token_embeddings.weight": torch.randn(7, 12), "lm_head.weight": torch.randn(7, 12)}
    layers = {f"layers.{i}.{name}": weight + i for i in range(2) for name, weight in block.items()}
    model = ends | {"ln_final.weight": torch.randn(12)} | layers
    return {
        "softmax": (x, 1),
        "silu": (x,),
        "linear": (x, torch.randn(3, 12)),
        "embedding": (torch.randint(7, (2, 5)), torch.randn(7, 12)),
        "rmsnorm": (x, torch.randn(12), 1e-3),
        "swiglu": (x, torch.randn(20, 12), torch.randn(12, 20), torch.randn(20, 12)),
        "rope": (x, torch.tensor([3, 1, 4, 0, 8]), 100.0, 9),
        "scaled_dot_product_attention": (x, torch.randn(2, 6, 12), torch.randn(2, 6, 3), torch.rand(5, 6) < 0.7),
        "multihead_self_attention": (x, *square, 3),
        "multihead_self_attention_with_rope": (x, *square, 3, 100.0, 9, torch.tensor([3, 1, 4, 0, 8])),
        "transformer_block": (x, block, 3, 100.0, 9),
        "transformer_lm": (torch.randint(7, (2, 5)), model, 3, 100.0, 9),
    }[operator]


def test_there_are_twelve_functions():
    functions = {name for name in vars(adapters) if name.startswith("run_")}
    assert functions == set(INTERFACE) == {f"run_{operator}" for operator in OPERATORS}


@pytest.mark.parametrize("name", INTERFACE)
def test_arguments_have_the_published_names_in_the_published_order(name):
    parameters = inspect.signature(getattr(adapters, name)).parameters
    assert list(parameters) == INTERFACE[name].split()
    optional = [key for key, parameter in parameters.items() if parameter.default is not inspect.Parameter.empty]
    assert optional == OPTIONAL.get(name, [])


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_function_is_the_operator_of_its_name(operator):
    args = plain_arguments(operator)
    positional, keywords = OPERATORS[operator].adapter(*args)
    got = getattr(adapters, f"run_{operator}")(*positional, **keywords)
    assert torch.equal(got, getattr(functional, operator)(*args))


def test_the_mask_and_the_positions_may_be_left_out():
    q, k, v, _ = plain_arguments("scaled_dot_product_attention")
    everything = torch.ones(5, 6, dtype=torch.bool)
    run = adapters.run_scaled_dot_product_attention
    assert torch.equal(run(Q=q, K=k, V=v), run(Q=q, K=k, V=v, mask=everything))
    *args, _ = plain_arguments("multihead_self_attention_with_rope")
    _, keywords = OPERATORS["multihead_self_attention_with_rope"].adapter(*args)
    run = adapters.run_multihead_self_attention_with_rope
    assert torch.equal(run(**keywords), run(**keywords, token_positions=torch.arange(5)))


def test_gradients_reach_the_weights_passed_in():
    ids, weights, heads, theta, length = plain_arguments("transformer_lm")
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    _, keywords = OPERATORS["transformer_lm"].adapter(ids, weights, heads, theta, length)
    adapters.run_transformer_lm(**keywords).sum().backward()
    assert [name for name, weight in weights.items() if weight.grad is None] == []
