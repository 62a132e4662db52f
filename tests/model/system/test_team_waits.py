"""The engine's team spins while the cores are its own, and sleeps while others want them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import pytest
import torch

from lora_serve.model.system.threads import IdleTeam, TeamWaits, team_waits


@dataclass
class Machine:
    """A clock, what the thread has waited, and what its team was told."""

    now: float = 100.0
    waited: float = 7.0
    told: list[str] = field(default_factory=list)

    def hold(self) -> None:
        self.told.append("sleep")

    def release(self) -> None:
        self.told.append("spin")

    def run(self, waits: TeamWaits, seconds: float, share: float) -> None:
        """Steps of 50 ms, with this share of each spent without a core."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self.waited += 0.05 * share
            waits.after_step()


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def waits(machine: Machine) -> TeamWaits:
    return TeamWaits(machine, lambda: machine.waited, lambda: machine.now)


def test_team_sleeps_soon_after_others_want_the_cores_and_spins_once_they_are_free(
    machine: Machine, waits: TeamWaits
) -> None:
    machine.run(waits, 10, 0.01)
    assert machine.told == []
    machine.run(waits, 2, 0.5)
    assert machine.told == ["sleep"]
    machine.run(waits, 20, 0.15)
    assert machine.told == ["sleep"]
    machine.run(waits, 4, 0.0)
    assert machine.told == ["sleep", "spin"]


def test_neighbour_that_is_felt_only_while_the_team_spins_is_tried_ever_more_seldom(
    machine: Machine, waits: TeamWaits
) -> None:
    for _ in range(6000):  # five minutes
        machine.run(waits, 0.05, 0.0 if waits.is_sleeping else 0.5)
    assert 6 <= machine.told.count("spin") <= 15
    assert machine.told.count("sleep") - machine.told.count("spin") in (0, 1)


def test_idle_time_and_another_thread_s_waits_count_nothing(machine: Machine, waits: TeamWaits) -> None:
    machine.run(waits, 1, 0.0)
    machine.waited += 3.0
    other = threading.Thread(target=waits.after_step)  # its waits are its own
    other.start()
    other.join()
    waits.after_step()
    machine.run(waits, 1, 0.0)
    assert machine.told == []


def test_only_a_team_on_processors_is_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert team_waits(torch.device("cuda")) is None
    assert team_waits(torch.device("cpu")) is not None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert team_waits(torch.device("cpu")) is None


def test_idle_team_ends_when_it_is_released() -> None:
    team = IdleTeam(2)
    team.release()
    for _ in range(2):
        team.hold()
        (idle,) = (thread for thread in threading.enumerate() if thread.name == "idle team")
        team.release()
        idle.join(30)
        assert not idle.is_alive()


SPINNING = """
import time, torch
from lora_serve.model.system.threads import IdleTeam
numbers, idle = torch.zeros(2**20), IdleTeam(torch.get_num_threads() + 1)

def seconds_after_loops() -> float:
    numbers.add_(1)
    time.sleep(0.3)  # whoever spins has ended
    found = 0.0
    for _ in range(10):
        numbers.add_(1)
        before = time.process_time()
        time.sleep(0.05)
        found += time.process_time() - before
    return found

alone = seconds_after_loops()
idle.hold()
time.sleep(0.5)
held = seconds_after_loops()
idle.release()
time.sleep(0.5)
print(alone, held, seconds_after_loops())
"""


def test_threads_of_a_team_spin_after_a_loop_unless_an_idle_team_is_there() -> None:
    """By the processor time that goes by while nothing is computed: the library's own behaviour, on which all rests."""
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    done = subprocess.run(
        [sys.executable, "-c", SPINNING], capture_output=True, text=True, timeout=110, env={**os.environ, **threads}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    alone, held, again = (float(word) for word in done.stdout.split())
    assert held < alone / 5
    assert held < again / 5
