"""Lua scripts, run inside the transaction. The interpreter is Lua's own, through lupa.

RQ's scripts differ by release and by key prefix, so that none is recognised: each is compiled and run.
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError, ResponseError

from litebroker_rq.keyspace import COMMANDS, OK, Reply, Session, Status, command, from_float, to_int

if TYPE_CHECKING:
    from collections.abc import Callable

_PRELUDE = b"""
local call = ...
local strip = {'os', 'io', 'python', 'debug', 'package', 'require', 'dofile', 'loadfile', 'load', 'loadstring'}
local compile = loadstring or load
for _, name in ipairs(strip) do _G[name] = nil end
unpack = unpack or table.unpack
redis = {
    call = function(...)
        local reply = call(...)
        if type(reply) == 'table' and reply.err then error(reply.err, 0) end
        return reply
    end,
    pcall = function(...) return call(...) end,
    error_reply = function(message) return {err = message} end,
    status_reply = function(message) return {ok = message} end,
    sha1hex = function(text) return nil end,
    log = function() end,
    LOG_DEBUG = 0, LOG_VERBOSE = 1, LOG_NOTICE = 2, LOG_WARNING = 3,
}
return function(source, keys, argv)
    local chunk, message = compile(source, '@user_script')
    if not chunk then error(message, 0) end
    return chunk
end
"""

_MAX_SCRIPTS = 1000


class Scripts:
    """The scripts that this process was given, and a Lua state for each of its threads."""

    def __init__(self) -> None:
        self._sources: dict[bytes, bytes] = {}
        self._local = threading.local()

    def load(self, source: bytes) -> bytes:
        """Keep a script; its SHA-1 is the name that EVALSHA gives."""
        sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        if len(self._sources) >= _MAX_SCRIPTS:
            self._sources.clear()  # clients load it again when they are told that it is missing
        self._sources[sha] = source
        return sha

    def learn(self, args: list[bytes]) -> None:
        """Keep what this command makes known: another process runs it, but may not run what comes later."""
        if args[0] == b"EVAL" and len(args) > 1:
            self.load(args[1])
        elif args[0] == b"SCRIPT" and len(args) > 1:
            word = args[1].upper()
            if word == b"LOAD" and len(args) > 2:  # noqa: PLR2004
                self.load(args[2])
            elif word == b"FLUSH":
                self.forget()

    def has(self, sha: bytes) -> bool:
        return sha.lower() in self._sources

    def forget(self) -> None:
        self._sources.clear()

    def run(self, session: Session, sha: bytes, keys: list[bytes], argv: list[bytes]) -> Reply:
        source = self._sources.get(sha.lower())
        if source is None:
            message = "No matching script. Please use EVAL."
            raise NoScriptError(message)
        return self._state().run(session, sha, source, keys, argv)

    def _state(self) -> _State:
        state: _State | None = getattr(self._local, "state", None)
        if state is None or state.pid != os.getpid():
            state = self._local.state = _State()
        return state


class _State:
    """One Lua state."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lupa, runtime_type = _lupa()
        self._runtime = runtime_type(
            encoding=None,
            register_eval=False,
            register_builtins=False,
            unpack_returned_tuples=False,
            attribute_filter=_no_attributes,
        )
        self._session: Session | None = None
        self._globals = self._runtime.globals()
        self._compile = self._runtime.execute(_PRELUDE, self._call)
        self._compiled: dict[bytes, Callable[[], Any]] = {}

    def run(self, session: Session, sha: bytes, source: bytes, keys: list[bytes], argv: list[bytes]) -> Reply:
        outer, self._session = self._session, session
        table = self._runtime.table_from
        try:
            chunk = self._compiled.get(sha)
            if chunk is None:
                chunk = self._compiled[sha] = self._compile(source)
            self._globals[b"KEYS"], self._globals[b"ARGV"] = table(keys), table(argv)
            result = chunk()
        except self._lupa.LuaError as error:
            text = str(error)
            message = f"Error running script: {text}"
            raise ResponseError(text if text.startswith(("ERR", "WRONGTYPE")) else message) from error
        finally:
            self._session = outer
        return self._to_redis(result)

    def _call(self, name: object, *args: object) -> Any:
        session = self._session
        if session is None or not isinstance(name, bytes):
            return self._error("ERR a command's name is needed")
        entry = COMMANDS.get(name.upper())
        if entry is None:
            return self._error(f"ERR unknown command {name.decode('latin-1')!r} in a script")
        arguments = [_argument(arg) for arg in args]
        if len(arguments) < entry.least:
            return self._error(f"ERR wrong number of arguments for {name.decode('latin-1')!r}")
        try:
            return self._to_lua(entry.run(session, arguments))
        except ResponseError as error:
            return self._error(str(error))

    def _error(self, message: str) -> Any:
        return self._runtime.table_from({b"err": message.encode()})

    def _to_lua(self, reply: Reply) -> Any:
        if reply is None:
            return False
        if isinstance(reply, Status):
            return self._runtime.table_from({b"ok": reply})
        if isinstance(reply, list):
            return self._runtime.table_from([self._to_lua(item) for item in reply])
        return reply

    def _to_redis(self, value: Any) -> Reply:
        if isinstance(value, bytes):
            return value
        if isinstance(value, (int, float)) and value is not False:
            return int(value)
        if self._lupa.lua_type(value) != "table":
            return None
        if value[b"err"] is not None:
            raise ResponseError(value[b"err"].decode("utf-8", "replace"))
        if value[b"ok"] is not None:
            return Status(value[b"ok"])
        items: list[Reply] = []
        while (item := value[len(items) + 1]) is not None:
            items.append(self._to_redis(item))
        return items


def _argument(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        message = "Lua redis lib command arguments must be strings or integers"
        raise ResponseError(message)
    return from_float(float(value)) if isinstance(value, float) else b"%d" % value


def _no_attributes(*_: object) -> str:
    message = "scripts see no Python objects"
    raise AttributeError(message)


def _lupa() -> tuple[Any, Any]:
    try:
        from lupa import lua51 as lupa
    except ImportError:
        try:
            import lupa
        except ImportError:
            message = "RQ's Lua scripts need lupa: pip install 'litebroker[rq]'"
            raise ResponseError(message) from None
    return lupa, lupa.LuaRuntime


def _split(args: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    count = to_int(args[1])
    return args[2 : 2 + count], args[2 + count :]


@command("EVALSHA", least=2, writes=True)
def evalsha(session: Session, args: list[bytes]) -> Reply:
    """Run a script that was loaded."""
    return session.database.scripts.run(session, args[0], *_split(args))


@command("EVAL", least=2, writes=True)
def eval_(session: Session, args: list[bytes]) -> Reply:
    """Run a script."""
    scripts = session.database.scripts
    return scripts.run(session, scripts.load(args[0]), *_split(args))


@command("SCRIPT", least=1)
def script(session: Session, args: list[bytes]) -> Reply:
    """Load scripts, or ask for them."""
    scripts = session.database.scripts
    word = args[0].upper()
    if word == b"LOAD":
        return scripts.load(args[1])
    if word == b"EXISTS":
        return [int(scripts.has(sha)) for sha in args[1:]]
    if word == b"FLUSH":
        scripts.forget()
        return OK
    message = f"SCRIPT {word.decode('latin-1')} is not answered here"
    raise ResponseError(message)
