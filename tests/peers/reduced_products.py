"""Products in two to four parts, each rounded to the dtype of its factors before they are added in that dtype: what
graphics processors may do by default where factors have 16 bits."""

from .composed import operators_of
from .tf32_products import TF32

spec_lm_conventions = {"accumulation": "reduced"}
spec_lm_supports = {"dtype": ["bfloat16", "float16"]}


class Reduced(TF32):
    def product(self, a, b):
        terms = a.shape[-1]
        part = -(-terms // 4)
        starts = range(0, terms, part)
        partial = [a[..., start : start + part] @ b[..., start : start + part, :] for start in starts]
        return sum(partial[1:], start=partial[0])


globals().update(operators_of(Reduced()))
