"""Shapes of layers by the name of the model, and parsing of them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from moe_tk.errors import ArgumentError
from moe_tk.sizes import check_count, check_width


@dataclass(frozen=True)
class Shape:
    """Widths and counts of one layer."""

    name: str
    hidden: int        # H
    intermediate: int  # I
    experts: int       # E
    top_k: int         # k


SHAPES = {shape.name: shape for shape in (
    Shape("seed", 4096, 3072, 64, 8),
    Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
    Shape("olmoe", 2048, 1024, 64, 8),
    Shape("mixtral-8x7b", 4096, 14336, 8, 2),
    Shape("deepseek-v3", 7168, 2048, 256, 8),
    Shape("deepseek-v4-flash", 4096, 2048, 256, 6),
    Shape("deepseek-v4-pro", 7168, 3072, 384, 6),
)}
SHORT_NAMES = {"qwen3": "qwen3-30b-a3b", "mixtral": "mixtral-8x7b", "dsv3": "deepseek-v3", "flash": "deepseek-v4-flash",
               "pro": "deepseek-v4-pro"}


def parse_shapes(text: str) -> list[Shape]:
    """The shapes of "NAME,NAME,.." or the one of "H,I,E,k"; "all" is every shape that has a name. Raises ArgumentError."""
    words = [word.strip() for word in text.split(",")]
    if words == ["all"]:
        return list(SHAPES.values())
    if all(word.isdigit() for word in words):
        return [_own_shape(words)]
    shapes = []
    for word in words:
        found = SHAPES.get(SHORT_NAMES.get(word, word))
        if found is None:
            raise ArgumentError(f"shape {word!r} is not known: wanted {', '.join(SHAPES)}, a short name "
                                f"({', '.join(SHORT_NAMES)}), all, or four numbers H,I,E,k")
        shapes.append(found)
    return shapes


def _own_shape(words: list[str]) -> Shape:
    if len(words) != 4:
        raise ArgumentError(f"shape {','.join(words)!r} has {len(words)} numbers, wanted four: H,I,E,k")
    hidden, intermediate, experts, top_k = map(int, words)
    check_width("H", hidden)
    check_count("I", intermediate)
    check_count("E", experts)
    check_count("k", top_k, most=experts)
    return Shape(f"{hidden}x{intermediate}-e{experts}k{top_k}", hidden, intermediate, experts, top_k)
