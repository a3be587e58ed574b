"""How an implementation's gradients are taken: by one call forward and one backward, on copies, where it has any."""

import pytest
import torch
from torch import Tensor

from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.operators import OPERATORS, Checked
from spec_lm.conformance.tolerance import NotJudged, Raised, Violation, close
from spec_lm.reference import functional


def of(operator: str, function=None, **declared) -> Checked:
    return Checked(OPERATORS[operator], function or getattr(functional, operator), **declared)


X, UPSTREAM = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 2.0, -1.0])


def test_every_floating_point_argument_gets_its_gradient_by_its_name():
    ids = torch.tensor([[0, 1]])
    table = torch.eye(2)
    weights = {"token_embeddings.weight": table, "ln_final.weight": torch.ones(2), "lm_head.weight": table}
    gradients = of("transformer_lm").gradients((ids, weights, 1, 100.0, 4), torch.ones(1, 2, 2))
    assert list(gradients) == [f"weights[{key!r}]" for key in weights]
    assert all(gradient.shape == weights[key].shape for gradient, key in zip(gradients.values(), weights, strict=True))


def test_a_gradient_carries_its_bound():
    call = ((X,), UPSTREAM)
    gradient, exact = of("silu").gradients(*call)["x"], of("silu").exact_gradients(*call)["x"]
    close(gradient, exact)
    assert torch.all(gradient.error > 0)
    with pytest.raises(Violation):
        close(gradient, exact * 1.001)


def test_optional_arguments_may_be_left_out():
    q = torch.ones(1, 2, 2)
    gradients = of("scaled_dot_product_attention").gradients((q, q, q, None), q)
    assert list(gradients) == ["query", "key", "value"]


def test_it_is_taken_under_no_grad_too_and_leaves_the_mode():
    with torch.no_grad():
        assert list(of("silu").gradients((X,), UPSTREAM)) == ["x"]
        assert not torch.is_grad_enabled()


def test_what_was_given_gets_no_gradient_and_the_copies_keep_its_strides():
    wide, upstream = torch.arange(12.0).reshape(3, 4), torch.ones(1, 1).expand(3, 2)
    strides = []

    def seen(x: Tensor) -> Tensor:
        strides.append((x.is_leaf, x.stride(), x.storage_offset()))
        return x * 1.0

    checked = of("silu", seen)
    checked.gradients((wide[:, 1::2],), upstream)
    assert strides == [(True, (4, 2), 1)]
    assert checked.handed_cotangent is not None
    assert checked.handed_cotangent.stride() == (0, 0)
    assert checked.handed_cotangent.data_ptr() != upstream.data_ptr()
    assert not wide.requires_grad


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0


def viewed_under_no_grad(x):
    with torch.no_grad():
        return torch.nn.Parameter(x.clone())[:]


def in_place(x):
    return x.mul_(2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.detach(),
        WithoutBackward.apply,
        viewed_under_no_grad,
        lambda x: torch.from_numpy(x.numpy()),
        in_place,
    ],
    ids=["detached", "no backward", "viewed under no_grad", "through NumPy", "in place"],
)
def test_an_implementation_need_not_be_differentiable(function):
    assert of("silu", function).gradients((X,), UPSTREAM) == {}


def test_an_argument_that_is_copied_gets_none():
    copied = of("linear", lambda x, weight: functional.linear(x, weight.detach().clone()))
    assert list(copied.gradients((X, torch.eye(3)), UPSTREAM)) == ["x"]


def test_an_exception_of_backward_is_the_implementations():
    def failing(x):
        y = x * 2
        y.register_hook(lambda gradient: 1 / 0)
        return y

    with pytest.raises(Raised, match=r"ZeroDivisionError.*test_gradients.py"):
        of("silu", failing).gradients((X,), UPSTREAM)


def test_a_wrong_result_is_judged_before_its_gradients():
    with pytest.raises(Violation, match="returned shape"):
        of("silu", lambda x: x[:1]).gradients((X,), UPSTREAM)


def test_arguments_beyond_the_support_are_not_judged():
    with pytest.raises(NotJudged, match="n = 3"):
        of("silu", supports={"n": [4]}).gradients((X,), UPSTREAM)


def test_the_declared_convention_is_followed():
    x, positions = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([1])
    arguments, upstream = (x, positions, 100.0, 4), torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    exact = of("rope", conventions={"rope_pairing": "halves"}).exact_gradients(arguments, upstream)["x"]
    torch.testing.assert_close(exact[0, 0], torch.tensor(1.0, dtype=torch.float64).sin())


def test_a_clause_is_not_judged_where_no_gradient_arrives():
    for clause_id in (f"silu.{name}" for name in ("gradients_with_respect_to_inputs", "backward_changes_nothing")):
        with pytest.raises(NotJudged, match="no gradient arrives at"):
            CLAUSES[clause_id].body(of("silu", lambda x: functional.silu(x).detach()), (X,), UPSTREAM)


def test_a_gradient_under_an_undeclared_convention_is_named_as_such():
    def half_split(x, positions, theta, max_seq_len):
        order = torch.arange(x.shape[-1]).unflatten(0, (2, -1)).T.reshape(-1)
        return functional.rope(x[..., order], positions, theta, max_seq_len)[..., order.argsort()]

    clause = CLAUSES["rope.gradients_with_respect_to_inputs"]
    arguments, upstream = (torch.zeros(1, 4), torch.tensor([1]), 100.0, 4), torch.tensor([[1.0, 0.5, -1.0, 2.0]])
    with pytest.raises(Violation, match="half-split"):
        clause.body(of("rope", half_split), arguments, upstream)
    clause.body(of("rope", half_split, conventions={"rope_pairing": "halves"}), arguments, upstream)
