"""A job, a schedule, a value or a queue as one line of JSON: how it is written, and what of it is taken.

What is read is checked whole, since people edit such lines: a field that is not known is refused, too.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, TypeAlias

from litebroker.arguments import job_id_of
from litebroker.errors import ScheduleError, TransferError
from litebroker.jobs import Attempt, DedupeUntil, JobCopy, JobError, JobRecord, JobSpec, QueueInfo, State
from litebroker.schedules import ScheduleSpec, next_tick
from litebroker.storage import ScheduleRecord, Value

_VERSION = 1
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_Line = dict[str, Any]
_Types = frozenset[Any]

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().raw_decode


class PausedQueue(NamedTuple):
    """A queue that was paused."""

    name: str


class CarriedValue(NamedTuple):
    """A value and its place."""

    space: str
    key: str
    value: Value


Thing: TypeAlias = "JobCopy | ScheduleRecord | CarriedValue | PausedQueue | Literal['end'] | None"


# -- written --

_MAX_ATTEMPTS = JobSpec._field_defaults["max_attempts"]
_USUAL: Mapping[str, Any] = {
    "priority": 0,
    "attempts": 0,
    "max_attempts": _MAX_ATTEMPTS,
    "claimed_at_ms": None,
    "ended_at_ms": None,
    "ref": None,
    "task": None,
    "encoding": None,
}


def header_line(queues: Sequence[str] | None) -> bytes:
    """The first line of an export: it gives the export a name of its own."""
    header: _Line = {"kind": "litebroker", "version": _VERSION, "export": secrets.token_hex(16)}
    if queues is not None:
        header["queues"] = list(queues)
    return _line(header)


def end_line(jobs: int | None) -> bytes:
    """The last line. ``jobs`` is how many there are, or None where that is not known."""
    return _line({"kind": "end"} if jobs is None else {"kind": "end", "jobs": jobs})


def queue_line(info: QueueInfo) -> bytes:
    """A queue, so that it is paused where it goes."""
    return _line({"kind": "queue", "name": info.name, **({} if info.paused_at_ms is None else {"paused": True})})


def job_line(copy: JobCopy) -> bytes:
    """A job. An active one is as if it had not been claimed: its lease stays behind."""
    record = copy.record
    if record.state is State.ACTIVE:
        record = record._replace(state=State.PENDING, attempts=max(record.attempts - 1, 0), claimed_at_ms=None)
    line: _Line = {
        "kind": "job",
        "id": str(record.id),
        "queue": record.queue,
        "state": record.state.value,
        "created_at_ms": record.created_at_ms,
        "due_at_ms": record.due_at_ms,
    }
    for name, usual in _USUAL.items():
        value = getattr(record, name)
        if value != usual:
            line[name] = value
    if record.group is not None:
        line["group"] = record.group
        line["group_concurrency"] = copy.group_concurrency
    if record.dedupe_key is not None:
        line["dedupe_key"] = record.dedupe_key
        line["dedupe_until"] = copy.dedupe_until
    if record.headers:
        line["headers"] = dict(record.headers)
    if record.error is not None:
        line["error"] = record.error._asdict()
    if record.history:
        line["history"] = [attempt._asdict() for attempt in record.history]
    _put_bytes(line, "payload", record.payload)
    return _line(line)


def schedule_line(record: ScheduleRecord) -> bytes:
    """A schedule, with what is not usual of its jobs."""
    line: _Line = {"kind": "schedule", "queue": record.queue, "id": record.id, "next_at_ms": record.next_at_ms}
    line.update((name, value) for name, value in asdict(record.spec).items() if value is not None)
    if record.last_at_ms is not None:
        line["last_at_ms"] = record.last_at_ms
    options = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in record.job._asdict().items()
        if name in _OPTIONS and value != JobSpec._field_defaults[name]
    }
    if options:
        line["job"] = options
    _put_bytes(line, "payload", record.job.payload)
    return _line(line)


def value_line(space: str, key: str, value: Value) -> bytes:
    """A value. What is left of its time is counted from when it is imported."""
    line: _Line = {"kind": "value", "space": space, "key": key}
    if value.number:
        line["number"] = value.number
    if value.expires_in_ms is not None:
        line["expires_in_ms"] = value.expires_in_ms
    _put_bytes(line, "data", value.data)
    return _line(line)


def _line(fields: Mapping[str, object]) -> bytes:
    return _encode(fields).encode() + b"\n"


def _put_bytes(line: _Line, name: str, data: bytes) -> None:
    try:
        line[name] = data.decode()
    except UnicodeDecodeError:
        line[f"{name}_base64"] = base64.b64encode(data).decode()


# -- read --

_TEXT, _NUMBER = frozenset({str}), frozenset({int})
_JOB = {
    "kind": _TEXT,
    "id": _TEXT,
    "queue": _TEXT,
    "state": _TEXT,
    "created_at_ms": _NUMBER,
    "due_at_ms": _NUMBER,
    "max_attempts": frozenset({int, type(None)}),
    "priority": _NUMBER,
    "attempts": _NUMBER,
    "claimed_at_ms": _NUMBER,
    "ended_at_ms": _NUMBER,
    "group": _TEXT,
    "group_concurrency": _NUMBER,
    "dedupe_key": _TEXT,
    "dedupe_until": _TEXT,
    "ref": _TEXT,
    "task": _TEXT,
    "encoding": _TEXT,
    "headers": frozenset({dict}),
    "error": frozenset({dict}),
    "history": frozenset({list}),
    "payload": _TEXT,
    "payload_base64": _TEXT,
}
_JOB_NEEDS = frozenset({"id", "queue", "state", "created_at_ms", "due_at_ms"})
_ERROR = {"reason": _TEXT, "type": _TEXT, "message": _TEXT, "stack": _TEXT, "causes": frozenset({list})}
_ATTEMPT = {
    "number": _NUMBER,
    "started_at_ms": _NUMBER,
    "ended_at_ms": _NUMBER,
    "worker": _TEXT,
    "outcome": _TEXT,
    "error": frozenset({str, type(None)}),
}
_OPTIONS = {
    "encoding": _TEXT,
    "priority": _NUMBER,
    "dedupe_key": _TEXT,
    "dedupe_until": _TEXT,
    "group": _TEXT,
    "group_concurrency": _NUMBER,
    "max_attempts": frozenset({int, type(None)}),
    "headers": frozenset({dict}),
    "ref": _TEXT,
    "task": _TEXT,
}
_SCHEDULE = {
    "kind": _TEXT,
    "queue": _TEXT,
    "id": _TEXT,
    "every_ms": _NUMBER,
    "cron": _TEXT,
    "tz": _TEXT,
    "next_at_ms": _NUMBER,
    "last_at_ms": _NUMBER,
    "job": frozenset({dict}),
    "payload": _TEXT,
    "payload_base64": _TEXT,
}
_VALUE = {
    "kind": _TEXT,
    "space": _TEXT,
    "key": _TEXT,
    "number": _NUMBER,
    "expires_in_ms": _NUMBER,
    "data": _TEXT,
    "data_base64": _TEXT,
}
_QUEUE = {"kind": _TEXT, "name": _TEXT, "paused": frozenset({bool})}
_END = {"kind": _TEXT, "jobs": _NUMBER}
_HEADER = {"kind": _TEXT, "version": _NUMBER, "export": _TEXT, "queues": frozenset({list})}

_LEAST = {"attempts": 0, "max_attempts": 1, "group_concurrency": 1, "every_ms": 1, "expires_in_ms": 0}
_MOST = 2**31 - 1
_LAST_MS = 253_402_300_799_999  # the end of the year 9999, up to which dates are shown
_STATES = {state.value: state for state in State if state is not State.ACTIVE}
_DEDUPE: dict[str, DedupeUntil] = {"removed": "removed", "ended": "ended"}


def export_of(line: bytes) -> str:
    """The name of the export that begins with this line."""
    export: str = _header(line)["export"]
    return export


def queues_of(line: bytes) -> list[str] | None:
    """The queues that the export which begins with this line is of; None for all."""
    return _header(line).get("queues")


def _header(line: bytes) -> _Line:
    try:
        fields = _object(line)
        _check(fields, _HEADER, _HEADER.keys() - {"queues"})
    except TransferError as error:
        fields, why = {}, str(error)
    else:
        why = "it is not the first line of an export" if fields["kind"] != "litebroker" else ""
        if not why and fields["version"] != _VERSION:
            why = f"version {fields['version']} is not known here: upgrade litebroker"
    if why:
        raise TransferError(
            f"line 1: {why}; give a file that `litebroker export` has written, with its first line", line=1
        )
    return fields


def parsed(line: bytes) -> Thing:
    """Raises `TransferError` without the line's number."""
    fields = _object(line)
    kind = fields.get("kind")
    if kind == "job":
        return _job(fields)
    try:
        if kind == "value":
            return _value(fields)
        if kind == "schedule":
            return _schedule(fields)
    except ScheduleError as error:
        raise TransferError(str(error)) from None
    if kind == "queue":
        _check(fields, _QUEUE, {"name"})
        return PausedQueue(_name(fields, "name")) if fields.get("paused") else None
    if kind == "end":
        _check(fields, _END, set())
        return "end"
    raise TransferError(f"kind={kind!r} is not known")


def _object(line: bytes) -> _Line:
    try:
        text = line.decode().strip()
        fields, end = _decode(text)
    except (ValueError, RecursionError) as error:
        raise TransferError(f"not JSON ({error})") from None
    if end != len(text):
        raise TransferError(f"not JSON (more behind it: {_shown(text[end:])})")
    if type(fields) is not dict:
        raise TransferError("not a JSON object")
    # A surrogate, which UTF-8 has no place for, can come from an escape only.
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise TransferError(f"half a surrogate pair, {error.object[error.start]!a}, is no text") from None
    return fields


def _check(fields: _Line, known: Mapping[str, _Types], needed: AbstractSet[str]) -> None:
    """Refuse fields that are not known, of a wrong type, out of range, or missing."""
    for name, value in fields.items():
        kinds = known.get(name)
        if kinds is None:
            raise TransferError(f"{name!r} is not known: a newer litebroker may have exported it")
        if type(value) not in kinds:
            raise TransferError(f"{name}={_shown(value)} is of a wrong type")
        if type(value) is int and (value < 0 or value > _LAST_MS or name in _LEAST):
            _check_number(name, value)
    if not fields.keys() >= needed:
        raise TransferError(f"{min(needed - fields.keys())!r} is missing")


def _check_number(name: str, value: int) -> None:
    low, high = _LOWEST, _HIGHEST
    if name.endswith("_at_ms"):
        low, high = -_LAST_MS, _LAST_MS
    elif name in _LEAST:
        low, high = _LEAST[name], _MOST if not name.endswith("_ms") else _HIGHEST >> 1
    if not low <= value <= high:
        raise TransferError(f"{name}={_shown(value)} is out of range")


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."  # noqa: PLR2004


def _job(fields: _Line) -> JobCopy:
    _check(fields, _JOB, _JOB_NEEDS)
    get = fields.get
    state = _STATES.get(fields["state"])
    if state is None:
        raise TransferError(f"state={fields['state']!r}: it is one of {', '.join(_STATES)}")
    ended_at_ms = get("ended_at_ms")
    if (ended_at_ms is None) != (state is State.PENDING):
        raise TransferError(f"a job that is {state} has {'no' if state is State.PENDING else 'an'} ended_at_ms")
    queue = _name(fields, "queue")
    error, history, until = get("error"), get("history"), get("dedupe_until")
    record = JobRecord(
        _id(fields["id"]),
        queue,
        state,
        get("priority", 0),
        fields["due_at_ms"],
        get("attempts", 0),
        get("max_attempts", _MAX_ATTEMPTS),
        fields["created_at_ms"],
        None,
        None,
        get("claimed_at_ms"),
        ended_at_ms,
        get("group"),
        get("dedupe_key"),
        get("ref"),
        get("task"),
        get("encoding"),
        _headers(get("headers")),
        None if error is None else _error(error),
        () if history is None else [_attempt(entry) for entry in history],
        _bytes(fields, "payload"),
    )
    return JobCopy(record, "removed" if until is None else _dedupe_until(until), get("group_concurrency", 1))


def _name(fields: _Line, field: str) -> str:
    """As `Queue` takes it, or nothing could be done with what is called so."""
    name: str = fields[field]
    if not name or "\0" in name:
        raise TransferError(f"{field}={_shown(name)}: a name is not empty, and has no NUL")
    return name


def _id(text: str) -> int:
    number = job_id_of(text)
    if not number:
        raise TransferError(f"id={_shown(text)} is no job's")
    return number


def _bytes(fields: _Line, name: str) -> bytes:
    text: str | None = fields.get(name)
    encoded_name = name + "_base64"
    if text is not None and encoded_name not in fields:
        return text.encode()
    encoded: str | None = fields.get(encoded_name)
    if encoded is None or text is not None:
        raise TransferError(f"it has to have one of {name} and {name}_base64")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TransferError(f"{name}_base64 is not base64 ({error})") from None


def _headers(value: _Line | None) -> dict[str, str]:
    if not value:
        return {}
    for name, text in value.items():
        if type(text) is not str:
            raise TransferError(f"headers has {_shown(name)}: {_shown(text)}, and takes strings")
    return value


def _dedupe_until(value: str) -> DedupeUntil:
    until = _DEDUPE.get(value)
    if until is None:
        raise TransferError(f"dedupe_until={_shown(value)}: it is one of {', '.join(_DEDUPE)}")
    return until


def _error(value: _Line) -> JobError:
    _check(value, _ERROR, {"reason"})
    causes = value.get("causes", [])
    if not all(type(cause) is str for cause in causes):
        raise TransferError(f"causes={_shown(causes)} is of a wrong type")
    return JobError(**{**value, "causes": tuple(causes)})


def _attempt(value: object) -> Attempt:
    if type(value) is not dict:
        raise TransferError(f"history has {_shown(value)}, and takes objects")
    _check(value, _ATTEMPT, _ATTEMPT.keys())
    return Attempt(**value)


def _value(fields: _Line) -> CarriedValue:
    _check(fields, _VALUE, {"space", "key"})
    value = Value(_bytes(fields, "data"), fields.get("number", 0), fields.get("expires_in_ms"))
    return CarriedValue(fields["space"], fields["key"], value)


def _schedule(fields: _Line) -> ScheduleRecord:
    _check(fields, _SCHEDULE, {"queue", "id", "next_at_ms"})
    options = fields.get("job", {})
    _check(options, _OPTIONS, set())
    _headers(options.get("headers"))
    _dedupe_until(options.get("dedupe_until", "removed"))
    spec = ScheduleSpec(every_ms=fields.get("every_ms"), cron=fields.get("cron"), tz=fields.get("tz"))
    if (spec.every_ms is None) == (spec.cron is None):
        raise TransferError("a schedule has exactly one of every_ms and cron")
    next_tick(spec, 0)
    queue, schedule_id = _name(fields, "queue"), _name(fields, "id")
    job = JobSpec(queue=queue, payload=_bytes(fields, "payload"), **options)
    return ScheduleRecord(queue, schedule_id, spec, job, fields["next_at_ms"], fields.get("last_at_ms"))
