"""The recipes of docs/transactions.md, as they stand there, and the traps of which it warns."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from tests.doc_examples import blocks_of

from litebroker import Backoff, Context, Counts, DatabaseBusyError, Queue
from litebroker.wakeup import Wakeups

DOCUMENT = Path(__file__).parent.parent / "docs" / "transactions.md"
LIMIT = 20


def block(start: str) -> str:
    """The block of the document in which this is defined."""
    (found,) = ("\n".join(it.text) for it in blocks_of(DOCUMENT.read_text(encoding="utf-8")) if start in it.text)
    return found


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customers"
    name: Mapped[str] = mapped_column(primary_key=True)


class Recipe:
    """The document's listeners on a new file, and what a test needs beside them."""

    def __init__(self, folder: Path) -> None:
        code = block("def add_job(session, queue, data, **options):").replace("app.db", str(folder / "app.db"))
        namespace: dict[str, Any] = {}
        exec(compile(code, DOCUMENT, "exec"), namespace)  # noqa: S102 (our own text)
        self.engine: Engine = namespace["engine"]
        self.add_job: Callable[..., Any] = namespace["add_job"]
        self._wake = namespace["wake"]
        Base.metadata.create_all(self.engine)
        self.url = f"sqlite:///{folder / 'app.db'}?shared=1"
        self.queue: Queue[Any] = Queue("emails", self.url, durability="relaxed", backoff=Backoff.fixed(0))
        self.queue.storage.queues()  # makes the tables
        self.wakeups = Wakeups(folder / "app.db-litebroker")

    def customers(self) -> set[str]:
        with self.engine.connect() as connection:
            return set(connection.scalars(select(Customer.name)))

    def close(self) -> None:
        event.remove(Session, "after_commit", self._wake)
        self.queue.close()
        self.wakeups.close()
        self.engine.dispose()


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Recipe]:
    with closing(Recipe(tmp_path)) as recipe:
        yield recipe


def driver(session: Session) -> object:
    return session.connection().connection.driver_connection


# SQLAlchemy


def test_a_job_is_there_when_the_session_commits(recipe: Recipe) -> None:
    with Session(recipe.engine) as session:
        session.add(Customer(name="a"))
        recipe.add_job(session, recipe.queue, {"to": "a"}, delay=60)
        before = recipe.queue.size()
        session.commit()

    assert before == 0
    assert recipe.queue.stats() == Counts(delayed=1)
    assert recipe.customers() == {"a"}


def test_a_job_is_gone_when_the_session_rolls_back(recipe: Recipe) -> None:
    with Session(recipe.engine) as session:
        session.add(Customer(name="a"))
        recipe.add_job(session, recipe.queue, {"to": "a"})
        session.rollback()
    with pytest.raises(KeyError), Session(recipe.engine) as session, session.begin():  # noqa: PT012 (what is rolled back)
        session.add(Customer(name="b"))
        recipe.add_job(session, recipe.queue, {"to": "b"})
        raise KeyError

    assert recipe.queue.stats() == Counts()
    assert recipe.customers() == set()


def test_a_savepoint_takes_its_jobs_with_it(recipe: Recipe) -> None:
    with Session(recipe.engine) as session:
        recipe.add_job(session, recipe.queue, "outer")
        with pytest.raises(KeyError), session.begin_nested():  # noqa: PT012 (as above)
            recipe.add_job(session, recipe.queue, "inner")
            raise KeyError
        session.commit()
    with Session(recipe.engine) as session:
        with session.begin_nested():
            recipe.add_job(session, recipe.queue, "never")
        session.rollback()

    assert [job.data for job in recipe.queue.list("pending")] == ["outer"]


def test_the_commit_wakes_workers_and_a_released_savepoint_does_not(recipe: Recipe) -> None:
    listener = recipe.wakeups.listener(["emails"], [])
    with Session(recipe.engine) as session:
        with session.begin_nested():
            recipe.add_job(session, recipe.queue, {"to": "a"})
        while listener.wait(0):
            pass  # Of the add itself, which cannot know better.
        before = "queues" in session.info
        session.commit()

    assert before
    assert listener.wait(LIMIT)
    listener.close()


def test_a_worker_finds_the_rows_that_were_written_with_its_job(recipe: Recipe) -> None:
    seen: list[set[str]] = []
    done = threading.Event()

    def handler(_: Any) -> None:
        seen.append(recipe.customers())
        done.set()

    worker = recipe.queue.process(handler)
    with Session(recipe.engine) as session:
        recipe.add_job(session, recipe.queue, {"to": "a"})
        session.add(Customer(name="a"))
        session.commit()

    assert done.wait(LIMIT)
    worker.close()
    assert seen == [{"a"}]


def test_a_job_can_be_completed_in_the_session_of_its_handler(recipe: Recipe) -> None:
    attempts: list[int] = []
    done = threading.Event()

    def handler(data: dict[str, str], context: Context) -> None:
        attempts.append(context.attempt)
        with Session(recipe.engine) as session:
            session.add(Customer(name=f"{data['to']}{context.attempt}"))
            context.complete(connection=driver(session))
            if context.attempt == 1:
                session.rollback()
            else:
                session.commit()
                done.set()

    recipe.queue.add({"to": "a"})
    worker = recipe.queue.process(handler)
    assert done.wait(LIMIT)
    worker.close()

    assert attempts == [1, 2]
    assert recipe.customers() == {"a2"}
    assert recipe.queue.stats() == Counts()


def test_a_session_that_has_read_can_still_add_a_job(recipe: Recipe) -> None:
    with Session(recipe.engine) as session:
        session.scalars(select(Customer)).all()
        recipe.add_job(session, recipe.queue, {"to": "a"})
        session.commit()

    assert recipe.queue.size() == 1


def test_with_a_plain_begin_it_cannot_once_another_has_written(recipe: Recipe) -> None:
    plain = create_engine(recipe.engine.url)
    event.listen(plain, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(plain, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))

    with Session(plain) as session:
        session.scalars(select(Customer)).all()
        recipe.queue.add("from another")
        with pytest.raises(DatabaseBusyError, match="BEGIN IMMEDIATE"):
            recipe.add_job(session, recipe.queue, {"to": "a"})
    plain.dispose()


def test_without_the_listeners_a_savepoint_commits_its_jobs(recipe: Recipe) -> None:
    bare = create_engine(recipe.engine.url, connect_args={"isolation_level": "DEFERRED"})

    with Session(bare) as session:
        with session.begin_nested():
            recipe.add_job(session, recipe.queue, {"to": "a"})
        session.rollback()
    bare.dispose()

    assert recipe.queue.size() == 1  # which is what the document warns of


# Django

SETTINGS = """
    ROOT_URLCONF = "urls"
    SECRET_KEY = "x"
    USE_TZ = True
    ALLOWED_HOSTS = ["*"]
    DATABASES = {{
        "default": {{
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": "app.db",
            "ATOMIC_REQUESTS": True,
            "OPTIONS": {{"timeout": 30, {options}}},
            "TEST": {{"NAME": {test_name!r}}},
        }}
    }}
    INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth"]
"""

URLS = """
    from django.contrib.auth.models import User
    from django.http import HttpResponse
    from django.urls import path
    from jobs import add_job_in_django, elsewhere, welcome

    def register(request, name):
        known = User.objects.count()
        elsewhere(name)
        add_job_in_django(welcome, {"name": name})
        if name == "bad":
            raise ValueError(name)
        User.objects.create(username=name)
        return HttpResponse(str(known))

    urlpatterns = [path("register/<name>", register)]
"""

JOBS = """
    import sqlite3
    import threading

    from django.db import connection, transaction
    from litebroker import Queue

    welcome = Queue("welcome", f"sqlite:///{connection.settings_dict['NAME']}?shared=1")

    def elsewhere(name):
        # Another process's write, as soon as it can: within the request, or after it.
        if name != "read":
            return
        db = sqlite3.connect("app.db", timeout=0)
        try:
            with db:
                db.execute("create table elsewhere(name text)")
        except sqlite3.OperationalError:
            pass  # The request holds the write lock.
        db.close()
"""

SCRIPT = """
    import json
    import os

    os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
    import django

    django.setup()
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.db import connection, transaction
    from django.test import Client
    from jobs import add_job_in_django, welcome
    from litebroker import LitebrokerError
    from litebroker.testing import drain

    call_command("migrate", verbosity=0)
    welcome.storage.open()
    told = {}
    notified = []
    notify = welcome.notify
    welcome.notify = lambda: notified.append(welcome.size())

    with transaction.atomic():
        User.objects.create(username="a")
        add_job_in_django(welcome, "a")
        told["before the commit"] = [len(notified), welcome.size()]
    told["after the commit"] = [list(notified), welcome.size()]
    try:
        with transaction.atomic():
            add_job_in_django(welcome, "b")
            raise KeyError
    except KeyError:
        told["after the rollback"] = [len(notified), welcome.size()]
    with transaction.atomic():
        try:
            with transaction.atomic():
                add_job_in_django(welcome, "inner")
                raise KeyError
        except KeyError:
            add_job_in_django(welcome, "outer")
    add_job_in_django(welcome, "autocommit")
    told["jobs"] = sorted(job.data for job in welcome.list("pending"))

    client = Client(raise_request_exception=False)
    told["requests"] = [client.get(f"/register/{name}").status_code for name in ("good", "bad")]
    told["names"] = sorted(job.data["name"] for job in welcome.list("pending") if isinstance(job.data, dict))
    client.raise_request_exception = True
    try:
        told["request that reads first"] = client.get("/register/read").status_code
    except LitebrokerError as error:
        told["request that reads first"] = f"{type(error).__name__}: {error}"

    def greet(job, context):
        with transaction.atomic():
            User.objects.create(username=f"greeted {context.job_id}")
            context.complete(connection=connection.connection)

    before = welcome.size()
    drained = drain(welcome, greet)
    told["all greeted once"] = (
        drained.completed == before == User.objects.filter(username__startswith="greeted").count()
    )
    print(json.dumps(told))
"""

TESTS = """
    import os

    from django.db import connection
    from django.test import TestCase
    from jobs import add_job_in_django
    from litebroker import Queue
    from litebroker.testing import assert_enqueued, assert_not_enqueued

    def queue():
        connection.ensure_connection()
        if {in_memory}:
            return Queue("welcome", connection.connection)
        return Queue("welcome", f"sqlite:///{{connection.settings_dict['NAME']}}?shared=1")

    class Test(TestCase):
        def test_job(self):
            with queue() as welcome, self.captureOnCommitCallbacks(execute=True) as callbacks:
                add_job_in_django(welcome, 1)
                assert_enqueued(welcome if {in_memory} else welcome.bind(connection.connection), 1, count=1)
            self.assertEqual(len(callbacks), 1)

        def test_none_of_another_test(self):
            with queue() as welcome:
                assert_not_enqueued(welcome if {in_memory} else welcome.bind(connection.connection))
"""


@pytest.fixture
def django(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    pytest.importorskip("django")

    def run(script: str, *, options: str = '"transaction_mode": "IMMEDIATE"', test_name: str | None = None) -> Any:
        recipe = block("def add_job_in_django(queue, data, **options):")
        recipe = recipe[recipe.index("def add_job_in_django") :]
        files = {
            "settings.py": SETTINGS.format(options=options, test_name=test_name),
            "urls.py": URLS,
            "jobs.py": JOBS,
            "script.py": script,
        }
        for name, text in files.items():
            extra = f"\n{recipe}\n" if name == "jobs.py" else ""
            (tmp_path / name).write_text(textwrap.dedent(text) + extra, encoding="utf-8")
        return subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_django_adds_jobs_in_its_transactions(django: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = django(SCRIPT)

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {
        "before the commit": [0, 0],
        "after the commit": [[1], 1],
        "after the rollback": [1, 1],
        "jobs": ["a", "autocommit", "outer"],
        "requests": [200, 500],
        "names": ["good"],
        "request that reads first": 200,
        "all greeted once": True,
    }


def test_without_immediate_a_request_that_reads_first_fails_when_another_has_written(
    django: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = django(SCRIPT, options="")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["request that reads first"]
    assert told.startswith("DatabaseBusyError: ")
    assert "BEGIN IMMEDIATE" in told


@pytest.mark.parametrize("in_memory", [True, False])
def test_jobs_of_a_django_test_case_are_rolled_back_with_it(
    django: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, *, in_memory: bool
) -> None:
    (tmp_path / "tests.py").write_text(textwrap.dedent(TESTS.format(in_memory=in_memory)), encoding="utf-8")
    script = """
        import os, sys

        os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
        from django.core.management import execute_from_command_line

        execute_from_command_line(["manage.py", "test", "tests"])
    """

    done = django(script, test_name=None if in_memory else "test.db")

    assert done.returncode == 0, done.stderr
    assert "Ran 2 tests" in done.stderr
