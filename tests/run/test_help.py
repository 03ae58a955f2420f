"""True help: a default that --help prints is the value that runs. For every command with a flags module."""

import argparse
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from ogdm_core.config import OGDMConfig
from run.quickstart import flags as quickstart

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(f"run.{file.parent.name}.flags" for file in (ROOT / "run").glob("*/flags.py"))
SETTINGS = {f"ogdm_{field.name}" for field in dataclasses.fields(OGDMConfig)}


def commands(parser, words=()):
    """(parser, words that choose it) of a command, or of each of its subcommands."""
    subs = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not subs:
        yield parser, list(words)
    for name, sub in subs[0].items() if subs else ():
        yield from commands(sub, (*words, name))


def placeholders(parser):
    """Words for the arguments that a command line must have."""
    one_of = [group._group_actions[0] for group in parser._mutually_exclusive_groups if group.required]
    words = []
    for action in parser._actions:
        flag = action.option_strings[:1]
        needed = action.required if flag else action.nargs not in ("?", "*", argparse.REMAINDER)
        if needed or action in one_of:
            candidates = [str(choice) for choice in action.choices or ("1", "32", "euler-5", "a=b")]
            words += [*flag, next(word for word in candidates if accepts(action.type or str, word))]
    return words


def accepts(parse, words):
    """Whether a flag's type, or a command's parser, takes the words."""
    try:
        parse(words)
    except (ValueError, argparse.ArgumentTypeError, SystemExit):
        return False
    return True


def printed_default(parser, action):
    """The value after "default:" in a flag's help; None where there is none, or a sentence in its place."""
    text = parser._get_formatter()._expand_help(action) if action.help not in (None, argparse.SUPPRESS) else ""
    found = re.search(r"default: ([^)]+)", text)
    if not found or action.nargs in ("+", "*"):
        return found and found[1]
    first = found[1].split()[0].rstrip(",;:")  # of a number and its reason: "2: one per core"
    return first if first == found[1] or re.fullmatch(r"[-+.\d][-+.,\de]*", first) else None


CASES = [
    pytest.param(importlib.import_module(name), words, id=" ".join([name, *words]))
    for name in MODULES
    for _, words in commands(importlib.import_module(name).parser())
]


@pytest.mark.parametrize(("module", "words"), CASES)
def test_a_default_given_as_a_flag_changes_nothing(module, words):
    parser = next(parser for parser, chosen in commands(module.parser()) if chosen == words)
    argv = [*words, *placeholders(parser)]
    dests = {action.dest for action in parser._actions}
    if "ogdm" in dests:
        argv.append("--ogdm")  # without it the settings have no effect
    # Some commands look for files that a placeholder does not name.
    parse = module.parse if accepts(module.parse, argv) else module.parser().parse_args

    def parsed(*more):
        """What the words give. The flags of the method do not count, but the OGDMConfig that parse makes of them."""
        found = {name: value for name, value in vars(parse([*argv, *more])).items() if name not in SETTINGS}
        return {name: str(value).replace(f"{ROOT}/", "") for name, value in found.items()}

    plain = parsed()
    if SETTINGS & dests:
        assert parsed("--ogdm-seed", "12345") != plain, "parse() leaves no OGDMConfig in the namespace"
    for action in parser._actions:
        text, value = printed_default(parser, action), plain.get(action.dest)
        if text is None or value in ("None", "()", "[]", ""):
            continue  # a sentence, or a default that the command fills in later
        given = [*action.option_strings[:1], *(text.split() if action.nargs else [text])]
        assert parsed(*given) == plain, f"{given[0]}: help prints {text}, which is not what runs"


def test_the_quickstarts_help_follows_the_data_set():
    def default(flag, *argv):
        parser = quickstart.parser(argv)
        return printed_default(parser, parser._option_string_actions[flag])

    assert (default("--steps"), default("--steps", "--data", "digits")) == ("1200", "2000")
