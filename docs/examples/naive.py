"""A softmax as it is often written first: right on small inputs, NaN on large ones."""

import torch


def run_softmax(in_features: torch.Tensor, dim: int) -> torch.Tensor:
    exponentials = in_features.exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


def run_silu(in_features: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError
