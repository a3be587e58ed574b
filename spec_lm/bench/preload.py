"""What the processes that check variants have behind them: the variants, and the peers that are installed."""

from contextlib import suppress
from importlib import import_module

from spec_lm.bench import variants  # noqa: F401

for peer in ("transformers.models.llama.modeling_llama", "x_transformers.x_transformers"):
    with suppress(Exception):  # its own row will say what is wrong with it
        import_module(peer)
