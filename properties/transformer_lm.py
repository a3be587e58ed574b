"""W_head RMSNorm(Block_n(.. Block_1(Embedding(ids)))): for every token, an unnormalized logit of each possible next.

A layer whose W_O and W_2 are zero adds nothing to the stream: so single layers, and the two ends, are seen alone.
"""

import hypothesis.strategies as st
import numpy as np
import torch

from spec_lm.conformance import oracle
from spec_lm.conformance.clause import clause, given
from spec_lm.conformance.operators import to_numpy
from spec_lm.conformance.strategies import (
    BLOCK_SIZES,
    THETAS,
    IdsRecipe,
    NotJudged,
    Size,
    WeightsRecipe,
    one_of,
    size,
    token_ids,
    weights,
)
from spec_lm.conformance.tolerance import bit_equal, close, refuses

LM = "transformer_lm"
SOURCE = "course notes: Transformer language model"
EMBEDDING, FINAL_GAIN, HEAD = "token_embeddings.weight", "ln_final.weight", "lm_head.weight"
DEEP = 12

_MODEL = {"heads": size("heads"), "theta": one_of(*THETAS), "context": size("context_length")}
_DEEP_MODEL = {**_MODEL, "theta": one_of(10000.0)}
_LM = {"ids": token_ids("*batch sequence"), "weights": weights(("halves",)), **_MODEL}


def _sized(batch, sequence, heads, d_head, vocab, layers=1, context_length=16):
    sizes = {"batch": (batch,), "sequence": sequence, "heads": heads, "d_head": d_head, "vocab": vocab}
    return Size(**sizes, d_model=heads * d_head, d_ff=3, layers=layers, context_length=context_length)


# Axes that are equally long, so that only their order tells them apart, and lone tokens in a batch.
_COINCIDING = (_sized(3, 1, 2, 2, 4), _sized(2, 2, 2, 2, 2, 2), _sized(3, 3, 3, 2, 3, 3), _sized(4, 1, 1, 4, 4))
_SQUARE = tuple(_sized(2, 3, heads, 2, 2 * heads, 2) for heads in (1, 2, 3))
_LARGE = (_sized(1, 3, 1, 2, 2049), _sized(1, 2, 1, 2, 50257))
# Positions that neither int8 nor bfloat16 can tell apart.
_DISTANT = (_sized(1, 260, 1, 2, 3, context_length=512),)


def _of_size(size):
    """What a required case is called."""
    return f"{size.batch} of {size.sequence} tokens, {size.heads} heads, {size.layers} layers, vocab {size.vocab}"


def _several_tokens(size):
    return size.sequence > 1


def _several_layers(size):
    return size.layers > 1


def _deep_weights(domain, name):
    """The weights of twelve layers, from few seeds: a call takes twelve times as long."""

    def recipe(size, seed):
        return WeightsRecipe(size.d_model, size.d_ff, "halves", seed, domain.dtype, DEEP, size.vocab)

    return st.builds(recipe, domain.sizes, st.integers(0, 1))


def _rising_ids(domain, name):
    return st.builds(lambda size: IdsRecipe(size.axes("*batch sequence"), size.vocab, "rising", 0), domain.sizes)


def _silenced(weights, layers=None):
    """The weights with these layers (by default all) adding nothing to the stream: their W_O and W_2 are zero."""
    ends = ("attn.output_proj.weight", "ffn.w2.weight")

    def silent(name):
        return name.endswith(ends) and (layers is None or int(name.split(".")[1]) in layers)

    return {name: weight * 0 if silent(name) else weight for name, weight in weights.items()}


def _only(weights, layers):
    """The weights of a model that has these layers alone, numbered from 0."""
    ends = {name: weight for name, weight in weights.items() if not name.startswith("layers.")}
    for new, old in enumerate(layers):
        prefix = f"layers.{old}."
        held = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        ends |= {f"layers.{new}.{name}": weight for name, weight in held.items()}
    return ends


def _without_layers(ids, weights):
    """W_head RMSNorm(Embedding(ids)) in float64."""
    ids, weights = to_numpy(ids), to_numpy(weights)
    stream = oracle.embedding(ids, weights[EMBEDDING])
    return oracle.linear(oracle.rmsnorm(stream, weights[FINAL_GAIN], oracle.BLOCK_EPS), weights[HEAD])


def _renumbering_commutes(lm, ids, weights, *rest):
    last = len(weights[EMBEDDING]) - 1
    renumbered = {**weights, EMBEDDING: weights[EMBEDDING].flip(0), HEAD: weights[HEAD].flip(0)}
    logits = lm(ids, weights, *rest)
    close(lm(last - ids, renumbered, *rest), logits.map(lambda t: t.flip(-1)))


def _twice(got, once):
    """got is exactly twice once; float16 rounds what is below its smallest normal number."""
    compare = close if got.raw.dtype == torch.float16 else bit_equal
    compare(got, once * 2, says="doubling a row of lm_head does not double its logit")


@clause(
    LM,
    given(**_LM),
    cases={},
    catches="a softmax or logarithm at the end, a bias, logits centered or capped",
    source=SOURCE,
)
def unnormalized_logits(lm, ids, weights, heads, theta, context):
    """A logit is one row of lm_head times the final norm's output and no more: a row of zeros gives exactly 0, a
    doubled row doubles its logit exactly, and changing a row moves no other logit."""
    head = weights[HEAD].clone()
    head[0], head[-1] = head[0] * 0, head[-1] * 2
    logits = lm(ids, weights, heads, theta, context)
    changed = lm(ids, {**weights, HEAD: head}, heads, theta, context)
    bit_equal(changed[..., 0], 0.0, says="a row of zeros in lm_head does not give the logit 0")
    bit_equal(changed[..., 1:-1], logits[..., 1:-1], says="changing rows of lm_head moved another row's logit")
    _twice(changed[..., -1], logits[..., -1])


@clause(
    LM,
    given(**_LM, scale=one_of(16.0, 0.0625)),
    cases={},
    catches="no final norm, or a norm after the head",
    source=SOURCE,
)
def final_norm_before_the_head(lm, ids, weights, heads, theta, context, scale):
    """The stream passes RMSNorm with the gain ln_final, then lm_head: where no layer adds anything, the logits are
    W_head RMSNorm(Embedding(ids)), however far the rms of the embedding is from 1."""
    quiet = _silenced({**weights, EMBEDDING: weights[EMBEDDING] * scale})
    close(lm(ids, quiet, heads, theta, context), _without_layers(ids, quiet))


@clause(LM, given(**_LM), cases={}, catches="1e-6 or 1e-8; an embedding scaled by sqrt(d_model)", source=SOURCE)
def eps_is_1e_5(lm, ids, weights, heads, theta, context):
    """The final norm's eps is 1e-5, and the embedding enters unscaled: both show where its mean square is below eps."""
    quiet = _silenced({**weights, EMBEDDING: weights[EMBEDDING] * 2.0**-10})
    close(lm(ids, quiet, heads, theta, context), _without_layers(ids, quiet))


@clause(
    LM,
    given(**_LM, number=st.integers(0, 15)),
    where=_several_layers,
    cases={},
    catches="all layers share one set of weights; the last layer is skipped",
    source=SOURCE,
)
def each_layer_has_its_own_weights(lm, ids, weights, heads, theta, context, number):
    """Layer i uses the weights layers.{i} and no others: where the other layers add nothing, the model is, bit for bit,
    the model of one layer that holds them."""
    layers = range(len({name.split(".")[1] for name in weights if name.startswith("layers.")}))
    chosen = number % len(layers)
    alone = lm(ids, _only(weights, [chosen]), heads, theta, context)
    bit_equal(lm(ids, _silenced(weights, set(layers) - {chosen}), heads, theta, context), alone)


@clause(
    LM,
    given(
        ids=_rising_ids, weights=_deep_weights, pair=one_of((0, 1), (2, 10), (1, 10), (3, 11), (10, 11)), **_DEEP_MODEL
    ),
    where=lambda s: s.batch == (2,) and s.layers > 1,
    cases={},
    catches="layers sorted by name (10 before 2) or in reverse order; layers.1 mistaken for layers.10",
    source=SOURCE,
)
def layers_run_in_order(lm, ids, weights, pair, heads, theta, context):
    """Layers run in the order of their numbers, 2 before 10 too: where only two of twelve add anything, the model is,
    bit for bit, the model of these two layers in their order."""
    two = _only(weights, pair)
    logits = lm(ids, two, heads, theta, context)
    with lm.naming(ids, two, heads, theta, context):
        close(logits, lm.exact(ids, two, heads, theta, context), says="two layers do not run in their order")
    others = set(range(DEEP)) - set(pair)
    twelve = lm(ids, _silenced(weights, others), heads, theta, context)
    bit_equal(twelve, logits, says="the two layers of twelve that add anything do not run in their order")


@clause(
    LM,
    given(**_LM, number=st.integers(0, 15)),
    where=_several_layers,
    cases={},
    catches="something between the layers: a norm, a scale, an embedding of the layer's number",
    source=SOURCE,
)
def a_layer_that_adds_nothing_can_be_removed(lm, ids, weights, heads, theta, context, number):
    """Nothing but the stream passes from layer to layer: one whose W_O and W_2 are zero can be removed, and the logits
    stay bit for bit as they were."""
    layers = range(len({name.split(".")[1] for name in weights if name.startswith("layers.")}))
    chosen = number % len(layers)
    rest = lm(ids, _only(weights, [layer for layer in layers if layer != chosen]), heads, theta, context)
    bit_equal(lm(ids, _silenced(weights, {chosen}), heads, theta, context), rest)


@clause(
    LM,
    given(**_LM),
    level="should",
    cases={},
    catches="a depth that is read from the first layer's weights",
    source="practice: a model without layers is where ablations over depth start",
)
def zero_layers(lm, ids, weights, heads, theta, context):
    """A model of no layers gives W_head RMSNorm(Embedding(ids))."""
    close(lm(ids, _only(weights, []), heads, theta, context), _without_layers(ids, weights))


@clause(
    LM,
    given(**_LM),
    cases={},
    catches="an id that is special; rows of the embedding or the head mixed up",
    source=SOURCE,
)
def vocabulary_permutation_commutes(lm, ids, weights, heads, theta, context):
    """The vocabulary has no order: renumbering the ids, and the rows of the embedding and of lm_head alike, renumbers
    the logits and changes nothing else."""
    _renumbering_commutes(lm, ids, weights, heads, theta, context)


@clause(LM, given(**_LM), cases={}, catches="the head is the embedding, or overwrites it", source=SOURCE)
def head_is_not_tied_to_the_embedding(lm, ids, weights, heads, theta, context):
    """lm_head and the embedding are two weights: changing the embedding of an absent token changes no logit, changing
    a present token's row of lm_head changes no logit but its own."""
    ids = ids // 2  # the last id is now absent
    table, head, present = weights[EMBEDDING].clone(), weights[HEAD].clone(), int(ids.flatten()[0])
    table[-1], head[present] = table[-1] * 2, head[present] * 2
    others = [row for row in range(len(head)) if row != present]
    changed = lm(ids, {**weights, EMBEDDING: table, HEAD: head}, heads, theta, context)
    bit_equal(changed[..., others], lm(ids, weights, heads, theta, context)[..., others])


@clause(
    LM,
    given(**_LM, other=token_ids("*batch sequence"), cut=st.integers(0, 15)),
    where=_several_tokens,
    catches="no causal mask in some layer",
    source=SOURCE,
)
def causal_independence_from_future_tokens(lm, ids, weights, heads, theta, context, other, cut):
    """Changing later tokens leaves the logits of earlier ones bit for bit as they were."""
    kept = 1 + cut % (ids.shape[-1] - 1)
    changed = torch.cat((ids[..., :kept], other[..., kept:]), -1)
    after = lm(changed, weights, heads, theta, context)
    bit_equal(after[..., :kept, :], lm(ids, weights, heads, theta, context)[..., :kept, :])


@clause(
    LM,
    given(**_LM, cut=st.integers(0, 15)),
    where=_several_tokens,
    catches="anything that depends on the sequence's length",
    source=SOURCE,
)
def prefix_gives_the_first_logits(lm, ids, weights, heads, theta, context, cut):
    """The logits for a prefix are the first logits for the whole sequence."""
    kept = 1 + cut % (ids.shape[-1] - 1)
    prefix = lm(ids[..., :kept], weights, heads, theta, context)
    close(prefix, lm(ids, weights, heads, theta, context)[..., :kept, :])


@clause(
    LM,
    given(ids=_LM["ids"], weights=_LM["weights"], heads=size("heads"), theta=one_of(*THETAS), cut=st.integers(0, 15)),
    where=_several_tokens,
    cases={},
    catches="over-long input is truncated, or gets positions beyond the table",
    enough=20,
    source=SOURCE,
)
def over_long_input_is_refused(lm, ids, weights, heads, theta, cut):
    """A sequence longer than context_length is refused."""
    sequence = ids.shape[-1]
    context = sequence - 1 - cut % (sequence - 1)
    refuses(lambda: lm(ids, weights, heads, theta, context), what=f"a sequence of {sequence} in a context of {context}")


@clause(LM, given(**_LM), cases={}, catches="only one length is accepted, or positions are stretched", source=SOURCE)
def context_length_is_only_a_limit(lm, ids, weights, heads, theta, context):
    """Any sequence up to context_length is accepted, and the limit takes no part in the logits."""
    filled = lm(ids, weights, heads, theta, ids.shape[-1])
    close(lm(ids, weights, heads, theta, context), filled)


@clause(
    LM,
    given(**_LM),
    cases={},
    catches="weights that are popped from the dict or scaled in place",
    source="adapter interface",
)
def the_same_weights_serve_twice(lm, ids, weights, heads, theta, context):
    """The weight dict as one call leaves it gives the next call the same logits."""
    logits = lm(ids, weights, heads, theta, context)
    left = lm.handed[1]
    bit_equal(len(left), len(weights), says="a call removed weights from the dict, or added some")
    close(lm(ids, left, heads, theta, context), logits, says="the second call with the same weights differs")


@clause(
    LM,
    given(**_LM, beyond=one_of(0, 1, 5), at=st.integers(0, 15)),
    level="should",
    cases={},
    enough=20,
    catches="an id outside that is clamped, wrapped, or given zeros",
    source="course notes: Building blocks, embedding",
)
def id_outside_the_vocabulary_is_refused(lm, ids, weights, heads, theta, context, beyond, at):
    """An id of the vocabulary's size or more is refused."""
    if lm.device != "cpu":
        raise NotJudged("an index outside a table would end the device's context, and this run with it")
    vocab = len(weights[EMBEDDING])
    ids.view(-1)[at % ids.numel()] = vocab + beyond
    refuses(lambda: lm(ids, weights, heads, theta, context), what=f"id {vocab + beyond} of a vocabulary of {vocab}")


@clause(
    LM,
    given(**_LM),
    level="should",
    cases={},
    enough=20,
    catches="a head size that is rounded down, or heads of unequal size",
    source="course notes: Causal multi-head self-attention, d_k = d_model / h",
)
def refuses_a_number_of_heads_that_does_not_divide(lm, ids, weights, heads, theta, context):
    """A number of heads that does not divide d_model is refused."""
    d_model = weights[EMBEDDING].shape[1]
    number = next(number for number in range(2, d_model + 2) if d_model % number)
    refuses(lambda: lm(ids, weights, number, theta, context), what=f"num_heads {number} for d_model {d_model}")


# ---------------------------------------------------------------------------------------------------- whatever the size


@clause(
    LM,
    given(**_LM),
    sizes=BLOCK_SIZES,
    cases={_of_size(size): size.__eq__ for size in BLOCK_SIZES[LM]},
    level="should",
    enough=20,
    catches="a window; a mask made for a fixed length, or for whole blocks; tokens beyond a block left out",
    source="practice: kernels work in blocks, and lengths are not multiples of them",
)
def running_means_at_any_length(lm, ids, weights, heads, theta, context):
    """However many tokens there are, with W_Q and W_2 zero a model of one layer adds to each embedding W_O W_V times
    the mean of the normalized embeddings up to it, before the final norm and the head."""
    ends = ("attn.q_proj.weight", "ffn.w2.weight")
    weights = {name: weight * 0 if name.endswith(ends) else weight for name, weight in weights.items()}
    held, layer = to_numpy(weights), "layers.0."
    stream = held[EMBEDDING][to_numpy(ids)]
    normed = oracle.rmsnorm(stream, held[f"{layer}ln1.weight"], oracle.BLOCK_EPS)
    means = normed.cumsum(-2) / np.arange(1, ids.shape[-1] + 1)[:, None]
    stream = stream + means @ (held[f"{layer}attn.output_proj.weight"] @ held[f"{layer}attn.v_proj.weight"]).T
    expected = oracle.linear(oracle.rmsnorm(stream, held[FINAL_GAIN], oracle.BLOCK_EPS), held[HEAD])
    close(lm(ids, weights, heads, theta, context), expected)


@clause(
    LM,
    given(**_LM),
    sizes={LM: _DISTANT},
    level="should",
    enough=3,
    catches="positions by way of a narrow dtype, in which neighbors become one",
    source="practice: sequences are longer than 256 tokens",
)
def rope_reaches_distant_positions(lm, ids, weights, heads, theta, context):
    """Hundreds of tokens from the first, queries and keys are still rotated by their own positions."""
    call = (ids, weights, heads, theta, context)
    with lm.naming(*call):
        close(lm(*call), lm.exact(*call))


@clause(
    LM,
    given(**_LM),
    sizes={LM: _SQUARE},
    cases={_of_size(size): size.__eq__ for size in _SQUARE},
    level="should",
    enough=20,
    catches="the embedding or lm_head transposed, where only their shape tells",
    source=SOURCE,
)
def vocabulary_as_large_as_the_model(lm, ids, weights, heads, theta, context):
    """Where there are as many tokens in the vocabulary as features, rows are still tokens: where no layer adds
    anything, the logits are W_head RMSNorm(Embedding(ids))."""
    quiet = _silenced(weights)
    close(lm(ids, quiet, heads, theta, context), _without_layers(ids, quiet))


@clause(
    LM,
    given(**_LM),
    sizes={LM: _LARGE},
    cases={_of_size(size): size.__eq__ for size in _LARGE},
    level="should",
    enough=10,
    catches="ids by way of a narrow dtype: bfloat16 knows 257 numbers in a row, float16 2049, int16 32768",
    source="practice: vocabularies have 50000 entries and more",
)
def large_vocabulary_permutation_commutes(lm, ids, weights, heads, theta, context):
    """A large vocabulary has no order either: renumbering its tokens renumbers the logits."""
    _renumbering_commutes(lm, ids, weights, heads, theta, context)


@clause(
    LM,
    given(**_LM),
    sizes={LM: _COINCIDING},
    cases={_of_size(size): size.__eq__ for size in _COINCIDING},
    level="should",
    enough=20,
    catches="axes told apart by their lengths; a path of its own for one token",
    source="practice: as many examples as heads or tokens; a decoder asks one token at a time",
)
def every_example_alone_where_sizes_coincide(lm, ids, weights, heads, theta, context):
    """Where examples, tokens, heads and layers are equally many, or tokens come alone, every example has the logits it
    has by itself."""
    whole = lm(ids, weights, heads, theta, context)
    for i in range(len(ids)):
        close(lm(ids[i : i + 1].clone(), weights, heads, theta, context), whole[i : i + 1])
