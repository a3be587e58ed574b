"""Gradients by hand are the derivatives of the oracle, and their bounds are neither jumpy nor blind."""

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from spec_lm.conformance import oracle, vjp
from spec_lm.conformance.bounds import FOLLOWED, PRECISIONS, exact_value
from spec_lm.conformance.clause import CLAUSES, EVERY
from spec_lm.conformance.operators import OPERATORS, Checked, to_numpy
from spec_lm.conformance.runner import preserved
from spec_lm.conformance.strategies import Domain, build
from spec_lm.conformance.vjp import bounded_gradients, exact_gradients
from spec_lm.reference import functional

Call = tuple[Any, Tensor]


LOG2_E = math.log2(math.e)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: on a busy machine, waiting for a second thread costs ten times the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@lru_cache
def calls(operator: str, dtype: str, examples: int, clause: str = "backward_changes_nothing") -> tuple[Call, ...]:
    """Arguments and cotangents as the clauses draw them."""
    found: list[Call] = []

    def collect(arguments: Any, cotangent: Any) -> None:
        found.append((build(arguments), build(cotangent)))

    asked = CLAUSES[f"{operator}.{clause}"]
    test = asked.given.over(asked.domain(Domain(operator, dtype)))(collect)
    unchecked: Any = tuple(HealthCheck)
    settings = hypothesis.settings(
        database=None, deadline=None, max_examples=examples, phases=[Phase.generate], suppress_health_check=unchecked
    )
    with preserved(0):
        hypothesis.seed(0)(settings(test))()
    return tuple(found)


def numbers(arguments: Any) -> tuple[Any, ...]:
    return tuple(map(to_numpy, arguments))


def ratios(operator: str, function: Callable[..., Tensor], dtype: str, call: Call) -> dict[str, float]:
    """The largest err/bound of the gradients that arrive, by name."""
    arguments, cotangent = call
    bounds = bounded_gradients(operator, numbers(arguments), to_numpy(cotangent), dtype)
    got = Checked(OPERATORS[operator], function).gradients(arguments, cotangent)
    found = {}
    for name, gradient in got.items():
        exact, bound = bounds[name]
        error = np.abs(gradient.value.numpy() - exact)
        found[name] = float(np.max(np.where(error == 0, 0, error / bound), initial=0))
    return found


# ---- The gradients are those of the oracle ----

TURNED = [name for name, followed in FOLLOWED.items() if "rope_pairing" in followed]
CASES = [(operator, {}) for operator in EVERY] + [
    (operator, {convention: choice})
    for operator in TURNED
    for convention, choice in (("rope_pairing", "halves"), ("rope_direction", "clockwise"))
]


def floating(arguments: Any) -> dict[str, np.ndarray]:
    """The arguments that have gradients, by the names of these."""
    named = dict(zip(arguments._fields, numbers(arguments), strict=True))
    weights = {f"weights[{key!r}]": value for key, value in named.pop("weights", {}).items()}
    arrays = {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
    return {name: value for name, value in (arrays | weights).items() if value.dtype == np.float64}


def moved(arguments: Any, name: str, change: np.ndarray) -> tuple[Any, ...]:
    """The arguments as numbers, one of them changed."""
    named = dict(zip(arguments._fields, numbers(arguments), strict=True))
    if name in named:
        return tuple({**named, name: named[name] + change}.values())
    key = name.removeprefix("weights['").removesuffix("']")
    weights = {**named["weights"], key: named["weights"][key] + change}
    return tuple({**named, "weights": weights}.values())


def slope(value: Callable[[float], np.ndarray]) -> tuple[float, float]:
    """The derivative at 0 of a sum whose terms are given, by central differences, and how far off it may be.

    Of each step and the two after it, each a quarter of the last: where the steps are too long, the differences of
    their slopes show the truncation, and where they are too short, the roundoff. The best step is where both are least.
    What is less than the last digits of the terms, divided by the step, shows in none.
    """
    steps = [4.0**-k for k in range(3, 13)]
    slopes = [float((value(h).sum() - value(-h).sum()) / (2 * h)) for h in steps]
    spreads = [max(three) - min(three) for three in zip(slopes, slopes[1:], slopes[2:], strict=False)]
    best = int(np.argmin(spreads))
    return slopes[best + 1], 4 * spreads[best] + 2.0**-48 * float(np.abs(value(0.0)).sum()) / steps[best]


@pytest.mark.parametrize(("operator", "conventions"), CASES, ids=lambda case: str(case))
def test_a_gradient_is_the_slope_of_the_oracle_in_every_direction(operator: str, conventions: dict[str, str]) -> None:
    """To three digits and better in most draws, or this would say little: some lie on top of a maximum."""
    generator, sharp = np.random.Generator(np.random.PCG64(7)), []
    for arguments, cotangent in calls(operator, "float64", 8):
        upstream = to_numpy(cotangent)
        gradients = exact_gradients(operator, numbers(arguments), upstream, conventions)
        assert set(gradients) == set(floating(arguments))
        for name, argument in floating(arguments).items():
            direction = generator.uniform(-1, 1, argument.shape)

            def terms(h: float, name=name, direction=direction, upstream=upstream, arguments=arguments) -> np.ndarray:
                return upstream * exact_value(operator, moved(arguments, name, h * direction), conventions)

            found, tolerance = slope(terms)
            size = np.abs(gradients[name] * direction).sum()
            assert abs((gradients[name] * direction).sum() - found) <= tolerance + 2.0**-40 * size
            sharp.append(tolerance <= 1e-3 * size)
    assert np.mean(sharp) > 0.5


@pytest.mark.parametrize("choice", ["zeros", "uniform"])
def test_a_query_that_may_see_nothing_passes_the_gradient_of_its_convention(choice: str) -> None:
    (query, key, value, _), cotangent = calls("scaled_dot_product_attention", "float64", 12)[-1]
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    mask[0] = False
    args, conventions = numbers((query, key, value, mask)), {"all_masked": choice}
    found = bounded_gradients("scaled_dot_product_attention", args, to_numpy(cotangent), "float32", conventions)
    assert np.all(found["query"][0][..., 0, :] == 0)
    seen = exact_gradients("scaled_dot_product_attention", _without_row(args, 0), to_numpy(cotangent)[..., 1:, :])
    mean = to_numpy(cotangent)[..., :1, :] / key.shape[-2] if choice == "uniform" else 0
    np.testing.assert_allclose(found["value"][0], seen["value"] + mean, atol=1e-12)
    np.testing.assert_allclose(found["key"][0], seen["key"], atol=1e-12)
    assert all(np.isfinite(bound).all() for _, bound in found.values())


def _without_row(args: tuple[Any, ...], row: int) -> tuple[Any, ...]:
    query, key, value, mask = args
    return np.delete(query, row, -2), key, value, np.delete(mask, row, -2)


# ---- Not jumpy ----


class Stepwise:
    """Every operator as autograd differentiates it step by step, the maximum of a softmax inside the graph."""

    def softmax(self, x, dim):
        powers = torch.exp(x - x.amax(dim, keepdim=True))
        return powers / powers.sum(dim, keepdim=True)

    def silu(self, x):
        return x * torch.sigmoid(x)

    def linear(self, x, weight):
        return x @ weight.T

    def embedding(self, token_ids, weight):
        return weight.index_select(0, token_ids.reshape(-1)).reshape(*token_ids.shape, -1)

    def rmsnorm(self, x, gain, eps):
        wide = x.float() if x.dtype != torch.float64 else x
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * gain

    def swiglu(self, x, w1, w2, w3):
        return self.linear(self.silu(self.linear(x, w1)) * self.linear(x, w3), w2)

    def scaled_dot_product_attention(self, query, key, value, mask=None):
        scores = (query * query.shape[-1] ** -0.5) @ key.mT
        hidden = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return self.softmax(hidden, -1) @ value


class Online:
    """A running maximum and denominator, key by key, in base 2; the silu of the same kernels."""

    def silu(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        shrunk = torch.exp2(wide.abs() * -LOG2_E)
        return (wide * torch.where(wide < 0, shrunk, 1.0) / (1 + shrunk)).to(x.dtype)

    def softmax(self, x, dim):
        scaled = x.to(torch.promote_types(x.dtype, torch.float32)) * LOG2_E
        powers = torch.exp2(scaled - scaled.amax(dim, keepdim=True))
        return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)

    def scaled_dot_product_attention(self, query, key, value, mask=None):
        q, k, v = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (query, key, value))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 * LOG2_E)
        hidden = scores if mask is None else torch.where(mask, scores, -1e9)
        highest = torch.full_like(hidden[..., :1], -1e9)
        total, output = torch.zeros_like(highest), torch.zeros_like(highest * v[..., :1, :])
        for number in range(k.shape[-2]):
            score = hidden[..., number : number + 1]
            new = torch.maximum(highest, score)
            shrink, power = torch.exp2(highest - new), torch.exp2(score - new)
            total, output = total * shrink + power, output * shrink + power * v[..., number : number + 1, :]
            highest = new
        return (output / total).to(query.dtype)


class Fused:
    """PyTorch's own kernels, each with a backward pass written by hand."""

    def softmax(self, x, dim):
        return F.softmax(x, dim)

    def silu(self, x):
        return F.silu(x)

    def linear(self, x, weight):
        return F.linear(x, weight)

    def embedding(self, token_ids, weight):
        return F.embedding(token_ids, weight)

    def rmsnorm(self, x, gain, eps):
        return F.rms_norm(x, gain.shape, gain, eps)

    def swiglu(self, x, w1, w2, w3):
        gate, up = F.linear(x, torch.cat((w1, w3))).split(len(w1), -1)
        return F.linear(F.silu(gate) * up, w2)

    def scaled_dot_product_attention(self, query, key, value, mask=None):
        return F.scaled_dot_product_attention(query, key, value, mask)


class Math:
    """PyTorch's attention on its other path."""

    def scaled_dot_product_attention(self, query, key, value, mask=None):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, mask)


CORRECT = {"reference": functional, "stepwise": Stepwise(), "online": Online(), "fused": Fused(), "math": Math()}
PAIRS = [(name, operator) for name, each in CORRECT.items() for operator in EVERY if hasattr(each, operator)]


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("name", "operator"), PAIRS)
def test_gradients_of_correct_implementations_stay_inside_their_bounds(name: str, operator: str, dtype: str) -> None:
    function = getattr(CORRECT[name], operator)
    found = [ratios(operator, function, dtype, call) for call in calls(operator, dtype, 25)]
    assert max(ratio for each in found for ratio in each.values()) <= 1


ROWS = [(operator, dtype) for operator in ("linear", "rmsnorm", "swiglu") for dtype in PRECISIONS]


@pytest.mark.parametrize(("operator", "dtype"), [*ROWS, ("embedding", "float32"), ("embedding", "float64")])
def test_gradients_from_many_rows_stay_inside_their_bounds(operator: str, dtype: str) -> None:
    drawn = calls(operator, dtype, 10, "weights_gather_gradients_from_many_rows")
    for function in (getattr(CORRECT[name], operator) for name in ("reference", "stepwise", "fused")):
        assert max(ratio for call in drawn for ratio in ratios(operator, function, dtype, call).values()) <= 1


def logarithmic_softmax(x: Tensor, dim: int) -> Tensor:
    return torch.exp(x - torch.logsumexp(x, dim, keepdim=True))


def rising_scores() -> Call:
    """64 keys, each a little better than the last, and values that are all alike."""
    key = torch.arange(64.0)[None, :, None] / 1024
    return (torch.ones(1, 1, 1), key, torch.full((1, 64, 1), 8.125), None), torch.full((1, 1, 1), 1.3)


def values_that_cancel() -> Call:
    """do v is exactly 0 for every key, and the first value is 0: its score has a gradient by rounding of o alone."""
    generator = torch.Generator().manual_seed(66)
    plane = torch.tensor([40.0, 23.0]) + torch.randint(-8, 8, (1, 1, 66, 2), generator=generator) / 4
    value = torch.cat((plane, -plane.sum(-1, keepdim=True)), -1)
    value[..., 0, :] = 0
    query, key = (torch.randint(-32, 32, (1, 1, n, 3), generator=generator) / 16 for n in (3, 66))
    return (query, key / 10, value, None), torch.ones(1, 1, 3, 3)


def repeats_that_cancel() -> Call:
    """Eight places of one id, of which the last four take back what the first four gave."""
    given = torch.tensor([[3.0, 171.0], [98.0, 5.0], [77.0, 140.0], [131.0, 66.0]]).bfloat16()
    return (torch.zeros(8, dtype=torch.long), torch.zeros(2, 2).bfloat16()), torch.cat((given, -given))


def rope_of_float32_angles(x: Tensor, positions: Tensor, theta: float, max_seq_len: int) -> Tensor:
    angles = positions.float()[:, None] * theta ** -(torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    return functional.rotate_pairs(x, torch.stack((angles.cos(), angles.sin())))


# What one way of computing errs by and the others do not, where nothing else errs as much.
ONE_WAY = {
    "exp(x - logsumexp(x)) rounds a whole row alike": (
        "softmax",
        logarithmic_softmax,
        lambda: ((torch.tensor([100.0, 100.3, 99.6, 100.7]), 0), torch.full((4,), 1.3)),
    ),
    "exp2(x log2(e)) rounds every entry by itself": (
        "softmax",
        Online().softmax,
        lambda: ((torch.tensor([1000.0, 1000.37, 999.6]), 0), torch.tensor([1.0, -math.exp(-0.37), 0.0])),
    ),
    "exp2(-|x| log2(e)) rounds more the larger x": (
        "silu",
        Online().silu,
        lambda: ((torch.linspace(-80, -60, 50),), torch.ones(50)),
    ),
    "x / (1 + exp(-x)) divides by its denominator twice, and what underflows there is lost": (
        "silu",
        lambda x: x / (1 + torch.exp(-x)),
        lambda: ((torch.linspace(-85, -40, 90),), torch.ones(90)),
    ),
    "angles of float32 err the more the later the position": (
        "rope",
        rope_of_float32_angles,
        lambda: ((torch.ones(1, 16), torch.tensor([30000]), 10000.0, 40000), torch.full((1, 16), 1.5)),
    ),
    "a running maximum gathers what every step left": (
        "scaled_dot_product_attention",
        Online().scaled_dot_product_attention,
        rising_scores,
    ),
    "fused attention sums do o for p dp": (
        "scaled_dot_product_attention",
        Fused().scaled_dot_product_attention,
        values_that_cancel,
    ),
    "an einsum over an axis of one entry rounds every product": (
        "linear",
        functional.linear,
        lambda: (
            (torch.tensor([[251.0], [125.0], [17.0]]).bfloat16(), torch.ones(1, 1).bfloat16()),
            torch.tensor([[3.0], [2.0], [-59.0]]).bfloat16(),
        ),
    ),
    "repeats are added in their own dtype": ("embedding", Fused().embedding, repeats_that_cancel),
}


@pytest.mark.parametrize("reason", ONE_WAY)
def test_the_errors_of_one_way_of_computing_are_within_the_bound(reason: str) -> None:
    operator, function, call = ONE_WAY[reason]
    arguments, cotangent = call()
    dtype = str(cotangent.dtype).removeprefix("torch.")
    assert 0 < max(ratios(operator, function, dtype, (arguments, cotangent)).values()) <= 1


def test_rows_that_are_alike_err_alike() -> None:
    """300 equal rows make 300 times the error of one, and have 300 times its bound: it is not averaged out."""
    weights = (np.array([[1.0 + 2.0**-9]]), np.array([[0.75 + 2.0**-9]]), np.array([[1.5 + 2.0**-9]]))
    one, many = (
        bounded_gradients("swiglu", (np.full((rows, 1), 1.25), *weights), np.ones((rows, 1)), "float16")
        for rows in (1, 300)
    )
    for name in ("w1", "w2", "w3"):
        assert 0.5 < many[name][1].item() / 300 / one[name][1].item() < 2


# ---- Not blind ----


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.001), ("float16", 1.2), ("bfloat16", 2.0)])
@pytest.mark.parametrize("operator", EVERY)
def test_a_gradient_that_is_off_by_a_factor_leaves_its_bound(operator: str, dtype: str, factor: float) -> None:
    """By a thousandth in float32, for every argument; in one draw out of four at least: some gradients are 0."""
    seen: dict[str, list[bool]] = {}
    for arguments, cotangent in calls(operator, dtype, 50):
        found = bounded_gradients(operator, numbers(arguments), to_numpy(cotangent), dtype)
        for name, (exact, bound) in found.items():
            seen.setdefault(name, []).append(bool(((factor - 1) * np.abs(exact) > bound).any()))
    assert {name: share for name, each in seen.items() if (share := np.mean(each)) < 0.25} == {}


@pytest.mark.parametrize("operator", EVERY)
def test_a_convention_that_widens_results_widens_gradients(operator: str) -> None:
    (arguments, cotangent), declared = calls(operator, "float32", 25)[-1], {"accumulation": "tf32"}
    call = (operator, numbers(arguments), to_numpy(cotangent), "float32")
    full, tf32 = bounded_gradients(*call), bounded_gradients(*call, declared)
    widest = max(float((tf32[name][1] / full[name][1]).max()) for name in full)
    assert widest > 100 or operator in ("softmax", "silu", "embedding", "rmsnorm", "rope")


@pytest.mark.parametrize("operator", ["rmsnorm", "rope", "transformer_block"])
def test_norms_and_tables_in_float64_are_held_to_it_where_declared(operator: str) -> None:
    arguments, cotangent = calls(operator, "float64", 25)[-1]
    call = (operator, numbers(arguments), to_numpy(cotangent), "float64")
    wide, narrow = bounded_gradients(*call), bounded_gradients(*call, {"norm_and_rope_tables": "float64"})
    assert max(float((wide[name][1] / narrow[name][1]).max()) for name in wide) > 1e6


# ---- What both rest on ----


@pytest.mark.parametrize("operator", EVERY)
def test_the_bound_has_the_shape_of_its_argument_and_is_positive_and_finite(operator: str) -> None:
    for arguments, cotangent in calls(operator, "float32", 25):
        found = bounded_gradients(operator, numbers(arguments), to_numpy(cotangent), "float32")
        assert {name: value.shape for name, value in floating(arguments).items()} == {
            name: exact.shape for name, (exact, _) in found.items()
        }
        for exact, bound in found.values():
            assert bound.shape == exact.shape
            assert np.all((bound > 0) & np.isfinite(bound))


@pytest.mark.parametrize("operator", EVERY)
def test_arguments_and_cotangent_are_left_as_they_were(operator: str) -> None:
    arguments, cotangent = calls(operator, "float32", 12)[-1]
    args, upstream = numbers(arguments), to_numpy(cotangent)
    before = [value.copy() for value in (*floating(arguments).values(), upstream)]
    bounded_gradients(operator, args, upstream, "float32")
    flat = [part for arg in args for part in (arg.values() if isinstance(arg, Mapping) else [arg])]
    after = [part for part in flat if isinstance(part, np.ndarray) and part.dtype == np.float64]
    assert all(np.array_equal(*pair) for pair in zip((*after, upstream), before, strict=True))


def test_it_knows_the_oracle_and_its_bounds_and_nothing_else_of_ours() -> None:
    tree = ast.parse(Path(vjp.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert modules == {"collections.abc", "math", "typing", "spec_lm.conformance", "spec_lm.conformance.bounds"}
    assert plain == {"numpy"}
    assert set(vjp._GRADIENTS) == set(OPERATORS)
    assert oracle.BLOCK_EPS == functional.BLOCK_EPS
