"""Hugging Face's Llama with its eager attention."""

from . import llama


def transformer_lm(*arguments):
    before, llama.ATTENTION = llama.ATTENTION, "eager"
    try:
        return llama.transformer_lm(*arguments)
    finally:
        llama.ATTENTION = before
