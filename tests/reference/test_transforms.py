"""What PyTorch does to functions and modules works on the reference: compile, vmap, grad, fake tensors, export."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap  # pyright: ignore[reportPrivateImportUsage]

from spec_lm.reference import functional
from spec_lm.reference.modules import MultiHeadSelfAttention, TransformerLM

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 10]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4], [7, 0, 0, 2, 1]])


def make_model() -> TransformerLM:
    return TransformerLM(11, 8, 12, 1, 3, 20, 1e4)


@pytest.fixture
def model() -> TransformerLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make_model()


@pytest.fixture
def attention(model) -> MultiHeadSelfAttention:
    return model.get_submodule("layers.0.attn")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _no_compiled_code_is_left():
    yield
    torch.compiler.reset()


def test_the_language_model_compiles_as_one_graph_with_equal_results(model):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(IDS), model(IDS))
    gradients = []
    for call in (compiled, model):
        model.zero_grad()
        call(IDS).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_attention_at_given_positions_compiles_as_one_graph(attention, x):
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, POSITIONS), attention(x, POSITIONS))


def test_a_refusal_is_not_hidden_by_a_graph_break(model):
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="a sequence of 9 tokens exceeds context_length 8"):
        compiled(torch.zeros(1, 9).long())


def test_vmap_over_examples_equals_the_batch(model, attention, x):
    torch.testing.assert_close(vmap(model)(IDS), model(IDS))
    torch.testing.assert_close(vmap(attention)(x, POSITIONS), attention(x, POSITIONS))


def test_vmap_over_masks_equals_one_mask_after_another(x):
    masks = torch.stack((functional.causal_mask(5), torch.zeros(5, 5, dtype=torch.bool)))
    got = vmap(lambda mask: functional.scaled_dot_product_attention(x, x, x, mask))(masks)
    each = [functional.scaled_dot_product_attention(x, x, x, mask) for mask in masks]
    torch.testing.assert_close(got, torch.stack(each))


def test_func_grad_equals_backward(model):
    parameters = dict(model.named_parameters())
    got = grad(lambda weights: functional_call(model, weights, (IDS,)).square().sum())(parameters)
    model(IDS).square().sum().backward()
    torch.testing.assert_close(got, {name: parameter.grad for name, parameter in parameters.items()})


def test_per_example_gradients_by_vmap_of_grad_sum_to_the_gradient_of_the_batch(model):
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loss = grad(lambda weights, ids: functional.transformer_lm(ids, weights, 3, 1e4, 8).square().sum())
    each = vmap(loss, in_dims=(None, 0))(weights, IDS)
    torch.testing.assert_close({name: g.sum(0) for name, g in each.items()}, loss(weights, IDS), rtol=1e-4, atol=1e-4)


def test_fake_tensors_give_shapes():
    with FakeTensorMode():
        assert make_model()(torch.zeros(2, 5).long()).shape == (2, 5, 11)
        attention, positions = MultiHeadSelfAttention(12, 3, 1e4, 8), torch.zeros(2, 5).long()
        assert attention(torch.ones(2, 5, 12), positions).shape == (2, 5, 12)


def test_the_language_model_exports_with_equal_results(model):
    program = torch.export.export(model, (IDS,))
    assert torch.equal(program.module()(IDS), model(IDS))


def test_the_language_model_exports_for_every_length_up_to_the_context(model):
    length = torch.export.Dim("length", min=2, max=8)
    program = torch.export.export(model, (IDS,), dynamic_shapes=({1: length},))
    for ids in (IDS[:, :2], IDS, torch.arange(8).expand(2, 8)):
        torch.testing.assert_close(program.module()(ids), model(ids))
