"""Writes the table of docs/formats.md: which packed form each source type becomes, and what that step loses.

    python -m tests.golden.make_formats_doc

The error is the root of the mean square of (packed value - dequantised value), over that of the dequantised values,
for 256 x 2048 weights of tests/model/blocks.py. A test holds the committed table true.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.model.decoder import AUTO_FORMS, FORM_BITS
from paceline.ops.dequantize import BLOCKS, dequantize
from paceline.ops.numpy_pack import ROUNDERS, rounded_to_form
from tests.model import blocks

DOC_PATH = Path(__file__).parents[2] / "docs" / "formats.md"
START, END = "<!-- table: made by tests/golden/make_formats_doc.py -->\n", "<!-- end of table -->\n"


def relative_error(kind: str, form: str) -> float:
    source = blocks.source(kind, 256, 2048, seed=1)
    values = dequantize(source).astype(np.float64)
    return float(np.sqrt(((rounded_to_form(source, form) - values) ** 2).mean() / (values**2).mean()))


def table() -> str:
    forms = list(ROUNDERS)
    lines = ["| source type | bits in the file | packed form (auto) | bits | " + " | ".join(forms) + " |",
             "|---|---|---|---|" + "---|" * len(forms)]
    for kind, form in sorted(AUTO_FORMS.items(), key=lambda item: list(BLOCKS).index(item[0])):
        num_values, num_bytes = BLOCKS[kind]
        errors = [relative_error(kind, name) for name in forms]
        shown = [_shown(error, name == form) for error, name in zip(errors, forms, strict=True)]
        bits = 8 * num_bytes / num_values
        lines.append(f"| {kind} | {bits:g} | {form} | {FORM_BITS[form]:g} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _shown(error: float, is_chosen: bool) -> str:
    text = f"{error:.1e}" if error else "0"
    return f"**{text}**" if is_chosen else text


def main() -> None:
    before, _, rest = DOC_PATH.read_text().partition(START)
    DOC_PATH.write_text(before + START + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
