"""Writes ``authoring.pyi``, so that an editor completes and checks the instruction methods: ``python -m cdna4dsl.stubs``."""
from __future__ import annotations

import ast
from pathlib import Path

from . import asm, isa

_TYPES = {"label": "str", "imm": "int", "waitcnt": "int", "saddr": "Reg | Off", "vgpr": "Reg", "vreg": "Reg", "sreg": "Reg", "mask": "Reg",
          "vaddr": "Reg | Off", "vcsrc": "Reg | Imm | int | float", "smoff": "Reg | Imm | int"}


def _shape(node: ast.stmt) -> ast.stmt | None:
    """A definition without its bodies."""
    if isinstance(node, ast.FunctionDef):
        doc = ast.get_docstring(node)
        body: list[ast.stmt] = [ast.Expr(ast.Constant(doc))] if doc else []
        node.body = body + [ast.Expr(ast.Constant(...))]
        return node
    if isinstance(node, ast.ClassDef):
        node.body = [s for s in map(_shape, node.body) if s] or [ast.Expr(ast.Constant(...))]
        return node
    keep = isinstance(node, (ast.Import, ast.ImportFrom, ast.AnnAssign)) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return node if keep else None


def text() -> str:
    """The stub file's text, from the source of ``authoring`` and the specs."""
    tree = ast.parse((Path(__file__).parent / "authoring.py").read_text())
    body = [s for s in (_shape(n) for n in tree.body if not (isinstance(n, ast.FunctionDef) and n.name == "_method")) if s]
    lines = ["# Written by python -m cdna4dsl.stubs; do not edit."]
    for node in body:
        lines.append(ast.unparse(node))
        if isinstance(node, ast.ClassDef) and node.name == "Kernel":
            for spec in isa.load().instructions.values():
                ops = [f"{o.name}: {_TYPES.get(o.kind, 'Reg | Imm | int | float')}" for o in spec.operands]
                if "lds" in spec.modifiers:
                    ops[0] += " | None"
                mods = [f"{m}: int | list[int] = ..." for m in spec.modifiers]
                if spec.forms[-1].encoding == "VOP3" and not mods:
                    mods = ["clamp: int = ...", "omod: int = ..."]
                signature = ", ".join(["self", *ops, "*", "comment: str | None = ...", *mods])
                lines.append(f"    def {spec.mnemonic}({signature}) -> Instruction: ...")
    names = ["off: Off", "vcc: Reg", "exec_mask: Reg", "m0: Reg"]
    return "\n".join(lines + names) + "\n"


if __name__ == "__main__":
    print(asm.write_atomic(Path(__file__).parent / "authoring.pyi", text()))
