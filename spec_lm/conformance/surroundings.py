"""What lies around a call: the global random generators and the settings that all code of a process shares."""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from spec_lm.conformance.tolerance import Violation

# By name: how it is read, and how it is put back.
_Part = tuple[Callable[[], Any], Callable[[Any], Any]]

GENERATORS: dict[str, _Part] = {
    "torch's global random generator": (
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: _torch_to(state),
    ),
    "NumPy's global random generator": (lambda: _hashable(np.random.get_state()), lambda state: _numpy_to(state)),
    "Python's global random generator": (random.getstate, random.setstate),
}
SETTINGS: dict[str, _Part] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, lambda device: _device_to(device)),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch's deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        lambda enabled: torch.use_deterministic_algorithms(enabled),
    ),
    "torch's flush of subnormal numbers": (lambda: _smallest().item() == 0, torch.set_flush_denormal),
    "NumPy's error handling": (lambda: tuple(np.geterr().items()), lambda state: np.seterr(**dict(state))),
    "the current folder": (lambda: current_folder(), lambda folder: folder_to(folder)),
    "the environment variables": (lambda: tuple(os.environ.items()), lambda items: _environment_to(dict(items))),
}


def _torch_to(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _device_to(device: torch.device) -> None:
    """The CPU is the default where none is set: to set it would slow down every call from then on."""
    torch.set_default_device(None if device.type == "cpu" else device)


def _hashable(state: Any) -> tuple[Any, ...]:
    name, keys, *rest = state
    return name, tuple(keys), *rest


def _numpy_to(state: Any) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.array(keys, np.uint32), *rest))


def current_folder() -> str:
    """The current folder; empty where it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def folder_to(folder: str) -> None:
    """Go to a folder, where it is still there."""
    with contextlib.suppress(FileNotFoundError):
        os.chdir(folder)


def _smallest() -> torch.Tensor:
    """Half of the smallest normal number: 0 where subnormal numbers are flushed."""
    return torch.tensor([torch.finfo(torch.float32).tiny], dtype=torch.float32, device="cpu") * 0.5


def _environment_to(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def restored(parts: dict[str, _Part]) -> Iterator[list[str]]:
    """Afterwards these parts of the process are as they were before; the list names those that had changed."""
    before = {name: read() for name, (read, _) in parts.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        changed += [name for name, (read, _) in parts.items() if read() != before[name]]
        for name in changed:
            parts[name][1](before[name])


@contextmanager
def undisturbed(parts: dict[str, _Part]) -> Iterator[None]:
    """What happens inside leaves these parts of the process as they were; afterwards they are put back at any rate.

    Raises:
        Violation: names the first part that changed.
    """
    with restored(parts) as changed:
        yield
    if changed:
        raise Violation(f"it changed {changed[0]}", kind=f"changed {changed[0]}")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the global random generators are at a seed; afterwards they are where they were."""
    before = {name: read() for name, (read, _) in GENERATORS.items()}
    try:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        yield
    finally:
        for name, (_, put_back) in GENERATORS.items():
            put_back(before[name])


@contextmanager
def drawn_from() -> Iterator[None]:
    """Inside, the global random generators are in a state that no seed gives; afterwards they are where they were."""
    with seeded(0):
        torch.rand(1)
        np.random.random()
        random.random()
        yield
