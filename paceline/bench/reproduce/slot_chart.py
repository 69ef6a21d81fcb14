"""Who rode in which slot at which step: a strip a slot, as text and as a picture.

The scheduler counts slots and does not number them; here a request takes the lowest one that is free when its first row
runs, and leaves it with its last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from ...engine.messages import RequestOutput
from ...sched.plan import SchedulerOutput, StepResult

CELL, GAP, LEFT, TOP = 26, 3, 60, 34    # of the picture, in its units
MARKS = "123456789abcdefghijklmnopqrstuvwxyz"
INKS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")


@dataclass
class SlotChart:
    """A listener. Steps are columns; a cell is the request's number in order of its start, None where the slot is
    idle. prefills are cells in which a prompt ran."""

    num_slots: int
    strips: list[list[int | None]] = field(default_factory=list)    # [slot][step]
    prefills: set[tuple[int, int]] = field(default_factory=set)     # (slot, step)
    pauses: dict[tuple[int, int], int] = field(default_factory=dict)    # the slot is a request's, which has no row
    num_idle_while_waiting: int = 0                                 # slot-steps in which a request waited
    num_decode_steps: int = 0                                       # steps in which no prompt ran
    num_idle_in_decode: int = 0                                     # slot-steps of those
    _slots: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _num_steps: int = 0

    def __post_init__(self) -> None:
        self.strips = [[] for _ in range(self.num_slots)]

    def on_step(self, plan: SchedulerOutput, result: StepResult) -> None:
        for strip in self.strips:
            strip.append(None)
        for row in plan.rows:
            slot = self._slot_of(row.request_id)
            self.strips[slot][-1] = self._numbers[row.request_id]
            if len(row.token_ids) > 1:
                self.prefills.add((slot, self._num_steps))
        with_row = {row.request_id for row in plan.rows}
        self.pauses |= {(slot, self._num_steps): self._numbers[one] for one, slot in self._slots.items()
                        if one not in with_row}
        if plan.num_waiting:
            self.num_idle_while_waiting += plan.num_idle_slots
        if all(len(row.token_ids) == 1 for row in plan.rows):
            self.num_decode_steps += 1
            self.num_idle_in_decode += plan.num_idle_slots
        self._num_steps += 1

    def on_request_finished(self, output: RequestOutput) -> None:
        self._slots.pop(output.request_id, None)

    def _slot_of(self, request_id: str) -> int:
        if request_id not in self._slots:
            taken = set(self._slots.values())
            self._slots[request_id] = next(slot for slot in range(self.num_slots) if slot not in taken)
            self._numbers.setdefault(request_id, len(self._numbers) + 1)
        return self._slots[request_id]

    def text(self, title: str) -> str:
        """A request by its digit, a prompt's pass by #, one that pauses by -, an idle slot by a dot."""
        lines = [f"{title} ({self._num_steps} steps)"]
        for slot, strip in enumerate(self.strips):
            lines.append(f"  slot {slot + 1} |{''.join(self._mark(slot, step) for step in range(len(strip)))}|")
        return "\n".join(lines)

    def _mark(self, slot: int, step: int) -> str:
        if (slot, step) in self.prefills:
            return "#"
        number = self.strips[slot][step]
        if number is None:
            return "-" if (slot, step) in self.pauses else "."
        return MARKS[(number - 1) % len(MARKS)]

    def svg(self, title: str) -> str:
        """The same: a prompt's pass is pale, a slot whose request pauses has its colour as a border."""
        width, height = LEFT + CELL * self._num_steps + GAP, TOP + CELL * self.num_slots + 24
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'font-size="12" role="img" aria-label="{escape(title)}">',
            "<style>text{fill:#333}.idle{fill:#eee}@media(prefers-color-scheme:dark){text{fill:#ddd}"
            ".idle{fill:#333}}text.in{fill:#111}.p{opacity:.45}</style>",
            f'<text x="{GAP}" y="18" font-weight="bold">{escape(title)}</text>']
        for slot, strip in enumerate(self.strips):
            y = TOP + CELL * slot
            parts.append(f'<text x="{GAP}" y="{y + 17}">slot {slot + 1}</text>')
            parts += [self._cell(slot, step, LEFT + CELL * step, y) for step in range(len(strip))]
        parts += [f'<text x="{LEFT + CELL * step}" y="{height - 8}">{step}</text>'
                  for step in range(0, self._num_steps, 5)]
        return "\n".join([*parts, "</svg>", ""])

    def _cell(self, slot: int, step: int, x: int, y: int) -> str:
        size, number = CELL - GAP, self.strips[slot][step]
        place = f'x="{x}" y="{y}" width="{size}" height="{size}"'
        if number is None:
            holder = self.pauses.get((slot, step))
            stroke = "" if holder is None else f' stroke="{INKS[(holder - 1) % len(INKS)]}" stroke-width="2"'
            return f'<rect {place} class="idle"{stroke}/>'
        style = ' class="p"' if (slot, step) in self.prefills else ""
        return (f'<rect {place} fill="{INKS[(number - 1) % len(INKS)]}"{style}/>'
                f'<text class="in" x="{x + size / 2}" y="{y + 16}" text-anchor="middle">{number}</text>')
