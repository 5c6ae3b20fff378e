"""Traces that go from `add` to the handler."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from litebroker import Backoff, Context, Group, GroupConflictError, NewJob, Queue, SQLiteStorage, current_job
from litebroker.testing import ManualClock, drain
from litebroker.tracing import Tracing


class Spans:
    """What was traced, in the order in which it ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name == name]

    def the(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=ManualClock(), durability="relaxed")
    yield storage
    storage.close()


@pytest.fixture
def queue(storage: SQLiteStorage, spans: Spans) -> Queue[Any]:
    queue: Queue[Any] = Queue("emails", storage, backoff=Backoff.fixed(0), attempts=2)
    queue.observe(Tracing(spans.provider))
    return queue


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context
    return context.span_id


def trace_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context
    return context.trace_id


def test_a_trace_goes_from_the_caller_over_add_to_the_handler(queue: Queue[Any], spans: Spans) -> None:
    tracer = spans.provider.get_tracer("shop")
    with tracer.start_as_current_span("request"):
        job = queue.add({"to": "a@example.com"}, task="greet")

    def handler(_: Any) -> None:
        with tracer.start_as_current_span("smtp"):
            pass

    drain(queue, handler)

    request, add, process, smtp = map(spans.the, ("request", "add emails", "process emails", "smtp"))
    assert parent_of(add) == id_of(request)
    assert parent_of(process) == id_of(add)
    assert parent_of(smtp) == id_of(process)
    assert len({trace_of(span) for span in spans.all()}) == 1
    assert job.headers["traceparent"].split("-")[1:3] == [f"{trace_of(add):032x}", f"{id_of(add):016x}"]


def test_the_spans_say_what_opentelemetry_wants_to_know_of_messages(queue: Queue[Any], spans: Spans) -> None:
    job = queue.add({"to": "a@example.com"}, task="greet")

    drain(queue, lambda _: None)

    add, process = spans.the("add emails"), spans.the("process emails")
    assert (add.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    common = {
        "messaging.system": "litebroker",
        "messaging.destination.name": "emails",
        "messaging.message.id": str(job.id),
        "messaging.message.body.size": len('{"to":"a@example.com"}'),
    }
    assert add.attributes == {**common, "messaging.operation.name": "add", "messaging.operation.type": "send"}
    assert process.attributes == {
        **common,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "litebroker.job.attempt": 1,
        "litebroker.job.max_attempts": 2,
        "litebroker.job.task": "greet",
    }


def test_each_attempt_has_a_span_and_a_failed_one_says_why(queue: Queue[Any], spans: Spans) -> None:
    queue.add(1)

    def handler(_: Any, context: Context) -> None:
        if context.attempt == 1:
            raise ValueError("no such mailbox")

    drain(queue, handler, raises=False)

    first, second = spans.named("process emails")
    assert first.attributes
    assert second.attributes
    assert (first.attributes["litebroker.job.attempt"], second.attributes["litebroker.job.attempt"]) == (1, 2)
    assert (first.status.status_code, first.attributes["error.type"]) == (StatusCode.ERROR, "ValueError")
    assert [event.name for event in first.events] == ["exception"]
    assert second.status.status_code is StatusCode.UNSET
    assert parent_of(first) == parent_of(second) == id_of(spans.the("add emails"))


def test_what_follows_a_job_goes_on_in_its_trace(queue: Queue[Any], storage: SQLiteStorage, spans: Spans) -> None:
    bills: Queue[Any] = Queue("bills", storage)
    bills.observe(Tracing(spans.provider))
    queue.add(1)

    drain(queue, lambda _, context: context.complete(then=[NewJob(2, queue="bills")]))
    drain(bills, lambda _: None)

    follow = spans.the("add bills")
    assert parent_of(follow) == id_of(spans.the("process emails"))
    assert parent_of(spans.the("process bills")) == id_of(follow)
    assert len({trace_of(span) for span in spans.all()}) == 1


def test_many_jobs_are_added_in_one_span(queue: Queue[Any], spans: Spans) -> None:
    jobs = queue.add_many([1, NewJob(2, headers={"mine": "too"})])
    queue.add_many([3, NewJob(4, queue="other")])

    first, both = spans.all()
    assert first.attributes
    assert both.attributes
    assert (first.name, first.attributes["messaging.batch.message_count"]) == ("add emails", 2)
    assert (both.name, "messaging.destination.name" in both.attributes) == ("add", False)
    assert {job.headers["traceparent"].split("-")[2] for job in jobs} == {f"{id_of(first):016x}"}
    assert jobs[1].headers["mine"] == "too"


def test_a_handler_of_several_jobs_is_linked_to_each(tmp_path: Path, spans: Spans) -> None:
    with Queue("emails", tmp_path / "batch.db", durability="relaxed") as queue:
        queue.observe(Tracing(spans.provider))
        queue.add(1)
        queue.add(2)
        ran = threading.Event()
        worker = queue.process_many(lambda _: ran.set(), batch=2)
        assert ran.wait(30)
        worker.close()

    process = spans.the("process emails")
    assert process.parent is None
    assert {link.context.span_id for link in process.links} == {id_of(span) for span in spans.named("add emails")}


def test_async_handlers_that_run_at_once_are_each_in_a_trace_of_their_own(tmp_path: Path, spans: Spans) -> None:
    tracer = spans.provider.get_tracer("shop")
    running: list[int] = []
    together = asyncio.Event()
    done = threading.Semaphore(0)

    async def handler(_: Any) -> None:
        job = current_job()
        assert job
        running.append(job.id)
        if len(running) == 2:
            together.set()
        await together.wait()
        with tracer.start_as_current_span(f"smtp {job.id}"):
            await asyncio.sleep(0)
        assert current_job() is job
        done.release()

    with Queue("emails", tmp_path / "async.db", durability="relaxed") as queue:
        queue.observe(Tracing(spans.provider))
        jobs = [queue.add(1), queue.add(2)]
        worker = queue.process(handler, concurrency=2)
        assert done.acquire(timeout=30)
        assert done.acquire(timeout=30)
        worker.close()

    processes = {id_of(span): span for span in spans.named("process emails")}
    assert len(processes) == 2
    for job in jobs:
        inner = spans.the(f"smtp {job.id}")
        outer = processes[parent_of(inner) or 0]
        assert outer.attributes
        assert outer.attributes["messaging.message.id"] == str(job.id)
        assert f"{trace_of(outer):032x}" in job.headers["traceparent"]


def test_a_job_that_brings_its_trace_keeps_it(queue: Queue[Any], spans: Spans) -> None:
    brought = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    queue.add(1, headers={"traceparent": brought})

    drain(queue, lambda _: None)

    process = spans.the("process emails")
    assert f"{trace_of(process):032x}" == "0af7651916cd43dd8448eb211c80319c"


def test_a_job_without_a_trace_begins_one(queue: Queue[Any], storage: SQLiteStorage, spans: Spans) -> None:
    Queue("emails", storage).add(1)
    queue.add(2, headers={"traceparent": "nonsense"})

    with spans.provider.get_tracer("test").start_as_current_span("test"):
        drain(queue, lambda _: None)

    assert [span.parent for span in spans.named("process emails")] == [None, None]


def test_baggage_travels_too(queue: Queue[Any]) -> None:
    seen: list[object] = []
    token = context.attach(baggage.set_baggage("customer", "7"))
    queue.add(1)
    context.detach(token)

    drain(queue, lambda _: seen.append(baggage.get_baggage("customer")))

    assert seen == ["7"]
    assert baggage.get_baggage("customer") is None


def test_a_refused_add_is_an_error_in_its_span(queue: Queue[Any], spans: Spans) -> None:
    queue.add(1, group=Group("g", concurrency=1))

    with pytest.raises(GroupConflictError):
        queue.add(1, group=Group("g", concurrency=2))

    assert [span.status.status_code for span in spans.all()] == [StatusCode.UNSET, StatusCode.ERROR]


def test_a_held_dedupe_key_is_told(queue: Queue[Any], spans: Spans) -> None:
    first = queue.add(1, dedupe_key="k")
    queue.add(1, dedupe_key="k")

    again = spans.all()[-1].attributes
    assert again
    assert (again["litebroker.job.duplicate"], again["messaging.message.id"]) == (True, str(first.id))


def test_after_the_handler_its_span_is_not_current_any_more(queue: Queue[Any]) -> None:
    queue.add(1)

    drain(queue, lambda _: None)

    assert trace.get_current_span() is trace.INVALID_SPAN


def test_without_an_sdk_jobs_are_as_they_were(storage: SQLiteStorage) -> None:
    queue: Queue[Any] = Queue("emails", storage)
    queue.observe(Tracing())

    job = queue.add(1)
    drained = drain(queue, lambda _: None)

    assert job.headers == {}
    assert drained.completed == 1


def test_without_opentelemetry_it_says_what_to_install() -> None:
    script = "import sys\nsys.modules['opentelemetry'] = None\nimport litebroker.tracing\n"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert "litebroker.tracing needs opentelemetry-api: pip install 'litebroker[tracing]'" in done.stderr
