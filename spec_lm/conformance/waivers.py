"""Failures that are accepted with a reason, and how such a waiver cannot rot.

A waiver may pin the counterexample it is about. That is run first, and as long as it fails nothing is searched; once it
and the search hold, the waiver itself is an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from spec_lm.conformance.clause import CLAUSES, nearest
from spec_lm.conformance.report import Outcome, UserError

MOST_BY_WILDCARD = 10
_KEYS = ("reason", "counterexample")
_MEND = "mend the waiver: it holds"


@dataclass(frozen=True)
class Waiver:
    """Why a clause may fail.

    Args:
        reason: in words; never empty.
        recipes: of the counterexample it is about, as a report stores them; None where none is pinned.
    """

    reason: str
    recipes: Mapping[str, Any] | None = None

    def applied(self, outcome: Outcome, pinned: Outcome | None) -> Outcome:
        """What a clause comes to under this waiver.

        Args:
            outcome: of its search.
            pinned: of the pinned counterexample, where there is one.
        """
        if pinned and pinned.outcome == "error":
            return replace(outcome, outcome="error", message=pinned.message)
        for broken in (outcome, pinned):
            if broken and broken.outcome == "fails":
                return replace(broken, outcome="waived", message=f"{self.reason} (seen: {broken.message})")
        if outcome.outcome != "holds":
            return outcome
        on = f"on {outcome.examples} examples"
        if pinned and pinned.outcome == "holds":
            mend = f"{_MEND} {on} and on its pinned counterexample; remove it (its reason: {self.reason})"
            return replace(outcome, outcome="error", message=mend)
        return replace(outcome, message=f"waived, but it holds {on}; remove the waiver, or pin its counterexample")


def is_needless(outcome: Outcome) -> bool:
    """Whether an outcome says that its clause's waiver is to be removed."""
    return outcome.outcome == "error" and outcome.message.startswith(_MEND)


def toml_of(waivers: Mapping[str, Waiver]) -> str:
    """The table `waivers` of a file, as `read_config` reads it."""
    lines: list[str] = []
    for clause, waiver in waivers.items():
        lines += [f"[waivers.{_quoted(clause)}]", f"reason = {_quoted(waiver.reason)}"]
        if waiver.recipes is not None:
            lines.append(f"counterexample = {_quoted(json.dumps(waiver.recipes))}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """TOML's basic strings escape as JSON's do, once no character needs two escapes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def waivers_of(waive: Mapping[str, Any], where: str = "waive") -> dict[str, Waiver]:
    """Waivers by clause id: each given as its reason, or as a table of reason and counterexample.

    Args:
        waive: by id, or by a wildcard as in "silu.*in_float16".
        where: it is written, for errors.

    Raises:
        UserError: an unknown id, a missing reason, a wildcard of too many clauses, or what is no counterexample.
    """
    found: dict[str, Waiver] = {}
    for pattern, given in waive.items():
        place = f"{where}, {pattern}"
        waiver = _waiver(given, place)
        ids = _ids(pattern, place)
        if waiver.recipes is not None and len(ids) > 1:
            raise UserError(f"{place}: a counterexample is one clause's; name that clause instead of {len(ids)}")
        found |= dict.fromkeys(ids, waiver)
    return found


def _waiver(given: Any, place: str) -> Waiver:
    if isinstance(given, Waiver):
        return given
    table = given if isinstance(given, Mapping) else {"reason": given}
    for key in table:
        if key not in _KEYS:
            raise UserError(f"{place}: unknown key {key}{nearest(key, list(_KEYS))}; expected {' and '.join(_KEYS)}")
    reason = table.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise UserError(f'{place}: a waiver needs a reason, as in reason = "kept in float16, see issue 12"')
    return Waiver(reason.strip(), _recipes(table.get("counterexample"), place))


def _recipes(given: Any, place: str) -> Mapping[str, Any] | None:
    """Recipes from a table, or from its JSON, as a report has it."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise UserError(f"{place}: its counterexample is no JSON: {error}") from None
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"{place}: its counterexample is a {type(given).__name__}, expected a table of recipes by name")
    return given


def _ids(pattern: str, place: str) -> list[str]:
    if not set(pattern) & set("*?["):
        if pattern not in CLAUSES:
            raise UserError(f"{place}: no clause has this id{nearest(pattern, list(CLAUSES))}")
        return [pattern]
    ids = [clause_id for clause_id in CLAUSES if fnmatchcase(clause_id, pattern)]
    if not ids:
        raise UserError(f"{place}: no clause matches this wildcard; `spec-lm clauses` lists them")
    if len(ids) > MOST_BY_WILDCARD:
        raise UserError(f"{place}: this matches {len(ids)} clauses; a wildcard may waive {MOST_BY_WILDCARD} at most")
    return ids
