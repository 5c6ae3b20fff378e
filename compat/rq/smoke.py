"""Smoke tests of RQ's companions on a file; `tools` runs this in an environment that has them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import rq
from compat.rq import smoke_jobs

from litebroker_rq import SQLiteConnection, connect, install, pool

DATABASE = Path("jobs.db").resolve()
URL = f"sqlite:///{DATABASE}"


def filled() -> tuple[SQLiteConnection, rq.Queue]:
    """A queue with a job in each state."""
    connection = connect(DATABASE)
    connection.flushdb()
    queue = rq.Queue(connection=connection)
    queue.enqueue(smoke_jobs.nothing)
    queue.enqueue(smoke_jobs.fail)
    rq.SimpleWorker([queue], connection=connection).work(burst=True, logging_level="ERROR")
    first = queue.enqueue(smoke_jobs.nothing)
    queue.enqueue(smoke_jobs.nothing, depends_on=first)
    queue.enqueue_in(timedelta(hours=1), smoke_jobs.nothing)
    return connection, queue


def rq_dashboard() -> None:
    """Every page and button of the dashboard, which is given nothing but a URL."""
    install()
    rq_dashboard, flask = imported("rq_dashboard"), imported("flask")

    _, queue = filled()
    failed = queue.failed_job_registry.get_job_ids()[0]
    app = flask.Flask("smoke")
    app.config.from_object(rq_dashboard.default_settings)
    app.config["RQ_DASHBOARD_REDIS_URL"] = URL
    rq_dashboard.web.setup_rq_connection(app)
    app.register_blueprint(rq_dashboard.blueprint, url_prefix="/rq")
    client = app.test_client()
    for page in (
        "/rq/",
        "/rq/0/view",
        "/rq/0/view/queues",
        "/rq/0/view/workers",
        "/rq/0/view/jobs",
        "/rq/0/view/jobs/default/queued/8/asc/1",
        f"/rq/0/view/job/{failed}",
        "/rq/0/data/queues.json",
        "/rq/0/data/workers.json",
        "/rq/0/data/jobs/default/failed/8/asc/1.json",
        f"/rq/0/data/job/{failed}.json",
    ):
        expect(client.get(page, follow_redirects=True).status_code, 200, page)
    expect(client.post(f"/rq/job/{failed}/requeue").status_code, 200, "requeue")
    expect(queue.failed_job_registry.count, 0, "failed jobs after the requeue")
    expect(client.post("/rq/queue/default/queued/empty").status_code, 200, "empty")
    expect(len(queue), 0, "jobs after empty")


def rq_scheduler() -> None:
    """Schedules, cron and changes of both, and the scheduler's run."""
    connection, queue = filled()
    queue.empty()
    scheduler = imported("rq_scheduler").Scheduler(connection=connection, queue_name="default")
    soon = scheduler.enqueue_at(datetime.now(timezone.utc).replace(tzinfo=None), smoke_jobs.nothing)
    later = scheduler.enqueue_in(timedelta(hours=1), smoke_jobs.nothing)
    cron = scheduler.cron("0 0 * * *", func=smoke_jobs.nothing)
    expect(len(list(scheduler.get_jobs())), 3, "scheduled jobs")
    scheduler.change_execution_time(later, datetime.now(timezone.utc).replace(tzinfo=None) + timedelta(hours=2))
    scheduler.cancel(cron)
    scheduler.enqueue_jobs()
    expect(queue.job_ids, [soon.id], "queued jobs")
    expect(soon in scheduler, False, "what is queued is scheduled no more")


def django_rq() -> None:
    """Enqueue, work and look at the pages of django-rq."""
    import django
    from django.conf import settings

    settings.configure(
        SECRET_KEY="smoke",
        DEBUG=True,
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django.db"}},
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "django_rq",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        RQ_QUEUES={
            "default": {
                "HOST": "localhost",
                "PORT": 6379,
                "DB": 0,
                "REDIS_CLIENT_KWARGS": {"connection_pool": pool(URL)},
            }
        },
    )
    django.setup()
    from django.contrib import admin
    from django.contrib.auth import get_user_model
    from django.core.management import call_command
    from django.test import Client
    from django.urls import include, path

    urlpatterns[:] = [path("admin/", admin.site.urls), path("django-rq/", include("django_rq.urls"))]
    filled()
    call_command("migrate", verbosity=0)
    user = get_user_model().objects.create_superuser("admin", "admin@example.com", "password")
    job = imported("django_rq").enqueue(smoke_jobs.nothing)
    call_command("rqworker", "--burst", "--worker-class", "rq.SimpleWorker", verbosity=0)
    expect(job.get_status(refresh=True), "finished", "the job that django-rq enqueued")
    client = Client()
    client.force_login(user)
    pages = ["", "stats.json/", "queues/0/", "queues/0/failed/", "queues/0/finished/", "queues/0/scheduled/"]
    pages += ["workers/0/", f"queues/0/{job.id}/"]
    for page in pages:
        expect(client.get(f"/django-rq/{page}").status_code, 200, page)


urlpatterns: list[object] = []


def imported(name: str) -> Any:
    """A module that only this environment has."""
    return importlib.import_module(name)


def expect(found: object, wanted: object, what: str) -> None:
    """Fail when they differ."""
    if found != wanted:
        raise SystemExit(f"{what}: {found!r} instead of {wanted!r}")


TOOLS = {"rq-dashboard": rq_dashboard, "rq-scheduler": rq_scheduler, "django-rq": django_rq}


def main() -> int:
    """Try each in a process of its own; 0 when all work."""
    if len(sys.argv) > 1:
        TOOLS[sys.argv[1]]()
        return 0
    failed = []
    for name in TOOLS:
        status = subprocess.run([sys.executable, __file__, name], env=os.environ, check=False).returncode
        print(f"{name}: {'works' if status == 0 else 'does not work'}", flush=True)
        failed += [name] if status else []
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
