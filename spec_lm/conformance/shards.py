"""A check in parts, for the machines of a CI: which operators each part checks, and one report of all parts.

Operators are never split: what one clause shows an operator to lack leaves the draws of its others.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spec_lm.conformance.clause import Clause
from spec_lm.conformance.diagnosis import diagnose
from spec_lm.conformance.operators import OPERATORS
from spec_lm.conformance.report import Report, ReportError, UserError

# How long a clause takes, measured on the reference, in clauses of a small operator.
_COSTS = {"swiglu": 1.3, "rope": 1.2, "scaled_dot_product_attention": 1.7, "multihead_self_attention": 1.8}
_COSTS |= {"multihead_self_attention_with_rope": 2.5, "transformer_block": 2.8, "transformer_lm": 3.3}
_OWN = ("shard", "clauses")  # entries of a header that differ from part to part


@dataclass(frozen=True)
class Shard:
    """One part of a check.

    Args:
        number: which, from 1.
        of: how many there are.
    """

    number: int
    of: int

    @classmethod
    def read(cls, text: str) -> "Shard":
        """From "2/3".

        Raises:
            UserError: it is not a number of a part and how many there are.
        """
        found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
        if not found or int(found[1]) > int(found[2]):
            raise UserError(f"shard {text}: write it as I/N, from 1/N to N/N")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def part(self, clauses: list[Clause]) -> list[Clause]:
        """The clauses of whole operators that this part checks, in their order: the same on every machine, and about as
        long in each part.

        Raises:
            UserError: there are more parts than operators.
        """
        sizes = Counter(clause.operator for clause in clauses)
        costs = {operator: size * _COSTS.get(operator, 1.0) for operator, size in sizes.items()}
        if self.of > len(costs):
            raise UserError(
                f"shard {self}: {len(costs)} operators are checked, so that there are at most as many shards"
            )
        loads = dict.fromkeys(range(1, self.of + 1), 0.0)
        mine = set()
        for operator in sorted(costs, key=lambda operator: -costs[operator]):
            lightest = min(loads, key=loads.__getitem__)
            loads[lightest] += costs[operator]
            if lightest == self.number:
                mine.add(operator)
        return [clause for clause in clauses if clause.operator in mine]

    def header(self, clauses: int) -> dict[str, Any]:
        """What the header of a part says, of a check of so many clauses in all."""
        return {"shard": str(self), "clauses_in_all": clauses}


def merged(parts: Mapping[str, Report]) -> Report:
    """The report of a whole check.

    Args:
        parts: the reports of its shards, by the names of their files.

    Raises:
        ReportError: a part is missing, comes twice, did not end, or is of another check.
    """
    shards = _shards(parts)
    first, *others = parts
    for other in others:
        _refuse_mixture(first, parts[first].header, other, parts[other].header)
    numbers = {shard.number: name for name, shard in shards.items()}
    if lacking := sorted(set(range(1, shards[first].of + 1)) - numbers.keys()):
        missing = ", ".join(f"{number}/{shards[first].of}" for number in lacking)
        raise ReportError(
            f"not all shards are there: {missing} missing; there are {', '.join(map(str, shards.values()))}"
        )
    rank = {operator: place for place, operator in enumerate(OPERATORS)}
    outcomes = sorted((o for report in parts.values() for o in report), key=lambda o: rank.get(o.operator, len(rank)))
    header = {name: value for name, value in parts[first].header.items() if name not in ("shard", "clauses_in_all")}
    header["clauses"] = parts[first].header["clauses_in_all"]
    if len(outcomes) != header["clauses"] or len({outcome.clause for outcome in outcomes}) != len(outcomes):
        raise ReportError(f"the shards hold {len(outcomes)} clauses of {header['clauses']}; check them all alike")
    return Report(header, tuple(outcomes), parts[first].required, diagnosis=diagnose(outcomes))


def _shards(parts: Mapping[str, Report]) -> dict[str, Shard]:
    """Which shard each file holds.

    Raises:
        ReportError: it holds none, or did not end, or another file holds the same.
    """
    found: dict[str, Shard] = {}
    for name, report in parts.items():
        if not {"shard", "clauses_in_all"} <= report.header.keys():
            raise ReportError(f"{name} is a whole report; parts of one are written by `spec-lm check --shard I/N`")
        if not report.complete:
            raise ReportError(f"{name} is incomplete: its check did not end; run it again")
        shard = Shard.read(str(report.header["shard"]))
        if twin := next((other for other, each in found.items() if each == shard), ""):
            raise ReportError(f"{twin} and {name} overlap: both are shard {shard}")
        found[name] = shard
    return found


def _refuse_mixture(first: str, one: dict[str, Any], second: str, other: dict[str, Any]) -> None:
    """Refuse two parts that were run with something else, telling what."""
    one, other = (
        {**header, **header.get("versions", {}), "shards": str(header["shard"]).partition("/")[2]}
        for header in (one, other)
    )
    for name in dict.fromkeys([*one, *other]):
        if name not in (*_OWN, "versions") and one.get(name) != other.get(name):
            values = f"{one.get(name)} in {first}, {other.get(name)} in {second}"
            raise ReportError(f"these are no shards of one check: {name} is {values}")
