"""A launch: grid, buffers and kernel arguments; from Python or from a launch file."""
from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import numpy as np
from attrs import define, field

from .isa import load

# dtype names of a launch file -> how numpy holds them (FP8 and BF16 as their bits)
DTYPES = {"float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": "u2", "fp8_e4m3": "u1", "uint8": "u1", "int8": "i1", "uint16": "u2",
          "int16": "i2", "uint32": "u4", "int32": "i4", "uint64": "u8", "int64": "i8"}
_KINDS = {"buffer": 8, "u64": 8, "u32": 4, "i32": 4, "f32": 4}
_MAX_BYTES = 1 << 36


class LaunchError(ValueError):
    """A launch that cannot be run; names the file, the key and what would be right."""


@define
class Launch:
    """grid: workgroups in x, y, z. workgroup: work-items in x, y, z. kernarg: entries {"offset": bytes, KIND: value},
    KIND one of buffer (a name; "byte_offset" may be added to its address), u32, i32, u64, f32. outputs: buffers whose
    contents at the start do not count."""
    grid: tuple[int, int, int]
    workgroup: tuple[int, int, int]
    buffers: dict[str, np.ndarray] = field(factory=dict)
    kernarg: list[dict] = field(factory=list)
    outputs: set[str] = field(factory=set)
    source: str = "launch"

    def __attrs_post_init__(self):
        self.validate()

    def validate(self) -> None:
        """LaunchError for anything out of range."""
        for key in ("grid", "workgroup"):
            value = getattr(self, key)
            if not isinstance(value, (list, tuple)) or len(value) != 3 or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 1 <= n < 1 << 31 for n in value):
                raise LaunchError(f"{self.source}: {key} is {value}; expected three numbers of at least 1")
        most = load().param("chip.max_workgroup")
        if np.prod([int(n) for n in self.workgroup]) > most:
            raise LaunchError(f"{self.source}: workgroup {list(self.workgroup)} has more than {most} work-items")
        used: list[tuple[int, int]] = []
        for i, entry in enumerate(self.kernarg):
            where = f"{self.source}: kernarg[{i}]"
            if not isinstance(entry, dict) or "offset" not in entry:
                raise LaunchError(f"{where} is {entry}; expected {{\"offset\": bytes, KIND: value}}, KIND one of {', '.join(_KINDS)}")
            kinds = [k for k in entry if k not in ("offset", "byte_offset")]
            if len(kinds) != 1 or kinds[0] not in _KINDS:
                raise LaunchError(f"{where} has {', '.join(kinds) or 'no value'}; expected one of {', '.join(_KINDS)}")
            kind, offset = kinds[0], entry["offset"]
            size = _KINDS[kind]
            if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= 4096 or offset % size:
                raise LaunchError(f"{where}: offset {offset}; expected a multiple of {size} from 0 to 4096")
            for begin, end in used:
                if offset < end and begin < offset + size:
                    raise LaunchError(f"{where}: bytes {offset} to {offset + size - 1} overlap another argument at offset {begin}")
            used.append((offset, offset + size))
            if kind == "buffer":
                if not isinstance(entry["buffer"], str) or entry["buffer"] not in self.buffers:
                    raise LaunchError(f"{where}: no buffer '{entry['buffer']}'; there is {', '.join(self.buffers) or 'none'}")
                shift = entry.get("byte_offset", 0)
                if isinstance(shift, bool) or not isinstance(shift, (int, np.integer)) or not -(1 << 40) < shift < 1 << 40:
                    raise LaunchError(f"{where}: byte_offset is {shift!r}; expected a number of bytes")
            elif "byte_offset" in entry:
                raise LaunchError(f"{where}: byte_offset goes with buffer, not with {kind}")
            else:
                self._number(where, kind, entry[kind])

    def kernarg_end(self) -> int:
        """First byte past the last kernel argument."""
        return max([e["offset"] + next(_KINDS[k] for k in e if k in _KINDS) for e in self.kernarg], default=0)

    @staticmethod
    def _number(where: str, kind: str, value) -> bytes:
        formats = {"u32": "<I", "i32": "<i", "u64": "<Q", "f32": "<f"}
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or kind != "f32" and not isinstance(value, (int, np.integer)):
            raise LaunchError(f"{where}: {kind} is {value!r}; expected a number")
        try:
            return struct.pack(formats[kind], value)
        except (struct.error, OverflowError):
            raise LaunchError(f"{where}: {value} does not fit {kind}") from None

    def kernarg_bytes(self, addresses: dict[str, int], size: int) -> bytes:
        """The kernarg segment of ``size`` bytes (more if an entry lies beyond). addresses: of each buffer."""
        out = bytearray(max(size, self.kernarg_end()))
        for entry in self.kernarg:
            kind = next(k for k in entry if k not in ("offset", "byte_offset"))
            data = (struct.pack("<Q", addresses[entry["buffer"]] + entry.get("byte_offset", 0)) if kind == "buffer"
                    else self._number("kernarg", kind, entry[kind]))
            out[entry["offset"]:entry["offset"] + len(data)] = data
        return bytes(out)

    @classmethod
    def from_json(cls, path: str | Path) -> "Launch":
        """Read a launch file; ``.npy`` files are relative to it."""
        path = Path(path)
        try:
            spec = json.loads(path.read_text())
        except OSError as e:
            raise LaunchError(f"{path}: {e.strerror}") from None
        except (ValueError, RecursionError) as e:
            raise LaunchError(f"{path}: no JSON: {e}") from None
        if not isinstance(spec, dict):
            raise LaunchError(f"{path}: expected an object with grid, workgroup, buffers and kernarg")
        known = {"grid", "workgroup", "buffers", "kernarg"}
        for key in spec.keys() - known:
            raise LaunchError(f"{path}: unknown key '{key}'; there are {', '.join(sorted(known))}")
        for key in ("grid", "workgroup"):
            if key not in spec:
                raise LaunchError(f"{path}: '{key}' is missing")
        buffers, outputs = {}, set()
        if not isinstance(spec.get("buffers", {}), dict) or not isinstance(spec.get("kernarg", []), list):
            raise LaunchError(f"{path}: 'buffers' is an object and 'kernarg' a list")
        for name, b in spec.get("buffers", {}).items():
            buffers[name] = _buffer(path, name, b)
            if "file" not in b:
                outputs.add(name)
        return cls(spec["grid"], spec["workgroup"], buffers, spec.get("kernarg", []), outputs, str(path))


def _buffer(path: Path, name: str, b) -> np.ndarray:
    where = f"{path}: buffer '{name}'"
    if not isinstance(b, dict) or not ("file" in b) ^ ("shape" in b) or b.keys() - {"file", "shape", "dtype"}:
        raise LaunchError(f"{where}: expected {{\"file\": \"x.npy\"}} or {{\"shape\": [...], \"dtype\": \"...\"}}")
    dtype = b.get("dtype")
    if dtype is not None and dtype not in DTYPES or dtype is None and "shape" in b:
        raise LaunchError(f"{where}: dtype {dtype}; one of {', '.join(DTYPES)}")
    if "shape" in b:
        shape = b["shape"]
        if not isinstance(shape, list) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape):
            raise LaunchError(f"{where}: shape {shape}; expected a list of numbers")
        bytes_ = np.dtype(DTYPES[dtype]).itemsize
        for n in shape:
            bytes_ *= n
        if bytes_ > _MAX_BYTES:
            raise LaunchError(f"{where}: shape {shape} of {dtype} is {bytes_} bytes; at most {_MAX_BYTES}")
        return np.zeros(shape, DTYPES[dtype])
    try:
        array = np.load(path.parent / b["file"], allow_pickle=False)
    except (OSError, TypeError) as e:
        raise LaunchError(f"{where}: {b['file']}: {getattr(e, 'strerror', None) or e}") from None
    except (ValueError, EOFError, MemoryError, zipfile.BadZipFile) as e:
        raise LaunchError(f"{where}: {b['file']} is no .npy file: {e}") from None
    if not isinstance(array, np.ndarray):
        raise LaunchError(f"{where}: {b['file']} is no .npy file")
    if dtype is not None and array.dtype != np.dtype(DTYPES[dtype]):
        raise LaunchError(f"{where}: {b['file']} holds {array.dtype}, not {dtype} (kept as {np.dtype(DTYPES[dtype])})")
    if array.dtype.str.lstrip("<|=") not in DTYPES.values():
        raise LaunchError(f"{where}: {b['file']} holds {array.dtype}; one of {', '.join(DTYPES)}")
    return np.ascontiguousarray(array)
