"""django-dramatiq with the settings that the documentation gives, on Django's own database file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.dramatiq.conftest import App

SETTINGS = """
    SECRET_KEY = "x"
    USE_TZ = True
    DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": {name!r}}}}}
    INSTALLED_APPS = ["django_dramatiq"]
    WHERE = "sqlite:///" + {name!r} + "?shared=1"
    DRAMATIQ_BROKER = {{
        "BROKER": "litebroker_dramatiq.SQLiteBroker",
        "OPTIONS": {{"where": WHERE}},
        "MIDDLEWARE": [
            "dramatiq.middleware.AgeLimit",
            "dramatiq.middleware.TimeLimit",
            "dramatiq.middleware.Callbacks",
            "dramatiq.middleware.Retries",
            "litebroker_dramatiq.Dedupe",
            "litebroker_dramatiq.Schedules",
            "django_dramatiq.middleware.AdminMiddleware",
            "django_dramatiq.middleware.DbConnectionsMiddleware",
        ],
    }}
    DRAMATIQ_RESULT_BACKEND = {{
        "BACKEND": "litebroker_dramatiq.SQLiteResultBackend",
        "BACKEND_OPTIONS": {{"where": WHERE}},
        "MIDDLEWARE_OPTIONS": {{"store_results": True}},
    }}
    DRAMATIQ_RATE_LIMITER_BACKEND = {{
        "BACKEND": "litebroker_dramatiq.SQLiteRateLimiterBackend",
        "BACKEND_OPTIONS": {{"where": WHERE}},
    }}
"""

SCRIPT = """
    import os

    os.environ["DJANGO_SETTINGS_MODULE"] = "app"
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connection, transaction
    import dramatiq

    call_command("migrate", verbosity=0)
    broker = dramatiq.get_broker()

    @dramatiq.actor(unique=True)
    def double(n):
        return 2 * n

    try:
        with transaction.atomic():
            with broker.transaction(connection.connection):
                double.send(1)
            raise KeyError
    except KeyError:
        pass
    print(broker.storage.counts("dramatiq:default").ready)
    with transaction.atomic():
        with broker.transaction(connection.connection):
            message = double.send(21)
    worker = dramatiq.Worker(broker, worker_threads=2, worker_timeout=100)
    worker.start()
    print(message.get_result(block=True))
    broker.join("default", timeout=10_000)
    worker.stop()
    broker.close()

    from django_dramatiq.models import Task

    print(list(Task.tasks.values_list("actor_name", "status")))
"""


@pytest.mark.skipif(not find_spec("django_dramatiq"), reason="django-dramatiq is not installed")
def test_django_sends_in_its_own_transactions(app: App, tmp_path: Path) -> None:
    app.write(SETTINGS.format(name=str(tmp_path / "db.sqlite3")))

    process = app.python(SCRIPT)

    assert process.wait() == 0, process.output
    assert process.output.splitlines()[-3:] == ["0", "42", "[('double', 'done')]"]
