"""Tensors as Python text that builds them again bit for bit: the shortest form, in the fewest digits."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lm.conformance.display import exceptions, shortest
from spec_lm.conformance.strategies import IdsRecipe, TensorRecipe

_DEFAULT = (torch.float32, torch.int64, torch.bool)  # the dtypes that torch.tensor takes numbers for by itself
MOST_NUMBERS = 600


class TooLong(Exception):
    """A tensor has more numbers than anybody reads, and no shorter form."""


def literal(tensor: Tensor, drawn: "Drawn | None" = None) -> str:
    """The shortest text for a contiguous tensor of these values.

    Args:
        tensor: any; its values count, not how it lies in memory.
        drawn: what a large tensor may be a draw of.

    Raises:
        TooLong: it takes more than `MOST_NUMBERS`.
    """
    texts = list(_compact(tensor, drawn))
    if 0 < tensor.numel() <= MOST_NUMBERS:
        texts.append(f"torch.tensor({_numbers(tensor)}{_dtype(tensor)})")
    if not texts:
        raise TooLong
    return min(texts, key=len)


def laid_out(tensor: Tensor, drawn: "Drawn | None" = None) -> str:
    """The text for a tensor that lies in memory as this one does, with what is between its entries."""
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return literal(tensor, drawn)
    if tensor.ndim >= 2 and tensor.mT.is_contiguous() and tensor.storage_offset() == 0:
        return f"{literal(tensor.mT, drawn)}.mT"
    stored = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return f"{literal(stored)}.as_strided({tuple(tensor.shape)}, {tensor.stride()}, {tensor.storage_offset()})"


def number(value: float, dtype: str = "float64") -> str:
    """A number in the fewest digits that its dtype needs: 0.1, torch.nan, -torch.inf."""
    if isinstance(value, bool | int):
        return str(value)
    return shortest(value, dtype).replace("NaN", "torch.nan").replace("inf", "torch.inf")


def _compact(tensor: Tensor, drawn: "Drawn | None") -> Iterator[str]:
    shape, flat = ", ".join(map(str, tensor.shape)), tensor.flatten()
    if not tensor.numel():
        yield f"torch.zeros({shape}{_dtype(tensor, torch.float32)})"
    elif _same(flat, flat[:1].expand_as(flat)):
        yield from _constant(flat[0], shape, tensor)
    if tensor.ndim and tensor.dtype in (torch.int64, torch.float32, torch.float64) and _same(flat, _counted(flat)):
        yield _rising(tensor, flat)
    if tensor.ndim == 2 and 1 < len(tensor) == tensor.shape[1] and _same(tensor, torch.eye(len(tensor)).to(tensor)):
        yield f"torch.eye({len(tensor)}{_dtype(tensor, torch.float32)})"
    if tensor.ndim == 2 and tensor.dtype == torch.bool and _same(tensor, torch.ones_like(tensor).tril()):
        yield f"torch.ones({shape}, dtype=torch.bool).tril()"
    if tensor.ndim > 1 and len(tensor) > 1 and _same(tensor, tensor[:1].expand_as(tensor)):
        yield f"{literal(tensor[0])}.repeat({', '.join(map(str, [len(tensor), *[1] * (tensor.ndim - 1)]))})"
    if tensor.numel() > 1 and (found := exceptions(tensor)) and found[1] and not _has_negative_zero(tensor):
        yield _but_text(tensor, *found)
    if drawn is not None:
        yield from drawn.texts(tensor)


def _has_negative_zero(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(((tensor == 0) & tensor.signbit()).any())


def _but_text(tensor: Tensor, fill: Tensor, others: list[tuple[int, ...]]) -> str:
    """All the same, but for a few entries, put in by their flat indices."""
    values, flat = tensor[tuple(torch.tensor(others).T)], np.ravel_multi_index(tuple(np.array(others).T), tensor.shape)
    same = min(_constant(fill, ", ".join(map(str, tensor.shape)), tensor), key=len)
    return f"{same}.put(torch.tensor({flat.tolist()}), torch.tensor({_numbers(values)}{_dtype(tensor)}))"


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, NaN and the sign of 0 included."""
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    if not tensor.is_floating_point():
        return torch.equal(tensor, other)
    parts = (torch.isnan, torch.nan_to_num, torch.signbit)
    return all(torch.equal(part(tensor), part(other)) for part in parts)


def _constant(value: Tensor, shape: str, tensor: Tensor) -> Iterator[str]:
    for constant, name in ((0, "zeros"), (1, "ones")):
        if _same(value, torch.full_like(value, constant)) and tensor.ndim:
            yield f"torch.{name}({shape}{_dtype(tensor, torch.float32)})"
    yield f"torch.full(({shape}{',' if tensor.ndim == 1 else ''}), {_numbers(value)}{_dtype(tensor)})"


def _counted(flat: Tensor) -> Tensor:
    """Whole numbers, one after the other, from the first entry on; nothing where that is none."""
    first = float(flat[0]) if len(flat) else 0.0
    if flat.is_floating_point() and not (first.is_integer() and abs(first) < 2**23):
        return flat[:0]
    return flat[:1] + torch.arange(len(flat), dtype=flat.dtype)


def _rising(tensor: Tensor, flat: Tensor) -> str:
    first = f"{int(flat[0])}, " if len(flat) and flat[0] else ""
    text = f"torch.arange({first}{int(flat[0]) + len(flat) if len(flat) else 0}{_dtype(tensor, torch.int64)})"
    return text if tensor.ndim == 1 else f"{text}.reshape({', '.join(map(str, tensor.shape))})"


def _numbers(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _nested(tensor.double().tolist() if tensor.is_floating_point() else tensor.tolist(), dtype)


def _nested(value: Any, dtype: str) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_nested(item, dtype) for item in value)}]"
    return number(value, dtype)


def _dtype(tensor: Tensor, *implied: torch.dtype) -> str:
    return "" if tensor.dtype in (implied or _DEFAULT) else f", dtype={tensor.dtype}"


# ------------------------------------------------------------------------------------------------------- drawn tensors

# How a regime makes values of integers, where that is one expression.
_FIRST = ".index_fill(0, torch.tensor(0), {})"
_REGIMES = {
    "plain": "{} / 2**20",
    "halves": "{} / 2**22",
    "tiny": "{} / 2**30",
    "shifted": "{} / 2**20 + 8",
    "positive": "{}.abs() / 2**20 + 2**-10",
    "small integers": "{} % 7 - 3.",
    "ones and zeros": "{} % 2.",
    "quarters": "({} % 17 - 8) / 4",
    "one large": f"({{}} / 2**20){_FIRST.format('128.')}",
    "large": f"({{}} / 2**20){_FIRST.format('1.5')} * 2**12",
    "large integers": f"({{}} % 7 - 3.){_FIRST.format('2.')} * 64",
    "negative tail": "-4 - {}.abs() / 2**20 * 38",
}
_REGIMES_OF_HALVES = _REGIMES | {
    "shifted": "{} / 2**20 + 1.5",
    "large": f"({{}} / 2**20){_FIRST.format('1.5')} * 64",
    "large integers": f"({{}} % 7 - 3.){_FIRST.format('2.')} * 8",
    "negative tail": "-4 - {}.abs() / 2**20 * 4",
}


class Drawn:
    """Large tensors as draws from a seeded generator: what recipes describe, again in torch's own words.

    Args:
        recipes: of a counterexample, by argument.
        few: a tensor of no more numbers is written by them.
    """

    def __init__(self, recipes: Mapping[str, Any], few: int = 64) -> None:
        self._few = few
        self._recipes = [part for recipe in recipes.values() for part in _parts(recipe)]

    def texts(self, tensor: Tensor) -> Iterator[str]:
        """An expression for the tensor, where a recipe describes it and the expression gives it bit for bit."""
        for recipe in self._recipes if tensor.numel() > self._few else ():
            text = _drawn(recipe) if recipe.shape == tuple(tensor.shape) else ""
            if text and _same(eval(text, {"torch": torch}), tensor):
                yield text
                return


def _parts(recipe: Any) -> Iterator[Any]:
    if hasattr(recipe, "items"):
        for _, item in recipe.items:
            yield from _parts(item)
    elif hasattr(recipe, "parts"):
        yield from (part for part in recipe.parts().values() if isinstance(part, TensorRecipe))
    elif isinstance(recipe, TensorRecipe | IdsRecipe):
        yield recipe


def _drawn(recipe: TensorRecipe | IdsRecipe) -> str:
    size, pool = torch.Size(recipe.shape).numel(), 4096
    while pool < size:
        pool *= 2
    generator = f"torch.Generator().manual_seed({recipe.seed})"
    integers = f"torch.randint(-2**21, 2**21, ({pool},), generator={generator})[:{size}]"
    shape = f".reshape({', '.join(map(str, recipe.shape))})"
    if isinstance(recipe, IdsRecipe):
        return f"({integers} % {recipe.vocab}){shape}"
    regimes = _REGIMES_OF_HALVES if recipe.dtype == "float16" else _REGIMES
    if recipe.regime not in regimes:
        return ""
    values = regimes[recipe.regime].format(integers if recipe.dtype == "float32" else f"{integers}.double()")
    dtype = "" if recipe.dtype in ("float32", "float64") else f".to(torch.{recipe.dtype})"
    after = dtype + (shape if len(recipe.shape) > 1 else "")
    return f"({values}){after}" if after else values
