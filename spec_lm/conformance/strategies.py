"""What clauses draw: recipes of tensors, masks, positions, weights and sizes.

A strategy yields a *recipe*, a small frozen value from which fresh arguments are built for every call; it is what a
report stores, what a replay needs, and what shrinks. Sizes are drawn once an example, by the names of their axes, and
shared by all arguments; then a *regime*, simplest first; then a seed. The number of draws is constant, integers stay
within -99..99 (Hypothesis mixes larger literals of loaded modules into what it draws), and values are integers from one
pool times a power of two: the same on every machine, and stable while a size shrinks.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from zlib import crc32

import hypothesis
import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from spec_lm.conformance.operators import Checked, nearest_supported, same_axes
from spec_lm.conformance.tolerance import NotJudged, Raised, Violation

# --------------------------------------------------------------------------------------------------------------- sizes


class Size(SimpleNamespace):
    """The axis sizes of one example by name, as `size.d_model`; `batch` is a tuple of leading axes."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no axis is named {name}; this size has {', '.join(vars(self))}")

    def axes(self, names: str) -> tuple[int, ...]:
        """The shape "*batch sequence d_model" names here; a number stands for itself."""
        shape: list[int] = []
        for name in names.split():
            if name.startswith("*"):
                shape.extend(getattr(self, name[1:]))
            else:
                shape.append(int(name) if name.isdigit() else getattr(self, name))
        return tuple(shape)


def _table(names: str, *rows: tuple[Any, ...], **derived: Callable[[Size], Any]) -> tuple[Size, ...]:
    sizes = [Size(**dict(zip(names.split(), row, strict=True))) for row in rows]
    for size in sizes:
        vars(size).update({name: rule(size) for name, rule in derived.items()})
    return tuple(sizes)


def _model_table(*rows: tuple[Any, ...]) -> tuple[Size, ...]:
    names = "batch sequence heads d_head d_ff layers vocab"
    longest = {name: lambda s: max(16, s.sequence) for name in ("max_seq_len", "context_length")}
    return _table(names, *rows, d_model=lambda s: s.heads * s.d_head, **longest)


# Simplest first: shrinking walks towards the first row. Few rows, since some implementations pay 0.15 s for each fresh
# shape; each coincidence (batch == heads, sequence == d_head, square weights) stands beside its absence.
_MHA = _model_table(
    ((1,), 1, 1, 2, 4, 1, 5),
    ((1,), 2, 1, 2, 4, 1, 5),
    ((1,), 2, 2, 2, 4, 1, 5),
    ((2,), 2, 1, 2, 4, 1, 5),
    ((1,), 2, 1, 4, 4, 1, 5),
    ((2,), 3, 2, 2, 5, 2, 7),
    ((1,), 3, 2, 4, 8, 2, 7),
    ((3,), 2, 2, 4, 12, 1, 11),
    ((2,), 5, 1, 4, 3, 1, 8),
    ((1,), 4, 3, 4, 12, 2, 5),
    ((3,), 4, 3, 2, 7, 3, 13),
    ((2,), 7, 4, 2, 8, 1, 9),
    ((4,), 6, 2, 6, 16, 2, 11),
    ((1,), 9, 2, 8, 24, 1, 17),
    ((1,), 34, 1, 2, 4, 1, 5),
)
SIZES: dict[str, tuple[Size, ...]] = {
    "softmax": _table(
        "batch n",
        *(((), 1), ((), 2), ((2,), 1), ((2,), 3), ((), 5), ((3,), 3), ((1,), 8), ((2, 3), 4), ((4,), 17), ((), 64)),
        ((), 65),
    ),
    "silu": _table("batch n", *(((), 1), ((), 3), ((2,), 2), ((2, 3), 5), ((), 33), ((4, 1, 2), 8))),
    "linear": _table(
        "batch d_in d_out",
        *(((), 1, 1), ((), 2, 2), ((), 3, 2), ((1,), 4, 4), ((2,), 3, 5), ((2, 3), 5, 5), ((4,), 8, 3)),
        *(((3,), 64, 8), ((1, 2), 7, 7), ((2,), 1, 4)),
    ),
    "embedding": _table(
        "batch vocab d_model",
        *(((), 1, 1), ((1,), 3, 2), ((2,), 3, 3), ((4,), 5, 2), ((2, 3), 7, 4), ((1, 2, 3), 11, 8), ((9,), 3, 16)),
    ),
    "rmsnorm": _table(
        "batch d_model",
        *(((), 1), ((), 2), ((2,), 2), ((1,), 4), ((3,), 3), ((2, 3), 8), ((2, 1, 2), 5), ((4,), 64)),
        *(((2, 2, 1, 2), 6), ((1,), 257)),
    ),
    "swiglu": _table(
        "batch d_model d_ff",
        *(((), 1, 1), ((), 2, 3), ((1,), 2, 2), ((2,), 4, 4), ((2, 3), 3, 8), ((3,), 8, 5), ((1, 2), 8, 64)),
    ),
    "rope": _table(
        "batch sequence d_k",
        *(
            ((), 1, 2),
            ((), 2, 2),
            ((2,), 2, 2),
            ((1,), 2, 4),
            ((2,), 3, 4),
            ((2,), 4, 4),
            ((2, 2), 3, 6),
            ((1, 3), 5, 8),
        ),
        *(((3,), 3, 8), ((2, 3), 1, 4), ((), 7, 16)),
        max_seq_len=lambda s: 16,
    ),
    "scaled_dot_product_attention": _table(
        "batch queries keys d_k d_v",
        *(((1,), 1, 1, 1, 1), ((1,), 1, 2, 1, 1), ((1,), 2, 2, 1, 1), ((2,), 1, 2, 1, 1), ((1,), 1, 2, 2, 1)),
        *(((1,), 2, 2, 2, 2), ((1,), 2, 3, 2, 3)),
        *(((2,), 3, 3, 4, 3), ((2,), 3, 5, 4, 2), ((1, 2), 4, 4, 4, 4), ((2, 3), 2, 6, 8, 5), ((3,), 7, 5, 3, 5)),
        *(((2, 2), 5, 5, 8, 8), ((2, 1, 2), 3, 4, 2, 4), ((1,), 1, 9, 16, 9), ((2,), 8, 17, 5, 17)),
        *(((1,), 8, 8, 4, 3), ((1,), 3, 33, 2, 1), ((1,), 66, 66, 1, 2)),
    ),
    "multihead_self_attention": _MHA,
    "multihead_self_attention_with_rope": _MHA,
    "transformer_block": _MHA,
    "transformer_lm": tuple(size for size in _MHA if size.sequence * size.d_model <= 36),
}

# Lengths at which kernels that work in blocks go wrong: one less than a block, a block, one more. 1024 is whole blocks
# of whatever size, and 1025 one more. No kernel is made for 17 heads.
_LENGTHS = (31, 32, 33, 63, 64, 65, 127, 513)
_LONGER = (*_LENGTHS, 1024, 1025)
_LONG_MODELS = _model_table(
    *(((1,), length, 1, 2, 4, 1, 5) for length in _LENGTHS[:-1]),
    *(((2,), 130, 2, 2, 4, 1, 5), ((1,), 513, 1, 2, 2, 1, 3), ((1,), 2, 17, 2, 4, 1, 5)),
)
BLOCK_SIZES: dict[str, tuple[Size, ...]] = {
    "softmax": _table("batch n", *(((), length) for length in _LONGER), ((3,), 130)),
    "silu": _table("batch n", *(((), length) for length in _LONGER), ((3,), 130), ((), 4097)),
    "linear": _table(
        "batch d_in d_out",
        *(((2,), n, 1) for n in (*_LENGTHS, 1024)),
        *(((), 3, 33), ((65,), 2, 130), ((), 1, 1024), ((2,), 2, 4097)),
    ),
    "embedding": _table(
        "batch vocab d_model",
        *(((n,), n, 1) for n in _LENGTHS),
        *(((2,), 3, 33), ((3,), 5, 130), ((1024,), 3, 1), ((1025,), 2, 1), ((2,), 3, 1025)),
    ),
    "rmsnorm": _table("batch d_model", *(((), length) for length in _LONGER), ((3,), 130), ((65,), 3)),
    "swiglu": _table(
        "batch d_model d_ff",
        *((((2,), 1, n)) for n in (*_LENGTHS, 1024)),
        *(((33,), 2, 3), ((), 65, 2), ((), 1025, 2)),
    ),
    "rope": _table(
        "batch sequence d_k",
        *(((), length, 2) for length in _LONGER),
        *(((2,), 3, 64), ((), 2, 66), ((1, 2), 2, 128), ((3,), 130, 4)),
        max_seq_len=lambda s: 2 * s.sequence,
    ),
    "scaled_dot_product_attention": _table(
        "batch queries keys d_k d_v",
        *(((1,), 1, length, 1, 1) for length in _LONGER),
        *(((1,), length, 2, 1, 1) for length in _LONGER),
        *(
            ((1,), 33, 33, 1, 1),
            ((1,), 65, 65, 2, 1),
            ((2,), 130, 130, 2, 2),
            ((1,), 2, 3, 64, 1),
            ((1,), 2, 3, 72, 80),
        ),
        *(((1, 2), 2, 33, 80, 3), ((1,), 3, 65, 128, 64), ((1,), 513, 513, 1, 1)),
    ),
    "multihead_self_attention": _LONG_MODELS,
    "multihead_self_attention_with_rope": _LONG_MODELS,
    "transformer_block": tuple(size for size in _LONG_MODELS if size.sequence < 130),
    "transformer_lm": tuple(size for size in _LONG_MODELS if size.sequence < 100),
}
# Rows as long as a vocabulary, tables of its size, sums of thousands of products.
LONG_SIZES: dict[str, tuple[Size, ...]] = {
    "softmax": _table("batch n", ((), 4097), ((2,), 30000)),
    "linear": _table("batch d_in d_out", ((), 4097, 1), ((2,), 12288, 2)),
    "embedding": _table("batch vocab d_model", ((3,), 2049, 1), ((40,), 50257, 2)),
    "rmsnorm": _table("batch d_model", ((), 4097), ((2,), 12288)),
    "swiglu": _table("batch d_model d_ff", ((), 2, 4097), ((2,), 3, 11008)),
    "scaled_dot_product_attention": _table("batch queries keys d_k d_v", ((1,), 1, 4097, 1, 1), ((1,), 2, 9000, 2, 2)),
}

_COINCIDENCES: dict[str, Callable[[Size], bool]] = {
    "batch == heads": lambda s: s.batch == (s.heads,) and s.heads > 1,
    "batch != heads, both > 1": lambda s: s.heads > 1 and s.batch[0] > 1 and s.batch != (s.heads,),
    "one head": lambda s: s.heads == 1,
    "sequence == d_head": lambda s: s.sequence == s.d_head > 1,
}
CASES: dict[str, dict[str, Callable[[Size], bool]]] = {
    "linear": {"square weight": lambda s: s.d_in == s.d_out > 1, "d_in != d_out": lambda s: s.d_in != s.d_out},
    "swiglu": {"square weights": lambda s: s.d_ff == s.d_model > 1, "d_ff != d_model": lambda s: s.d_ff != s.d_model},
    "rope": {"sequence == d_k": lambda s: s.sequence == s.d_k, "batch of batches": lambda s: len(s.batch) == 2},
    "scaled_dot_product_attention": {
        "queries == keys == d_k": lambda s: s.queries == s.keys == s.d_k > 1,
        "queries != keys": lambda s: s.queries != s.keys,
        "d_v != d_k": lambda s: s.d_v != s.d_k,
    },
    "multihead_self_attention": _COINCIDENCES,
    "multihead_self_attention_with_rope": _COINCIDENCES,
    "transformer_block": _COINCIDENCES,
    "transformer_lm": _COINCIDENCES,
}


Where = Callable[[Size], bool]


def PLAINEST(size: Size) -> bool:
    """As a clause's `where`: only the first size, the plainest."""
    return True


def batched(size: Size) -> bool:
    """As a clause's `where`: sizes with at least two rows on the first leading axis."""
    return bool(size.batch) and size.batch[0] > 1


@dataclass(frozen=True)
class Domain:
    """What a search may draw.

    Args:
        operator: whose sizes.
        dtype: of the run, as in "float32".
        where: the sizes the clause needs.
        case: one required partition of the sizes, for a search of its own.
        without: features the implementation was seen to lack, as "mask none": left out of the draws.
        supports: the part of the domain the implementation declares, as {"d_head": [64]}.
        key: arguments drawn under one key share their size.
        table: a clause's own sizes, simplest first; by default those of its operator.
    """

    operator: str
    dtype: str = "float32"
    where: Where | None = None
    case: Where | None = None
    without: frozenset[str] = frozenset()
    supports: Mapping[str, Any] = field(default_factory=dict)
    key: str = "sizes"
    table: tuple[Size, ...] = ()

    @cached_property
    def rows(self) -> list[Size]:
        """The sizes left to draw from, simplest first."""
        table = self.table or SIZES[self.operator]
        rows = [size for size in _fitted_table(table, self.supports, _OWN_AXES[self.operator]) if self._takes(size)]
        if self.where is PLAINEST:
            return rows[:1]
        return [row for row in rows if self.case is None or self.case(row)]

    @cached_property
    def sizes(self) -> SearchStrategy[Size]:
        """One size an example, shared by every argument.

        Raises:
            NotJudged: nothing is left.
        """
        if not self.rows:
            lacks = ", ".join(sorted(self.without)) or "its declared support"
            raise NotJudged(f"no size this clause needs is left to draw ({lacks})")
        return st.shared(st.sampled_from(self.rows), key=self.key)

    def _takes(self, size: Size) -> bool:
        lacking = f"{len(size.batch)} leading axes" in self.without
        return not lacking and (self.where is None or self.where(size))


# How many axes the first argument has beside the leading ones.
_OWN_AXES = dict.fromkeys(("softmax", "silu", "linear", "rmsnorm", "swiglu", "transformer_lm"), 1) | {"embedding": 0}
_OWN_AXES |= dict.fromkeys(("rope", "scaled_dot_product_attention", "transformer_block"), 2)
_OWN_AXES |= dict.fromkeys(("multihead_self_attention", "multihead_self_attention_with_rope"), 2)


def _fitted_table(table: tuple[Size, ...], supports: Mapping[str, Any], own: int) -> list[Size]:
    """The sizes, each axis moved to the nearest that is supported; those that coincide stand once."""
    fitted = [_fitted(size, supports, own) for size in table]
    return [size for number, size in enumerate(fitted) if size not in fitted[:number]]


def _fitted(size: Size, supports: Mapping[str, Any], own: int) -> Size:
    moved = dict(vars(size))
    for name, allowed in supports.items():
        if name == "axes" and "batch" in moved:
            moved["batch"] = _with_axes(moved["batch"], [axes - own for axes in allowed if axes >= own])
        for axis in same_axes(name):
            if isinstance(moved.get(axis), int):
                moved[axis] = nearest_supported(moved[axis], allowed)
    if "heads" in moved and "d_head" in moved:
        moved["d_model"] = moved["heads"] * moved["d_head"]
    return Size(**moved)


def _with_axes(batch: tuple[int, ...], counts: list[int]) -> tuple[int, ...]:
    """The leading axes, of the nearest supported number: axes of one added in front, or the first ones left out."""
    count = min(counts, key=lambda n: abs(n - len(batch)), default=len(batch))
    return (1,) * (count - len(batch)) + batch[max(0, len(batch) - count) :]


# ------------------------------------------------------------------------------------------------------------- regimes

_POOL_BITS = 22
_SMALLEST_POOL = 4096


@lru_cache(maxsize=512)
def _pool(seed: int, count: int) -> Tensor:
    """Integers in [-2^21, 2^21) from a generator of their own; a longer pool begins with the shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2 ** (_POOL_BITS - 1)), 2 ** (_POOL_BITS - 1), (count,), generator=generator)


def _integers(seed: int, count: int) -> Tensor:
    length = _SMALLEST_POOL
    while length < count:
        length *= 2
    return _pool(seed, length)[:count]


# Multiples of 2^-GRID add to shifts up to MOST_SHIFT without rounding in this dtype: |x| + |c| <= 2^(p - g).
_GRID = {"float64": 6, "float32": 6, "float16": 3, "bfloat16": 1}
_MOST_SHIFT = {"float64": 2.0**13, "float32": 2.0**13, "float16": 2.0**7, "bfloat16": 2.0**7}
_LARGEST = {name: torch.finfo(getattr(torch, name)).max for name in _GRID}
_LARGE_STEP = {"float64": 64.0, "float32": 64.0, "bfloat16": 64.0, "float16": 8.0}  # its products stay below 3e4
_FULL = 2.0 ** -(_POOL_BITS - 2)  # the pool's integers become full-mantissa values in [-2, 2)


def _led(values: Tensor, first: float) -> Tensor:
    """The values with a telling one in front, so that shrinking to one entry keeps what the regime is about."""
    values = values.clone()
    values[:1] = first
    return values


def _grid(values: Tensor, dtype: str) -> Tensor:
    steps = 2 ** _GRID[dtype]
    return (values % (8 * steps) - 4 * steps).double() / steps


# A regime makes values from pool integers; its magnitude never depends on the number of values, else shrinking sticks.
REGIMES: dict[str, Callable[[Tensor, str], Tensor]] = {
    "zeros": lambda values, dtype: torch.zeros(len(values), dtype=torch.float64),
    "small integers": lambda values, dtype: (values % 7 - 3).double(),
    "ones and zeros": lambda values, dtype: (values % 2).double(),
    "constant": lambda values, dtype: torch.full((len(values),), 1.5, dtype=torch.float64),
    "plain": lambda values, dtype: values.double() * _FULL,
    "halves": lambda values, dtype: values.double() * _FULL / 4,
    "positive": lambda values, dtype: values.double().abs() * _FULL + 2.0**-10,
    "shifted": lambda values, dtype: values.double() * _FULL + (1.5 if dtype == "float16" else 8.0),
    "tiny": lambda values, dtype: values.double() * _FULL * 2.0**-10,
    "one large": lambda values, dtype: _led(values.double() * _FULL, 128.0),
    "large integers": lambda values, dtype: _led((values % 7 - 3).double(), 2.0) * _LARGE_STEP[dtype],
    "large": lambda values, dtype: _led(values.double() * _FULL, 1.5) * (64.0 if dtype == "float16" else 2.0**12),
    "huge": lambda values, dtype: _led(values.double() * _FULL, 1.5) / 8 * _LARGEST[dtype],
    "vast": lambda values, dtype: _led(values.double() * _FULL, 1.5) * (2.0**10 if dtype == "float16" else 2.0**58),
    "negative tail": lambda values, dtype: -4 - values.double().abs() * _FULL * (4.0 if dtype == "float16" else 38.0),
    "numbered": lambda values, dtype: torch.arange(len(values), dtype=torch.float64),
    "grid": _grid,
    "quarters": lambda values, dtype: (values % 17 - 8).double() / 4,
}
GENERAL = ("zeros", "small integers", "plain", "plain", "shifted", "tiny", "one large", "constant", "large integers")
MODERATE = ("zeros", "small integers", "plain", "plain", "tiny", "shifted", "ones and zeros")
NONZERO = ("small integers", "plain", "plain", "positive")
WEIGHTS = ("small integers", "halves", "halves", "halves", "constant")
GAINS = ("plain", "positive", "small integers", "constant")


# ------------------------------------------------------------------------------------------------------------- recipes

LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "expanded")


@dataclass(frozen=True)
class TensorRecipe:
    """A tensor: integers of the seed's pool, made values by the regime, laid out in memory."""

    shape: tuple[int, ...]
    regime: str
    seed: int
    dtype: str
    layout: str = "contiguous"

    def build(self) -> Tensor:
        """The tensor, in fresh memory."""
        count = 1
        for size in self.shape:
            count *= size
        values = REGIMES[self.regime](_integers(self.seed, count), self.dtype)
        return laid_out(values.to(getattr(torch, self.dtype)).reshape(self.shape), self.layout)


@dataclass(frozen=True)
class EntriesRecipe:
    """A tensor of one number, but for a few entries: what a counterexample made plainer says of a tensor.

    Args:
        shape: of the tensor.
        fill: the number.
        entries: flat index and value of each entry that is another.
        dtype: as in "float32".
        layout: in memory.
    """

    shape: tuple[int, ...]
    fill: float
    entries: tuple[tuple[int, float], ...]
    dtype: str
    layout: str = "contiguous"

    def build(self) -> Tensor:
        """The tensor, in fresh memory."""
        values = torch.full((torch.Size(self.shape).numel(),), self.fill, dtype=getattr(torch, self.dtype))
        if self.entries:
            places, others = zip(*self.entries, strict=True)
            values[torch.tensor(places)] = torch.tensor(others, dtype=values.dtype)
        return laid_out(values.reshape(self.shape), self.layout)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in another memory layout; what lies between its elements is NaN, True or 0.

    "expanded" repeats the first entry of the first axis with stride 0, and so changes values.
    """
    between = torch.nan if tensor.is_floating_point() else tensor.dtype == torch.bool
    if layout == "transposed" and tensor.ndim >= 2:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced" and tensor.ndim >= 1:
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), between)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "offset":
        longer = torch.cat([tensor.new_full((3,), between), tensor.reshape(-1)])
        return longer[3:].view(tensor.shape)
    return tensor[:1].expand_as(tensor) if layout == "expanded" and tensor.ndim >= 2 else tensor


@dataclass(frozen=True)
class ShiftRecipe:
    """Constants that add to the regime "grid" without rounding: all the same, or of alternating sign."""

    shape: tuple[int, ...]
    share: float
    alternating: bool
    dtype: str

    def build(self) -> Tensor:
        """The constants: multiples of the grid, up to the largest exact shift at a share of 1."""
        amount = self.share * (_MOST_SHIFT[self.dtype] - 4)
        count = torch.Size(self.shape).numel()
        signs = 1.0 - 2.0 * (torch.arange(count) % 2) if self.alternating else torch.ones(count)
        return (signs * amount).to(getattr(torch, self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class MaskRecipe:
    """A boolean mask, True where a query attends; every row keeps at least one True."""

    kind: str
    shape: tuple[int, ...]
    seed: int

    def build(self) -> Tensor | None:
        """The mask, or None for the kind "none"."""
        if self.kind == "none":
            return None
        queries, keys = self.shape[-2:]
        if self.kind == "all":
            return torch.ones(self.shape, dtype=torch.bool)
        if self.kind == "causal":
            return torch.ones(queries, keys, dtype=torch.bool).tril().expand(self.shape).clone()
        if self.kind == "one key":
            chosen = _integers(self.seed, queries) % keys
            return torch.nn.functional.one_hot(chosen, keys).bool().expand(self.shape).clone()
        mask = (_integers(self.seed, torch.Size(self.shape).numel()) % 2 == 0).reshape(self.shape)
        kept = (_integers(self.seed + 1, mask[..., 0].numel()) % keys).reshape(self.shape[:-1])
        return mask | torch.nn.functional.one_hot(kept, keys).bool()


@dataclass(frozen=True)
class IdsRecipe:
    """Token ids below `vocab`: rising from 0, all the same, or drawn."""

    shape: tuple[int, ...]
    vocab: int
    kind: str
    seed: int

    def build(self) -> Tensor:
        """The ids, int64."""
        count = torch.Size(self.shape).numel()
        if self.kind == "rising":
            return (torch.arange(count) % self.vocab).reshape(self.shape)
        if self.kind == "same":
            return torch.full(self.shape, self.seed % self.vocab)
        return (_integers(self.seed, count) % self.vocab).reshape(self.shape)


@dataclass(frozen=True)
class PositionsRecipe:
    """Token positions below `limit`: 0, 1, 2, .., shifted, with gaps, or permuted."""

    shape: tuple[int, ...]
    limit: int
    kind: str
    seed: int

    def build(self) -> Tensor:
        """The positions, int64; each row of leading axes has its own where the kind is drawn."""
        length = self.shape[-1]
        if self.kind == "from 0":
            return torch.arange(length).expand(self.shape).clone()
        if self.kind == "shifted":
            return (torch.arange(length) + self.seed % (self.limit - length + 1)).expand(self.shape).clone()
        rows = torch.Size(self.shape[:-1]).numel()
        keys = torch.stack([_integers(self.seed + row, self.limit).argsort(stable=True) for row in range(rows)])
        chosen = keys[:, :length]
        return (chosen.sort(-1).values if self.kind == "gapped" else chosen).reshape(self.shape)


class Projections(NamedTuple):
    """The four weights of multi-head attention, in the order of the plain signature."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor


@dataclass(frozen=True)
class ProjectionsRecipe:
    """W_Q, W_K, W_V, W_O, each (d_model, d_model), of one regime with a seed of its own."""

    d_model: int
    regime: str
    seed: int
    dtype: str
    replaced: tuple[tuple[str, EntriesRecipe], ...] = ()

    def parts(self) -> dict[str, TensorRecipe | EntriesRecipe]:
        """The recipe of each weight by its name in the plain signature."""
        shape = (self.d_model, self.d_model)
        names = ("w_q", "w_k", "w_v", "w_o")
        drawn = {n: TensorRecipe(shape, self.regime, _stream(n, self.seed), self.dtype) for n in names}
        return drawn | dict(self.replaced)

    def build(self) -> Projections:
        """The weights, in fresh memory."""
        return Projections(*(part.build() for part in self.parts().values()))


def _block_shapes(d_model: int, d_ff: int) -> dict[str, tuple[int, ...]]:
    square = {f"attn.{name}_proj.weight": (d_model, d_model) for name in ("q", "k", "v", "output")}
    norms: dict[str, tuple[int, ...]] = {"ln1.weight": (d_model,), "ln2.weight": (d_model,)}
    wide = {"ffn.w1.weight": (d_ff, d_model), "ffn.w2.weight": (d_model, d_ff), "ffn.w3.weight": (d_ff, d_model)}
    return square | norms | wide


@dataclass(frozen=True)
class WeightsRecipe:
    """The weight dict of a block (`layers` is None) or of a language model; gains are near 1 and never all 1."""

    d_model: int
    d_ff: int
    regime: str
    seed: int
    dtype: str
    layers: int | None = None
    vocab: int = 0
    replaced: tuple[tuple[str, EntriesRecipe], ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight by its key."""
        block = _block_shapes(self.d_model, self.d_ff)
        if self.layers is None:
            return block
        table: tuple[int, ...] = (self.vocab, self.d_model)
        layers = {f"layers.{i}.{key}": shape for i in range(self.layers) for key, shape in block.items()}
        ends = {"ln_final.weight": (self.d_model,), "lm_head.weight": table}
        return {"token_embeddings.weight": table} | layers | ends

    def parts(self) -> dict[str, TensorRecipe | EntriesRecipe]:
        """The recipe of each weight by its key."""
        drawn = {
            key: TensorRecipe(shape, self._regime(key), _stream(key, self.seed), self.dtype)
            for key, shape in self.shapes().items()
        }
        return drawn | dict(self.replaced)

    def _regime(self, key: str) -> str:
        if "ln" in key:
            return "positive"
        return "plain" if key == "token_embeddings.weight" and self.regime == "halves" else self.regime

    def build(self) -> dict[str, Tensor]:
        """The weights, in fresh memory."""
        return {key: part.build() for key, part in self.parts().items()}


RECIPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(TensorRecipe, EntriesRecipe, ShiftRecipe, MaskRecipe, IdsRecipe, PositionsRecipe),
        *(ProjectionsRecipe, WeightsRecipe),
    )
}


@dataclass(frozen=True)
class ArgumentsRecipe:
    """All arguments of an operator's plain signature, by name, their tensors laid out alike in memory."""

    items: tuple[tuple[str, Any], ...]
    layout: str = "contiguous"

    def build(self) -> Any:
        """The arguments as a named tuple, in the order of the plain signature."""
        built: dict[str, Any] = {}
        for name, recipe in self.items:
            value = map_tensors(build(recipe), lambda tensor: laid_out(tensor, self.layout))
            if isinstance(value, Projections):
                built |= dict(zip(("w_q", "w_k", "w_v", "w_o"), value, strict=True))
            else:
                built[name] = value
        return _named_tuple(tuple(built))(**built)


RECIPES["ArgumentsRecipe"] = ArgumentsRecipe


@lru_cache
def _named_tuple(names: tuple[str, ...]) -> Any:
    return namedtuple("Arguments", names)


def parts_of(recipe: Any) -> dict[tuple[str, ...], TensorRecipe | EntriesRecipe]:
    """The recipes of single tensors of numbers inside a recipe, by the names that lead to them."""
    if isinstance(recipe, TensorRecipe | EntriesRecipe):
        return {(): recipe}
    inside = dict(recipe.items) if isinstance(recipe, ArgumentsRecipe) else {}
    if isinstance(recipe, ProjectionsRecipe | WeightsRecipe):
        inside = recipe.parts()
    return {(name, *path): part for name, each in inside.items() for path, part in parts_of(each).items()}


def with_part(recipe: Any, path: tuple[str, ...], part: EntriesRecipe) -> Any:
    """A recipe with another in place of the one that these names lead to."""
    if not path:
        return part
    name, *rest = path
    if isinstance(recipe, ArgumentsRecipe):
        changed = ((n, with_part(each, tuple(rest), part) if n == name else each) for n, each in recipe.items)
        return replace(recipe, items=tuple(changed))
    return replace(recipe, replaced=tuple((dict(recipe.replaced) | {name: part}).items()))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """An argument with its tensor, or every tensor of its dict or named tuple, changed; anything else is itself."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: change(item) for name, item in value.items()}
    if hasattr(value, "_replace"):
        return value._replace(**{name: map_tensors(item, change) for name, item in value._asdict().items()})
    return value


def takes_the_dtype(operator: Checked, arguments: Sequence[Any]) -> None:
    """Judge no operator in a dtype that it refuses: then it gives no wrong numbers.

    Zeros tell, without a mask or positions of one's own: so that what fails for its values is no refusal.

    Raises:
        NotJudged: it refuses the dtype of these arguments.
    """
    plain = [map_tensors(value, lambda t: torch.zeros_like(t) if t.is_floating_point() else t) for value in arguments]
    if operator.operator.optional:
        plain[-1] = None
    try:
        operator(*plain)
    except Raised as raised:
        raise NotJudged(f"it refuses this dtype: {raised}") from None
    except Violation:
        pass


def build(recipe: Any) -> Any:
    """What a recipe describes; anything else is itself."""
    return recipe.build() if type(recipe).__name__ in RECIPES else recipe


def to_json(recipe: Any) -> Any:
    """A recipe as JSON values; `from_json` is its inverse."""
    if type(recipe).__name__ in RECIPES:
        fields = {name: to_json(getattr(recipe, name)) for name in recipe.__dataclass_fields__}
        return {"recipe": type(recipe).__name__, **fields}
    if isinstance(recipe, tuple | list):
        return [to_json(item) for item in recipe]
    return recipe


def from_json(data: Any) -> Any:
    """The recipe that `to_json` wrote.

    Raises:
        ValueError: the data name no recipe of this version.
    """
    if isinstance(data, dict):
        name = data.get("recipe")
        if name not in RECIPES:
            raise ValueError(f"no recipe named {name!r}; known are {', '.join(RECIPES)}")
        shape, layout = data.get("shape", []), data.get("layout", LAYOUTS[0])
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"its shape is {shape!r}, expected a list of sizes")
        if layout not in LAYOUTS:
            raise ValueError(f"its layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
        return RECIPES[name](**{key: from_json(value) for key, value in data.items() if key != "recipe"})
    return tuple(from_json(item) for item in data) if isinstance(data, list) else data


# ---------------------------------------------------------------------------------------------------------- strategies

# From a domain and the argument's name to what Hypothesis draws. A plain SearchStrategy serves as well.
Draw = Callable[[Domain, str], SearchStrategy[Any]]

SEEDS = st.integers(0, 63)


def _stream(name: str, seed: int) -> int:
    """A seed of the argument's own, so that two arguments of one example never share their values."""
    return (crc32(name.encode()) % 1000) * 64 + seed


def tensors(axes: str, regimes: Iterable[str] = GENERAL, layouts: Iterable[str] = ("contiguous",)) -> Draw:
    """Tensors of the axes, as in "*batch sequence d_model", in the run's dtype."""
    regimes, layouts = tuple(regimes), tuple(layouts)

    def draw(domain: Domain, name: str) -> SearchStrategy[TensorRecipe]:
        def recipe(size: Size, regime: str, seed: int, layout: str) -> TensorRecipe:
            return TensorRecipe(size.axes(axes), regime, _stream(name, seed), domain.dtype, layout)

        return st.builds(recipe, domain.sizes, st.sampled_from(regimes), SEEDS, st.sampled_from(layouts))

    return draw


def exact_shifts(axes: str) -> Draw:
    """Constants that add to a tensor of the regime "grid" without rounding, whatever the dtype."""

    def draw(domain: Domain, name: str) -> SearchStrategy[ShiftRecipe]:
        def recipe(size: Size, share: float, alternating: bool) -> ShiftRecipe:
            return ShiftRecipe(size.axes(axes), share, alternating, domain.dtype)

        return st.builds(recipe, domain.sizes, st.sampled_from((0.0, 1.0, -1.0, 0.5)), st.booleans())

    return draw


def masks(kinds: Iterable[str] = ("all", "causal", "random", "random"), axes: str = "queries keys") -> Draw:
    """Masks of the kinds ("none", "all", "causal", "random", "one key"), each row with a True: of the axes, or one for
    each example of the batch."""
    kinds = tuple(kinds)

    def draw(domain: Domain, name: str) -> SearchStrategy[MaskRecipe]:
        supported = domain.supports.get("mask", kinds)
        left = [kind for kind in kinds if f"mask {kind}" not in domain.without and kind in supported]
        if not left:
            needed = ["a call without a mask" if kind == "none" else f"a mask of the kind {kind}" for kind in kinds]
            lacking = any(f"mask {kind}" in domain.without for kind in kinds)
            why = "already fails" if lacking else "lies outside the declared support"
            raise NotJudged(f"it needs {' or '.join(dict.fromkeys(needed))}, which {why}")

        def recipe(size: Size, kind: str, seed: int, whole: bool) -> MaskRecipe:
            return MaskRecipe(kind, size.axes(f"*batch {axes}" if whole else axes), _stream(name, seed))

        return st.builds(recipe, domain.sizes, st.sampled_from(left), SEEDS, st.booleans())

    return draw


def token_ids(axes: str = "*batch") -> Draw:
    """Ids below the size's vocabulary."""

    def draw(domain: Domain, name: str) -> SearchStrategy[IdsRecipe]:
        def recipe(size: Size, kind: str, seed: int) -> IdsRecipe:
            return IdsRecipe(size.axes(axes), size.vocab, kind, _stream(name, seed))

        return st.builds(recipe, domain.sizes, st.sampled_from(("rising", "same", "drawn", "drawn")), SEEDS)

    return draw


def positions(axes: str = "sequence", kinds: Iterable[str] = ("from 0", "shifted", "gapped", "permuted")) -> Draw:
    """Positions below the size's max_seq_len."""
    kinds = tuple(kinds)

    def draw(domain: Domain, name: str) -> SearchStrategy[PositionsRecipe]:
        def recipe(size: Size, kind: str, seed: int) -> PositionsRecipe:
            return PositionsRecipe(size.axes(axes), size.max_seq_len, kind, _stream(name, seed))

        return st.builds(recipe, domain.sizes, st.sampled_from(kinds), SEEDS)

    return draw


def projections(regimes: Iterable[str] = WEIGHTS) -> Draw:
    """The four weights of multi-head attention."""
    regimes = tuple(regimes)

    def draw(domain: Domain, name: str) -> SearchStrategy[ProjectionsRecipe]:
        def recipe(size: Size, regime: str, seed: int) -> ProjectionsRecipe:
            return ProjectionsRecipe(size.d_model, regime, seed, domain.dtype)

        return st.builds(recipe, domain.sizes, st.sampled_from(regimes), SEEDS)

    return draw


def weights(regimes: Iterable[str] = ("halves", "halves", "small integers")) -> Draw:
    """The weight dict of the domain's operator: of a block, or of a language model."""
    regimes = tuple(regimes)

    def draw(domain: Domain, name: str) -> SearchStrategy[WeightsRecipe]:
        def recipe(size: Size, regime: str, seed: int) -> WeightsRecipe:
            layers = size.layers if domain.operator == "transformer_lm" else None
            return WeightsRecipe(size.d_model, size.d_ff, regime, seed, domain.dtype, layers, size.vocab)

        return st.builds(recipe, domain.sizes, st.sampled_from(regimes), SEEDS)

    return draw


def size(name: str) -> Draw:
    """A size of the example, as "heads"."""
    return lambda domain, argument: st.builds(lambda size: getattr(size, name), domain.sizes)


def index_of(name: str, first: int = 0) -> Draw:
    """An index of an axis of the example, as "heads", from `first` on; that axis must be longer."""

    def draw(domain: Domain, argument: str) -> SearchStrategy[int]:
        def index(size: Size, number: int) -> int:
            return first + number % (getattr(size, name) - first)

        return st.builds(index, domain.sizes, st.integers(0, 15))

    return draw


def one_of(*values: Any) -> Draw:
    """One of a few values, simplest first."""
    return lambda domain, name: st.sampled_from(values)


def dims(axes: str = "*batch n") -> Draw:
    """Any axis of a tensor of these axes, counted from the front or from the back."""

    def draw(domain: Domain, name: str) -> SearchStrategy[int]:
        def dim(size: Size, number: int) -> int:
            rank = len(size.axes(axes))
            return number // 2 % rank - (rank if number % 2 else 0)

        return st.builds(dim, domain.sizes, st.integers(0, 7))

    return draw


THETAS = (10000.0, 100.0, 500000.0)
_MODEL = {"num_heads": size("heads"), "theta": one_of(*THETAS)}
# For each operator the strategies of its plain arguments, in order.
ARGUMENTS: dict[str, dict[str, Draw]] = {
    "softmax": {"x": tensors("*batch n", (*GENERAL, "large")), "dim": dims()},
    "silu": {"x": tensors("*batch n", GENERAL)},
    "linear": {"x": tensors("*batch d_in", GENERAL), "weight": tensors("d_out d_in", WEIGHTS)},
    "embedding": {"token_ids": token_ids(), "weight": tensors("vocab d_model", GENERAL)},
    "rmsnorm": {"x": tensors("*batch d_model"), "gain": tensors("d_model", GAINS), "eps": one_of(1e-5, 1e-6, 1e-3)},
    "swiglu": {
        "x": tensors("*batch d_model", MODERATE),
        "w1": tensors("d_ff d_model", WEIGHTS),
        "w2": tensors("d_model d_ff", WEIGHTS),
        "w3": tensors("d_ff d_model", WEIGHTS),
    },
    "rope": {
        "x": tensors("*batch sequence d_k"),
        "positions": positions(),
        "theta": one_of(*THETAS),
        "max_seq_len": size("max_seq_len"),
    },
    "scaled_dot_product_attention": {
        "query": tensors("*batch queries d_k", MODERATE),
        "key": tensors("*batch keys d_k", MODERATE),
        "value": tensors("*batch keys d_v", MODERATE),
        "mask": masks(),
    },
    "multihead_self_attention": {
        "x": tensors("*batch sequence d_model", MODERATE),
        "w": projections(),
        "num_heads": size("heads"),
    },
    "multihead_self_attention_with_rope": {
        "x": tensors("*batch sequence d_model", MODERATE),
        "w": projections(),
        **_MODEL,
        "max_seq_len": size("max_seq_len"),
        "positions": positions(),
    },
    "transformer_block": {
        "x": tensors("*batch sequence d_model", MODERATE),
        "weights": weights(),
        **_MODEL,
        "max_seq_len": size("max_seq_len"),
    },
    "transformer_lm": {
        "token_ids": token_ids("*batch sequence"),
        "weights": weights(),
        **_MODEL,
        "context_length": size("context_length"),
    },
}


def arguments(sizes: str = "sizes") -> Draw:
    """All arguments of the domain's operator, built as a named tuple in the order of its plain signature.

    Args:
        sizes: arguments that give another name here have sizes of their own.
    """

    def draw(domain: Domain, name: str) -> SearchStrategy[ArgumentsRecipe]:
        domain = replace(domain, key=sizes)
        drawn = {each: strategy(domain, f"{name} {each}") for each, strategy in ARGUMENTS[domain.operator].items()}

        def recipe(*values: Any) -> ArgumentsRecipe:
            return ArgumentsRecipe(tuple(zip(drawn, values, strict=True)))

        return st.builds(recipe, *drawn.values())

    return draw


def plainest(domain: Domain) -> ArgumentsRecipe:
    """The simplest arguments of the domain's operator.

    Raises:
        NotJudged: the domain is empty.
    """
    unchecked: Any = tuple(HealthCheck)
    settings = hypothesis.settings(
        database=None, deadline=None, max_examples=1, phases=[Phase.generate], suppress_health_check=unchecked
    )
    return hypothesis.find(arguments()(domain, "arguments"), lambda found: True, settings=settings)
