"""The machine as data: loads ``isa_specs/*.isa`` into attrs classes.

Everything the other modules know about an instruction comes from here: encoding, operands, timing class,
semantics, hazards, and where each fact is from. ``load()`` parses once and keeps the result.
"""
from __future__ import annotations

import functools
from pathlib import Path

import lark
from attrs import field, frozen

SPEC_DIR = Path(__file__).resolve().parent.parent / "isa_specs"

# dwords of each operand type that is no multiple ("x16") of another
_DWORDS = {"f64": 2, "b64": 2, "u64": 2, "i64": 2}


class SpecError(ValueError):
    """A fault in the spec files; the message names file, line and column."""


@frozen
class Cite:
    """Where a fact comes from: keys of ``Machine.sources``, a confidence (H, M, L) and a note."""
    sources: tuple[str, ...]
    confidence: str | None = None
    note: str | None = None


@frozen
class Param:
    """A number (or a named choice) the models use; ``unit`` is clk, bytes, MHz, ... or None."""
    name: str
    value: int | float | str
    unit: str | None
    cite: Cite


@frozen
class Field:
    """A bit field of an encoding; ``kind`` says how an operand or modifier is coded, ``value`` if it is fixed."""
    name: str
    high: int
    low: int
    kind: str | None = None
    args: tuple[str, ...] = ()
    value: int | None = None

    @property
    def width(self) -> int:
        return self.high - self.low + 1


@frozen
class Encoding:
    """``bits`` long; ``promotes`` maps an encoding to the opcode offset of its instructions' copies here."""
    name: str
    bits: int
    literal: bool
    promotes: dict[str, int]
    fields: dict[str, Field]
    cite: Cite


@frozen
class Timing:
    """A timing class; ``values`` holds unit (a word), issue and latency (clk), coexecute."""
    name: str
    values: dict[str, int | str]
    cite: Cite | None


@frozen
class HazardRule:
    """``producer``/``consumer``/``relation`` are the words of the clauses; ``wait`` maps passes (0: any) to wait states."""
    name: str
    producer: tuple[str, ...]
    consumer: tuple[str, ...]
    relation: tuple[str, ...]
    wait: dict[int, int]
    severity: str
    cite: Cite


@frozen
class OperandSpec:
    """One operand as written in assembly text.

    kind: vgpr, vreg (VGPR or AGPR), vcsrc (that or an inline constant), src (any VALU source), sreg, ssrc (SGPR or
    constant), mask (a lane mask: SGPR pair or vcc), imm, label, waitcnt, saddr (SGPR pair or ``off``), smoff
    (scalar offset: bytes or SGPR), vaddr (VGPRs whose number depends on the modifiers).
    """
    name: str
    kind: str
    type: str
    out: bool
    inp: bool

    @property
    def dwords(self) -> int:
        base, _, count = self.type.partition("x")
        return int(count) * _DWORDS.get(base, 1) if count else _DWORDS.get(base, 1)

    @property
    def element(self) -> str:
        """Element type: f32, u32, i32, b32, ..."""
        return self.type.partition("x")[0]


@frozen
class Form:
    """One encoding of an instruction, with its opcode there."""
    encoding: str
    opcode: int
    suffix: str  # "", "_e32" or "_e64": what LLVM prints


@frozen(eq=False)
class InstructionSpec:
    """One instruction. ``classes`` are its timing and hazard classes; ``forms`` start with the shortest encoding."""
    mnemonic: str
    family: str
    operands: tuple[OperandSpec, ...]
    modifiers: tuple[str, ...]
    classes: tuple[str, ...]
    passes: int | None
    semantics_text: str
    forms: tuple[Form, ...]
    unit: str
    issue: int
    latency: int
    cite: Cite
    where: str

    def operand(self, name: str) -> OperandSpec:
        for o in self.operands:
            if o.name == name:
                return o
        raise KeyError(name)

    @functools.cached_property
    def semantics(self) -> tuple:
        """The parsed semantics: a tuple of ("assign", name, expr) and ("call", name, args) nodes; expressions are
        ("num", v), ("name", n), ("call", n, args), ("bin", op, a, b), ("un", op, a), ("if", c, a, b)."""
        return _semantics(self.semantics_text, self.where)

    @functools.cached_property
    def implicit_reads(self) -> frozenset[str]:
        """Architectural state (scc, vcc, exec, m0) that the semantics read beyond the operands."""
        return frozenset(self._state(False))

    @functools.cached_property
    def implicit_writes(self) -> frozenset[str]:
        return frozenset(self._state(True))

    def _state(self, writes: bool):
        special, written = {"scc", "vcc", "exec", "m0"}, set()

        def names(node):
            if node[0] == "name":
                yield node[1]
            for child in node[1:]:
                if isinstance(child, tuple):
                    yield from names(child) if child and isinstance(child[0], str) else (n for c in child for n in names(c))
        for st in self.semantics:
            if not writes:
                expr = st[2] if st[0] == "assign" else st
                for n in names(expr):
                    if n in special and n not in written:
                        yield n
            if st[0] == "assign" and st[1] in special:
                written.add(st[1])
        if writes:
            yield from written
        elif self.unit in ("valu", "matrix", "lds", "vmem") and "lane" not in self.classes and "xdl" not in self.classes:
            yield "exec"


@frozen
class Machine:
    sources: dict[str, str]
    params: dict[str, Param]
    encodings: dict[str, Encoding]
    names: dict[str, dict[str, int]]  # words that assembly text has for numbers, by kind
    timings: dict[str, Timing]
    hazards: tuple[HazardRule, ...]
    instructions: dict[str, InstructionSpec]

    def param(self, name: str):
        """Value of a parameter; KeyError names the nearest if there is none."""
        try:
            return self.params[name].value
        except KeyError:
            import difflib
            near = difflib.get_close_matches(name, self.params, 1)
            raise KeyError(f"no parameter '{name}'" + (f"; did you mean '{near[0]}'?" if near else "")) from None


def _parser(start: str) -> lark.Lark:
    return lark.Lark((SPEC_DIR / "grammar.lark").read_text(), start=start, parser="lalr", lexer="contextual",
                     propagate_positions=True, maybe_placeholders=True)


_semantics_parser = functools.lru_cache(None)(lambda: _parser("semantics"))


@lark.v_args(inline=True)
class _SemanticsTree(lark.Transformer):
    def number(self, t):
        return ("num", float(t) if "." in t else int(t, 0))

    def name(self, t):
        return ("name", str(t))

    def call(self, name, *args):
        return ("call", str(name), tuple(a for a in args if a is not None))

    def binary(self, first, *rest):
        for op, right in zip(rest[::2], rest[1::2]):
            first = ("bin", str(op), first, right)
        return first

    def ternary(self, c, a=None, b=None):
        return c if a is None else ("if", c, a, b)

    def negate(self, a):
        return ("un", "-", a)

    def invert(self, a):
        return ("un", "~", a)

    def assign(self, name, e):
        return ("assign", str(name), e)

    def effect(self, c):
        return c

    def semantics(self, *st):
        return tuple(s for s in st if s is not None)


setattr(_SemanticsTree, "not", lark.v_args(inline=True)(lambda self, a: ("un", "!", a)))


def _semantics(text: str, where: str) -> tuple:
    try:
        return _SemanticsTree().transform(_semantics_parser().parse(text))
    except lark.exceptions.LarkError as e:
        raise SpecError(f"{where}: semantics: {e}") from None


class _Tree(lark.Transformer):
    """Turns one file's tree into ("kind", ...) records."""
    int = staticmethod(lambda c: int(c[0], 0))
    float = staticmethod(lambda c: float(c[0]))
    string = staticmethod(lambda c: str(c[0])[1:-1])
    word = staticmethod(lambda c: str(c[0]))

    def cite(self, c):
        *names, conf, note = c
        return Cite(tuple(str(n) for n in names if n), conf and str(conf), note and str(note)[1:-1])

    def source(self, c):
        return ("source", str(c[0]), str(c[1])[1:-1])

    def param(self, c):
        return ("param", Param(str(c[0]), c[1], c[2] and str(c[2]), c[3]))

    def promote(self, c):
        return (str(c[0]), int(c[1], 0))

    def field_kind(self, c):
        return str(c[0]), tuple(str(a) for a in c[1:] if a)

    def field(self, c):
        name, high, low, kind, value = c
        high = int(high, 0)
        k, args = kind or (None, ())
        return Field(str(name), high, high if low is None else int(low, 0), k, args, None if value is None else int(value, 0))

    def encoding(self, c):
        name, bits, literal, rest = str(c[0]), int(c[1], 0), c[2] is not None, c[3:]
        fields = [f for f in rest if isinstance(f, Field)]
        cite = next(f for f in rest if isinstance(f, Cite))
        return ("encoding", Encoding(name, bits, literal, dict(f for f in rest if isinstance(f, tuple)), {f.name: f for f in fields}, cite))

    def names(self, c):
        return ("names", str(c[0]), {str(n): int(v, 0) for n, v in zip(c[2::2], c[3::2])}, c[1])

    def attribute(self, c):
        return (str(c[0]), c[1])

    def timing(self, c):
        return ("class", Timing(str(c[0]), dict(c[2:]), c[1]))

    def clause_word(self, c):
        return str(c[0])

    def clause(self, c):
        return (str(c[0]), tuple(c[1:]))

    def hazard(self, c):
        d = dict(c[1:-1])
        wait = {int(w.split("=")[0]): int(w.split("=")[1]) for w in d["wait"]} if "=" in d["wait"][0] else {0: int(d["wait"][0])}
        return ("hazard", HazardRule(str(c[0]), d["producer"], d["consumer"], d["relation"], wait, d.get("severity", ("error",))[0], c[-1]))

    def operand(self, c):
        d = str(c[0])
        return OperandSpec(str(c[1]), str(c[2]), str(c[3]), d != "in", d != "out")

    def operands(self, c):
        return tuple(c)

    def specs(self, c):
        return c


@functools.lru_cache(None)
def load() -> Machine:
    """Parse every ``*.isa`` file. Raises SpecError with file, line and column."""
    parser = _parser("specs")
    sources, params, encodings, names, timings, hazards, families = {}, {}, {}, {}, {}, [], []
    for path in sorted(SPEC_DIR.glob("*.isa")):
        text = path.read_text()
        try:
            tree = parser.parse(text)
        except lark.exceptions.UnexpectedInput as e:
            raise SpecError(f"{path.name}:{e.line}:{e.column}: {str(e).splitlines()[0]}\n{e.get_context(text)}") from None
        for node in tree.children:
            if node.data == "family":
                families.append((path.name, node))
                continue
            record = _Tree().transform(node)
            kind = record[0]
            if kind == "source":
                sources[record[1]] = record[2]
            elif kind == "param":
                params[record[1].name] = record[1]
            elif kind == "encoding":
                encodings[record[1].name] = record[1]
            elif kind == "names":
                names[record[1]] = record[2]
            elif kind == "class":
                timings[record[1].name] = record[1]
            else:
                hazards.append(record[1])
    instructions: dict[str, InstructionSpec] = {}
    for file, node in families:
        for spec in _family(file, node, encodings, timings):
            if spec.mnemonic in instructions:
                raise SpecError(f"{spec.where}: {spec.mnemonic} is defined twice, first at {instructions[spec.mnemonic].where}")
            instructions[spec.mnemonic] = spec
    for cite in [p.cite for p in params.values()] + [h.cite for h in hazards] + [i.cite for i in instructions.values()]:
        for s in cite.sources:
            if s not in sources:
                raise SpecError(f"unknown source '{s}'; known: {', '.join(sources)}")
    return Machine(sources, params, encodings, names, timings, tuple(hazards), instructions)


def _family(file, node, encodings, timings):
    names, cite, instrs = [], None, []
    for child in node.children:
        if child is None:
            continue
        if isinstance(child, lark.Token):
            names.append(str(child))
        elif child.data == "cite":
            cite = _Tree().transform(child)
        else:
            instrs.append(child)
    encoding, classes = names[0], names[1:]
    if encoding not in encodings:
        raise SpecError(f"{file}:{node.meta.line}: unknown encoding {encoding}")
    for i in instrs:
        where = f"{file}:{i.meta.line}"
        mnemonic, opcode = str(i.children[0]), int(i.children[1], 0)
        operands, own_cite, semantics, mods, own, passes = (), cite, "{}", [], [], None
        for child in i.children[2:]:
            if isinstance(child, lark.Tree):
                if child.data == "mods":
                    mods = [str(t) for t in child.children]
                elif child.data == "classes":
                    own = [str(t) for t in child.children]
                elif child.data == "operands":
                    operands = _Tree().transform(child)
                else:
                    own_cite = _Tree().transform(child)
            elif child is not None and child.type == "SEMANTICS":
                semantics = str(child)
            elif child is not None:
                passes = int(child)
        all_classes = tuple(classes) + tuple(own)
        values: dict = {}
        for c in all_classes:
            if c not in timings:
                raise SpecError(f"{where}: unknown class '{c}'")
            values.update(timings[c].values)
        latency = passes * 4 if passes else values.get("latency", 4)
        forms = [Form(encoding, opcode, "")]
        for e in encodings.values():
            if encoding in e.promotes:
                name = "VOP3SD" if any(o.name == "sdst" for o in operands) and any(o.name == "vdst" for o in operands) else e.name
                forms = [Form(encoding, opcode, "_e32"), Form(name, opcode + e.promotes[encoding], "_e64")]
        if "one_form" in all_classes:
            forms = [Form(encoding, opcode, "")]
        yield InstructionSpec(mnemonic, encoding, operands, tuple(mods), all_classes, passes, semantics[semantics.index("{") + 1:-1].strip(),
                              tuple(forms), values["unit"], values["issue"], latency, own_cite, where)
