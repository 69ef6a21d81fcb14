"""The table of docs/formats.md is what packing does today, and no type has a much better form than the one chosen."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.model.decoder import AUTO_FORMS, FORM_BITS
from paceline.model.packing_errors import PACKING_ERRORS, packing_error
from paceline.ops.dequantize import BLOCKS
from paceline.ops.numpy_pack import LOSSLESS
from tests.golden import make_formats_doc


def test_the_committed_tables_are_the_measured_ones() -> None:
    text = make_formats_doc.DOC_PATH.read_text()
    for start, made in make_formats_doc.TABLES.items():
        assert text.partition(start)[2].partition(make_formats_doc.END)[0] == made()


@pytest.mark.parametrize("kind", BLOCKS)
def test_info_tells_the_errors_of_the_table(kind: str) -> None:
    told = {form: packing_error(kind, form) for form in FORM_BITS}
    assert told == {form: float(f"{make_formats_doc.relative_error(kind, form):.1e}") for form in FORM_BITS}


def test_info_knows_the_quantised_checkpoints_too_and_invents_nothing() -> None:
    assert set(PACKING_ERRORS) - set(BLOCKS) == {"AWQ", "GPTQ", "F8_E4M3"}
    worst = max(float(text) for text in make_formats_doc.four_bit_table().replace("|", " ").split()
                if text[0].isdigit() and "e" in text)
    assert packing_error("AWQ", "int4") == packing_error("GPTQ", "int4") == worst
    assert packing_error("AWQ", "int8") is None and packing_error("Q9_X", "f32") is None


def test_every_type_that_can_be_read_has_a_form() -> None:
    assert set(AUTO_FORMS) == set(BLOCKS)


@pytest.mark.parametrize("kind", AUTO_FORMS)
def test_the_chosen_form_is_exact_or_close(kind: str) -> None:
    error = make_formats_doc.relative_error(kind, AUTO_FORMS[kind])
    assert error == 0 if kind in LOSSLESS[AUTO_FORMS[kind]] | {"MXFP4"} else 0 < error < 0.007
    smaller = [form for form, bits in FORM_BITS.items() if bits < FORM_BITS[AUTO_FORMS[kind]]]
    assert all(make_formats_doc.relative_error(kind, form) > max(error, np.finfo(np.float32).eps) for form in smaller)
