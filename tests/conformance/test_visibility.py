"""Which losses of precision a clause sees, and which lie below its bounds: the figures of docs/tolerance.md.

One function of the reference is replaced by a less precise one, and an operator that uses it is measured on the
examples of its clause `agrees_with_the_oracle`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from spec_lm.conformance.bounds import bounded
from spec_lm.conformance.clause import CLAUSES
from spec_lm.conformance.operators import OPERATORS, Checked, to_numpy
from spec_lm.conformance.runner import Settings, run_clause
from spec_lm.conformance.strategies import Domain
from spec_lm.reference import functional
from spec_lm.reference.functional import upcast

PAGE = Path(__file__).parents[2] / "docs" / "tolerance.md"
EXAMPLES = 50
ATTENTION = "scaled_dot_product_attention"
MHA = "multihead_self_attention"


@cache
def examples(operator: str, dtype: str) -> list[tuple[tuple[Any, ...], np.ndarray, np.ndarray]]:
    """Those of the operator's oracle clause: arguments, exact value and bound."""
    found = []

    def keep(checked, arguments):
        found.append((arguments, *bounded(operator, tuple(map(to_numpy, arguments)), dtype)))

    keeping = replace(CLAUSES[f"{operator}.agrees_with_the_oracle"], body=keep)
    checked = Checked(OPERATORS[operator], getattr(functional, operator))
    run_clause(keeping, checked, Domain(operator, dtype), Settings(EXAMPLES, dtype=dtype))
    assert len(found) >= EXAMPLES // 2
    return found


def largest(operator: str, function: Callable, dtype: str) -> float:
    """The largest err/bound on these examples."""
    ratios = []
    for arguments, exact, bound in examples(operator, dtype):
        error = np.abs(function(*arguments).double().numpy() - exact)
        ratios.append(np.divide(error, bound, out=np.zeros_like(error), where=error != 0).max(initial=0.0))
    return float(max(ratios))


# ---- Less precise functions ----


def denominator_plus(amount):
    def softmax(x, dim):
        powers = (upcast(x) - upcast(x).amax(dim, keepdim=True)).exp()
        return (powers / (powers.sum(dim, keepdim=True) + amount)).to(x.dtype)

    return softmax


def rough(x):
    """Factors within 1e-4 of 1, as those of a cheap exponential or root are."""
    return 1 + 1e-4 * torch.sin(1000 * x.clamp(-1000, 1000))


def softmax_of_a_rough_exp(x, dim):
    shifted = upcast(x) - upcast(x).amax(dim, keepdim=True)
    powers = shifted.exp() * rough(shifted)
    return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)


def softmax_at_another_temperature(x, dim):
    return torch.softmax(x * 1.0001, dim)


def softmax_without_upcast(x, dim):
    powers = (x - x.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


def attention_without_upcast(query, key, value, mask=None):
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return softmax_without_upcast(scores, -1) @ value


def in_bfloat16(function):
    def wrapped(*arguments):
        short = (a.bfloat16() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)
        return function(*short).to(arguments[0].dtype)

    return wrapped


def rmsnorm_with_a_rough_root(x, gain, eps):
    mean_square = upcast(x).square().mean(-1, keepdim=True) + eps
    return (upcast(x) * mean_square.rsqrt() * rough(mean_square) * gain).to(x.dtype)


def rmsnorm_without_upcast(x, gain, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def rmsnorm_cast_before_the_gain(x, gain, eps):
    return (upcast(x) * torch.rsqrt(upcast(x).square().mean(-1, keepdim=True) + eps)).to(x.dtype) * gain


def rmsnorm_with_a_tenth_of_eps(x, gain, eps):
    return torch.nn.functional.rms_norm(x, gain.shape, gain, eps / 10)


def silu_by_cancellation(x):
    return (upcast(x) * (1 - torch.sigmoid(-upcast(x)))).to(x.dtype)


def silu_without_upcast(x):
    return x / (1 + torch.exp(-x))


def linear_in_tf32(x, weight):
    def short(t):
        return ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    return short(x) @ short(weight).T


def linear_summed_in_its_own_dtype(x, weight):
    total = torch.zeros((*x.shape[:-1], len(weight)), dtype=x.dtype)
    for term in (x[..., None, :] * weight).unbind(-1):
        total = total + term
    return total


def angles_in(dtype):
    def rope_table(positions, d_k, theta):
        frequencies = theta ** -(torch.arange(0, d_k, 2).float() / d_k)
        angles = positions[..., None].to(dtype) * frequencies.to(dtype)
        return torch.stack((angles.cos(), angles.sin()))

    return rope_table


def table_in_bfloat16(positions, d_k, theta):
    return EXACT_TABLE(positions, d_k, theta).bfloat16()


def table_of_another_theta(positions, d_k, theta):
    return EXACT_TABLE(positions, d_k, theta * 1.001)


EXACT_TABLE = functional.rope_table


@dataclass(frozen=True)
class Loss:
    """One row of the page: what is lost, in which function of the reference, and where it is looked for."""

    what: str
    replaced: str
    by: Callable
    operator: str
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.what} | {self.operator} | {self.dtype}"

    def measured(self) -> float:
        with patch.object(functional, self.replaced, self.by):
            return largest(self.operator, getattr(functional, self.operator), self.dtype)


DENOMINATORS = [
    Loss(f"{amount} in the softmax's denominator", "softmax", denominator_plus(float(amount)), operator)
    for amount in ("1e-7", "1e-6", "1e-5")
    for operator in ("softmax", ATTENTION, MHA, "transformer_block", "transformer_lm")
]
LOSSES = [
    *DENOMINATORS,
    Loss("an exponential good to 1e-4", "softmax", softmax_of_a_rough_exp, "softmax"),
    Loss("an exponential good to 1e-4", "softmax", softmax_of_a_rough_exp, ATTENTION),
    Loss("an exponential good to 1e-4", "softmax", softmax_of_a_rough_exp, "transformer_lm"),
    Loss("a temperature of 1.0001", "softmax", softmax_at_another_temperature, "softmax"),
    Loss("a temperature of 1.0001", "softmax", softmax_at_another_temperature, "transformer_lm"),
    Loss("softmax in bfloat16", "softmax", in_bfloat16(softmax_without_upcast), "softmax"),
    Loss("softmax in bfloat16", "softmax", in_bfloat16(softmax_without_upcast), "transformer_lm"),
    Loss("softmax in its own dtype", "softmax", softmax_without_upcast, "softmax", "bfloat16"),
    Loss("softmax in its own dtype", "softmax", softmax_without_upcast, "softmax", "float16"),
    Loss("attention in bfloat16", ATTENTION, in_bfloat16(attention_without_upcast), ATTENTION),
    Loss("attention in its own dtype", ATTENTION, attention_without_upcast, ATTENTION, "bfloat16"),
    Loss("attention in its own dtype", ATTENTION, attention_without_upcast, ATTENTION, "float16"),
    Loss("an inverse root good to 1e-4", "rmsnorm", rmsnorm_with_a_rough_root, "rmsnorm"),
    Loss("an inverse root good to 1e-4", "rmsnorm", rmsnorm_with_a_rough_root, "transformer_lm"),
    Loss("a tenth of eps", "rmsnorm", rmsnorm_with_a_tenth_of_eps, "rmsnorm"),
    Loss("a tenth of eps", "rmsnorm", rmsnorm_with_a_tenth_of_eps, "transformer_lm"),
    Loss("RMSNorm in its own dtype", "rmsnorm", rmsnorm_without_upcast, "rmsnorm", "bfloat16"),
    Loss("RMSNorm in its own dtype", "rmsnorm", rmsnorm_without_upcast, "rmsnorm", "float16"),
    Loss("RMSNorm in its own dtype", "rmsnorm", rmsnorm_without_upcast, "transformer_lm", "bfloat16"),
    Loss("RMSNorm cast before its gain", "rmsnorm", rmsnorm_cast_before_the_gain, "rmsnorm", "bfloat16"),
    Loss("RMSNorm cast before its gain", "rmsnorm", rmsnorm_cast_before_the_gain, "rmsnorm", "float16"),
    Loss("silu by cancellation", "silu", silu_by_cancellation, "silu"),
    Loss("silu by cancellation", "silu", silu_by_cancellation, "silu", "bfloat16"),
    Loss("silu by cancellation", "silu", silu_by_cancellation, "transformer_block"),
    Loss("silu by cancellation", "silu", silu_by_cancellation, "transformer_lm"),
    Loss("silu in its own dtype", "silu", silu_without_upcast, "silu", "bfloat16"),
    Loss("products in TF32", "linear", linear_in_tf32, "linear"),
    Loss("products in TF32", "linear", linear_in_tf32, "transformer_lm"),
    Loss("sums in their own dtype", "linear", linear_summed_in_its_own_dtype, "linear", "bfloat16"),
    Loss("sums in their own dtype", "linear", linear_summed_in_its_own_dtype, "linear", "float16"),
    Loss("sums in their own dtype", "linear", linear_summed_in_its_own_dtype, "transformer_lm", "bfloat16"),
    Loss("angles in bfloat16", "rope_table", angles_in(torch.bfloat16), "rope"),
    Loss("angles in bfloat16", "rope_table", angles_in(torch.bfloat16), "transformer_lm"),
    Loss("angles in their own dtype", "rope_table", angles_in(torch.bfloat16), "rope", "bfloat16"),
    Loss("angles in their own dtype", "rope_table", angles_in(torch.float16), "rope", "float16"),
    Loss("tables in bfloat16", "rope_table", table_in_bfloat16, "rope"),
    Loss("tables in bfloat16", "rope_table", table_in_bfloat16, "rope", "bfloat16"),
    Loss("theta off by 0.1%", "rope_table", table_of_another_theta, "rope"),
]


def figures() -> dict[str, tuple[str, float]]:
    """Of every row on the page: the section it stands in, and err/bound."""
    found, section = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.strip("# ")
        elif row := re.fullmatch(r"\| (.+ \| `\w+` \| \w+) \| ([\d.e]+) \|", line):
            found[row[1].replace("`", "")] = (section, float(row[2]))
    return found


FIGURES = figures()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_loss_is_seen_or_not_as_the_page_says(loss: Loss):
    """And about by as much: processors differ in their last bits, and so does what cancels."""
    section, figure = FIGURES[str(loss)]
    measured = loss.measured()
    if section == "Seen":
        assert measured > 1
    elif section == "Not seen":
        assert measured < 1
    else:
        assert section == "Seen or not, by chance"
    assert figure / 4 < measured < figure * 4


def test_the_page_has_no_figure_that_is_not_measured():
    """A row that no loss stands for fails."""
    assert set(FIGURES) == {str(loss) for loss in LOSSES}
