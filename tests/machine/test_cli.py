"""The command line keeps its contract: what it prints, what it writes, and its exit codes."""

import errno
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from spec_lm import cli

HOLDS = ("softmax=torch:softmax", "--operator", "softmax", "--examples", "4")
NAIVE = """
    def run_softmax(in_features, dim):
        e = in_features.exp()
        return e / e.sum(dim, keepdim=True)
"""
FAILS = ("--clause", "softmax.large_inputs_stay_finite", "--examples", "10")
CLAUSE = "softmax.large_inputs_stay_finite"


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --------------------------------------------------------------------------------------------------------------- check


def test_what_holds_exits_with_0_and_ends_with_a_denominator(spec_lm_command):
    ran = spec_lm_command("check", *HOLDS)
    assert ran.code == 0
    assert ran.out.startswith("spec_lm 0.1.0, spec 1 | softmax=torch:softmax | torch ")
    assert "cpu float32 | seed 0, 4 examples, level must\n" in ran.out
    total = ran.last_line.split(" of ")[1].split(" ")[0]
    assert ran.last_line == f"softmax=torch:softmax conforms: {total} of {total} MUST clauses ran, {total} hold"
    assert any(line.split() == ["softmax", total, "hold"] for line in ran.out.splitlines())


def test_what_fails_exits_with_1_and_is_shown_with_its_smallest_input(spec_lm_command, write):
    write("adapters.py", NAIVE)
    ran = spec_lm_command("check", "./adapters.py", *FAILS)
    assert ran.code == 1
    failure = ran.out.split("\n\n")[1].splitlines()
    assert failure[0].split() == ["FAILS", CLAUSE, "MUST"]
    assert failure[1].strip().endswith("since the slice's maximum can be subtracted first.")
    assert failure[2] == "  x = [128.]  (1,) float32"
    assert failure[4] == "  got       [NaN]   expected finite values   worst at [0]"
    again = f"  again     spec-lm replay .spec-lm/last.jsonl {CLAUSE}"
    assert failure[failure.index(again) :] == [
        again,
        '  code      import sys, torch; sys.path.insert(0, ".")',
        "            from adapters import run_softmax",
        "            got = run_softmax(torch.tensor([128.]), dim=-1)",
        "            expected = torch.ones(1)",
        "            assert ((got - expected).abs() <= 1.6e-05).all(), got",
        f"  read      spec-lm explain {CLAUSE}",
    ]
    assert ran.last_line == "./adapters.py does not conform: 1 of 1 MUST clauses ran, 0 hold, 1 fails"


def test_without_an_implementation_the_reference_is_checked_and_it_says_so(spec_lm_command):
    ran = spec_lm_command("check", "--clause", "softmax.sums_to_one", "--examples", "2")
    assert ran.code == 0
    assert ran.last_line.startswith("the built-in reference conforms: 1 of 1 MUST clauses ran, 1 holds; check your own")
    assert "spec-lm check path/to/adapters.py" in ran.last_line


def test_absent_operators_are_named_with_the_reason_and_exit_with_0_unless_required(spec_lm_command, write):
    write("adapters.py", NAIVE + "    def run_silu(in_features):\n        raise NotImplementedError\n")
    chosen = ("--clause", "softmax.sums_to_one", "--clause", "silu.agrees_with_the_oracle", "--examples", "1")
    ran = spec_lm_command("check", "adapters.py", *chosen)
    assert ran.code == 0
    assert "absent (run_silu raises NotImplementedError)" in ran.out
    assert ran.last_line.endswith("1 of 2 MUST clauses ran, 1 holds; not provided: silu (1)")
    for required in ("silu", "all"):
        ran = spec_lm_command("check", "adapters.py", *chosen, "--require", required)
        assert ran.code == 2
        assert "does not provide what is required (silu)" in ran.last_line


def test_an_implementation_without_what_was_asked_for_exits_with_2(spec_lm_command):
    ran = spec_lm_command("check", "softmax=torch:softmax", "--operator", "rope", "--examples", "1")
    assert ran.code == 2
    assert "provides nothing that was to be checked" in ran.last_line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--clause", "softmax.shift_invarianc"), "did you mean softmax.shift_invariance?"),
        (("--clause", "softmax"), "spec-lm clauses --operator softmax lists its clauses"),
        (("--operator", "sofmax"), "did you mean softmax?"),
        (("--dtype", "float31"), "float32, float64, bfloat16, float16"),
        (("--require", "ropes"), "did you mean rope?"),
        (("--convention", "rope_pairing=half"), "rope_pairing=neighbors|halves"),
        (("--convention", "rope_pairing"), "write it as name=value"),
        (("nowhere.py",), "there is no file nowhere.py"),
        (("softmax=torch:sofmax",), "did you mean softmax?"),
        (("sofmax=torch:softmax",), "did you mean softmax?"),
        (("no_such_module",), "path/to/adapters.py"),
        (("broken.py",), "broken.py cannot be imported: ModuleNotFoundError: No module named 'not_there'; install"),
        (("exits.py",), "exits.py cannot be imported: SystemExit: 3"),
        (("empty.py",), "provides no operator"),
        (("--report", "folder"), "cannot write folder"),
        (("--junit", "folder/none/x.xml"), "cannot write folder/none/x.xml"),
        (("--in-process", "--memory", "1"), "--jobs and --memory are about processes of their own"),
        (("--memory", "1", "--device", "cuda"), "--memory cannot be kept with --device cuda"),
        (("--memory", "inf"), "--memory is inf; expected GiB"),
        (("--seed", str(10**23)), "seed is 100000000000000000000000; torch takes"),
        (("--support", "d_head=sixty"), "--support d_head=sixty: write the value as JSON"),
        (("--support", "d_head"), "--support d_head: write it as name=value"),
    ],
)
def test_what_the_user_can_mend_is_one_message_without_a_traceback(spec_lm_command, write, tmp_path, arguments, said):
    write("broken.py", "import not_there")
    write("exits.py", "raise SystemExit(3)")
    write("empty.py", "")
    (tmp_path / "folder").mkdir()
    ran = spec_lm_command("check", *arguments)
    assert ran.code == 2
    assert said in ran.err
    assert "Traceback" not in ran.out + ran.err


def test_what_cannot_be_loaded_does_not_stop_the_next(spec_lm_command):
    ran = spec_lm_command("check", "nowhere.py", *HOLDS)
    assert ran.code == 2
    assert "there is no file nowhere.py" in ran.err
    assert ran.last_line.startswith("softmax=torch:softmax conforms")


def test_all_pairs_together_are_one_implementation_and_every_other_argument_is_its_own(spec_lm_command, write):
    write("adapters.py", NAIVE)
    chosen = ("--clause", "softmax.sums_to_one", "--clause", "silu.agrees_with_the_oracle", "--examples", "1")
    pairs = ("softmax=torch:softmax", "silu=torch.nn.functional:silu")
    ran = spec_lm_command("check", pairs[0], "adapters.py", pairs[1], *chosen, "--report", "out.jsonl")
    assert ran.code == 0
    lines = lines_of(Path("out.jsonl"))
    assert [line["implementation"] for line in lines if line["kind"] == "header"] == [" ".join(pairs), "adapters.py"]
    assert [line["kind"] for line in lines] == ["header", "outcome", "outcome", "footer"] * 2


def test_the_report_has_a_header_a_line_an_outcome_and_a_footer(spec_lm_command, write):
    write("adapters.py", NAIVE)
    ran = spec_lm_command("check", "adapters.py", *FAILS, "--report", "out.jsonl", "--seed", "3")
    header, outcome, footer = lines_of(Path("out.jsonl"))
    assert {"implementation": "adapters.py", "seed": 3, "dtype": "float32", "level": "must"}.items() <= header.items()
    wanted = {"clause", "operator", "level", "outcome", "message", "counterexample", "examples", "seconds", "worst"}
    assert wanted <= set(outcome)
    assert (outcome["outcome"], footer["fails"], footer["exit_code"]) == ("fails", 1, ran.code)


def test_outcomes_are_in_the_report_as_they_come(spec_lm_command, write):
    """The implementation itself reads, while it is checked, what the report holds so far."""
    write(
        "adapters.py",
        """
        import torch
        def softmax(x, dim):
            return torch.softmax(x, dim)
        def silu(x):
            assert '"clause": "softmax.sums_to_one"' in open("out.jsonl").read()
            return torch.nn.functional.silu(x)
        """,
    )
    chosen = ("--clause", "softmax.sums_to_one", "--clause", "silu.agrees_with_the_oracle", "--examples", "1")
    assert spec_lm_command("check", "adapters.py", *chosen, "--report", "out.jsonl", "--jobs", "1").code == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no file that is always full")
def test_a_full_disk_is_told_at_the_start(spec_lm_command):
    ran = spec_lm_command("check", *HOLDS, "--report", "/dev/full")
    assert ran.code == 2
    assert ran.err == "spec-lm: cannot write /dev/full: No space left on device; make room, or give another path\n"
    assert "hold" not in ran.out


def test_a_disk_that_becomes_full_is_told_and_the_check_goes_on(spec_lm_command, monkeypatch):
    """The verdict is printed; but the report that was asked for is not whole, which is an error."""

    def write_lines(file, lines):
        if lines[0]["kind"] != "header":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, "write_lines", write_lines)
    ran = spec_lm_command("check", *HOLDS, "--report", "out.jsonl")
    assert ran.code == 2
    assert ran.err.splitlines() == [
        "spec-lm: cannot write out.jsonl: No space left on device; it is not complete",
        "spec-lm: cannot write .spec-lm/last.jsonl: No space left on device; it is not complete",
    ]
    assert ran.last_line.startswith("softmax=torch:softmax conforms")


@pytest.mark.parametrize("how", [("--jobs", "2"), ("--in-process",)])
def test_a_check_leaves_nothing_in_the_folder_but_the_last_report(spec_lm_command, write, tmp_path, how):
    write("adapters.py", f"    import helper\n{NAIVE}")
    write("helper.py", "")
    assert spec_lm_command("check", "adapters.py", *FAILS, *how).code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".spec-lm", "adapters.py", "helper.py"]
    assert sorted(path.name for path in (tmp_path / ".spec-lm").iterdir()) == [".gitignore", "last.jsonl"]


def test_a_declared_support_narrows_what_is_drawn(spec_lm_command):
    assert spec_lm_command("check", *HOLDS, "--clause", "softmax.any_dim", "--support", "n=[3]").code == 0
    assert lines_of(Path(".spec-lm/last.jsonl"))[0]["supports"] == {"n": [3]}


def test_the_last_report_is_kept_out_of_version_control(spec_lm_command):
    spec_lm_command("check", *HOLDS)
    assert Path(".spec-lm/.gitignore").read_text() == "*\n"
    assert [line["kind"] for line in lines_of(Path(".spec-lm/last.jsonl"))][::20][0] == "header"


def test_where_the_last_report_cannot_be_written_it_says_so_and_goes_on(spec_lm_command, write):
    write("adapters.py", NAIVE)
    Path(".spec-lm").write_text("a file is in the way")
    ran = spec_lm_command("check", "adapters.py", *FAILS)
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
    assert ".spec-lm/last.jsonl cannot be written" in ran.err
    assert "again" not in ran.out


@pytest.mark.parametrize("wrong", [("--operator", "sofmax"), ("no_such_module",)])
def test_a_check_that_does_not_begin_leaves_the_files_it_would_have_written(spec_lm_command, wrong):
    assert spec_lm_command("check", *HOLDS, "--report", "old.jsonl", "--junit", "old.xml").code == 0
    before = {path: path.read_bytes() for path in (Path("old.jsonl"), Path("old.xml"), Path(".spec-lm/last.jsonl"))}
    assert spec_lm_command("check", *wrong, "--report", "old.jsonl", "--junit", "old.xml").code == 2
    assert {path: path.read_bytes() for path in before} == before
    assert spec_lm_command("check", *wrong, "--report", "new.jsonl").code == 2
    assert sorted(Path().rglob("*.jsonl")) == [Path(".spec-lm/last.jsonl"), Path("old.jsonl")]


def test_a_report_is_written_over_a_longer_one_and_through_a_link(spec_lm_command):
    Path("real.jsonl").write_text("old\n" * 100_000)
    Path("link.jsonl").symlink_to("real.jsonl")
    assert spec_lm_command("check", *HOLDS, "--report", "link.jsonl").code == 0
    assert [line["kind"] for line in lines_of(Path("real.jsonl"))][:: len(lines_of(Path("link.jsonl"))) - 1] == [
        "header",
        "footer",
    ]


def test_two_checks_at_once_in_one_folder_each_write_a_whole_last_report(spec_lm_command, write):
    """The first check runs a second one, so that both have begun before either has ended."""
    write(
        "adapters.py",
        """
        import subprocess, sys, torch
        def softmax(x, dim):
            return torch.softmax(x, dim)
        check = "check softmax=torch:softmax --clause softmax.any_dim --examples 1".split()
        def silu(x, run=[]):
            if not run:
                run.append(subprocess.run([sys.executable, "-m", "spec_lm", *check], check=True))
                open("between.jsonl", "w").write(open(".spec-lm/last.jsonl").read())
            return torch.nn.functional.silu(x)
        """,
    )
    chosen = ("--clause", "softmax.sums_to_one", "--clause", "silu.agrees_with_the_oracle", "--examples", "1")
    assert spec_lm_command("check", "adapters.py", *chosen, "--in-process").code == 0
    for path, clauses in (("between.jsonl", ["softmax.any_dim"]), (".spec-lm/last.jsonl", [chosen[1], chosen[3]])):
        _, *outcomes, footer = lines_of(Path(path))
        assert [line["clause"] for line in outcomes] == clauses
        assert footer["complete"]


def test_an_interrupt_before_anything_was_checked_says_so_and_leaves_the_old_report(spec_lm_command, write):
    assert spec_lm_command("check", *HOLDS, "--report", "old.jsonl").code == 0
    before = Path("old.jsonl").read_bytes(), Path(".spec-lm/last.jsonl").read_bytes()
    write("adapters.py", "raise KeyboardInterrupt\n")
    ran = spec_lm_command("check", "adapters.py", "--report", "old.jsonl", "--in-process")
    assert (ran.code, ran.err) == (2, "spec-lm: interrupted before anything was checked\n")
    assert (Path("old.jsonl").read_bytes(), Path(".spec-lm/last.jsonl").read_bytes()) == before


def test_a_reader_that_goes_away_changes_neither_the_report_nor_the_exit_code(tmp_path):
    """As `| head` does: here the pipe has no reader from the start."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "spec_lm", "check", *HOLDS, "--report", "out.jsonl"]
    ran = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(writes)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert lines_of(tmp_path / "out.jsonl")[-1]["complete"]


def test_a_lone_surrogate_is_written_as_an_escape(spec_lm_command):
    spec_lm_command("check", *HOLDS)
    header, first, *rest = lines_of(Path(".spec-lm/last.jsonl"))
    header["implementation"] = first["level"] = "a\ud800b"
    Path("odd.jsonl").write_text("\n".join(map(json.dumps, [header, first, *rest])))
    for format in ("terminal", "markdown", "html", "junit"):
        assert spec_lm_command("report", "odd.jsonl", "--format", format, "--output", "out").code == 0
        assert "\\ud800" in Path("out").read_text(encoding="utf-8")


def test_quiet_prints_failures_and_the_last_line_only(spec_lm_command, write):
    write("adapters.py", NAIVE)
    assert spec_lm_command("check", *HOLDS, "--quiet").out.count("\n") == 1
    ran = spec_lm_command("check", "adapters.py", *FAILS, "--quiet")
    assert ran.out.startswith("FAILS")
    assert "seed 0" not in ran.out


def test_what_an_implementation_prints_does_not_reach_stdout(spec_lm_command, write):
    write(
        "adapters.py",
        "print('while imported')\n"
        + "import torch\ndef softmax(x, dim):\n    print('called')\n    return x.softmax(dim)",
    )
    ran = spec_lm_command("check", "adapters.py", *HOLDS[1:], "--in-process")
    assert ran.code == 0
    assert "while imported" not in ran.out
    assert "while imported" in ran.err
    assert "called" not in ran.out + ran.err


def test_text_of_an_implementation_is_no_markup_and_moves_no_cursor(spec_lm_command, write):
    write("adapters.py", "def softmax(x, dim):\n    raise TypeError('[bold]loud[/bold] \\x1b[2J \\udc80 \\x07')")
    ran = spec_lm_command("check", "adapters.py", "--operator", "softmax", "--examples", "1")
    assert r"raised TypeError: [bold]loud[/bold] \x1b[2J \udc80 \x07 (adapters.py:2)" in ran.out
    assert {c for c in ran.out if not c.isprintable()} == {"\n"}


def test_an_interrupted_check_says_what_is_known_and_exits_with_2(spec_lm_command, write):
    write("adapters.py", NAIVE + "    def run_silu(in_features):\n        raise KeyboardInterrupt\n")
    chosen = ("--clause", "softmax.sums_to_one", "--clause", "silu.agrees_with_the_oracle", "--examples", "1")
    chosen += ("--report", "out.jsonl", "--in-process")
    ran = spec_lm_command("check", "adapters.py", "softmax=torch:softmax", *chosen)
    assert ran.code == 2
    assert ran.last_line == "adapters.py was not checked to the end: 1 of 2 MUST clauses ran, 1 holds"
    footer = lines_of(Path("out.jsonl"))[-1]
    assert (footer["kind"], footer["complete"], footer["exit_code"]) == ("footer", False, 2)


def test_junit_holds_a_suite_an_implementation_and_a_case_a_clause(spec_lm_command, write):
    write("adapters.py", NAIVE)
    chosen = ("--clause", "softmax.any_dim", "--clause", "rope.agrees_with_the_oracle", *FAILS)
    spec_lm_command("check", "adapters.py", *chosen, "--junit", "out.xml")
    (suite,) = ET.parse("out.xml").getroot()
    assert suite.attrib | {"time": ""} == {
        "name": "adapters.py",
        "tests": "3",
        "failures": "1",
        "errors": "0",
        "skipped": "1",
        "time": "",
    }
    cases = {case.get("name"): case for case in suite}
    assert cases[CLAUSE].get("classname") == "softmax"
    assert "x = [128.]" in (cases[CLAUSE].findtext("failure") or "")
    assert [child.attrib for child in cases["rope.agrees_with_the_oracle"]] == [{"message": "not provided"}]
    assert len(cases["softmax.any_dim"]) == 0


def test_declared_conventions_are_in_the_header_line_and_in_the_report(spec_lm_command):
    ran = spec_lm_command("check", *HOLDS, "--convention", "rope_pairing=halves")
    assert "| rope_pairing=halves\n" in ran.out
    assert lines_of(Path(".spec-lm/last.jsonl"))[0]["conventions"] == {"rope_pairing": "halves"}


def test_color_and_progress_are_for_terminals_and_no_color_is_respected(spec_lm_command, write, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    write("adapters.py", NAIVE)
    assert "\x1b" not in spec_lm_command("check", "adapters.py", *FAILS).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    red = "\x1b[1;31mFAILS"
    assert red in spec_lm_command("check", "adapters.py", *FAILS).out
    assert "clauses   softmax" not in spec_lm_command("check", "adapters.py", *FAILS).out
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    assert "1 of 1 clauses   softmax" in spec_lm_command("check", "adapters.py", *FAILS).out
    monkeypatch.setenv("NO_COLOR", "1")
    ran = spec_lm_command("check", "adapters.py", *FAILS)
    assert "FAILS" in ran.out
    assert "31m" not in ran.out


# ------------------------------------------------------------------------------------------------------ other commands


def test_replay_runs_a_stored_counterexample_again(spec_lm_command, write):
    write("adapters.py", NAIVE)
    assert spec_lm_command("check", "adapters.py", *FAILS, "--clause", "softmax.shift_invariance").code == 1
    ran = spec_lm_command("replay", ".spec-lm/last.jsonl")
    assert ran.code == 1
    assert f"still fails   {CLAUSE}\nFAILS" in ran.out
    assert ran.last_line == "2 counterexamples of .spec-lm/last.jsonl replayed: 2 still fail, 0 fixed"
    write("adapters.py", "def run_softmax(in_features, dim):\n    return in_features.softmax(dim)")
    ran = spec_lm_command("replay", ".spec-lm/last.jsonl", CLAUSE)
    assert ran.code == 0
    assert ran.out.startswith(f"fixed         {CLAUSE}\n")


def test_replay_says_what_it_cannot_run(spec_lm_command, write):
    assert spec_lm_command("check", *HOLDS).code == 0
    ran = spec_lm_command("replay", ".spec-lm/last.jsonl")
    assert (ran.code, ran.last_line) == (0, ".spec-lm/last.jsonl holds no counterexample")
    ran = spec_lm_command("replay", ".spec-lm/last.jsonl", "softmax.any_dim")
    assert ran.code == 2
    assert "holds no counterexample of softmax.any_dim; nothing fails in it" in ran.err
    assert "cannot read nowhere.jsonl" in spec_lm_command("replay", "nowhere.jsonl").err
    write("text.jsonl", "hello\n")
    ran = spec_lm_command("replay", "text.jsonl")
    assert ran.code == 2
    assert "text.jsonl, line 1: not a line of a report" in ran.err


def test_replay_prints_the_code_of_a_failure_alone_and_it_fails(spec_lm_command, write, tmp_path):
    write("adapters.py", NAIVE)
    spec_lm_command("check", "adapters.py", *FAILS, "--clause", "softmax.shift_invariance")
    ran = spec_lm_command("replay", ".spec-lm/last.jsonl", CLAUSE, "--code")
    assert ran.code == 0
    (tmp_path / "repro.py").write_text(ran.out)
    alone = subprocess.run([sys.executable, "repro.py"], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 1
    assert "AssertionError: tensor([nan])" in alone.stderr
    assert "spec_lm" not in ran.out


def test_replay_prints_the_code_of_all_failures_where_none_is_named(spec_lm_command, write):
    write("adapters.py", NAIVE)
    spec_lm_command("check", "adapters.py", *FAILS, "--clause", "softmax.shift_invariance")
    ran = spec_lm_command("replay", ".spec-lm/last.jsonl", "--code")
    assert ran.code == 0
    assert [line for line in ran.out.splitlines() if line.startswith("# ")] == [
        f"# {CLAUSE}",
        "# softmax.shift_invariance",
    ]
    assert ran.out.count("\nassert ") == 2


def test_replay_says_where_a_failure_has_no_code(spec_lm_command, write):
    write("adapters.py", NAIVE)
    spec_lm_command("check", "adapters.py", *FAILS)
    path = Path(".spec-lm/last.jsonl")
    lines = [json.dumps({**line, "reproduction": ""}) for line in lines_of(path)]
    path.write_text("\n".join(lines))
    ran = spec_lm_command("replay", path, CLAUSE, "--code")
    assert ran.code == 2
    assert f"{CLAUSE} has no code in {path}" in ran.err
    assert f"{path} holds no code; it holds those of {CLAUSE}" in spec_lm_command("replay", path, "--code").err


def test_many_failures_are_told_in_short_unless_all_are_asked_for(spec_lm_command, write):
    write("adapters.py", "def softmax(x, dim):\n    return x * 0.5 + 1\n")
    asked = ("check", "adapters.py", "--operator", "softmax", "--examples", "5")
    short = spec_lm_command(*asked).out
    number = int(short.split(" fail\n")[0].split()[-1])
    assert short.count("\nFAILS  ") == 3
    assert f"FAIL   {number - 3} more clauses of softmax; in full: --all-failures or spec-lm replay" in short
    assert short.count("  likely    ") >= 1
    assert spec_lm_command(*asked, "--all-failures").out.count("\nFAILS  ") == number


def test_what_was_accepted_is_shown_as_it_was_handed_over(spec_lm_command, write):
    write("adapters.py", "def embedding(ids, weight):\n    return weight[ids % len(weight)]\n")
    ran = spec_lm_command("check", "adapters.py", "--clause", "embedding.ids_outside_are_refused")
    assert "  token_ids = 1  () int64\n" in ran.out
    assert "seen      id 1 with a vocabulary of 1 was accepted" in ran.out


def test_clauses_are_listed_one_a_line(spec_lm_command):
    ran = spec_lm_command("clauses", "--operator", "softmax")
    lines = [line.split(maxsplit=2) for line in ran.out.splitlines()]
    assert ["softmax.shift_invariance", "MUST"] in [line[:2] for line in lines]
    assert {line[0].split(".")[0] for line in lines} == {"softmax"}
    should = [line.split()[1] for line in spec_lm_command("clauses").out.splitlines()]
    must = [line.split()[1] for line in spec_lm_command("clauses", "--level", "must").out.splitlines()]
    assert set(must) == {"MUST"}
    assert len(must) == should.count("MUST")


def test_explain_shows_sentence_source_bug_and_property(spec_lm_command):
    ran = spec_lm_command("explain", "softmax.shift_invariance")
    assert ran.code == 0
    for piece in ("MUST", "softmax(v + c) = softmax(v)", "source    course notes", "catches ", "def shift_invariance("):
        assert piece in ran.out
    ran = spec_lm_command("explain", "softmax.shift")
    assert ran.code == 2
    assert "did you mean softmax.shift_invariance?" in ran.err


def test_the_version_names_package_and_specification(spec_lm_command):
    assert spec_lm_command("--version").out == "spec_lm 0.1.0, spec 1\n"


# --------------------------------------------------------------------------------------------------------------- light


def loads_torch(code: str) -> bool:
    """Whether a fresh Python has torch loaded after this code."""
    end = "import sys\nprint('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", f"{code}\n{end}"], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()[-1] == "True"


def test_package_command_line_and_plugin_are_imported_without_torch():
    assert not loads_torch(
        "import spec_lm, spec_lm.cli, spec_lm.pytest_plugin, spec_lm.testing, spec_lm.conformance.report"
    )


def test_pytest_with_the_plugin_shows_its_help_without_torch():
    assert not loads_torch("import pytest\npytest.main(['--help', '-p', 'no:cacheprovider'])")


def test_the_test_of_light_imports_can_fail():
    assert loads_torch("import spec_lm\nspec_lm.Violation")


@pytest.mark.parametrize("arguments", [("--help",), ("check", "--help")])
def test_help_comes_at_once_and_without_torch(arguments, tmp_path):
    """0.4 s of processor time, the best of three: elapsed time is the machine's business."""
    code = f"from spec_lm.cli import app\ntry:\n    app({list(arguments)!r})\nexcept SystemExit: pass\nimport sys\n"
    code += "assert 'torch' not in sys.modules"
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=tmp_path)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.4


def test_python_m_spec_lm_is_the_command(tmp_path):
    ran = subprocess.run([sys.executable, "-m", "spec_lm", "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout == "spec_lm 0.1.0, spec 1\n", ran.stderr
