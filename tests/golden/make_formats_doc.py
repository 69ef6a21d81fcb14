"""Writes the tables of docs/formats.md: which packed form each source type becomes, and what that step loses.

    python -m tests.golden.make_formats_doc

The error is the root of the mean square of (packed value - dequantised value), over that of the dequantised values,
for 256 x 2048 weights of tests/model/blocks.py. A test holds the committed table true.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.model.decoder import AUTO_FORMS, FORM_BITS
from paceline.model.fields import Fields
from paceline.model.prequantized import plain_checkpoint
from paceline.model.stored import StoredTensor
from paceline.ops.dequantize import BLOCKS, dequantize
from paceline.ops.numpy_pack import ROUNDERS, rounded_to_form
from tests.model import blocks, quantized

DOC_PATH = Path(__file__).parents[2] / "docs" / "formats.md"
END = "<!-- end of table -->\n"


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


def four_bit_table() -> str:
    """The same error for AWQ and GPTQ, which share it: against s (q - z) in float64, s in half precision."""
    lines = ["| group | symmetric | with zero points |", "|---|---|---|"]
    weights = np.random.default_rng(1).normal(0.002, 0.02, (256, 2048)).astype(np.float32)
    for group_size in (32, 64, 128):
        errors = []
        for is_symmetric in (True, False):
            linear = quantized.quantized(weights, group_size, is_symmetric)
            tensors = {name: StoredTensor(name, array.shape, "F16" if array.dtype == np.float16 else "I32",
                                          array.reshape(-1).view(np.uint8))
                       for name, array in quantized.awq_arrays("w", linear).items()}
            settings = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": group_size}}
            _, plain = plain_checkpoint(Fields(settings, "made up"), tensors)
            difference = dequantize(plain["w.weight"].to_matrix()) - linear.values
            errors.append(float(np.sqrt((difference**2).mean() / (linear.values**2).mean())))
        lines.append(f"| {group_size} | {' | '.join(_shown(error, False) for error in errors)} |")
    return "\n".join(lines) + "\n"


def _shown(error: float, is_chosen: bool) -> str:
    text = f"{error:.1e}" if error else "0"
    return f"**{text}**" if is_chosen else text


TABLES = {"<!-- table: made by tests/golden/make_formats_doc.py -->\n": table,
          "<!-- table of four bits: made by the same -->\n": four_bit_table}


def main() -> None:
    text = DOC_PATH.read_text()
    for start, made in TABLES.items():
        before, _, rest = text.partition(start)
        text = before + start + made() + END + rest.partition(END)[2]
    DOC_PATH.write_text(text)


if __name__ == "__main__":
    main()
