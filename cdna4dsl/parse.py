"""gfx950 assembly text in LLVM's dialect to programs.

A statement's syntax is a lark grammar; a line's operands are checked by ``operands.validate``. Identical statements are
parsed once.
"""
from __future__ import annotations

import difflib
import functools
import re
import struct

import lark
from attrs import define

from .isa import load
from .operands import choose_form, validate
from .program import SOURCE_NAMES, SPECIAL, WAITCNT_MAX, Arg, Imm, Instruction, KernelInfo, Label, Off, Operand, Program, Reg, encode_waitcnt

_GRAMMAR = r"""
start: MNEMONIC [operand ("," operand)* modifier*]
?operand: MINUS plain -> signed
        | plain
plain: REGISTER -> register
     | RANGE -> range
     | "|" plain "|" -> absolute
     | "abs" "(" plain ")" -> absolute
     | "neg" "(" plain ")" -> negated
     | FLOAT -> float
     | INT -> int
     | COUNTER+ -> counters
     | NAME -> name
modifier: NAME ":" INT -> number
        | NAME ":" MINUS INT -> negative
        | NAME ":" "[" INT ("," INT)* "]" -> bits
        | NAME -> flag
MINUS: "-"
MNEMONIC.2: /[a-z]+_\w+/
REGISTER.3: /[vas]\d+\b/
RANGE.3: /[vas]\[\s*\d+\s*(:\s*\d+\s*)?\]/
COUNTER.3: /(vmcnt|lgkmcnt|expcnt)\s*\(\s*\d+\s*\)[\s&]*/
FLOAT.2: /\d+\.\d*(e-?\d+)?|\.\d+/
INT: /0x[0-9a-fA-F]+|0b[01]+|\d+/
NAME: /[A-Za-z_.$][\w.$]*/
%ignore /[ \t]+/
"""
_TOKENS = {"COMMA": "','", "COLON": "':'", "VBAR": "'|'", "LPAR": "'('", "RPAR": "')'", "RSQB": "']'", "NAME": "a name", "INT": "a number",
           "REGISTER": "a register", "RANGE": "a register range", "FLOAT": "a float", "COUNTER": "a counter", "MNEMONIC": "a mnemonic",
           "$END": "the end of the line", "MINUS": "'-'", "LSQB": "'['", "ABS": "abs(", "NEG": "neg("}
_PLACE = re.compile(r"@(\S+\.py):(\d+)\s*$")
_LABEL = re.compile(r"\s*([A-Za-z_.$][\w.$]*)\s*:(?!:)")
_MAX_PROBLEMS = 20
_DATA = {".long", ".byte", ".short", ".word", ".quad", ".int", ".ascii", ".asciz", ".string", ".fill", ".zero", ".space", ".skip", ".2byte", ".4byte", ".8byte"}


@define
class ParseError(ValueError):
    """Text that is no gfx950 assembly; ``problems`` are (line, column, message), at most 20."""
    source: str
    problems: list[tuple[int, int, str]]

    def __str__(self) -> str:
        return "\n".join(f"{self.source}:{line}:{column}: {message}" for line, column, message in self.problems)


@define
class _Bad(Exception):
    message: str
    column: int = 1


@functools.lru_cache(None)
def _parser() -> lark.Lark:
    return lark.Lark(_GRAMMAR, parser="lalr", lexer="contextual", maybe_placeholders=True)


@functools.lru_cache(1 << 16)
def _syntax(text: str) -> lark.Tree:
    try:
        return _parser().parse(text)
    except lark.exceptions.UnexpectedCharacters as e:
        raise _Bad(f"unexpected '{text[e.column - 1]}'; expected {_expected(e.allowed)}", e.column) from None
    except lark.exceptions.UnexpectedToken as e:
        got = "end of line" if e.token.type == "$END" else f"'{e.token}'"
        raise _Bad(f"unexpected {got}; expected {_expected(e.accepts or e.expected)}", len(text) + 1 if e.token.type == "$END" else e.column) from None


def _expected(kinds) -> str:
    return ", ".join(sorted(_TOKENS.get(k, k) for k in kinds or ())) or "nothing"


def _name(name: str) -> Operand:
    if name == "off":
        return Off()
    if name in SPECIAL:
        index, count = SPECIAL[name]
        return Reg("s", index, count)
    if name in SOURCE_NAMES:
        return Reg("s", SOURCE_NAMES[name])
    return Label(name)


def _plain(node, symbols) -> Operand | int | float:
    kind, first = node.data, node.children[0]
    if kind == "register":
        return Reg(first[0], int(first[1:]))
    if kind == "range":
        ends = [int(n) for n in re.findall(r"\d+", first)]
        if ends[-1] < ends[0]:
            raise _Bad(f"{first}: the range runs backwards", first.column)
        return Reg(first[0], ends[0], ends[-1] - ends[0] + 1)
    if kind in ("absolute", "negated"):
        inner = _plain(first, symbols)
        if not isinstance(inner, Reg):
            raise _Bad("a modifier needs a register")
        return abs(inner) if kind == "absolute" else -inner
    if kind == "float":
        return float(first)
    if kind == "int":
        return int(first, 0)
    if kind == "counters":
        counts = {}
        for token in node.children:
            name, number = re.match(r"(\w+)\s*\(\s*(\d+)", token).groups()
            if int(number) > WAITCNT_MAX[name]:
                raise _Bad(f"{name}({number}): 0 to {WAITCNT_MAX[name]}", token.column)
            counts[name] = int(number)
        return Imm(encode_waitcnt(**counts))
    return symbols[first] if first in symbols else _name(str(first))


@functools.lru_cache(1 << 12)
def _split_mnemonic(text: str) -> tuple[str, str]:
    """(mnemonic of the specs, forced suffix)."""
    instructions = load().instructions
    if text in instructions:
        return text, ""
    for suffix in ("_e32", "_e64"):
        if text.endswith(suffix) and text[:-4] in instructions:
            return text[:-4], suffix
    near = difflib.get_close_matches(text, instructions, 3)
    raise _Bad(f"unknown instruction '{text}'" + (f"; did you mean {', '.join(near)}?" if near else ""))


def _instruction(text: str, symbols: dict[str, int]) -> Instruction:
    tree = _syntax(text)
    mnemonic, suffix = _split_mnemonic(str(tree.children[0]))
    spec = load().instructions[mnemonic]
    values, mods = [], {}
    for node in tree.children[1:]:
        if node is None:
            continue
        if node.data == "signed":
            value = _plain(node.children[-1], symbols)
            if not isinstance(value, (int, float, Reg)):
                raise _Bad(f"'-' before '{value}'")
            values.append(-value)
        elif node.data in ("register", "range", "absolute", "negated", "float", "int", "counters", "name"):
            values.append(_plain(node, symbols))
        else:
            _modifier(node, mods)
    dma = mods.get("lds") and "lds" in spec.modifiers
    specs = [o for o in spec.operands if not (dma and o.name == "vdata")]
    if len(values) != len(specs):
        raise _Bad(f"{mnemonic} takes {len(specs)} operand(s) ({', '.join(o.name for o in specs)}), got {len(values)}")
    ops: dict[str, Operand] = {}
    for o, value in zip(specs, values):
        if isinstance(value, (int, float)):
            try:
                if isinstance(value, float) and (o.dwords > 1 and o.element != "f32" or o.kind not in ("src", "ssrc", "vcsrc")):
                    raise ValueError(f"a {o.element} operand cannot be the float {value}")
                value = Imm.of(value)
            except (ValueError, OverflowError, struct.error) as e:
                raise _Bad(f"operand {o.name}: {e}") from None
        ops[o.name] = value
    form = choose_form(spec, ops, mods)
    if suffix and suffix != form.suffix:
        forced = [f for f in spec.forms if f.suffix == suffix]
        if not forced or suffix == "_e32":
            raise _Bad(f"{mnemonic} cannot be {suffix[1:]} with these operands" if forced else f"{mnemonic} has no {suffix[1:]} form")
        form = forced[0]
    problems = validate(spec, form, ops, mods)
    if problems:
        raise _Bad("; ".join(problems))
    return Instruction(spec, form, ops, mods)


def _modifier(node, mods: dict[str, int]) -> None:
    name, values = str(node.children[0]), [int(c, 0) for c in node.children[1:] if c.type == "INT"]
    if name in ("mul", "div"):
        omod = {("mul", 2): 1, ("mul", 4): 2, ("div", 2): 3}.get((name, values[0] if values else 0))
        if omod is None:
            raise _Bad(f"{name}:{values}: mul:2, mul:4 or div:2")
        mods["omod"] = omod
    elif node.data == "bits":
        bits = values[:3] + ([0] * (3 - len(values[:3])) + values[3:] if len(values) > 3 else [])
        if any(b not in (0, 1) for b in values):
            raise _Bad(f"{name}: each is 0 or 1")
        mods[name] = sum(b << i for i, b in enumerate(bits))
    else:
        mods[name] = 1 if node.data == "flag" else -values[0] if node.data == "negative" else values[0]


def _op_sel(inst: Instruction) -> Instruction:
    """VOP3's op_sel list ends with the destination's bit, which is bit 3; op_sel_hi left out is all ones."""
    mods = inst.mods
    sources = sum(o.name.startswith("src") for o in inst.spec.operands)
    if mods.get("op_sel") and inst.form.encoding == "VOP3" and sources < 3 and mods["op_sel"] >> sources & 1:
        mods["op_sel"] = mods["op_sel"] & (1 << sources) - 1 | 8
    if "op_sel_hi" in mods and inst.form.encoding == "VOP3P":
        mods["op_sel_hi"] |= 7 & ~((1 << sources) - 1)
        if mods["op_sel_hi"] == 7:
            del mods["op_sel_hi"]
    inst.mods = {k: v for k, v in mods.items() if v or k == "op_sel_hi" and inst.form.encoding == "VOP3P"}
    return inst


def _strip(text: str) -> tuple[str, str]:
    """(code, comment) of a line; a ';' or '//' inside a string does not begin a comment."""
    m = re.match(r"""((?:[^;/"]|"(?:[^"\\]|\\.)*"|/(?!/))*)(.*)""", text, re.S)
    return m[1].rstrip(), m[2]


def _expression(text: str, symbols: dict[str, int]) -> int:
    """Value of an integer expression of + - * / ( ) << >> & | and symbols."""
    import ast
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        raise _Bad(f"cannot read the expression '{text.strip()}'") from None

    def value(n) -> int:
        if isinstance(n, ast.Expression):
            return value(n.body)
        if isinstance(n, ast.Constant) and isinstance(n.value, int):
            return n.value
        if isinstance(n, ast.Name):
            if n.id not in symbols:
                raise _Bad(f"unknown symbol '{n.id}'")
            return symbols[n.id]
        if isinstance(n, ast.UnaryOp) and isinstance(n.op, (ast.USub, ast.Invert)):
            return -value(n.operand) if isinstance(n.op, ast.USub) else ~value(n.operand)
        ops = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.BitAnd: int.__and__, ast.BitOr: int.__or__}
        if isinstance(n, ast.BinOp):
            left, right = value(n.left), value(n.right)
            if type(n.op) in ops:
                return ops[type(n.op)](left, right)
            if isinstance(n.op, (ast.LShift, ast.RShift)) and 0 <= right < 64:
                return left << right if isinstance(n.op, ast.LShift) else left >> right
            if isinstance(n.op, ast.Div) and right:
                return left // right
        raise _Bad(f"cannot read the expression '{text.strip()}'")
    return value(tree)


def parse(text: str, source: str = "input.s") -> list[Program]:
    """One Program a kernel (a symbol with an .amdhsa_kernel block); text without directives is one bare fragment.

    A comment ``; @file.py:12`` on an instruction is the Python line that emitted it. ParseError lists what is wrong.
    """
    symbols: dict[str, int] = {}
    problems: list[tuple[int, int, str]] = []
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    label_lines: dict[str, int] = {}
    sections = {"section": ".text", "kernel": None, "metadata": None}
    kernels: dict[str, dict[str, int]] = {}
    metadata: list[tuple[int, str]] = []
    data: list[tuple[int, int, str]] = []      # index of the instruction that would follow, line, directive
    directives = False
    clean = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n") or " ", text, flags=re.S)
    for number, raw in enumerate(clean.split("\n"), 1):
        if len(problems) >= _MAX_PROBLEMS:
            break
        if sections["metadata"] is not None:
            if raw.strip() == ".end_amdgpu_metadata":
                sections["metadata"] = None
            else:
                metadata.append((number, raw))
            continue
        line, comment = _strip(raw)
        at = 0
        try:
            while m := _LABEL.match(line, at):
                name, at = m[1], m.end()
                if sections["section"].startswith(".text"):
                    if name in labels:
                        raise _Bad(f"label '{name}' twice, first on line {label_lines[name]}", m.start(1) + 1)
                    labels[name], label_lines[name] = len(instructions), number
            statement = line[at:].strip()
            if not statement:
                continue
            column = len(line) - len(line[at:].lstrip()) + 1
            if statement.startswith("."):
                directives = True
                if sections["section"].startswith(".text") and statement.split()[0] in _DATA:
                    data.append((len(instructions), number, statement.split()[0]))
                _directive(statement, symbols, sections, kernels)
            else:
                try:
                    inst = _op_sel(_instruction(statement, symbols))
                except _Bad as e:
                    raise _Bad(e.message, column + e.column - 1) from None
                place = _PLACE.search(comment)
                inst.line, inst.python = number, (place[1], int(place[2])) if place else None
                instructions.append(inst)
        except _Bad as e:
            problems.append((number, e.column, e.message))
    if sections["kernel"]:
        problems.append((clean.count("\n") + 1, 1, f".amdhsa_kernel {sections['kernel']} has no .end_amdhsa_kernel"))
    if not problems:
        for inst in instructions:
            for o in inst.operands.values():
                if isinstance(o, Label) and o.name not in labels and len(problems) < _MAX_PROBLEMS:
                    near = difflib.get_close_matches(o.name, labels, 1)
                    problems.append((inst.line, 1, f"{inst.mnemonic}: no label '{o.name}'" + (f"; did you mean '{near[0]}'?" if near else "")))
        for name in kernels:
            if name not in labels:
                problems.append((1, 1, f".amdhsa_kernel {name}: no label '{name}'"))
        begins = {len(instructions), *(labels[n] for n in kernels if n in labels)}
        for index, number, word in data:
            if not (index in begins and index and instructions[index - 1].mnemonic == "s_endpgm"):
                problems.append((number, 1, f"{word} among instructions: data in code is only read after a kernel's last s_endpgm"))
        if not instructions:
            problems.append((1, 1, "no instruction"))
        elif directives and not kernels:
            kernels = {}
    if problems:
        raise ParseError(source, problems)
    if not kernels:
        return [Program("fragment", instructions, labels, None, source)]
    try:
        notes = _metadata(metadata)
    except _Number as e:
        raise ParseError(source, [(e.args[0], 1, e.args[1])]) from None
    return [_kernel(name, values, notes.get(name, {}), instructions, labels, kernels, source) for name, values in kernels.items()]


def _directive(statement: str, symbols, sections, kernels) -> None:
    word, _, rest = statement.partition(" ")
    rest = rest.strip()
    if sections["kernel"]:
        if word == ".end_amdhsa_kernel":
            sections["kernel"] = None
        elif word.startswith(".amdhsa_"):
            kernels[sections["kernel"]][word[8:]] = _expression(rest, symbols)
        else:
            raise _Bad(f"'{word}' inside .amdhsa_kernel {sections['kernel']}")
    elif word in (".text", ".data", ".rodata", ".bss"):
        sections["section"] = word
    elif word == ".section":
        sections["section"] = rest.split(",")[0].strip()
    elif word == ".amdhsa_kernel":
        if not rest or rest in kernels:
            raise _Bad(f".amdhsa_kernel '{rest}': a new kernel's name")
        kernels[rest], sections["kernel"] = {}, rest
    elif word == ".amdgpu_metadata":
        sections["metadata"] = True
    elif word in (".set", ".equ"):
        name, comma, value = rest.partition(",")
        if not comma:
            raise _Bad(f"{word} needs a name and a value")
        symbols[name.strip()] = _expression(value, symbols)
    elif word == ".amdgcn_target":
        if "gfx950" not in rest:
            raise _Bad(f".amdgcn_target {rest}: not gfx950")
    elif word in (".macro", ".rept", ".irp", ".if", ".include", ".altmacro"):
        raise _Bad(f"{word} is not supported; expand it first (llvm-mc does)")


class _Number(Exception):
    """(line, message): metadata with text where a number must be."""


def _number(text: str, line: int, key: str) -> int:
    try:
        value = int(text.removeprefix("!!int").strip(), 0) if len(text) < 20 else -1
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 32:
        raise _Number(line, f".{key}: {text[:40]}: expected a number of 32 bits")
    return value


def _metadata(lines: list[tuple[int, str]]) -> dict[str, dict]:
    """Kernel name -> {"args", "workgroup"} from the YAML of .amdgpu_metadata as compilers and ``asm`` print it."""
    kernels: dict[str, dict] = {}
    entry: dict = {}
    arg: dict | None = None
    in_kernels = False
    entry_indent = None
    for number, line in lines:
        m = re.match(r"(\s*)(-\s+)?\.?([\w.]+):\s*(.*)$", line)
        if not m:
            continue
        indent, dash, key, value = len(m[1]), bool(m[2]), m[3], m[4].removeprefix("!str").strip().strip("'\"")
        if key == "amdhsa.kernels":
            in_kernels = True
            continue
        if not in_kernels:
            continue
        if dash and (entry_indent is None or indent <= entry_indent):
            entry_indent, entry, arg = indent, {"args": [], "workgroup": None, "flat": 64}, None
        elif dash:
            arg = {}
            entry["args"].append(arg)
        elif arg is not None and indent <= entry_indent + 2:
            arg = None
        if arg is not None:
            arg[key] = _number(value, number, key) if key in ("offset", "size") else value
        elif key == "name":
            kernels[value] = entry
        elif key == "max_flat_workgroup_size":
            entry["flat"] = _number(value, number, key)
        elif key == "reqd_workgroup_size":
            numbers = [_number(n, number, key) for n in re.findall(r"\d+", value)]
            entry["workgroup"] = tuple(numbers) if len(numbers) == 3 else None
    return kernels


def _kernel(name, values, notes, instructions, labels, kernels, source) -> Program:
    start = labels[name]
    end = min((labels[k] for k in kernels if labels[k] > start), default=len(instructions))
    body = instructions[start:end]
    own = {n: i - start for n, i in labels.items() if start <= i <= end and n not in kernels and not n.startswith(".Lend_")}
    for inst in body:
        for o in inst.operands.values():
            if isinstance(o, Label) and o.name not in own:
                raise ParseError(source, [(inst.line, 1, f"{inst.mnemonic} {o.name} leaves kernel '{name}'")])
    flat = notes.get("flat", 64)
    get = values.get
    total = get("next_free_vgpr", 1)
    accum = get("accum_offset", min(256, -(-total // 4) * 4))
    kinds = {8: "u64", 4: "u32"}
    args = tuple(Arg(a.get("name", f"arg{i}"), a.get("offset", 0), a.get("size", 0),
                     "pointer" if a.get("value_kind") == "global_buffer" else kinds.get(a.get("size", 0), "u32"))
                 for i, a in enumerate(notes.get("args", ())))
    info = KernelInfo(name, notes.get("workgroup") or (flat, 1, 1), get("group_segment_fixed_size", 0), get("kernarg_size", 0), args,
                      min(total, accum), max(0, total - accum), get("next_free_sgpr", 0),
                      tuple(bool(get(f"system_sgpr_workgroup_id_{c}", int(c == "x"))) for c in "xyz"), get("private_segment_fixed_size", 0),
                      get("float_denorm_mode_32", 0), get("float_denorm_mode_16_64", 3), get("float_round_mode_32", 0),
                      bool(get("dx10_clamp", 1)), bool(get("ieee_mode", 1)), bool(get("fp16_overflow", 0)))
    return Program(name, body, own, info, source)
