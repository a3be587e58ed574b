"""The package's own fast implementation."""

from spec_lm.fused import *  # noqa: F403
