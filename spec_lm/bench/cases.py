"""What is measured: an operator at its sizes, its arguments, and the operations and bytes that it cannot do without."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from spec_lm.conformance.oracle import number_of_layers

Direction = Literal["forward", "training"]
THETA = 1e4
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a language model; an operator uses those that it has."""

    batch: int = 4
    sequence: int = 256
    d_model: int = 512
    heads: int = 8
    d_ff: int = 1344
    vocab: int = 10000
    layers: int = 2

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads


@dataclass(frozen=True)
class Case:
    """An operator at one size, in one dtype, on one device, in one direction, eager or compiled.

    Args:
        direction: forward, or training: forward, loss, backward.
        scan: the size that varies from case to case; cases that differ in nothing else are one curve.
        memory: whether its peak memory is measured, too.
    """

    operator: str
    sizes: Sizes = Sizes()
    dtype: str = "float32"
    device: str = "cpu"
    direction: Direction = "forward"
    compiled: bool = False
    scan: str = ""
    memory: bool = False

    @property
    def curve(self) -> str:
        """All but the size that varies, as text."""
        how = f"{self.direction}, {'compiled' if self.compiled else 'eager'}, {self.dtype} on {self.device}"
        sizes = ", ".join(f"{name} {getattr(self.sizes, name)}" for name in USED[self.operator] if name != self.scan)
        return f"{self.operator}: {how}; {sizes}"

    @property
    def size(self) -> int:
        """The size that varies."""
        return int(getattr(self.sizes, self.scan or "tokens"))

    def __str__(self) -> str:
        return self.curve + (f"; along {self.scan}: {self.size}" if self.scan else "")

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Case":
        """The case that `asdict` gave."""
        return cls(**{**told, "sizes": Sizes(**told["sizes"])})

    def told(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


# ------------------------------------------------------------------------------------------------------------ arguments


def tensors_of(arguments: tuple[Any, ...]) -> list[Tensor]:
    """Every tensor among arguments, those of dicts too."""
    flat = [item for value in arguments for item in (value.values() if isinstance(value, Mapping) else [value])]
    return [item for item in flat if isinstance(item, Tensor)]


def model_sizes(weights: Mapping[str, Tensor]) -> tuple[int, int, int, int]:
    """vocab, d_model, layers and d_ff of a language model; any d_ff where it has no layer."""
    vocab, d_model = weights["token_embeddings.weight"].shape
    layers = number_of_layers(weights)
    return vocab, d_model, layers, len(weights["layers.0.ffn.w1.weight"]) if layers else 4


def arguments(case: Case, seed: int) -> tuple[Any, ...]:
    """Random arguments of the plain signature."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(case.device, dtype)

    def ids() -> Tensor:
        shape = (case.sizes.batch, case.sizes.sequence)
        return torch.randint(0, case.sizes.vocab, shape, generator=generator).to(case.device)

    def weight(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, scale=columns**-0.5)

    return _ARGUMENTS[case.operator](case, normal, weight, ids)


Normal: TypeAlias = Callable[..., Tensor]
Weight: TypeAlias = Callable[[int, int], Tensor]
Ids: TypeAlias = Callable[[], Tensor]


def _stream(case: Case, normal: Normal) -> Tensor:
    return normal(case.sizes.batch, case.sizes.sequence, case.sizes.d_model)


@lru_cache(maxsize=1)
def _table(rows: int, columns: int, dtype: str, device: str) -> Tensor:
    """The same for every seed: a model has one table, whatever is looked up in it, and some hold 200 MB."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return values.to(device, getattr(torch, dtype))


def _projections(case: Case, weight: Weight) -> list[Tensor]:
    return [weight(case.sizes.d_model, case.sizes.d_model) for _ in range(4)]


def _network(case: Case, weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
    d_model, d_ff = case.sizes.d_model, case.sizes.d_ff
    return weight(d_ff, d_model), weight(d_model, d_ff), weight(d_ff, d_model)


def _heads(case: Case, normal: Normal) -> Tensor:
    return normal(case.sizes.batch, case.sizes.heads, case.sizes.sequence, case.sizes.d_head)


def _block_weights(case: Case, normal: Normal, weight: Weight) -> dict[str, Tensor]:
    names = [f"attn.{name}_proj.weight" for name in ("q", "k", "v", "output")]
    found = dict(zip(names, _projections(case, weight), strict=True))
    found |= {f"ffn.w{i + 1}.weight": w for i, w in enumerate(_network(case, weight))}
    return found | {f"ln{i}.weight": 1 + 0.1 * normal(case.sizes.d_model) for i in (1, 2)}


def _model_weights(case: Case, normal: Normal, weight: Weight) -> dict[str, Tensor]:
    sizes = case.sizes
    found = {"token_embeddings.weight": normal(sizes.vocab, sizes.d_model)}
    for layer in range(sizes.layers):
        found |= {f"layers.{layer}.{name}": w for name, w in _block_weights(case, normal, weight).items()}
    return found | {
        "ln_final.weight": 1 + 0.1 * normal(sizes.d_model),
        "lm_head.weight": weight(sizes.vocab, sizes.d_model),
    }


_ARGUMENTS: dict[str, Callable[[Case, Normal, Weight, Ids], tuple[Any, ...]]] = {
    "softmax": lambda c, normal, weight, ids: (_stream(c, normal), -1),
    "silu": lambda c, normal, weight, ids: (_stream(c, normal),),
    "linear": lambda c, normal, weight, ids: (_stream(c, normal), weight(c.sizes.d_model, c.sizes.d_model)),
    "embedding": lambda c, normal, weight, ids: (ids(), _table(c.sizes.vocab, c.sizes.d_model, c.dtype, c.device)),
    "rmsnorm": lambda c, normal, weight, ids: (_stream(c, normal), normal(c.sizes.d_model), 1e-5),
    "swiglu": lambda c, normal, weight, ids: (_stream(c, normal), *_network(c, weight)),
    "rope": lambda c, normal, weight, ids: (
        _heads(c, normal),
        torch.arange(c.sizes.sequence, device=c.device),
        THETA,
        c.sizes.sequence,
    ),
    "scaled_dot_product_attention": lambda c, normal, weight, ids: tuple(_heads(c, normal) for _ in "qkv"),
    "multihead_self_attention": lambda c, normal, weight, ids: (
        _stream(c, normal),
        *_projections(c, weight),
        c.sizes.heads,
    ),
    "multihead_self_attention_with_rope": lambda c, normal, weight, ids: (
        _stream(c, normal),
        *_projections(c, weight),
        c.sizes.heads,
        THETA,
        c.sizes.sequence,
    ),
    "transformer_block": lambda c, normal, weight, ids: (
        _stream(c, normal),
        _block_weights(c, normal, weight),
        c.sizes.heads,
        THETA,
        c.sizes.sequence,
    ),
    "transformer_lm": lambda c, normal, weight, ids: (
        ids(),
        _model_weights(c, normal, weight),
        c.sizes.heads,
        THETA,
        c.sizes.sequence,
    ),
}

# --------------------------------------------------------------------------------------------------------------- counts


def operations(case: Case) -> int:
    """Additions and multiplications (exponentials and roots count as one), as the equations state them; a pair that a
    causal mask hides is not counted. Backward of a product is two products: training counts three times forward."""
    return _OPERATIONS[case.operator](case.sizes) * (3 if case.direction == "training" else 1)


def traffic(case: Case) -> int:
    """Bytes that pass at least: forward reads the arguments and writes the result. Training then reads the cotangent of
    the result and, unless the operator is linear in them, the arguments, and writes a gradient for each."""
    arguments, result = _ARGUMENT_NUMBERS[case.operator](case.sizes), _RESULT_NUMBERS[case.operator](case.sizes)
    if case.direction == "training":
        arguments, result = arguments * (2 if case.operator in _LINEAR else 3), 2 * result
    return (arguments + result) * WIDTHS[case.dtype]


def _causal_pairs(s: Sizes) -> int:
    return s.batch * s.sequence * (s.sequence + 1) // 2


def _attention_operations(s: Sizes) -> int:
    return 8 * s.tokens * s.d_model**2 + (4 * s.d_model + 5 * s.heads) * _causal_pairs(s)


def _swiglu_operations(s: Sizes) -> int:
    return (6 * s.d_model + 5) * s.tokens * s.d_ff


def _rotation_operations(s: Sizes) -> int:
    return 3 * s.tokens * s.d_model


def _block_operations(s: Sizes) -> int:
    norms_and_sums = 2 * (4 + 1) * s.tokens * s.d_model
    return _attention_operations(s) + 2 * _rotation_operations(s) + _swiglu_operations(s) + norms_and_sums


_OPERATIONS: dict[str, Callable[[Sizes], int]] = {
    "softmax": lambda s: 5 * s.tokens * s.d_model,
    "silu": lambda s: 4 * s.tokens * s.d_model,
    "linear": lambda s: 2 * s.tokens * s.d_model**2,
    "embedding": lambda s: 0,
    "rmsnorm": lambda s: 4 * s.tokens * s.d_model,
    "swiglu": _swiglu_operations,
    "rope": _rotation_operations,
    "scaled_dot_product_attention": lambda s: (4 * s.d_model + 5 * s.heads) * s.tokens * s.sequence,
    "multihead_self_attention": _attention_operations,
    "multihead_self_attention_with_rope": lambda s: _attention_operations(s) + 2 * _rotation_operations(s),
    "transformer_block": _block_operations,
    "transformer_lm": lambda s: s.layers * _block_operations(s) + (4 + 2 * s.vocab) * s.tokens * s.d_model,
}


def _block_weights_numbers(s: Sizes) -> int:
    return 4 * s.d_model**2 + 3 * s.d_model * s.d_ff + 2 * s.d_model


def _stream_numbers(s: Sizes) -> int:
    return s.tokens * s.d_model


_LINEAR = ("embedding", "rope")  # a backward that needs no argument of the forward
_ARGUMENT_NUMBERS: dict[str, Callable[[Sizes], int]] = {
    **dict.fromkeys(("softmax", "silu", "rope", "embedding"), _stream_numbers),
    "linear": lambda s: _stream_numbers(s) + s.d_model**2,
    "rmsnorm": lambda s: _stream_numbers(s) + s.d_model,
    "swiglu": lambda s: _stream_numbers(s) + 3 * s.d_model * s.d_ff,
    "scaled_dot_product_attention": lambda s: 3 * _stream_numbers(s),
    "multihead_self_attention": lambda s: _stream_numbers(s) + 4 * s.d_model**2,
    "multihead_self_attention_with_rope": lambda s: _stream_numbers(s) + 4 * s.d_model**2,
    "transformer_block": lambda s: _stream_numbers(s) + _block_weights_numbers(s),
    "transformer_lm": lambda s: (
        _stream_numbers(s) + s.layers * _block_weights_numbers(s) + (s.vocab + 1) * s.d_model  # rows read of the table
    ),
}
_RESULT_NUMBERS: dict[str, Callable[[Sizes], int]] = {
    **dict.fromkeys(_ARGUMENT_NUMBERS, _stream_numbers),
    "transformer_lm": lambda s: s.tokens * s.vocab,
}

# The sizes that each operator has.
_TOKENS = ("batch", "sequence", "d_model")
USED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("softmax", "silu", "linear", "rmsnorm"), _TOKENS),
    "embedding": (*_TOKENS, "vocab"),
    "swiglu": (*_TOKENS, "d_ff"),
    **dict.fromkeys(
        (
            "rope",
            "scaled_dot_product_attention",
            "multihead_self_attention",
            "multihead_self_attention_with_rope",
        ),
        (*_TOKENS, "heads"),
    ),
    "transformer_block": (*_TOKENS, "heads", "d_ff"),
    "transformer_lm": (*_TOKENS, "heads", "d_ff", "vocab", "layers"),
}

# --------------------------------------------------------------------------------------------------------------- suites

_ATTENTION, _LM = "scaled_dot_product_attention", "transformer_lm"
_SMALL_LM = Sizes(batch=2, sequence=128, d_model=256, heads=8, d_ff=688, vocab=4000, layers=2)
# The language model of the project's own figures.
LM = Sizes(batch=4, sequence=256, d_model=512, heads=16, d_ff=1344, vocab=10000, layers=4)


def quick(device: str) -> Iterator[Case]:
    """About a minute on two cores: four operators and the model at one size, and attention along the sequence."""
    for operator in ("softmax", "rmsnorm", "swiglu", "multihead_self_attention_with_rope"):
        yield Case(operator, Sizes(batch=2, sequence=128), device=device)
    for sequence in (128, 256, 512):
        sizes = Sizes(batch=1, sequence=sequence, d_model=256, heads=4)
        yield Case(_ATTENTION, sizes, device=device, scan="sequence", memory=True)
    yield Case(_LM, _SMALL_LM, device=device)
    yield Case(_LM, _SMALL_LM, device=device, direction="training")


def standard(device: str) -> Iterator[Case]:
    """Every operator, both directions, scans of each size, the model eager and compiled."""
    large = device != "cpu"
    base = Sizes(batch=8, sequence=1024, d_model=1024, heads=16, d_ff=2752, vocab=32000) if large else Sizes()
    for operator in USED:
        if operator != _LM:
            yield from _both(Case(operator, base, device=device))
    for operator, scan, values in _scans(large):
        for value in values:
            memory = operator == _ATTENTION and scan == "sequence"
            sizes = replace(base if not memory else replace(base, batch=1), **{scan: value})
            yield Case(operator, sizes, device=device, scan=scan, memory=memory)
    for compiled in (False, True):
        yield from _both(Case(_LM, LM, device=device, compiled=compiled, memory=not compiled))


def model(device: str) -> Iterator[Case]:
    """The project's own figures: the model in every way, and attention's memory up to long sequences."""
    for compiled in (False, True):
        yield from _both(Case(_LM, LM, device=device, compiled=compiled))
    for sequence in (1024, 2048, 4096, 8192, 16384):
        sizes = Sizes(batch=1, sequence=sequence, d_model=128, heads=1)
        yield Case(_ATTENTION, sizes, device=device, scan="sequence", memory=True)


def _both(case: Case) -> Iterator[Case]:
    yield case
    yield replace(case, direction="training")


def _scans(large: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield _ATTENTION, "sequence", (1024, 2048, 4096, 8192, 16384) if large else (512, 1024, 2048, 4096)
    yield _ATTENTION, "heads", (4, 8, 16)
    yield "softmax", "batch", (1, 4, 16, 64) if large else (1, 4, 16)
    yield "linear", "d_model", (512, 1024, 2048, 4096) if large else (256, 512, 1024)
    yield "embedding", "vocab", (1000, 10000, 100000)
    yield "multihead_self_attention_with_rope", "sequence", (512, 1024, 2048, 4096) if large else (128, 256, 512)


SUITES: dict[str, Callable[[str], Iterator[Case]]] = {"quick": quick, "standard": standard, "model": model}
