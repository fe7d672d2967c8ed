"""Protocol buffers: message types declared in place."""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {kind: getattr(_FIELD, f"TYPE_{kind.upper()}") for kind in "bytes fixed32 float int64 string".split()}


def declare(**messages: Mapping[int, str]) -> dict[str, Any]:
    """Classes of google.protobuf by name, of the syntax proto3.

    Args:
      messages: of each message the fields by number, as 'TYPE NAME', 'repeated TYPE NAME',
        'oneof TYPE NAME' (one choice a message) or 'map TYPE NAME' (from strings to TYPE).
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{'_'.join(messages)}.proto", package="p", syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for number, text in fields.items():
            *label, kind, field = text.split()
            if label == ["map"]:
                entry = message.nested_type.add(name=f"{field.capitalize()}Entry")
                entry.options.map_entry = True
                _add_field(entry, 1, "string", "key")
                _add_field(entry, 2, kind, "value")
                kind, label = f"{name}.{entry.name}", ["repeated"]
            added = _add_field(message, number, kind, field)
            if label == ["repeated"]:
                added.label = _FIELD.LABEL_REPEATED
            elif label == ["oneof"]:
                if not message.oneof_decl:
                    message.oneof_decl.add(name="kind")
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"p.{name}")) for name in messages}


def _add_field(message: Any, number: int, kind: str, name: str) -> Any:
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    field.type = _SCALARS.get(kind, _FIELD.TYPE_MESSAGE)
    if kind not in _SCALARS:
        field.type_name = f".p.{kind}"
    return field
