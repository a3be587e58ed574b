"""y = W[id], with W (vocab, d_model): one row looked up for each id."""

import torch

from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.strategies import BLOCK_SIZES, LONG_SIZES, NONZERO, NotJudged, one_of, tensors, token_ids
from spec_lm.conformance.tolerance import bit_equal, refuses

SOURCE = "adapter interface: Building blocks, embedding"

_IDS = {"ids": token_ids()}
_W = {"weight": tensors("vocab d_model", (*NONZERO, "large integers", "huge"))}


@clause("embedding", given(**_IDS, **_W), catches="a table in another dtype, ids off by one", source=SOURCE)
def rows_are_copied_exactly(embedding, ids, weight):
    """Each id gives its row of the weight, bit for bit, repeated ids too."""
    bit_equal(embedding(ids, weight), weight[ids])


@clause("embedding", given(**_IDS, **_W), catches="a factor sqrt(d_model)", source=SOURCE)
def scaled_by_nothing(embedding, ids, weight):
    """Rows are scaled by nothing, whatever vocab and d_model: a weight of ones gives ones."""
    bit_equal(embedding(ids, torch.ones_like(weight)), 1.0)


@clause("embedding", given(**_IDS, **_W), catches="id 0 taken for padding", source=SOURCE)
def id_zero_is_not_special(embedding, ids, weight):
    """Id 0 gives the first row, like any other id its own."""
    bit_equal(embedding(torch.zeros_like(ids), weight), weight[0])


@clause("embedding", given(**_IDS, **_W), catches="an id that is special or shifted", source=SOURCE)
def renumbering_the_vocabulary_changes_nothing(embedding, ids, weight):
    """Reordering the rows of the weight and renumbering the ids alike changes nothing."""
    renumbered = weight.shape[0] - 1 - ids
    bit_equal(embedding(renumbered, weight.flip(0)), embedding(ids, weight))


@clause(
    "embedding",
    given(**_IDS, **_W, beyond=one_of(0, 1, 5, 90), at=one_of(0, 1, 2, 3)),
    catches="ids clamped, wrapped around, or given zeros",
    enough=20,
    source="adapter interface, ids",
)
def ids_outside_are_refused(embedding, ids, weight, beyond, at):
    """An id of vocab or more is refused, wherever it stands among ids inside."""
    if embedding.device != "cpu":
        raise NotJudged("judged on the CPU only: elsewhere an id outside can end the process instead of raising")
    vocab = weight.shape[0]
    ids.view(-1)[at % ids.numel()] = vocab + beyond
    refuses(lambda: embedding(ids, weight), what=f"id {vocab + beyond} with a vocabulary of {vocab}")


@clause(
    "embedding",
    given(**_IDS, **_W),
    level="should",
    catches="the ids' memory is read as int64",
    source="practice: tokenizers and data files give int32 ids",
)
def int32_ids(embedding, ids, weight):
    """Ids may be int32 as well as int64."""
    bit_equal(embedding(ids.int(), weight), weight[ids])


@clause(
    "embedding",
    given(**_IDS, weight=tensors("vocab d_model", NONZERO)),
    level="should",
    cases={},
    dtype="float64",
    enough=10,
    catches="a table that is kept in float32",
    source="practice: float64 is used where accuracy is what matters",
)
def rows_are_copied_exactly_in_float64(embedding, ids, weight):
    """Where float64 is among the declared dtypes, all 53 bits are copied."""
    if "float64" not in embedding.supports.get("dtype", ()):
        raise NotJudged('it does not declare float64: spec_lm_supports = {"dtype": ["float32", "float64"]}')
    weight = weight / 3
    bit_equal(embedding(ids, weight), weight[ids])


@clause(
    "embedding",
    given(**_IDS, **_W, negative=one_of(1, 2), at=one_of(0, 1, 2, 3)),
    level="should",
    enough=20,
    catches="-1, which many give to padding, taken for the last row",
    source="practice: an id below 0 is a mistake upstream",
)
def negative_ids_are_refused(embedding, ids, weight, negative, at):
    """An id below 0 is refused; it does not count from the end."""
    if embedding.device != "cpu":
        raise NotJudged("judged on the CPU only: elsewhere an id outside can end the process instead of raising")
    ids.view(-1)[at % ids.numel()] = -negative
    refuses(lambda: embedding(ids, weight), what=f"id {-negative}")


@clause(
    "embedding",
    given(weight=tensors("vocab 1", ("numbered",))),
    sizes=LONG_SIZES,
    cases={f"vocab {size.vocab}": size.__eq__ for size in LONG_SIZES["embedding"]},
    level="should",
    dtypes=("float32", "float64"),
    enough=2,
    catches="ids by way of a narrow dtype: bfloat16 knows 257 numbers in a row, float16 2049, int16 32768",
    source="practice: vocabularies have 50000 entries and more",
)
def rows_of_a_large_table_are_found(embedding, weight):
    """In a table of tens of thousands of rows, each holding its own number, ids all over it find their own."""
    some = torch.cat([torch.arange(0, len(weight), 31), torch.arange(len(weight) - 31, len(weight))])
    bit_equal(embedding(some, weight), weight[some])


@clause(
    "embedding",
    given(ids=token_ids(), weight=tensors("vocab d_model", ("plain", *NONZERO))),
    sizes=BLOCK_SIZES,
    cases={f"{size.batch} ids, {size.d_model} columns": size.__eq__ for size in BLOCK_SIZES["embedding"]},
    level="should",
    enough=20,
    catches="the tail of a block of ids or of columns is dropped",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def reversing_ids_and_columns(embedding, ids, weight):
    """Whatever their numbers, reversing the ids and the columns of the weight reverses the rows and their entries."""
    whole = embedding(ids, weight)
    reversed_ids = embedding(ids.flip(-1), weight.flip(-1))
    bit_equal(reversed_ids, whole.map(lambda t: t.flip(-2, -1)))
