"""Names of processes: who is alive, who is dead, and of whom nothing can be said."""

from __future__ import annotations

import subprocess
import sys

from litebroker_rq import processes

NAME = "import sys; from litebroker_rq import processes; print(processes.own(), flush=True); sys.stdin.read()"


def test_a_process_is_alive_until_it_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", NAME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        name = child.stdout.readline().strip()
        before = processes.is_alive(name)

        child.kill()
        child.wait()

        assert (before, processes.is_alive(name)) == (True, False)


def test_one_that_has_died_and_was_not_waited_for_is_dead() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", NAME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        name = child.stdout.readline().strip()

        child.kill()
        child.stdout.read()

        while processes.is_alive(name):
            pass
        assert child.returncode is None


def test_another_process_of_the_same_number_is_not_it() -> None:
    host, boot, namespace, pid, _ = processes.own().rsplit("|", 4)

    assert processes.is_alive(processes.own())
    assert not processes.is_alive(f"{host}|{boot}|{namespace}|{pid}|1")


def test_what_ran_before_the_machine_started_is_dead() -> None:
    host, _, namespace, pid, started = processes.own().rsplit("|", 4)

    assert not processes.is_alive(f"{host}|another-boot|{namespace}|{pid}|{started}")


def test_of_other_hosts_and_containers_nothing_is_known() -> None:
    host, boot, namespace, _, _ = processes.own().rsplit("|", 4)

    assert processes.is_alive(f"elsewhere|{boot}|{namespace}|1|1")
    assert processes.is_alive(f"{host}|{boot}|pid:[1]|1|1")
    assert processes.is_alive("not a name")
