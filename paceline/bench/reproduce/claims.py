"""A published figure beside ours. Three kinds: S, a property of the schedule, exact and the same on any hardware; H, of
the hardware, measured on the one at hand; K, of kernels or of a vendor's code, which no schedule reproduces."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Figure = float | int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """published: as printed there; None: nothing was. ours: unrounded. weakest: the condition under which the
    comparison is weakest."""

    what: str
    kind: Literal["S", "H", "K"]
    published: Figure
    ours: Figure
    unit: str
    definition: str
    weakest: str


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What one name gives. runs: the runs behind the claims, one flat object each. text: what a person sees beside the
    table, such as a chart."""

    name: str
    claims: Sequence[Claim]
    runs: Sequence[dict[str, Any]]
    text: Sequence[str] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "claims": [asdict(claim) for claim in self.claims], "runs": list(self.runs)}

    def table(self, width: int = 118) -> str:
        """For a person: the figures, then what each of them means, once."""
        rows = [[f"{number:>3}", claim.what, claim.kind, shown(claim.published), shown(claim.ours), claim.unit]
                for number, claim in enumerate(self.claims, 1)]
        lines = columns(["", "", "kind", "published", "ours", "unit"], rows)
        lines += ["", "Definitions"]
        lines += _notes([claim.definition for claim in self.claims], width)
        lines += ["", "Weakest conditions"]
        lines += _notes([claim.weakest for claim in self.claims], width)
        return "\n".join([*lines, *(f"\n{part}" for part in self.text)])


def _notes(texts: Sequence[str], width: int) -> list[str]:
    """Each text once, behind the numbers of those it belongs to."""
    numbers: dict[str, list[int]] = {}
    for number, text in enumerate(texts, 1):
        numbers.setdefault(text, []).append(number)
    return [line for text, of in numbers.items()
            for line in textwrap.wrap(f"  {_spans(of)}: {text}", width, subsequent_indent="    ")]


def columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines: the first two columns to the left, the others to the right."""
    widths = [max(len(row[index]) for row in [titles, *rows]) for index in range(len(titles))]
    return ["  ".join(cell.ljust(width) if index < 2 else cell.rjust(width)
                      for index, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in [titles, *rows]]


def machine_text(facts: Mapping[str, Any]) -> str:
    return "Measured on: " + ", ".join(f"{name} {value}" for name, value in facts.items())


def shown(value: Figure) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def _spans(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, dict.fromkeys(span))) for span in spans)
