"""What is built once of its arguments, as a module of its weights; and as a function of them again, to be checked."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spec_lm.bench.cases import tensors_of
from spec_lm.conformance.strategies import map_tensors

Built = tuple[Callable[..., Any], tuple[Any, ...], tuple[Tensor, ...]]
"""What is called, on what, and the leaves that get gradients."""


def as_function(builder: Callable[..., Built]) -> Callable[..., Tensor]:
    """A builder as a function; its gradients come back to the arguments that its leaves are made of."""

    def function(*arguments: Any) -> Tensor:
        call, inputs, leaves = builder(*arguments)
        result = call(*inputs)
        given = leaves_of(arguments)
        if not (torch.is_grad_enabled() and any(each.requires_grad for each in given)):
            return result
        return _Carried.apply(lambda: result, leaves, builder(*_numbered(arguments))[2], *given)

    return function


class _Carried(torch.autograd.Function):
    """A result, and the gradients of its leaves carried back to the entries that the leaves were made of.

    What is built copies its weights, packs and reorders them: built of numbered entries, its leaves say where each of
    theirs came from. Entry 0 stands for what came from nowhere, as a bias of zeros.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, result: Callable[[], Tensor], leaves: tuple[Tensor, ...], places: tuple[Tensor, ...], *given: Tensor
    ) -> Tensor:
        pairs = [(leaf, place) for leaf, place in zip(leaves, places, strict=True) if leaf.requires_grad]
        ctx.result, ctx.pairs, ctx.shapes = result, pairs, [each.shape for each in given]
        return result().detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        leaves = [leaf for leaf, _ in ctx.pairs]
        found = torch.autograd.grad(ctx.result(), leaves, cotangents, retain_graph=True, allow_unused=True)
        flat = cotangents[0].new_zeros(1 + sum(shape.numel() for shape in ctx.shapes))
        for (_, place), gradient in zip(ctx.pairs, found, strict=True):
            if gradient is not None:
                flat.index_add_(0, place.detach().flatten().long(), gradient.flatten())
        parts = flat[1:].split([shape.numel() for shape in ctx.shapes])
        return None, None, None, *(part.reshape(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def _numbered(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, but all entries of their floating-point tensors numbered from 1 on."""
    first = 1

    def numbers(tensor: Tensor) -> Tensor:
        nonlocal first
        if not tensor.is_floating_point():
            return tensor
        begin, first = first, first + tensor.numel()
        return torch.arange(begin, first, dtype=torch.float64, device=tensor.device).reshape(tensor.shape)

    return tuple(map_tensors(value, numbers) for value in arguments)


def leaves_of(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The floating-point tensors among arguments."""
    return tuple(filter(Tensor.is_floating_point, tensors_of(arguments)))
