"""What packing loses, for `paceline info`: the figures of docs/formats.md, which says how they are measured."""

from __future__ import annotations

# Source type -> packed form -> relative root mean square error; forms that are absent lose nothing.
PACKING_ERRORS: dict[str, dict[str, float]] = {
    "F32": {"bf16": 1.7e-03, "int8": 7.7e-03, "int4": 7.1e-02},
    "F16": {"bf16": 1.7e-03, "int8": 7.7e-03, "int4": 7.1e-02},
    "BF16": {"int8": 8.0e-03, "int4": 7.1e-02},
    "Q4_0": {"bf16": 1.7e-03, "int8": 7.1e-03},
    "Q4_1": {"bf16": 1.7e-03, "int8": 7.6e-03},
    "Q5_0": {"bf16": 1.7e-03, "int4": 6.9e-02},
    "Q5_1": {"bf16": 1.7e-03, "int8": 5.4e-03, "int4": 6.6e-02},
    "Q8_0": {"bf16": 1.7e-03, "int4": 7.1e-02},
    "Q2_K": {"bf16": 1.6e-03, "int8": 5.7e-03, "int4": 4.6e-02},
    "Q3_K": {"bf16": 1.6e-03, "int8": 4.2e-03, "int4": 4.5e-02},
    "Q4_K": {"bf16": 1.7e-03, "int8": 7.5e-03, "int4": 7.6e-04},
    "Q5_K": {"bf16": 1.6e-03, "int8": 3.9e-03, "int4": 5.4e-02},
    "Q6_K": {"bf16": 1.7e-03, "int8": 5.2e-03, "int4": 7.0e-02},
    "IQ4_NL": {"bf16": 1.7e-03, "int4": 5.9e-02},
    "MXFP4": {"int4": 6.5e-02},
    "AWQ": {"int4": 4.0e-04},      # of the groups measured, the worst; only auto is measured
    "GPTQ": {"int4": 4.0e-04},
    "F8_E4M3": {"bf16": 1.7e-03},
}
ONLY_AUTO = ("AWQ", "GPTQ", "F8_E4M3")


def packing_error(source_type: str, form: str) -> float | None:
    """None where it was not measured."""
    errors = PACKING_ERRORS.get(source_type)
    if errors is None or (source_type in ONLY_AUTO and form not in errors):
        return None
    return errors.get(form, 0.0)
