# SPDX-License-Identifier: Apache-2.0
"""`epd doctor`: can this machine run an engine with this configuration?

Owns: the options, which checks are made, and how findings are shown. Does not
own: looking (``cli/facts.py``) or judging (``cli/checks.py``). Starts no engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from epd_connector.cli import checks, facts
from epd_connector.cli.checks import Finding, Level
from epd_connector.config import DEFAULT_EC_PORT, Config, Role
from epd_connector.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
"""The host engine's own default of ``ec_ip``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `epd doctor`."""
    parser.add_argument(
        "--config",
        type=_json_object,
        default={},
        metavar="JSON",
        help="the engine's ec_connector_extra_config; default: nothing set",
    )
    parser.add_argument(
        "--role",
        type=Role,
        choices=list(Role),
        metavar="ROLE",
        help=f"the engine's ec_role: {', '.join(Role)}; default: a producer and a consumer",
    )
    parser.add_argument("--ec-ip", default=DEFAULT_HOST, help="the engine's ec_ip (%(default)s)")
    parser.add_argument(
        "--ec-port", type=int, default=DEFAULT_EC_PORT, help="the engine's ec_port (%(default)s)"
    )
    parser.add_argument(
        "--tp-size", type=_count, default=1, help="tensor-parallel size (%(default)s)"
    )
    parser.add_argument(
        "--dp-size", type=_count, default=1, help="data-parallel engines here (%(default)s)"
    )
    parser.add_argument(
        "--fast", action="store_true", help="do not import the host, which takes seconds"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Look, judge, print. 0 if nothing failed, else 1."""
    findings = diagnose(args)
    problems = sum(finding.level is Level.FAIL for finding in findings)
    print(as_json(findings) if args.json else as_text(findings))
    return 1 if problems else 0


def diagnose(args: argparse.Namespace) -> list[Finding]:
    """Every finding for the options given. A configuration that is refused is one of them."""
    findings: list[Finding] = []
    configs: list[Config] = []
    for role in [args.role] if args.role else [Role.PRODUCER, Role.CONSUMER]:
        try:
            configs.append(_read(args, role))
        except ConfigError as error:
            findings.append(_refused(role, error))
        else:
            findings.append(Finding(f"config {role}", Level.OK, "accepted"))
    key_file = next((config.auth_key_file for config in configs), "")
    seen = facts.gather(fast=args.fast, auth_key_file=key_file)
    findings = checks.check_machine(seen) + findings
    for config in configs:
        findings += checks.check_config(config, seen, args.tp_size * args.dp_size)
        findings.append(_ports(config, args))
    return _once_each(findings)


def _read(args: argparse.Namespace, role: Role) -> Config:
    return Config.from_extra(
        args.config,
        role=role,
        default_host=args.ec_ip,
        default_port=role.default_port(args.ec_port),
    )


def _refused(role: Role, error: ConfigError) -> Finding:
    return Finding(f"config {role}", Level.FAIL, "refused", "a valid configuration", str(error))


def _ports(config: Config, args: argparse.Namespace) -> Finding:
    try:
        trials = [facts.try_ports(config, rank, args.tp_size) for rank in range(args.dp_size)]
    except ConfigError as error:
        return _refused(config.role, error)
    return checks.check_ports(config.role, tuple(trial for block in trials for trial in block))


def _once_each(findings: Iterable[Finding]) -> list[Finding]:
    """Two roles share some findings word for word; the order stays."""
    return list(dict.fromkeys(findings))


def as_text(findings: Sequence[Finding]) -> str:
    """A line per finding, its remedy below, and the sum in the last line."""
    lines = []
    width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        limit = f"  (needs: {finding.limit})" if finding.limit else ""
        level = finding.level.value.upper()
        lines.append(f"{level:<4}  {finding.check:<{width}}  {finding.value}{limit}")
        if finding.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.remedy}")
    return "\n".join([*lines, _summary(findings)])


def _summary(findings: Sequence[Finding]) -> str:
    problems = sum(finding.level is Level.FAIL for finding in findings)
    return f"doctor: {problems} problem(s)" if problems else "doctor: OK"


def as_json(findings: Sequence[Finding]) -> str:
    """``{"ok": bool, "problems": int, "findings": [{check, level, value, limit, remedy}]}``."""
    problems = sum(finding.level is Level.FAIL for finding in findings)
    listed = [asdict(finding) for finding in findings]
    return json.dumps({"ok": not problems, "problems": problems, "findings": listed}, indent=2)


def _json_object(text: str) -> dict[str, object]:
    # The text may hold a secret: errors say where it is wrong, not what it is.
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be a JSON object, such as \'{"shard": "never"}\'')
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 1024")
    return int(text)
