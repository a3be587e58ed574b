"""Correct implementations hold: `sweep.py` is the same with more seeds and examples."""

from importlib.util import find_spec

import pytest

import spec_lm

from .sweep import ALL, PEERS, Peer, Sweep, Tally, added, table

EXAMPLES = 6
SEED = 0


@pytest.fixture(scope="module")
def tallies() -> list[Tally]:
    """What every MUST clause comes to, for every peer that can be imported, in every dtype it is right in."""
    there = tuple(peer for peer in PEERS if not peer.needs or find_spec(peer.needs))
    return [tally for dtype in ALL for tally in Sweep(there, EXAMPLES, level="must").tallies(dtype, SEED)]


@pytest.mark.parametrize(("peer", "dtype"), [(peer, dtype) for peer in PEERS for dtype in peer.dtypes], ids=str)
def test_peer_holds(peer: Peer, dtype: str, tallies: list[Tally]):
    """No clause fails, and all operators that a peer is said to have are judged."""
    if peer.needs:
        pytest.importorskip(peer.needs)
    own = [tally for tally in tallies if (tally.peer, tally.dtype) == (peer.name, dtype)]
    assert [tally.clause for tally in own if tally.fails] == []
    assert {tally.clause.split(".")[0] for tally in own if tally.examples} == set(peer.operators)


def test_a_sweep_judges_what_a_check_judges(tallies: list[Tally]):
    """As many examples, and the same largest err/bound."""
    peer = next(peer for peer in PEERS if peer.name == "blockwise_attention")
    report = spec_lm.check(peer.path, operators=peer.operators, seed=SEED, examples=EXAMPLES)
    swept = {t.clause: (t.examples, t.worst) for t in tallies if (t.peer, t.dtype) == (peer.name, "float32")}
    assert swept == {outcome.clause: (outcome.examples, outcome.worst) for outcome in report}
    assert max(worst for _, worst in swept.values()) > 0


def test_a_peer_that_is_wrong_is_seen(tmp_path, capsys):
    """A sweep can fail: it prints what a check prints, and its table begins with the worst clause."""
    (tmp_path / "wrong.py").write_text(
        "import torch\n\n\ndef softmax(x, dim):\n    return torch.softmax(x, dim) * 1.0001"
    )
    wrong = Peer(str(tmp_path / "wrong"), operators=("softmax",))
    found = added(Sweep((wrong,), 5).tallies("float32", 7))
    assert [tally.fails for tally in found if tally.clause == "softmax.sums_to_one"] == [[7]]
    assert "The entries of every slice along `dim` sum to 1." in capsys.readouterr().out
    lines = list(table(found))
    assert lines[0].endswith("wrong float32, seed 7")
    worst = [float(line.split()[0]) for line in lines]
    assert worst == sorted(worst, reverse=True) != []
