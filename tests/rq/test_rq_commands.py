"""The commands answer as Redis does: the same commands on a redis-server and on a file, answer by answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from litebroker_rq import SQLiteConnection, connect

KEYS = ["a", "b", "rq:queue:x", "rq:queue:y", "rq:queue:x:intermediate"]
WORDS = ["", "1", "2", "-3", "x", "y", "long" * 2000]
SCORES = ["0", "1", "1.5", "-2", "inf", "-inf"]
BOUNDS = [*SCORES, "(1", "(0", "-inf", "+inf"]
RANKS = ["0", "1", "2", "-1", "-2", "5"]

key, word, score, bound, rank = (st.sampled_from(found) for found in (KEYS, WORDS, SCORES, BOUNDS, RANKS))
plain_key = st.sampled_from(KEYS[:2])
end = st.sampled_from(["LEFT", "RIGHT"])

COMMANDS = st.one_of(
    st.tuples(st.sampled_from(["DEL", "EXISTS", "TYPE", "PERSIST", "TTL"]), key),
    st.tuples(st.just("GET"), plain_key),
    st.tuples(st.just("SET"), plain_key, word),
    st.tuples(st.just("SET"), plain_key, word, st.sampled_from(["NX", "XX", "KEEPTTL"])),
    st.tuples(st.just("SET"), plain_key, word, st.just("EX"), st.just("100")),
    st.tuples(st.sampled_from(["INCR", "DECR"]), plain_key),
    st.tuples(st.just("EXPIRE"), plain_key, st.sampled_from(["100", "200", "-1"])),
    st.tuples(st.just("EXPIRE"), plain_key, st.just("150"), st.sampled_from(["NX", "XX", "GT", "LT"])),
    st.tuples(st.sampled_from(["HSET", "HSETNX"]), plain_key, word, word),
    st.tuples(st.just("HSET"), plain_key, word, word, word, word),
    st.tuples(st.sampled_from(["HGET", "HDEL", "HEXISTS"]), plain_key, word),
    st.tuples(st.just("HMGET"), plain_key, word, word),
    st.tuples(st.sampled_from(["HLEN", "SCARD", "ZCARD"]), plain_key),
    st.tuples(st.just("HINCRBY"), plain_key, word, st.sampled_from(["1", "-5"])),
    st.tuples(st.just("HINCRBYFLOAT"), plain_key, word, st.sampled_from(["1", "0.5"])),
    st.tuples(st.sampled_from(["SADD", "SREM"]), plain_key, word, word),
    st.tuples(st.just("SISMEMBER"), plain_key, word),
    st.tuples(st.just("ZADD"), plain_key, score, word, score, word),
    st.tuples(st.just("ZADD"), plain_key, st.sampled_from(["NX", "XX", "GT", "LT", "CH"]), score, word),
    st.tuples(st.sampled_from(["ZREM", "ZSCORE", "ZRANK", "ZREVRANK"]), plain_key, word),
    st.tuples(st.sampled_from(["ZCOUNT", "ZRANGEBYSCORE", "ZREMRANGEBYSCORE"]), plain_key, bound, bound),
    st.tuples(st.just("ZRANGEBYSCORE"), plain_key, bound, bound, st.just("LIMIT"), st.just("1"), st.just("2")),
    st.tuples(st.just("ZREVRANGEBYSCORE"), plain_key, bound, bound, st.just("WITHSCORES")),
    st.tuples(st.sampled_from(["ZRANGE", "ZREVRANGE"]), plain_key, rank, rank, st.just("WITHSCORES")),
    st.tuples(st.just("ZREMRANGEBYRANK"), plain_key, rank, rank),
    st.tuples(st.sampled_from(["ZPOPMIN", "ZPOPMAX"]), plain_key),
    st.tuples(st.sampled_from(["LPUSH", "RPUSH"]), key, word, word),
    st.tuples(st.sampled_from(["LPOP", "RPOP", "LLEN"]), key),
    st.tuples(st.just("LRANGE"), key, rank, rank),
    st.tuples(st.just("LINDEX"), key, rank),
    st.tuples(st.just("LREM"), key, st.sampled_from(["0", "1", "-1", "2"]), word),
    st.tuples(st.just("LPOS"), key, word),
    st.tuples(st.just("LMOVE"), key, key, end, end),
    st.tuples(st.just("RENAME"), key, key),
)


@pytest.fixture
def server(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url, protocol=2)


def answer(client: redis.Redis, command: tuple[str, ...]) -> Any:
    """What a client says; of a refusal, only its kind."""
    try:
        return client.execute_command(*command)
    except redis.ResponseError as error:
        return type(error).__name__, "WRONGTYPE" in str(error)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(commands=st.lists(COMMANDS, min_size=5, max_size=40))
def test_any_sequence_of_commands_is_answered_as_by_redis(
    commands: list[tuple[str, ...]], connection: SQLiteConnection, server: redis.Redis
) -> None:
    server.flushdb()
    connection.flushdb()

    for command in commands:
        assert answer(connection, command) == answer(server, command), command

    assert sorted(connection.keys()) == sorted(server.keys())
    for name in server.scan_iter():
        if server.type(name) == b"hash":
            assert connection.hgetall(name) == server.hgetall(name)
        if server.type(name) == b"set":
            assert connection.smembers(name) == server.smembers(name)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(commands=st.lists(COMMANDS.filter(lambda command: "PUSH" not in command[0]), min_size=2, max_size=20))
def test_a_pipeline_is_answered_as_by_redis(
    commands: list[tuple[str, ...]], connection: SQLiteConnection, server: redis.Redis
) -> None:
    answers = []
    for client in (connection, server):
        client.flushdb()
        client.rpush("rq:queue:x", "1", "2", "x")
        pipeline = client.pipeline()

        for command in commands:
            pipeline.execute_command(*command)

        found = pipeline.execute(raise_on_error=False)
        answers.append([type(item).__name__ if isinstance(item, Exception) else item for item in found])
    assert answers[0] == answers[1]


def test_bytes_of_any_value_come_back_as_they_were(connection: SQLiteConnection) -> None:
    value = bytes(range(256)) * 40

    connection.hset("h", mapping={"small": value[:300], "large": value, value[:256]: "name"})
    connection.set(b"\xff\x00", value)

    assert connection.hgetall("h") == {b"small": value[:300], b"large": value, value[:256]: b"name"}
    assert connection.get(b"\xff\x00") == value


def test_a_large_field_that_becomes_small_leaves_nothing_behind(connection: SQLiteConnection) -> None:
    connection.hset("h", "f", b"x" * 100_000)

    connection.hset("h", "f", "small")
    connection.hset("h", "g", b"y" * 100_000)
    connection.delete("h")

    assert connection.hgetall("h") == {}
    connection.hset("h", "f", "again")
    assert connection.hgetall("h") == {b"f": b"again"}


def test_keys_of_every_kind_are_made_in_one_transaction(connection: SQLiteConnection, path: Path) -> None:
    with connection.pipeline() as pipeline:
        for number in range(20):
            pipeline.hset(f"hash{number}", "f", "x" * 10_000 if number % 3 == 0 else "x")
            pipeline.sadd(f"set{number}", number)
            pipeline.set(f"string{number}", number)
            pipeline.zadd(f"zset{number}", {"m": number})
            if number == 10:
                pipeline.rename("hash3", "renamed")  # which writes what is there so far
        pipeline.execute()

    with connect(path) as other:
        assert len(other.keys()) == 80
        for number in range(20):
            assert other.smembers(f"set{number}") == {b"%d" % number}
            assert other.zscore(f"zset{number}", "m") == number
            assert other.get(f"string{number}") == b"%d" % number
        assert other.hget("renamed", "f") == b"x" * 10_000
        assert other.hget("hash19", "f") == b"x"


def test_a_key_that_has_expired_is_gone_for_every_command(connection: SQLiteConnection) -> None:
    connection.set("s", "x", px=1)
    connection.hset("h", "f", "v")
    connection.pexpire("h", 1)
    while connection.exists("s") or connection.exists("h"):
        pass

    connection.hset("h", "g", "w")

    assert connection.hgetall("h") == {b"g": b"w"}
    assert connection.ttl("h") == -1
    assert connection.keys("*") == [b"h"]


def test_an_unknown_command_is_an_error_that_names_it(connection: SQLiteConnection) -> None:
    with pytest.raises(redis.ResponseError, match=r"GEOADD.*litebroker_rq"):
        connection.geoadd("k", (1, 2, "x"))


def test_a_pipeline_with_an_unknown_command_does_nothing(connection: SQLiteConnection) -> None:
    pipeline = connection.pipeline()
    pipeline.set("a", 1)
    pipeline.geoadd("k", (1, 2, "x"))

    with pytest.raises(redis.ResponseError, match="GEOADD"):
        pipeline.execute()

    assert connection.get("a") is None


def test_a_watched_key_that_changes_ends_the_transaction(connection: SQLiteConnection, path: Path) -> None:
    other = connect(path)
    connection.set("k", 1)
    with connection.pipeline() as pipeline:
        pipeline.watch("k")
        seen = pipeline.get("k")
        other.set("k", 2)

        pipeline.multi()
        pipeline.set("k", 3)

        with pytest.raises(redis.WatchError):
            pipeline.execute()
    assert (seen, connection.get("k")) == (b"1", b"2")


def test_a_watched_key_that_is_deleted_and_made_again_has_changed(connection: SQLiteConnection, path: Path) -> None:
    other = connect(path)
    connection.sadd("k", 1)
    with connection.pipeline() as pipeline:
        pipeline.watch("k")
        other.delete("k")
        other.sadd("k", 1)

        pipeline.multi()
        pipeline.set("done", 1)

        with pytest.raises(redis.WatchError):
            pipeline.execute()


def test_a_watched_key_that_stays_lets_the_transaction_happen(connection: SQLiteConnection) -> None:
    connection.set("k", 1)
    with connection.pipeline() as pipeline:
        pipeline.watch("k", "absent")
        pipeline.get("k")
        pipeline.multi()
        pipeline.set("k", 2)

        assert pipeline.execute() == [True]


def test_streams_number_their_entries_and_keep_the_newest(connection: SQLiteConnection) -> None:
    ids = [connection.xadd("s", {"n": n}, maxlen=3) for n in range(5)]

    assert connection.xlen("s") == 3
    assert [entry for entry, _ in connection.xrange("s") or ()] == ids[2:]
    assert connection.xrevrange("s", count=1) == [(ids[4], {b"n": b"4"})]
    assert connection.xread({"s": ids[3]}) == [[b"s", [(ids[4], {b"n": b"4"})]]]


def test_scripts_see_what_the_pipeline_has_done(connection: SQLiteConnection) -> None:
    script = connection.register_script(
        "local n = redis.call('incr', KEYS[1])\n"
        "redis.call('rpush', KEYS[2], ARGV[1])\n"
        "return {n, redis.call('llen', KEYS[2])}"
    )
    pipeline = connection.pipeline()
    pipeline.set("n", 41)

    script(keys=["n", "l"], args=["x"], client=pipeline)

    assert pipeline.execute() == [True, [42, 1]]


def test_a_script_that_fails_changes_nothing_it_did_not_reach(connection: SQLiteConnection) -> None:
    connection.set("s", "text")

    with pytest.raises(redis.ResponseError, match="not an integer"):
        connection.eval("redis.call('incr', KEYS[1]); redis.call('set', 'after', 1)", 1, "s")

    assert connection.get("after") is None


def test_a_script_cannot_reach_python_or_the_machine(connection: SQLiteConnection) -> None:
    for source in (
        "return os.time()",
        "return io.open('/etc/passwd')",
        "return python.eval('1')",
        "return require('os')",
    ):
        with pytest.raises(redis.ResponseError):
            connection.eval(source, 0)


def test_answers_are_text_when_that_is_asked_for(path: Path) -> None:
    connection = connect(path, decode_responses=True)
    connection.hset("h", mapping={"f": "v"})
    connection.zadd("z", {"m": 1.5})

    with connection.pipeline() as pipeline:
        pipeline.hgetall("h")
        pipeline.zrange("z", 0, -1, withscores=True)
        found = pipeline.execute()

    assert found == [{"f": "v"}, [("m", 1.5)]]
    assert connection.hget("h", "f") == "v"


def test_the_list_of_jobs_that_are_about_to_start_is_among_the_keys(connection: SQLiteConnection) -> None:
    connection.hset("rq:job:j", "status", "queued")
    connection.rpush("rq:queue:q", "j")

    connection.lmove("rq:queue:q", "rq:queue:q:intermediate", "LEFT", "RIGHT")

    assert connection.keys("*:intermediate") == [b"rq:queue:q:intermediate"]
