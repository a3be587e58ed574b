"""Who is measured: for each operator a function of the plain signature, or a module that is built once of the weights.

`spec-lm check spec_lm.bench.variants:fused` checks a variant as it is measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lm.bench.built import Built, as_function, leaves_of
from spec_lm.bench.cases import model_sizes
from spec_lm.bench.unchecked import unchecked
from spec_lm.conformance.declarations import DTYPES
from spec_lm.conformance.implementation import Implementation
from spec_lm.conformance.operators import OPERATORS
from spec_lm.reference import functional, modules


@dataclass(frozen=True)
class Variant:
    """An implementation to measure.

    Args:
        name: in tables.
        spec: as `spec-lm check` takes it.
        functions: of the plain signatures, by operator.
        builders: by operator, of the plain arguments; what they do is not timed (weights are loaded once).
        conventions: it declares.
        supports: it declares.
    """

    name: str
    spec: str
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    builders: Mapping[str, Callable[..., Built]] = field(default_factory=dict)
    conventions: Mapping[str, str] = field(default_factory=dict)
    supports: Mapping[str, Any] = field(default_factory=dict)

    def build(self, operator: str, arguments: tuple[Any, ...]) -> Built:
        """What to call on these arguments."""
        if operator in self.builders:
            return self.builders[operator](*arguments)
        return self.functions[operator], arguments, leaves_of(arguments)

    def has(self, operator: str) -> bool:
        """Whether it provides an operator."""
        return operator in self.builders or operator in self.functions

    def operators(self) -> dict[str, Any]:
        """As an implementation to check."""
        built = {name: as_function(builder) for name, builder in self.builders.items()}
        declared = {"spec_lm_conventions": self.conventions, "spec_lm_supports": self.supports}
        return {**self.functions, **built, **declared}


def of_implementation(implementation: Implementation) -> Variant:
    """The variant that a user names."""
    conventions, supports = implementation.conventions, implementation.supports
    return Variant(implementation.name, implementation.name, implementation.functions, {}, conventions, supports)


# ------------------------------------------------------------------------------------------------------------ built in


def names() -> list[str]:
    """Those that can be measured here."""
    return [name for name, (_, needs) in _VARIANTS.items() if not needs or find_spec(needs)]


def variant(name: str) -> Variant:
    """The built-in variant of a name."""
    return _VARIANTS[name][0]()


def __getattr__(name: str) -> Any:
    """A variant as an implementation, under its name."""
    if name in _VARIANTS:
        return variant(name).operators()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _named(name: str, functions: Mapping[str, Any], **options: Any) -> Variant:
    return Variant(name, f"{__name__}:{name}", functions, **options)


def _all_of(module: Any) -> dict[str, Callable[..., Any]]:
    return {name: getattr(module, name) for name in OPERATORS}


_ANY_DTYPE = {"dtype": list(DTYPES)}


def _reference() -> Variant:
    plain, home = unchecked()["spec_lm.reference.functional"], unchecked()["spec_lm.reference.modules"]
    builders = {"transformer_lm": _model_builder(home.TransformerLM)}
    return _named("reference", _all_of(plain), builders=builders, supports=_ANY_DTYPE)


def _reference_checked() -> Variant:
    builders = {"transformer_lm": _model_builder(modules.TransformerLM)}
    return _named("reference_checked", _all_of(functional), builders=builders, supports=_ANY_DTYPE)


def _fused() -> Variant:
    home = unchecked()["spec_lm.fused"]
    builders = {"transformer_lm": _model_builder(home.TransformerLM)}
    return _named("fused", _all_of(home), builders=builders, supports=_ANY_DTYPE)


def _model_builder(kind: type[nn.Module]) -> Callable[..., Built]:
    def build(
        token_ids: Tensor, weights: Mapping[str, Tensor], num_heads: int, theta: float, context_length: int
    ) -> Built:
        vocab, d_model, layers, d_ff = model_sizes(weights)
        head = weights["lm_head.weight"]
        sizes = vocab, context_length, d_model, layers, num_heads, d_ff, theta
        model = kind(*sizes, weights=weights, device=head.device, dtype=head.dtype)
        return model, (token_ids,), tuple(model.parameters())

    return build


def _matmul_attention() -> Variant:
    plain = unchecked()["spec_lm.reference.functional"]

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """The reference's equation, with `@` in the place of einsum."""
        scores = functional.upcast(query) @ functional.upcast(key).mT / sqrt(query.shape[-1])
        mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
        blind = ~mask.any(-1, keepdim=True)
        hidden = scores.masked_fill(~(mask | blind), -torch.inf)
        probabilities = plain.softmax(hidden, -1).masked_fill(blind, 0.0)
        return (probabilities @ functional.upcast(value)).to(query.dtype)

    return _named("matmul_attention", {"scaled_dot_product_attention": attention}, supports=_ANY_DTYPE)


def _one_projection() -> Variant:
    """The reference's attention with the weights of Q, K and V as one."""
    plain = unchecked()["spec_lm.reference.functional"]

    def attend(x: Tensor, w_qkv: Tensor, w_o: Tensor, heads: int, theta: float, limit: int, positions: Any) -> Tensor:
        query, key, value = (plain.split_heads(each, heads) for each in plain.linear(x, w_qkv).chunk(3, -1))
        if positions is None:
            functional.refuse_longer(x.shape[-2], limit, "max_seq_len")
            positions = torch.arange(x.shape[-2], device=x.device)
        query, key = (plain.rope(each, positions.unsqueeze(-2), theta, limit) for each in (query, key))
        mask = plain.causal_mask(x.shape[-2], x.device)
        return plain.linear(plain.merge_heads(plain.scaled_dot_product_attention(query, key, value, mask)), w_o)

    def build(
        x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, heads: int, theta: float, limit: int,
        positions: Tensor | None = None,
    ) -> Built:  # fmt: skip
        w_qkv = torch.cat((w_q, w_k, w_v))
        return attend, (x, w_qkv, w_o, heads, theta, limit, positions), (x, w_qkv, w_o)

    builders = {"multihead_self_attention_with_rope": build}
    return _named("one_projection", {}, builders=builders, supports=_ANY_DTYPE)


def _torch_functions() -> Variant:
    """PyTorch's functions, where there is one for an operator."""
    found: dict[str, Callable[..., Any]] = {
        "softmax": torch.softmax,
        "silu": F.silu,
        "linear": F.linear,
        "embedding": lambda token_ids, weight: F.embedding(token_ids, weight),
        "rmsnorm": lambda x, gain, eps: F.rms_norm(x, gain.shape, gain, eps),
        "scaled_dot_product_attention": F.scaled_dot_product_attention,
    }
    return _named("torch_functions", found, supports=_ANY_DTYPE)


def _llama(attention: str) -> Callable[[], Variant]:
    def built(
        token_ids: Tensor, weights: Mapping[str, Tensor], num_heads: int, theta: float, context_length: int
    ) -> Built:
        from transformers import LlamaForCausalLM

        from spec_lm.bench import llama

        functional.refuse_longer(token_ids.shape[-1], context_length, "context_length")
        config = llama.configuration(*llama.sizes_of(weights, num_heads, theta, context_length))
        config._attn_implementation = attention
        head = weights["lm_head.weight"]
        model: Any = LlamaForCausalLM(config)
        model.to(head.device, head.dtype).eval()
        model.load_state_dict(llama.state_of(weights, num_heads))

        def logits(ids: Tensor) -> Tensor:
            return model(ids).logits

        return logits, (token_ids,), tuple(model.parameters())

    def made() -> Variant:
        return _named(f"llama_{attention}", {}, builders={"transformer_lm": built}, supports=_ANY_DTYPE)

    return made


def _x_transformers() -> Variant:
    """Its attention and its feed-forward network; its model has another norm, so it is another equation."""

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Built:
        from x_transformers.attend import Attend

        attend = Attend(causal=False, flash=False).eval()
        if mask is not None:
            mask = mask.expand(*query.shape[:-1], key.shape[-2])  # of two axes it would be read as (batch, keys)
            mask = mask[:, None] if mask.ndim == 3 else mask

        def average(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if query.ndim == 3:  # as of one head
                return attend(query[:, None], key[:, None], value[:, None], mask=mask)[0][:, 0]
            return attend(query, key, value, mask=mask)[0]

        return average, (query, key, value), (query, key, value)

    def network(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Built:
        from x_transformers.x_transformers import FeedForward

        d_ff, d_model = w1.shape
        ratio: Any = d_ff / d_model
        made = FeedForward(d_model, mult=ratio, glu=True, swish=True, no_bias=True).to(x).eval()
        values = torch.cat([w3, w1]), w1.new_zeros(2 * d_ff), w2  # its first product has a bias all the same
        made.load_state_dict(dict(zip(made.state_dict(), values, strict=True)))
        return made, (x,), (x, *made.parameters())

    return _named(
        "x_transformers",
        {},
        builders={"scaled_dot_product_attention": attention, "swiglu": network},
        conventions={"all_masked": "uniform"},
        supports={"axes": [3, 4], "dtype": ["float32", "bfloat16", "float16"]},
    )


_VARIANTS: dict[str, tuple[Callable[[], Variant], str]] = {
    "reference": (_reference, ""),
    "reference_checked": (_reference_checked, ""),
    "matmul_attention": (_matmul_attention, ""),
    "one_projection": (_one_projection, ""),
    "fused": (_fused, ""),
    "torch_functions": (_torch_functions, ""),
    "llama_eager": (_llama("eager"), "transformers"),
    "llama_sdpa": (_llama("sdpa"), "transformers"),
    "x_transformers": (_x_transformers, "x_transformers"),
}
