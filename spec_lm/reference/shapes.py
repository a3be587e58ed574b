"""The words for axes, and `shape_checked`, which holds every call to the shapes its signature states.

    batch      any number of leading axes, also none   d_model  features of one token
    sequence   tokens of one example                   d_k      features of one query or key
    queries    tokens that look                        d_v      features of one value
    keys       tokens that are looked at               d_ff     inner features of the feed-forward network
    heads      attentions side by side                 vocab    distinct token ids

`*` marks a word that stands for several axes, `#` one that may broadcast; `heads_d_k` is the product heads d_k.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from inspect import signature
from itertools import zip_longest
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError, jaxtyped

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_untraced = cache(torch.compiler.disable)  # keeps the checker out of what torch.compile traces after a graph break


class ShapeError(TypeError):
    """A value's shape or type is not what the signature states."""


def shape_checked(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Check arguments and result against the annotations; raise ShapeError naming argument, shapes and axis."""
    checked = jaxtyped(typechecker=beartype(conf=BeartypeConf(is_pep484_tower=True)))(function)

    @wraps(function)
    def checking(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():  # the checker cannot be traced
            return function(*args, **kwargs)
        check: Any = _untraced(checked) if "torch._dynamo" in sys.modules else checked
        try:
            return check(*args, **kwargs)
        except TypeCheckError as error:
            arguments = signature(function).bind(*args, **kwargs).arguments
            problem = next(_problems(function, arguments), None) or str(error.__cause__ or error).strip()
        raise ShapeError(f"{function.__qualname__}: {problem}")

    return checking


def _problems(function: Callable[..., Any], arguments: dict[str, Any]) -> Iterator[str]:
    """Arguments that are no such tensors, and axes on which two arguments disagree; the first one counts."""
    hints = {name: parameter.annotation for name, parameter in signature(function).parameters.items()}
    choices = [(name, kind) for name in arguments for kind in (hints[name], *get_args(hints[name]))]
    tensors = {name: kind for name, kind in choices if hasattr(kind, "dim_str") and arguments[name] is not None}
    expected = "expected " + ", ".join(f"{name} ({kind.dim_str.strip()})" for name, kind in tensors.items())
    seen: dict[str, tuple[Any, str]] = {}
    for name, kind in tensors.items():
        value, words = arguments[name], kind.dim_str.split()
        if str(getattr(value, "dtype", "")).removeprefix("torch.") not in kind.dtypes:
            yield f"{name} must be a {kind.__name__.split('[')[0]} Tensor, got {getattr(value, 'dtype', type(value))}"
        shape, here, spare = list(value.shape), f"{name} {tuple(value.shape)}", value.ndim - len(words) + 1
        if spare < 0 or (spare != 1 and "*" not in kind.dim_str):
            yield f"{here} does not have the axes ({' '.join(words)}); {expected}"
        for word in words:  # the starred word takes every axis that the others leave
            size: Any = tuple(shape.pop(0) for _ in range(spare)) if "*" in word else shape.pop(0)
            first, where = seen.setdefault(word.strip("*#"), (size, here))
            ends = (size[::-1], first[::-1]) if "*" in word else ((size,), (first,))
            fits = "#" in word and all(n in (1, m) for n, m in zip_longest(*ends, fillvalue=1))
            if size != first and not fits:
                yield f"axis {word.strip('*#')} is {size} in {here}, but {first} in {where}; {expected}"
