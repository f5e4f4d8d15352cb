"""What the command line calls a TARGET: assembly text, a code object, or a kernel (or its factory) in Python."""
from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

from . import codeobject, parse
from .authoring import Kernel
from .program import Program

_OBJECTS = (".co", ".hsaco", ".o")


class TargetError(Exception):
    """A target that cannot be loaded; the message says why and what would be right."""


def parameters(pairs: tuple[str, ...]) -> dict:
    """{"causal": False} from ("causal=False",); values are Python literals, else text."""
    out = {}
    for pair in pairs:
        key, sep, value = pair.partition("=")
        if not sep or not key.isidentifier():
            raise TargetError(f"-p {pair}: expected key=value")
        try:
            out[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            out[key] = {"true": True, "false": False}.get(value.lower(), value)
    return out


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise TargetError(f"{path}: {e.strerror}") from None


def _from_python(module: str, name: str, params: dict) -> Program:
    try:
        if module.endswith(".py"):
            if not Path(module).is_file():
                raise TargetError(f"{module}: no such file")
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
    except TargetError:
        raise
    except Exception as e:  # whatever the user's module raises becomes a message with its place
        raise TargetError(f"{module}: {_place(e)}{type(e).__name__}: {e}") from e
    if not hasattr(loaded, name):
        names = [n for n in vars(loaded) if not n.startswith("_")]
        raise TargetError(f"{module} has no '{name}'; it has {', '.join(names[:20])}")
    value = getattr(loaded, name)
    if callable(value) and not isinstance(value, (Kernel, Program)):
        try:
            value = value(**params)
        except Exception as e:
            raise TargetError(f"{module}:{name}({', '.join(f'{k}={v!r}' for k, v in params.items())}): {_place(e)}{type(e).__name__}: {e}") from e
    elif params:
        raise TargetError(f"{module}:{name} is no factory and takes no parameters ({', '.join(params)})")
    if isinstance(value, Kernel):
        value = value.finalize()
    if not isinstance(value, Program):
        raise TargetError(f"{module}:{name} is a {type(value).__name__}; expected a Kernel, a Program or a function that returns one")
    return value


def _place(e: BaseException) -> str:
    tb = e.__traceback__
    while tb and tb.tb_next:
        tb = tb.tb_next
    return f"{Path(tb.tb_frame.f_code.co_filename).name}:{tb.tb_lineno}: " if tb and not str(e)[:80].count(".py:") else ""


def load(target: str, params: dict | None = None) -> list[Program]:
    """Every kernel of a target. TargetError, ParseError, CodeObjectError or AuthoringError say what is wrong."""
    params = params or {}
    path = Path(target)
    suffix = path.suffix.lower()
    if suffix in _OBJECTS or suffix == ".s":
        if params:
            raise TargetError(f"{target} takes no parameters (-p); only a Python factory does")
        data = _read(path)
        if suffix == ".s":
            try:
                return parse.parse(data.decode(), str(path))
            except UnicodeDecodeError as e:
                raise TargetError(f"{path}: not text (byte {e.start}); a code object ends in {', '.join(_OBJECTS)}") from None
        return codeobject.read(data, str(path))
    module, sep, name = target.rpartition(":")
    if not sep or not module or not name:
        raise TargetError(f"'{target}' is no target: a .s file, a code object ({', '.join(_OBJECTS)}), module:name or path/file.py:name")
    return [_from_python(module, name, params)]


def one(programs: list[Program], name: str | None, target: str) -> Program:
    """The kernel called ``name``, or the only one."""
    if name is not None:
        for p in programs:
            if p.name == name:
                return p
        raise TargetError(f"{target} has no kernel '{name}'; it has {', '.join(p.name for p in programs)}")
    if len(programs) != 1:
        raise TargetError(f"{target} has {len(programs)} kernels ({', '.join(p.name for p in programs)}); choose one with --kernel-name")
    return programs[0]
