# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.sim --steps N --seed S``: worlds of seeds S, S + 1, ... until N steps are done.

``--only`` plays the world of seed S alone, and shows all of it; ``--storm`` plays worlds in one
weather. The last line says how it went; the exit code is 0 where no rule was broken.
"""

import argparse
import sys
import time

from tests.sim.runner import Finding, Played, draw_fleet, play, play_fleet
from tests.sim.weather import STORMS

TELL_EVERY_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000, help="events to play at least")
    parser.add_argument("--seed", type=int, default=1, help="of the first world")
    parser.add_argument("--storm", choices=sorted(STORMS), help="one weather for every world")
    parser.add_argument("--only", action="store_true", help="that world alone, all of its trace")
    args = parser.parse_args()
    if args.only:
        return _conclude(_show(args.seed, args.storm), args.storm)
    return _conclude(play(args.steps, args.seed, args.storm, _Progress().told), args.storm)


class _Progress:
    """A line now and then for whoever waits."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()

    def told(self, steps: int, seeds: int) -> None:
        now = time.monotonic()
        if now >= self._told + TELL_EVERY_S:
            self._told = now
            rate = steps / (now - self._began)
            print(f"steps={steps} seeds={seeds} ({rate:.0f} steps/s)", flush=True)


def _show(seed: int, storm: str | None) -> Played:
    fleet = draw_fleet(seed, kept=None, storm=storm)
    played = play_fleet(seed, fleet)
    if played.finding is None:
        print(f"{fleet.weather.words()}; {fleet.shape}", *fleet.trace.lines(), sep="\n")
        for job in fleet.jobs():
            reason = f": {job.failure}" if job.failure is not None else ""
            print(f"{job.request} {job.end.value if job.end else 'never ended'}{reason}")
    return played


def _conclude(played: Played, storm: str | None) -> int:
    if played.finding is None:
        print(f"sim: PASS steps={played.steps} seeds={played.seeds} violations=0")
        return 0
    _print_finding(played.finding, played.steps, storm)
    return 1


def _print_finding(finding: Finding, steps: int, storm: str | None) -> None:
    weather = f" --storm {storm}" if storm is not None else ""
    print(*finding.trace, sep="\n")
    print(f"seed {finding.seed} broke {finding.invariant.__name__}: {finding.detail}")
    print(f"python -m tests.sim --seed {finding.seed}{weather} --only   shows all that led there")
    print(f"sim: FAIL seed={finding.seed} steps={steps}: {finding.invariant.sentence()}")


if __name__ == "__main__":
    sys.exit(main())
