"""The twelve operators: how each is called, what it returns, and an implementation's operator as a clause sees it."""

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lm.conformance.bounds import CONVENTIONS, FOLLOWED, bounded, exact_value
from spec_lm.conformance.tolerance import (
    Evidence,
    NotJudged,
    OutOfMemory,
    Output,
    Raised,
    Violation,
    close,
    is_out_of_memory,
)
from spec_lm.conformance.vjp import bounded_gradients, exact_gradients

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Operator:
    """One building block of the model and its two interfaces.

    Args:
        name: in the field's words; `run_` + name is the adapter interface's function.
        parameters: of the plain signature, in order.
        shape: of the result, from the plain arguments.
        adapter: the adapter interface's arguments, positional and keyword, from the plain ones.
        optional: parameters that may be left out (mask, positions).
    """

    name: str
    parameters: tuple[str, ...]
    shape: Callable[..., tuple[int, ...]]
    adapter: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    optional: tuple[str, ...] = ()

    @property
    def run_name(self) -> str:
        return f"run_{self.name}"


def _projections(w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor) -> dict[str, Tensor]:
    return {"q_proj_weight": w_q, "k_proj_weight": w_k, "v_proj_weight": w_v, "o_proj_weight": w_o}


def _run_softmax(x, dim):
    return (x,), {"dim": dim}


def _run_silu(x):
    return (x,), {}


def _run_linear(x, weight):
    return (), {"d_in": weight.shape[1], "d_out": weight.shape[0], "weights": weight, "in_features": x}


def _run_embedding(token_ids, weight):
    return (), {"vocab_size": weight.shape[0], "d_model": weight.shape[1], "weights": weight, "token_ids": token_ids}


def _run_rmsnorm(x, gain, eps):
    return (), {"d_model": gain.shape[0], "eps": eps, "weights": gain, "in_features": x}


def _run_swiglu(x, w1, w2, w3):
    sizes = {"d_model": w1.shape[1], "d_ff": w1.shape[0]}
    return (), sizes | {"w1_weight": w1, "w2_weight": w2, "w3_weight": w3, "in_features": x}


def _run_rope(x, positions, theta, max_seq_len):
    named = {"theta": theta, "max_seq_len": max_seq_len, "in_query_or_key": x, "token_positions": positions}
    return (x.shape[-1],), named


def _run_attention(query, key, value, mask=None):
    return (), {"Q": query, "K": key, "V": value} | ({} if mask is None else {"mask": mask})


def _run_mha(x, w_q, w_k, w_v, w_o, num_heads):
    sizes = {"d_model": w_q.shape[1], "num_heads": num_heads}
    return (), sizes | _projections(w_q, w_k, w_v, w_o) | {"in_features": x}


def _run_mha_with_rope(x, w_q, w_k, w_v, w_o, num_heads, theta, max_seq_len, positions=None):
    sizes = {"d_model": w_q.shape[1], "num_heads": num_heads, "max_seq_len": max_seq_len, "theta": theta}
    given = {} if positions is None else {"token_positions": positions}
    return (), sizes | _projections(w_q, w_k, w_v, w_o) | {"in_features": x} | given


def _run_block(x, weights, num_heads, theta, max_seq_len):
    sizes = {"d_model": x.shape[-1], "num_heads": num_heads, "d_ff": weights["ffn.w1.weight"].shape[0]}
    return (), sizes | {"max_seq_len": max_seq_len, "theta": theta, "weights": weights, "in_features": x}


def _run_lm(token_ids, weights, num_heads, theta, context_length):
    vocab_size, d_model = weights["token_embeddings.weight"].shape
    layers = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    d_ff = weights["layers.0.ffn.w1.weight"].shape[0] if layers else 4 * d_model
    sizes = {"vocab_size": vocab_size, "context_length": context_length, "d_model": d_model, "num_layers": len(layers)}
    rest = {"num_heads": num_heads, "d_ff": d_ff, "rope_theta": theta, "weights": weights, "in_indices": token_ids}
    return (), sizes | rest


def _like_first(x, *rest):
    return tuple(x.shape)


def _rows_of_last(x, *weights):
    return (*x.shape[:-1], weights[-1].shape[0])


_ATTENTION_WEIGHTS = ("w_q", "w_k", "w_v", "w_o")
OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("softmax", ("x", "dim"), _like_first, _run_softmax),
        Operator("silu", ("x",), _like_first, _run_silu),
        Operator("linear", ("x", "weight"), _rows_of_last, _run_linear),
        Operator("embedding", ("token_ids", "weight"), lambda ids, w: (*ids.shape, w.shape[1]), _run_embedding),
        Operator("rmsnorm", ("x", "gain", "eps"), _like_first, _run_rmsnorm),
        Operator("swiglu", ("x", "w1", "w2", "w3"), lambda x, w1, w2, w3: _rows_of_last(x, w2), _run_swiglu),
        Operator("rope", ("x", "positions", "theta", "max_seq_len"), _like_first, _run_rope),
        Operator(
            "scaled_dot_product_attention",
            ("query", "key", "value", "mask"),
            lambda q, k, v, mask=None: (*q.shape[:-1], v.shape[-1]),
            _run_attention,
            optional=("mask",),
        ),
        Operator(
            "multihead_self_attention",
            ("x", *_ATTENTION_WEIGHTS, "num_heads"),
            lambda x, q, k, v, o, heads: _rows_of_last(x, o),
            _run_mha,
        ),
        Operator(
            "multihead_self_attention_with_rope",
            ("x", *_ATTENTION_WEIGHTS, "num_heads", "theta", "max_seq_len", "positions"),
            lambda x, q, k, v, o, *rest: _rows_of_last(x, o),
            _run_mha_with_rope,
            optional=("positions",),
        ),
        Operator("transformer_block", ("x", "weights", "num_heads", "theta", "max_seq_len"), _like_first, _run_block),
        Operator(
            "transformer_lm",
            ("token_ids", "weights", "num_heads", "theta", "context_length"),
            lambda ids, weights, *rest: (*ids.shape, weights["lm_head.weight"].shape[0]),
            _run_lm,
        ),
    )
}


# What each operator's equation is built of; what these are built of belongs to it too.
_BUILT_OF: dict[str, tuple[str, ...]] = {
    "swiglu": ("silu", "linear"),
    "scaled_dot_product_attention": ("softmax",),
    "multihead_self_attention": ("linear", "scaled_dot_product_attention"),
    "multihead_self_attention_with_rope": ("multihead_self_attention", "rope"),
    "transformer_block": ("rmsnorm", "multihead_self_attention_with_rope", "swiglu"),
    "transformer_lm": ("embedding", "transformer_block", "rmsnorm", "linear"),
}


def inside(operator: str) -> list[str]:
    """The operators that this one is built of, directly or through others, low ones first."""
    direct = _BUILT_OF.get(operator, ())
    found = {*direct, *(lower for name in direct for lower in inside(name))}
    return [name for name in OPERATORS if name in found]


# What a declared support may name, read off the plain arguments; `axes` counts all axes of the first argument.
_MEASURES: dict[str, Callable[..., dict[str, int]]] = {
    "softmax": lambda x, dim: {"n": x.shape[-1]},
    "silu": lambda x: {"n": x.shape[-1]},
    "linear": lambda x, weight: {"d_in": x.shape[-1], "d_out": weight.shape[0]},
    "embedding": lambda ids, weight: {"vocab": weight.shape[0], "d_model": weight.shape[1]},
    "rmsnorm": lambda x, *rest: {"d_model": x.shape[-1]},
    "swiglu": lambda x, w1, *rest: {"d_model": x.shape[-1], "d_ff": w1.shape[0]},
    "rope": lambda x, *rest: {"sequence": x.shape[-2], "d_k": x.shape[-1]},
    "scaled_dot_product_attention": lambda q, k, v, mask=None: {
        "queries": q.shape[-2],
        "keys": k.shape[-2],
        "d_k": q.shape[-1],
        "d_v": v.shape[-1],
    },
    "multihead_self_attention": lambda x, q, k, v, o, heads, *rest: _stream(x, heads),
    "multihead_self_attention_with_rope": lambda x, q, k, v, o, heads, *rest: _stream(x, heads),
    "transformer_block": lambda x, weights, heads, *rest: _stream(x, heads),
    "transformer_lm": lambda ids, weights, heads, *rest: {"sequence": ids.shape[-1], "heads": heads},
}
_SAME_AXES = {"d_head": ("d_head", "d_k", "d_v"), "sequence": ("sequence", "queries", "keys")}


def _stream(x: Tensor, heads: int) -> dict[str, int]:
    return {"sequence": x.shape[-2], "heads": heads, "d_model": x.shape[-1], "d_head": x.shape[-1] // heads}


def same_axes(name: str) -> tuple[str, ...]:
    """The axes a declared support's name stands for: a head size is d_k and d_v in attention."""
    return _SAME_AXES.get(name, (name,))


def nearest_supported(value: int, allowed: Any) -> int:
    """The smallest supported size that is no smaller, else the largest there is."""
    if isinstance(allowed, Mapping):
        step = allowed.get("multiple_of", 1)
        return -(-value // step) * step
    return min((each for each in allowed if each >= value), default=max(allowed))


def beyond_support(operator: "Operator", arguments: Sequence[Any], supports: Mapping[str, Any]) -> str:
    """What of these arguments lies outside a declared support, in words; empty where nothing does."""
    given = arguments[:-1] if operator.optional and arguments[-1] is None else arguments
    measured = _MEASURES.get(operator.name, lambda *rest: {})(*given) | {"axes": given[0].ndim}
    for name, allowed in supports.items():
        for axis in same_axes(name):
            if axis in measured and nearest_supported(measured[axis], allowed) != measured[axis]:
                return f"{axis} = {measured[axis]}"
    kind = _mask_kind(arguments[-1]) if operator.name == "scaled_dot_product_attention" else ""
    return f"a mask of the kind {kind!r}" if kind and kind not in supports.get("mask", (kind,)) else ""


def _mask_kind(mask: Tensor | None) -> str:
    if mask is None:
        return "none"
    if bool(mask.all()):
        return "all"
    return "causal" if torch.equal(mask, torch.ones_like(mask).tril()) else "random"


def fresh(value: Any, device: str = "cpu") -> Any:
    """A copy that shares no memory with the original and keeps its strides, its offset and what is expanded."""
    if isinstance(value, Tensor):
        if value.device.type != torch.device(device).type:
            return fresh(value).to(device)
        if value.is_contiguous() and value.storage_offset() == 0:
            return value.detach().clone()
        storage = value.detach().untyped_storage().clone()
        return value.new_empty(0).set_(storage, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, Mapping):
        return {name: fresh(item, device) for name, item in value.items()}
    return value


def _distinct(value: Any) -> Any:
    """Tensors of the same shapes, no entry of which is another; only floating-point ones change."""
    if isinstance(value, Mapping):
        return {name: _distinct(item) for name, item in value.items()}
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    count = torch.arange(1, value.numel() + 1, dtype=torch.float64) * (1 + value.ndim / 7)
    return count.sin().reshape(value.shape).to(value.dtype)


def _floating(arguments: Sequence[Any], names: Sequence[str]) -> dict[str, Tensor]:
    """Every floating-point tensor among the arguments by name; one in a dict goes by "weights['ln1.weight']"."""
    found: dict[str, Any] = {}
    for name, value in zip(names, arguments, strict=False):
        if isinstance(value, Mapping):
            found |= {f"{name}[{key!r}]": item for key, item in value.items()}
        else:
            found[name] = value
    return {n: item for n, item in found.items() if isinstance(item, Tensor) and item.is_floating_point()}


def unchanged(handed: Sequence[Any], given: Sequence[Any], names: Sequence[str]) -> None:
    """What was handed to an implementation is afterwards bit for bit what was given.

    Raises:
        Violation: names the argument that changed.
    """
    for name, after, before in zip(names, handed, given, strict=False):
        if isinstance(before, Mapping):
            if list(after) != list(before):
                raise Violation(f"it changed the keys of its argument {name}", kind=f"changed {name}")
            unchanged(list(after.values()), list(before.values()), [f"{name}[{key!r}]" for key in before])
        elif isinstance(before, Tensor) and not _same_bits(after.cpu(), before):
            evidence = Evidence(after.detach().cpu(), before)
            raise Violation(f"it changed its argument {name}", kind="changed", evidence=evidence)


def _same_bits(after: Tensor, before: Tensor) -> bool:
    if after.shape != before.shape or after.dtype != before.dtype:
        return False
    return torch.equal(after.nan_to_num(), before.nan_to_num())


def to_numpy(value: Any) -> Any:
    """Arguments as the oracle takes them: float64, integer and boolean arrays; dicts of them; the rest as it is."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.double() if value.is_floating_point() else value).numpy()
    if isinstance(value, Mapping):
        return {name: to_numpy(item) for name, item in value.items()}
    return value


def result_dtype(arguments: Sequence[Any]) -> torch.dtype:
    """The dtype a result must have: that of the first floating-point tensor among the arguments."""
    for value in arguments:
        for tensor in value.values() if isinstance(value, Mapping) else [value]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                return tensor.dtype
    raise TypeError("no floating-point tensor among the arguments")


@dataclass(eq=False)
class Call:
    """A recorded call: copies of what was given, the surroundings, and what came of it.

    Args:
        arguments: of the plain signature.
        requires_grad: whether floating-point arguments required gradients.
        grad_mode: whether torch recorded a graph.
        seed: that of torch's global random generator.
        cotangent: where gradients were asked for.
        output: None where it raised, or returned something that is not the result's type, shape, dtype or device.
        gradients: by name, those that arrived.
    """

    arguments: tuple[Any, ...]
    requires_grad: bool
    grad_mode: bool
    seed: int
    cotangent: Tensor | None = None
    output: Output | None = None
    gradients: Mapping[str, Output] = field(default_factory=dict)


@dataclass
class Checked:
    """An implementation's operator as a clause calls it.

    Each call hands over fresh copies; what is raised becomes a violation; the result's type, shape, dtype and device
    are judged before its values; and the output carries the error its operator may have on those inputs.

    Args:
        operator: which one.
        function: of the plain signature.
        conventions: declared by the implementation; the oracle follows them.
        observe: told every err/bound.
        device: where the arguments lie; outputs come back to the CPU.
        supports: the part of the domain the implementation declares.
        requires_grad: whether floating-point arguments require gradients.
        handed: the copies of the last call, as the implementation left them.
        handed_cotangent: the copy of the last cotangent, as backward left it.
        calls: where it is a list, every call is recorded in it.
        names_conventions: whether `naming` looks for undeclared choices, which takes longer than the clause.
    """

    operator: Operator
    function: Callable[..., Any]
    conventions: Mapping[str, str] = field(default_factory=dict)
    observe: Callable[[float], None] = lambda ratio: None
    device: str = "cpu"
    supports: Mapping[str, Any] = field(default_factory=dict)
    requires_grad: bool = False
    handed: tuple[Any, ...] = ()
    handed_cotangent: Tensor | None = None
    calls: list[Call] | None = None
    names_conventions: bool = True

    def __call__(self, *arguments: Any) -> Output:
        """Call it.

        Raises:
            Raised: the implementation raised.
            Violation: it returned something that is not the result's type, shape, dtype or device.
            NotJudged: the arguments lie outside the support it declares.
        """
        floating = self._hand_over(arguments)
        for tensor in floating.values() if self.requires_grad else ():
            tensor.requires_grad_()
        call = self._recorded(arguments)
        result = self._called()
        self._judge(result, arguments)
        call.output = self._output(result, lambda: self._error(arguments))
        return call.output

    def _output(self, raw: Tensor, error: Callable[[], Tensor]) -> Output:
        rounds_products = self.conventions.get("accumulation", "full") != "full"
        return Output(raw, error, self.observe, rounds_products)

    def gradients(self, arguments: Sequence[Any], cotangent: Tensor) -> dict[str, Output]:
        """The gradient of sum(cotangent * output) with respect to every floating-point argument, by one call forward
        and one backward; the entry of a dict of weights goes by a name like "weights['ln1.weight']".

        Only those that arrive: an implementation may copy what it is given, and need not be differentiable at all.

        Raises:
            Raised: backward raised.
            Violation: the call returned something that is not the result's type, shape, dtype or device.
            NotJudged: the arguments lie outside the support it declares.
        """
        leaves = {name: tensor.requires_grad_() for name, tensor in self._hand_over(arguments).items()}
        handed = self.handed_cotangent = fresh(cotangent, self.device)
        call = self._recorded(arguments, cotangent)
        try:
            with torch.enable_grad():
                result = self._called()
        except Raised:  # its forward pass is judged without gradients
            return {}
        self._judge(result, arguments)
        call.gradients = self._with_bounds(_arrived(result, leaves, handed), arguments, cotangent)
        return call.gradients

    def _with_bounds(
        self, gradients: Mapping[str, Tensor], arguments: Sequence[Any], cotangent: Tensor
    ) -> dict[str, Output]:
        @cache
        def bounds() -> dict[str, tuple[np.ndarray, np.ndarray]]:
            numbers, dtype = tuple(map(to_numpy, arguments)), _dtype_name(result_dtype(arguments))
            return bounded_gradients(self.operator.name, numbers, to_numpy(cotangent), dtype, self.conventions)

        def output(name: str) -> Output:
            return Output(gradients[name], lambda: _to_torch(bounds()[name][1]), self.observe)

        return {name: output(name) for name in gradients}

    def exact_gradients(self, arguments: Sequence[Any], cotangent: Tensor) -> dict[str, Tensor]:
        """The exact gradients in float64, by the names of `gradients`."""
        numbers = tuple(map(to_numpy, arguments))
        found = exact_gradients(self.operator.name, numbers, to_numpy(cotangent), self.conventions)
        return {name: _to_torch(gradient) for name, gradient in found.items()}

    @contextmanager
    def naming(self, *arguments: Any, cotangent: Tensor | None = None) -> Iterator[None]:
        """Where a comparison inside fails, but the result for these arguments, or its gradients where a cotangent is
        given, are right under other conventions than those declared, say which.

        Raises:
            Violation: names those choices and how to declare them; else what the comparison raised.
        """
        try:
            yield
        except Violation:
            choices = self._choices_of(arguments, cotangent) if self.names_conventions else {}
            if not choices:
                raise
            words = " and ".join(_CHOICES[choice] for choice in choices.values())
            options = " ".join(f"--convention {name}={choice}" for name, choice in choices.items())
            message = f"this is {words}; if intended, declare spec_lm_conventions = {choices} or {options}"
            raise Violation(message, kind=f"convention {', '.join(choices.values())}") from None

    def _choices_of(self, arguments: tuple[Any, ...], cotangent: Tensor | None) -> dict[str, str]:
        """The undeclared choices under which the result is right, as few as will do; none where it is right as it is,
        or wrong under all, or right by a coincidence of the values, which smallest counterexamples have."""
        again = replace(self, calls=None, observe=lambda ratio: None)
        if (raw := again._raw_result(arguments, cotangent)) is None:
            return {}
        for choices in sorted(self._undeclared(), key=len):
            declared = replace(again, conventions={**self.conventions, **choices})
            if declared._explains(raw, arguments, cotangent):
                return choices if choices and declared._explains_other_values(arguments, cotangent) else {}
        return {}

    def _explains_other_values(self, arguments: tuple[Any, ...], cotangent: Tensor | None) -> bool:
        others = tuple(_distinct(value) for value in arguments)
        cotangent = None if cotangent is None else _distinct(cotangent)
        raw = self._raw_result(others, cotangent)
        return raw is not None and self._explains(raw, others, cotangent)

    def _raw_result(self, arguments: tuple[Any, ...], cotangent: Tensor | None) -> Tensor | Mapping[str, Tensor] | None:
        """What a call returns, or its gradients where a cotangent is given; None where it breaks off."""
        try:
            if cotangent is None:
                return self(*arguments).raw
            return {name: output.raw for name, output in self.gradients(arguments, cotangent).items()}
        except Violation:
            return None

    def _explains(
        self, raw: Tensor | Mapping[str, Tensor], arguments: tuple[Any, ...], cotangent: Tensor | None
    ) -> bool:
        try:
            if isinstance(raw, Tensor):
                close(Output(raw, lambda: self._error(arguments)), self.exact(*arguments))
            elif cotangent is not None:
                exact = self.exact_gradients(arguments, cotangent)
                for name, gradient in self._with_bounds(raw, arguments, cotangent).items():
                    close(gradient, exact[name])
        except Violation:
            return False
        return True

    def _undeclared(self) -> Iterator[dict[str, str]]:
        """Every combination of choices that differ from those declared, the empty one first."""
        names = FOLLOWED.get(self.operator.name, {})
        declared = {name: self.conventions.get(name, CONVENTIONS[name][0]) for name in names}
        for chosen in product(*(CONVENTIONS[name] for name in names)):
            yield {n: choice for n, choice in zip(names, chosen, strict=True) if choice != declared[n]}

    def exact(self, *arguments: Any) -> Tensor:
        """The oracle's float64 values on the same inputs."""
        return torch.from_numpy(exact_value(self.operator.name, tuple(map(to_numpy, arguments)), self.conventions))

    def _hand_over(self, arguments: Sequence[Any]) -> dict[str, Tensor]:
        """Make the copies for one call; give those of floating-point tensors, by name."""
        if self.supports and (outside := beyond_support(self.operator, arguments, self.supports)):
            raise NotJudged(f"it needs {outside}, which lies outside the declared support")
        self.handed = tuple(fresh(value, self.device) for value in arguments)
        return _floating(self.handed, self.operator.parameters)

    def _recorded(self, arguments: Sequence[Any], cotangent: Tensor | None = None) -> Call:
        kept = tuple(arguments) if self.calls is None else tuple(map(fresh, arguments))
        call = Call(kept, self.requires_grad, torch.is_grad_enabled(), torch.initial_seed(), cotangent)
        if self.calls is not None:
            self.calls.append(call)
        return call

    def _called(self) -> Any:
        given = self.handed[:-1] if self.operator.optional and self.handed[-1] is None else self.handed
        return _guarded(self.function, *given)

    def _judge(self, result: Any, arguments: Sequence[Any]) -> None:
        if not isinstance(result, Tensor):
            raise Violation(f"returned {_kind_of(result)}, expected a torch.Tensor", kind="type")
        given = arguments[:-1] if self.operator.optional and arguments[-1] is None else arguments
        shape, dtype = self.operator.shape(*given), result_dtype(arguments)
        if tuple(result.shape) != shape:
            raise Violation(f"returned shape {tuple(result.shape)}, expected {shape}", kind="shape")
        if result.dtype != dtype:
            raise Violation(f"returned {result.dtype}, expected {dtype}, the dtype of its input", kind="dtype")
        device = next(value.device for value in self.handed if isinstance(value, Tensor))
        if result.device.type != device.type:
            raise Violation(f"returned a tensor on {result.device}, expected {device}", kind="device")

    def _error(self, arguments: tuple[Any, ...]) -> Tensor:
        dtype = _dtype_name(result_dtype(arguments))
        return _to_torch(bounded(self.operator.name, tuple(map(to_numpy, arguments)), dtype, self.conventions)[1])


def _guarded(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call what belongs to an implementation.

    Raises:
        Raised: it raised.
        OutOfMemory: its memory ran out.
    """
    process = os.getpid()
    try:
        return function(*arguments, **options)
    except BaseException as exception:
        if isinstance(exception, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            raise  # the user's; in a process that ignores interrupts it is the implementation's
        where = _where(exception)
        traceback.clear_frames(exception.__traceback__)  # what its functions held, perhaps all memory, is free again
        if is_out_of_memory(exception):
            raise OutOfMemory(exception) from None
        raise Raised(exception, where) from exception
    finally:
        if os.getpid() != process:  # the call forked, and its copy of this process came back too: it ends here
            os._exit(0)


def _arrived(result: Tensor, leaves: Mapping[str, Tensor], cotangent: Tensor) -> dict[str, Tensor]:
    """The gradients that arrive at the leaves; none where a step of the graph has no backward."""
    if not result.requires_grad or not leaves:
        return {}
    try:
        found = _guarded(torch.autograd.grad, result, tuple(leaves.values()), cotangent, allow_unused=True)
    except Raised as raised:
        if any(reason in str(raised.exception) for reason in _UNDIFFERENTIABLE):
            return {}
        raise
    return {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}


# What PyTorch says of a step without a backward: an operation, a function, a view that was taken under no_grad.
_UNDIFFERENTIABLE = ("is not implemented", "must implement either the backward", "does not require grad")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _to_torch(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


# What a reader calls a choice of a convention.
_CHOICES = {
    "neighbors": "the pairing of neighbors (2i, 2i + 1)",
    "halves": "the half-split pairing (i, i + d_k/2)",
    "counterclockwise": "the rotation by the positive angle",
    "clockwise": "the rotation by the negative angle",
    "zeros": "zeros for a query that sees no key",
    "nan": "NaN for a query that sees no key",
    "uniform": "the mean of all values for a query that sees no key",
}


def _kind_of(result: Any) -> str:
    return "None" if result is None else f"a {type(result).__module__}.{type(result).__qualname__}"


def _where(exception: BaseException) -> str:
    """The innermost line of the exception's own traceback, without the folder; none where that is the machine's."""
    frames = list(traceback.walk_tb(exception.__traceback__))
    if len(frames) < 2:
        return ""
    last, line = frames[-1]
    folder, _, name = last.f_code.co_filename.rpartition("/")
    return "" if folder == os.path.dirname(__file__) else f" ({name}:{line})"
