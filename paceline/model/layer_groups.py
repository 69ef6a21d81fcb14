"""Which layers share a block table: those that look back equally far, in groups of one size."""

from __future__ import annotations

from dataclasses import dataclass

from .spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one window (None: they see all), in order; a layer's place here is its place in a block."""

    window: int | None
    layers: tuple[int, ...]


def layer_groups(spec: ModelSpec, max_model_len: int) -> tuple[LayerGroup, ...]:
    """Groups of as many layers as the rarest kind has; a last group of a kind may leave places of its blocks unused.

    A window that no position up to max_model_len can look past is none.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer in range(spec.num_layers):
        window = spec.windows[layer] if spec.windows else None
        kinds.setdefault(window if window is not None and window < max_model_len else None, []).append(layer)
    size = min(map(len, kinds.values()))
    return tuple(
        LayerGroup(window, tuple(layers[start : start + size]))
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)    # those that see all come first
        for start in range(0, len(layers), size)
    )
