"""`LitebrokerStorage`, where huey's own suite (see compat/) does not look."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from huey.api import Huey
from huey.constants import EmptyData
from huey.exceptions import ConfigurationError
from hypothesis import given
from hypothesis import strategies as st

from litebroker import SQLiteStorage, State
from litebroker_huey import LitebrokerStorage, SQLiteHuey
from litebroker_huey.storage import _sortable, epoch_ms

numbers = st.one_of(st.floats(allow_nan=False), st.integers(-(2**70), 2**70))


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[LitebrokerStorage]:
    storage = LitebrokerStorage("app", filename=tmp_path / "jobs.db", read_timeout=0.05)
    yield storage
    storage.close()


@given(numbers, numbers)
def test_priorities_keep_their_order_as_integers(one: float, other: float) -> None:
    first, second = _sortable(one), _sortable(other)

    assert -(2**63) <= first < 2**63
    if float_of(one) < float_of(other):
        assert first < second
    if float_of(one) == float_of(other):
        assert first == second


def float_of(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.copysign(math.inf, number)


def test_a_worker_that_is_told_to_stop_while_it_claims_gives_the_task_back(storage: LitebrokerStorage) -> None:
    storage.enqueue(b"data")
    told = iter([False, True])  # Before the claim not yet, and after it.

    assert storage.claim(unless=lambda: next(told)) is None

    [job] = storage.jobs(storage.queue, State.PENDING)
    assert job.attempts == 0


def test_a_priority_that_is_no_number_is_refused(storage: LitebrokerStorage) -> None:
    with pytest.raises(ValueError, match="nan"):
        storage.enqueue(b"data", priority=math.nan)

    assert storage.queue_size() == 0


def test_tasks_come_by_priority_and_then_in_order(storage: LitebrokerStorage) -> None:
    for data, priority in [(b"a", None), (b"b", -100), (b"c", 0.5), (b"d", 0), (b"e", 0.25), (b"f", 0.5)]:
        storage.enqueue(data, priority)

    assert storage.enqueued_items() == [b"c", b"f", b"e", b"a", b"d", b"b"]
    assert storage.enqueued_items(2) == [b"c", b"f"]
    assert [storage.dequeue() for _ in range(7)] == [b"c", b"f", b"e", b"a", b"d", b"b", None]


def test_names_share_nothing_but_the_file(tmp_path: Path) -> None:
    one, other = (LitebrokerStorage(name, filename=tmp_path / "jobs.db") for name in ("a", "a:b"))
    one.enqueue(b"task")
    one.add_to_schedule(b"later", datetime(2000, 1, 1))  # noqa: DTZ001 - as huey gives them
    one.put_data("key", b"value")
    one.incr("counter", 3)

    assert (other.queue_size(), other.schedule_size(), other.result_items()) == (0, 0, {})
    assert (other.peek_data("key"), other.incr("counter", 0)) == (EmptyData, 0)
    other.flush_all()
    assert (one.queue_size(), one.schedule_size(), one.result_items()) == (1, 1, {"key": b"value"})
    assert one.incr("counter", 0) == 3
    one.close()
    other.close()


def test_huey_waits_for_a_task_and_is_woken_by_it(tmp_path: Path) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", read_timeout=20)

    @huey.task()
    def task() -> None:
        pass

    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(huey.dequeue()))
    waiter.start()
    time.sleep(0.1)  # so that it mostly waits; the outcome is the same if it does not
    began = time.monotonic()
    task()
    waiter.join(10)

    assert found
    assert time.monotonic() - began < 1
    huey.storage.close()


def test_who_waits_for_a_result_is_woken_by_it(storage: LitebrokerStorage) -> None:
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(storage.wait_result("key", timeout=20, max_delay=20)))
    waiter.start()
    time.sleep(0.1)  # as above
    began = time.monotonic()
    storage.put_data("key", b"value", is_result=True)
    waiter.join(10)

    assert found == [True]
    assert time.monotonic() - began < 1


def test_results_expire_where_it_is_asked_but_flags_and_locks_do_not(tmp_path: Path) -> None:
    storage = LitebrokerStorage("app", filename=tmp_path / "jobs.db", result_ttl=0.05)
    storage.put_data("result", b"1", is_result=True)
    storage.put_data("revoked", b"2")
    storage.put_if_empty("lock", b"3")

    end = time.monotonic() + 5
    while storage.has_data_for_key("result") and time.monotonic() < end:
        time.sleep(0.01)

    assert storage.result_items() == {"lock": b"3", "revoked": b"2"}
    storage.close()


def test_with_expire_time_reading_a_result_does_not_remove_it(tmp_path: Path) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", expire_time=3600)

    @huey.task()
    def task() -> int:
        return 7

    result = task()
    huey.execute(huey.dequeue())

    assert [huey.result(result.id), huey.result(result.id)] == [7, 7]
    huey.storage.close()


def test_a_flag_to_revoke_is_gone_after_the_task(tmp_path: Path) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", expire_time=3600)

    @huey.task()
    def task() -> None:
        huey.revoke(result.task)

    result = task()
    huey.execute(huey.dequeue())

    assert huey.result_count() == 0
    huey.storage.close()


@pytest.mark.parametrize("zone", ["UTC", "Europe/Paris", "America/New_York"])
def test_naive_datetimes_are_the_instants_that_huey_means(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    moment = datetime(2027, 3, 28, 2, 30, 15, 250_000)  # noqa: DTZ001 - in Paris there is no such time

    as_utc = epoch_ms(moment, utc=True)
    as_local = epoch_ms(moment, utc=False)

    assert as_utc == int(moment.replace(tzinfo=timezone.utc).timestamp() * 1000)
    assert as_local == int(moment.timestamp() * 1000)
    assert epoch_ms(moment.replace(tzinfo=timezone.utc), utc=False) == as_utc
    monkeypatch.undo()
    time.tzset()


def test_etas_in_utc_stay_in_order_where_the_local_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Paris")
    time.tzset()
    storage = LitebrokerStorage("app", filename=tmp_path / "jobs.db")
    start = datetime(2027, 3, 28, 1, 0)  # noqa: DTZ001 - naive, and in UTC
    for minutes in (150, 90, 30, 120, 60, 0):
        storage.add_to_schedule(b"%d" % minutes, start + timedelta(minutes=minutes))

    at_three = storage.read_schedule(start + timedelta(minutes=120))

    assert at_three == [b"0", b"30", b"60", b"90", b"120"]
    storage.close()
    monkeypatch.undo()
    time.tzset()


def test_huey_before_2_5_2_passes_its_setting_along(storage: LitebrokerStorage) -> None:
    storage.add_to_schedule(b"data", datetime(2000, 1, 1), True)  # noqa: DTZ001 - as it does

    assert storage.schedule_size() == 1


def test_a_long_queue_is_listed_whole(storage: LitebrokerStorage) -> None:
    for number in range(1203):
        storage.enqueue(b"%d" % number)

    assert storage.enqueued_items() == [b"%d" % number for number in range(1203)]


def test_a_storage_that_was_closed_opens_again(storage: LitebrokerStorage) -> None:
    storage.enqueue(b"task")

    assert storage.close()
    assert not storage.close()
    assert storage.queue_size() == 1


def test_a_storage_that_was_given_stays_open(tmp_path: Path) -> None:
    engine = SQLiteStorage(tmp_path / "jobs.db")
    storage = LitebrokerStorage("app", storage=engine)

    storage.close()
    storage.enqueue(b"task")

    assert engine.counts("huey:app").ready == 1
    engine.close()


def test_a_huey_may_live_in_memory(tmp_path: Path) -> None:
    huey = SQLiteHuey("app", filename=":memory:", read_timeout=0.05)

    @huey.task()
    def task() -> int:
        return 7

    result = task()
    worker = threading.Thread(target=lambda: huey.execute(huey.dequeue()))
    worker.start()
    worker.join(10)

    assert result.get() == 7
    assert not list(tmp_path.iterdir())
    huey.storage.close()


def test_without_leases_the_storage_still_serves_any_huey(tmp_path: Path) -> None:
    huey = Huey("app", storage_class=LitebrokerStorage, filename=tmp_path / "jobs.db", read_timeout=0.05)

    @huey.task()
    def task() -> int:
        return 7

    result = task()
    huey.execute(huey.dequeue())

    assert result.get() == 7
    huey.storage.close()


def test_a_fork_after_the_first_use_leaves_both_sides_a_working_storage(tmp_path: Path) -> None:
    script = """
import os, sys
from litebroker_huey import SQLiteHuey
huey = SQLiteHuey("app", filename=sys.argv[1])
@huey.task()
def task(n): return n
task(0)
for number in range(1, 6):
    child = os.fork()
    if not child:
        task(number)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
task(6)
print(sorted(task.args[0] for task in huey.pending()))
"""

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "jobs.db")],
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
        check=True,
    )

    assert done.stdout.strip() == "[0, 1, 2, 3, 4, 5, 6]"


def test_all_options_that_mean_nothing_here_are_named_at_once(tmp_path: Path) -> None:
    options = {"host": "localhost", "port": 6379, "cache_mb": 8, "nonsense": 1}

    with pytest.raises(ConfigurationError) as error:
        SQLiteHuey("app", filename=tmp_path / "jobs.db", **options)

    for option in options:
        assert option in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"blocking": False},
        {"read_timeout": 0.1},
        {"notify_result": True},
        {"strict_fifo": True},
        {"timeout": 5},
        {"fsync": True},
        {"journal_mode": "wal"},
        {"create_tables": False},
    ],
    ids=repr,
)
def test_options_of_other_hueys_that_mean_something_are_taken(tmp_path: Path, options: dict[str, Any]) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", **options)

    assert huey.pending_count() == 0
    huey.storage.close()


@pytest.mark.parametrize(
    "options",
    [{"lease": 0}, {"max_receives": 0}, {"result_ttl": -1}, {"filename": "a", "url": "sqlite:///b"}],
    ids=repr,
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        SQLiteHuey("app", **options)


def test_a_url_says_where_the_file_is(tmp_path: Path) -> None:
    huey = SQLiteHuey("app", url=f"sqlite:///{tmp_path}/jobs.db?durability=relaxed")

    assert huey.pending_count() == 0
    assert (tmp_path / "jobs.db").exists()
    huey.storage.close()


def test_a_rate_limit_is_exact_between_threads(tmp_path: Path) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db")
    if not hasattr(Huey, "rate_limit"):
        pytest.skip("huey before 3.0 has no rate limits")
    through: list[int] = []

    def call() -> None:
        try:
            huey.rate_limit("calls", 5, 3600).acquire()
        except Exception as error:  # noqa: BLE001 - the class is not there in every release
            assert type(error).__name__ == "RateLimitExceeded"  # noqa: PT017
        else:
            through.append(1)

    threads = [threading.Thread(target=call) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(through) == 5
    huey.storage.close()


def test_listings_of_the_engine_show_the_task_by_name_and_id(tmp_path: Path) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db")

    @huey.task(name="send_mail")
    def send() -> None:
        pass

    result = send()

    [job] = huey.storage.engine.page("huey:app", State.PENDING)
    assert (job.task, job.ref, job.encoding) == (f"{__name__}.send_mail", result.id, "huey")
    huey.storage.close()


def test_where_huey_is_missing_the_error_says_what_to_install() -> None:
    script = "import sys; sys.modules['huey'] = None; from litebroker_huey import SQLiteHuey"

    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=30, check=False)

    assert "pip install 'litebroker[huey]'" in done.stderr


def test_a_flag_of_another_process_is_seen_at_once(storage: LitebrokerStorage) -> None:
    script = (
        "from litebroker_huey import LitebrokerStorage;"
        f"storage = LitebrokerStorage('app', filename={storage.engine.location!r});"
        "print('ready', flush=True); input();"
        "[storage.put_data(key, b'1') for key in ('r:one', b'rt:task')]"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline()
        assert storage.peek_data("r:one") is EmptyData
        assert storage.peek_many(["r:two", "rt:task"]) == {}
        assert not storage.delete_data("r:one")
        other.communicate("\n", timeout=30)

    assert storage.peek_data("r:one") == b"1"
    assert storage.peek_many(["r:two", "rt:task"]) == {"rt:task": b"1"}
    assert storage.delete_data(b"r:one")
    assert not storage.delete_data("r:one")
    assert storage.pop_data("rt:task") == b"1"


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 120, 1200])
def test_any_number_of_flags_is_found(storage: LitebrokerStorage, count: int) -> None:
    with storage.engine.transaction():
        for number in range(count):
            storage.put_data(f"r:{number:04}", b"1")
    storage.put_data("rx", b"1")

    found = [number for number in range(count + 1) if storage.peek_data(f"r:{number:04}") is not EmptyData]

    assert found == list(range(count))


def test_flags_are_kept_apart_from_results_whose_keys_look_alike(storage: LitebrokerStorage) -> None:
    storage.put_data("report", b"1", is_result=True)
    storage.put_data("r", b"2", is_result=True)

    assert storage.peek_data("report") == b"1"
    assert storage.peek_many(["r", "r:1"]) == {"r": b"2"}


def test_a_result_whose_key_looks_like_a_flag_s_is_seen_at_once(storage: LitebrokerStorage) -> None:
    assert storage.pop_data("r:mine") is EmptyData

    storage.put_data("r:mine", b"1", is_result=True)

    assert storage.pop_data("r:mine") == b"1"


def test_a_result_whose_key_looks_like_a_flag_s_is_there_for_who_has_waited(storage: LitebrokerStorage) -> None:
    before: list[Any] = []
    elsewhere = threading.Thread(target=lambda: before.append(storage.pop_data("r:mine")))
    with storage.engine.transaction():
        storage.put_data("r:mine", b"1", is_result=True)
        elsewhere.start()
        elsewhere.join()

    has_come = storage.wait_result("r:mine", timeout=20)

    assert before == [EmptyData]
    assert has_come
    assert storage.pop_data("r:mine") == b"1"
