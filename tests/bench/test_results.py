"""From the JSON of a run to its report: medians, ratios within a session, growth, a baseline, and untrusted names."""

import copy
import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from spec_lm.bench.cases import Case, Sizes
from spec_lm.bench.display import change_text, html, in_markdown, markdown, seconds, terminal
from spec_lm.bench.results import Results, changes, read, slope
from spec_lm.conformance.report import UserError

CASE = Case("softmax", Sizes(2, 4, 8))
SESSIONS = (1.0, 10.0, 1.0)  # seconds a ceiling took: the machine was slow in the second
IN_CACHE = 7  # the sequence of the cases that find their inputs in a cache
HOSTILE = "<script>alert(1)</script>|`[x](http://y)$\x1b[31m"


def timed(case: Case, variant: str, session: int, median: float) -> dict[str, Any]:
    info = {"case": case.told(), "variant": variant, "session": session, "in_cache": case.sizes.sequence == IN_CACHE}
    info |= {"operations": 1000, "bytes": 500, "compile_seconds": None}
    return {"extra_info": info, "stats": {"median": median, "q1": median * 0.9, "q3": median * 1.2}}


def data_of(times: dict[tuple[Case, str], list[float]], **own: Any) -> dict[str, Any]:
    work: dict[Case, list[str]] = {}
    for case, name in times:
        work.setdefault(case, []).append(name)
    benchmarks = [timed(case, name, k, each) for (case, name), row in times.items() for k, each in enumerate(row)]
    for kind, rate in (("product", 1e4), ("product", 5e3), ("copy", 500), ("copy", 1e3)):
        info = {"ceiling": kind, "dtype": "float32", "work": rate}
        benchmarks.append({"extra_info": info, "stats": {"min": 1.0, "median": 3.0}})
        for case, (session, took) in product(work, enumerate(SESSIONS)):
            beside = {**info, "beside": case.told(), "session": session}
            benchmarks.append({"extra_info": beside, "stats": {"min": took, "median": took * 2}})
    told = {"asked": {"suite": "quick", "sessions": 3, "seconds": 0.1}, "verdicts": {}, "memory": [], "errors": {}}
    told |= {"work": [(case.told(), names) for case, names in work.items()]}
    machine = {"spec_lm": {"device": "a machine", "threads": 2, "torch": "2", "spec_lm": "0"}, "python_version": "3"}
    return json.loads(json.dumps({"machine_info": machine, "benchmarks": benchmarks, "spec_lm": {**told, **own}}))


DATA = data_of({(CASE, "reference"): [1.0, 10.0, 3.0], (CASE, "fast"): [0.5, 2.0, 3.0]})


def test_a_figure_is_the_median_of_sessions_and_a_ratio_is_of_one_session():
    """The second session was slow for both: their ratio of it counts as much as any."""
    reference, fast = Results(DATA).cells()[CASE]
    assert reference.seconds == 3.0
    assert reference.quartiles == (2.0, 6.5), "of the sessions' 1, 3 and 10 seconds"
    assert reference.speedup is None
    assert fast.speedup == (2.0, 1.0, 5.0)


def test_shares_are_of_the_ceilings_in_the_same_session_and_the_nearer_one_is_the_limit():
    reference, fast = Results(DATA).cells()[CASE]
    assert reference.share == pytest.approx((1000 / 10 / 250, 500 / 10 / 50)), "the sessions' are 2/5, 2/5 and 2/15"
    assert (reference.limit, fast.limit) == ("memory", "memory")
    slow = Results(data_of({(CASE, "reference"): [100.0]})).cells()[CASE][0]
    assert slow.limit == "neither"


def test_a_ceiling_is_the_best_of_all_sizes_sessions_and_rounds():
    assert Results(DATA).ceilings == {("product", "float32"): 1e4, ("copy", "float32"): 1e3}


def test_no_share_of_memory_is_stated_of_what_is_in_a_cache():
    case = replace(CASE, sizes=replace(CASE.sizes, sequence=IN_CACHE))
    results = Results(data_of({(case, "quick"): [0.8], (case, "slow"): [100.0]}))
    quick, slow = results.cells()[case]
    assert quick.share == (pytest.approx(0.5), None)
    assert (quick.limit, slow.limit) == ("products", "neither")
    assert "50%       in cache  products" in "\n".join(terminal(results))


def test_where_a_clause_fails_it_stands_in_the_place_of_the_figure():
    told = {**DATA["spec_lm"], "verdicts": {"fast softmax float32": "softmax.sums_to_one fails"}}
    results = Results({**DATA, "spec_lm": told})
    cell = results.cells()[CASE][1]
    assert (cell.seconds, cell.note) == (None, "softmax.sums_to_one fails")
    for text in ("\n".join(terminal(results)), html(results)):
        assert "softmax.sums_to_one fails" in text
    assert in_markdown("softmax.sums_to_one fails") in markdown(results)


def test_what_raised_while_it_was_built_says_so():
    told = {**DATA["spec_lm"], "errors": {str(CASE): {"fast": "ValueError: no"}}}
    assert Results({**DATA, "spec_lm": told}).cells()[CASE][1].note == "ValueError: no"


@pytest.mark.parametrize("exponent", [1.0, 2.0, 0.5])
def test_growth_is_the_exponent_of_time_and_of_memory(exponent):
    scanned = [replace(CASE, scan="sequence", memory=True, sizes=Sizes(2, n, 8)) for n in (10, 100, 1000)]
    times = {(case, "fast"): [1e-9 * case.size**exponent] for case in scanned}
    memory = [{"case": case.told(), "variant": "fast", "bytes": 3 * case.size**2} for case in scanned]
    (growth,) = Results(data_of(times, memory=memory)).growths()
    assert growth.exponent == pytest.approx(exponent)
    assert growth.memory_exponent == pytest.approx(2)
    assert (growth.scan, growth.variant) == ("sequence", "fast")


def test_a_slope_by_hand():
    assert slope([(1, 2), (10, 20), (100, 200)]) == pytest.approx(1)


def test_changes_against_a_baseline_begin_with_the_slowest():
    slower = data_of({(CASE, "reference"): [3.0], (CASE, "fast"): [3.0]})
    found = changes(Results(DATA), Results(slower))
    assert [(change.variant, change.slower) for change in found] == [("fast", 1.5), ("reference", 1.0)]
    assert change_text(found[0]).startswith("1.50 times the time of the baseline: fast, softmax")


def test_a_file_that_is_no_result_is_refused(tmp_path):
    path = tmp_path / "other.json"
    with pytest.raises(UserError, match="cannot read"):
        read(path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"expected the benchmarks.json of a report"):
        read(path)
    path.write_text(json.dumps(DATA), encoding="utf-8")
    assert read(path) == DATA


def test_a_page_holds_its_plots_and_needs_nothing_else():
    pytest.importorskip("matplotlib")
    scanned = [replace(CASE, scan="sequence", sizes=Sizes(2, n, 8)) for n in (10, 100, 1000)]
    page = html(Results(data_of({(case, "fast"): [1.0 * case.size] for case in [CASE, *scanned]})))
    assert page.count("<svg") == 1
    assert "src=" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_names_of_unknown_origin_are_text_everywhere():
    pytest.importorskip("matplotlib")
    results = Results(data_of({(CASE, "reference"): [1.0], (CASE, HOSTILE): [2.0]}))
    page = html(results)
    assert "<script" not in page
    assert "\x1b" not in page + markdown(results) + "\n".join(terminal(results))
    row = next(line for line in markdown(results).splitlines() if "script" in line)
    assert row.count("|") - row.count("\\|") == 10
    assert "\\<script\\>" in row


def test_a_note_of_unknown_origin_takes_one_line_of_a_table():
    data = copy.deepcopy(DATA)
    data["spec_lm"]["errors"] = {str(CASE): {"fast": "ValueError: a\n| b | c |\n"}}
    row = next(line for line in markdown(Results(data)).splitlines() if "ValueError" in line)
    assert row == r"| fast | ValueError: a \| b \| c \| |"


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2 s"), (0.01234, "12.3 ms"), (4.5e-6, "4.5 us"), (1e-9, "0.001 us")]
)
def test_times_have_three_digits(value, text):
    assert seconds(value) == text
