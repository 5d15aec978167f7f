"""Reads PTX: the instructions of each kernel, and which addresses come from given parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REGISTER = re.compile(r"%[A-Za-z_]*\d+|%SPL?\b")
_MEMORY = re.compile(r"^(ld|st|atom|red|fence)\b")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `opcode` with all its suffixes, operands as text in order."""

    opcode: str
    operands: tuple[str, ...]

    @property
    def address(self) -> str | None:
        """The operand in brackets, None if there is none."""
        return next((operand for operand in self.operands if operand.startswith("[")), None)

    @property
    def writes(self) -> frozenset[str]:
        """Registers that get a value: those of the first operand, unless it is an address or there is no result."""
        if not self.operands or self.operands[0].startswith("[") or self.opcode.startswith(("st", "red", "bra", "fence")):
            return frozenset()
        return frozenset(_REGISTER.findall(self.operands[0]))

    @property
    def reads(self) -> frozenset[str]:
        operands = self.operands if not self.writes else self.operands[1:]
        return frozenset(register for operand in operands for register in _REGISTER.findall(operand))


def kernels(text: str) -> dict[str, list[Instruction]]:
    """The instructions of every entry of a PTX file, labels and directives left out."""
    found = {}
    for match in re.finditer(r"\.entry (\w+)\(.*?\)[^{]*\{(.*?)^\}", text, re.DOTALL | re.MULTILINE):
        lines = [line.strip() for line in match[2].splitlines()]
        found[match[1]] = [_parse(line) for line in lines if line.endswith(";") and not line.startswith((".", "//"))]
    return found


def _parse(line: str) -> Instruction:
    line = re.sub(r"^@!?%\w+\s+", "", line.rstrip(";").strip())
    opcode, _, rest = line.partition(" ")
    operands = re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+", rest)
    return Instruction(opcode, tuple(operands))


def memory_order(instructions: list[Instruction]) -> list[str]:
    """Opcodes of loads, stores, atomics and fences, those of parameters left out."""
    return [i.opcode for i in instructions if _MEMORY.match(i.opcode) and not i.opcode.startswith("ld.param")]


def remote_accesses(instructions: list[Instruction], sources: tuple[str, ...]) -> list[str]:
    """Opcodes of all memory accesses whose address may come from the parameters `sources` (as in "[name+8]").

    Where a value from them is kept in local memory, everything that is loaded from local memory counts as one: addresses
    are never missed, at worst there are too many.
    """
    tainted: set[str] = set()
    local = False
    while True:
        before = (len(tainted), local)
        for i in instructions:
            if i.opcode.startswith("ld"):
                hit = i.address in sources or (i.opcode.startswith("ld.local") and local)
            else:
                hit = bool(i.reads & tainted) and not i.opcode.startswith(("atom", "setp"))
            if hit:
                tainted |= i.writes
            if i.opcode.startswith("st.local") and i.reads & tainted:
                local = True
        if (len(tainted), local) == before:
            break
    own = ("ld.param", "ld.local", "st.local")
    return [i.opcode for i in instructions if _MEMORY.match(i.opcode) and not i.opcode.startswith(own)
            and i.address and set(_REGISTER.findall(i.address)) & tainted]
