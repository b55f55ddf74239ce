"""The parts of the protobuf wire format that MindSpore's files use, without a protobuf library.

Theory. A message is a sequence of fields, each with a field number and a value: an integer of at most 64 bits, or bytes
of a stated length (text, an inner message, packed integers). A reader takes the fields that it knows and skips the
others, as protobuf does. Repeated integers may be packed into one field or not. A protobuf library would be a
dependency for only three kinds of small file.

Invariants:
1. Every length is compared with the number of remaining bytes before bytes are taken. Nothing is copied.
2. Damaged bytes raise ``ValueError`` with the broken rule. The reader of a file adds the name of the file.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, BYTES = 0, 2
"""Wire types: a number of variable length, and bytes with a length before them."""
_FIXED_SIZE_BYTES = {1: 8, 5: 4}

Value = int | memoryview


def fields(data: bytes | memoryview) -> Iterator[tuple[int, Value]]:
    """Yield (field number, value) of each field of a message. A value is an integer, or the bytes of the field.

    Raises:
        ValueError: the data is damaged.
    """
    view = memoryview(data)
    at = 0
    while at < len(view):
        tag, at = varint(view, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise ValueError("a field without a number")
        if kind == VARINT:
            value, at = varint(view, at)
            yield number, value
            continue
        size = _FIXED_SIZE_BYTES.get(kind)
        if kind == BYTES:
            size, at = varint(view, at)
        if size is None:
            raise ValueError(f"a field of wire type {kind}")
        if at + size > len(view):
            raise ValueError(f"a field of {size} bytes where {len(view) - at} are left")
        yield number, view[at : at + size]
        at += size


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """Decode the varint (a number of at most 64 bits) at offset ``at``. Return the number and the next offset.

    Raises:
        ValueError: the data is damaged.
    """
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def message(value: Value) -> memoryview:
    """Return the bytes of a field that holds an inner message.

    Raises:
        ValueError: the field is a number.
    """
    if isinstance(value, int):
        raise ValueError("a number where a message belongs")
    return value


def text(value: Value) -> str:
    """Return the text of a field that holds UTF-8.

    Raises:
        ValueError: the field is a number, or not valid UTF-8.
    """
    return str(message(value), "utf-8")


def integer(value: Value) -> int:
    """Return the value of a field as a signed 64-bit integer.

    Raises:
        ValueError: the field is bytes.
    """
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def repeated(value: Value) -> Iterator[int]:
    """Yield the unsigned integers in one field: the single integer, or the integers packed into its bytes.

    Raises:
        ValueError: the data is damaged.
    """
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        one, at = varint(value, at)
        yield one


def number(value: int) -> bytes:
    """Return ``value`` encoded as a varint. A negative number is encoded with 64 bits."""
    value &= 2**64 - 1
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*made, value))


def counted(field: int, value: int) -> bytes:
    """Return the encoding of a field whose value is a number."""
    return number(field << 3 | VARINT) + number(value)


def tagged(field: int, data: bytes) -> bytes:
    """Return the encoding of a field whose value is bytes."""
    return number(field << 3 | BYTES) + number(len(data)) + data
