"""Correct implementations that nobody here wrote hold; `sweep.py` is the same with more seeds and examples."""

from itertools import islice

import pytest

from .sweep import PEERS, Peer, swept

SEEDS = range(20)
EXAMPLES = 2


@pytest.mark.parametrize(("peer", "dtype"), [pytest.param(p, d, id=f"{p.name}-{d}") for p in PEERS for d in p.dtypes])
def test_peer_holds(peer: Peer, dtype: str):
    """No clause fails, and none is in error, on twenty seeds."""
    if peer.name.startswith(("llama", "x_transformers")):
        pytest.importorskip("transformers")
        pytest.importorskip("x_transformers")
    seeds = SEEDS if dtype == "float32" else SEEDS[:3]
    outcomes = swept(peer, dtype, seeds, EXAMPLES)
    assert [(o.clause, o.message) for o in outcomes if o.outcome in ("fails", "error")] == []


def test_a_peer_that_is_wrong_is_seen(tmp_path):
    """The sweep can fail: torch's softmax along a fixed axis does not hold."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import torch\n\n\ndef softmax(x, dim):\n    return torch.softmax(x, -1)\n")
    outcomes = swept(Peer(str(wrong.with_suffix(""))), "float32", SEEDS[:1], 10)
    assert "fails" in {outcome.outcome for outcome in islice(outcomes, 20)}
