"""Traces of OpenTelemetry that go from `add` to the handler, in whatever process that runs. Needs the extra `tracing`.

>>> from litebroker.tracing import Tracing
>>> queue.observe(Tracing())
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from litebroker.jobs import Added, JobRecord, JobSpec
from litebroker.observers import Observer

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context, attach, detach
    from opentelemetry.trace import Link, SpanKind, TracerProvider
    from opentelemetry.util.types import AttributeValue
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "opentelemetry":
        raise
    raise ModuleNotFoundError(
        "litebroker.tracing needs opentelemetry-api: pip install 'litebroker[tracing]'", name=error.name
    ) from None

__all__ = ["Tracing"]


class Tracing(Observer):
    """A span around each `add` and around each run of a handler, by OpenTelemetry's conventions for messaging.

    "add <queue>" (a producer's) is a child of whatever span its caller has. Its context travels in the job's headers,
    by the propagator that OpenTelemetry is set to (``traceparent``, by default). "process <queue>" (a consumer's) is
    its child, one for each attempt, in the same trace; around a handler of several jobs it is a trace of its own, with
    a link to each. What a handler adds, also by ``then=``, goes on in the trace. A job that brings such headers keeps
    them. The ticks of schedules begin traces of their own.

    One object serves any number of queues. Without an SDK it does nothing.

    Args:
        tracer_provider: None is the global one, whenever that is set.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("litebroker", tracer_provider=tracer_provider)

    @contextmanager
    def adding(self, specs: Sequence[JobSpec]) -> Iterator[Sequence[JobSpec]]:
        queues = {spec.queue for spec in specs}
        queue = queues.pop() if len(queues) == 1 else None
        attributes = _attributes("add", "send", queue, len(specs))
        if len(specs) == 1:
            attributes["messaging.message.body.size"] = len(specs[0].payload)
        with self._tracer.start_as_current_span(_name("add", queue), kind=SpanKind.PRODUCER, attributes=attributes):
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            yield [_with(spec, carrier) for spec in specs] if carrier else specs

    def added(self, specs: Sequence[JobSpec], added: Sequence[Added]) -> None:
        del specs
        if len(added) == 1:
            span = trace.get_current_span()
            span.set_attribute("messaging.message.id", str(added[0].id))
            if not added[0].created:
                span.set_attribute("litebroker.job.duplicate", value=True)

    @contextmanager
    def running(self, jobs: Sequence[JobRecord]) -> Iterator[None]:
        attributes = _attributes("process", "process", jobs[0].queue, len(jobs))
        origins = [propagate.extract(job.headers, Context()) for job in jobs]
        links = []
        if len(jobs) == 1:
            (job,), (origin,) = jobs, origins
            attributes["messaging.message.id"] = str(job.id)
            attributes["messaging.message.body.size"] = len(job.payload)
            attributes["litebroker.job.attempt"] = job.attempts
            if job.max_attempts is not None:
                attributes["litebroker.job.max_attempts"] = job.max_attempts
            if job.task is not None:
                attributes["litebroker.job.task"] = job.task
        else:
            origin = Context()
            spans = [trace.get_current_span(it).get_span_context() for it in origins]
            links = [Link(it) for it in spans if it.is_valid]
        token = attach(origin)  # With its baggage, too.
        try:
            with self._tracer.start_as_current_span(
                _name("process", jobs[0].queue), kind=SpanKind.CONSUMER, attributes=attributes, links=links
            ) as span:
                try:
                    yield
                except BaseException as error:
                    span.set_attribute("error.type", type(error).__qualname__)
                    raise
        finally:
            detach(token)


def _name(operation: str, queue: str | None) -> str:
    return operation if queue is None else f"{operation} {queue}"


def _attributes(operation: str, kind: str, queue: str | None, count: int) -> dict[str, AttributeValue]:
    """As opentelemetry.io/docs/specs/semconv/messaging/messaging-spans has them."""
    attributes: dict[str, AttributeValue] = {
        "messaging.system": "litebroker",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }
    if queue is not None:
        attributes["messaging.destination.name"] = queue
    if count > 1:
        attributes["messaging.batch.message_count"] = count
    return attributes


def _with(spec: JobSpec, carrier: dict[str, str]) -> JobSpec:
    headers = spec.headers or {}
    return spec if carrier.keys() & headers.keys() else spec._replace(headers={**headers, **carrier})
