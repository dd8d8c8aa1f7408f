"""English sentences for calibration and evaluation of the encoder: from a seeded grammar, and real documentation.

The grammar writes everyday sentences about a few dozen topics, so that some of them are close in meaning and most are
not; a second grammar, with other words and frames, writes those that are held out. The documentation is docstrings of
Python's standard library (PSF licence), cut into sentences: real prose, with names, code and numbers in it. No two
parts share a sentence or a module.
"""

import ast
import re
import sysconfig
from pathlib import Path

import numpy as np

SEED = 11
MODULES = {
    "calibration": (
        "argparse asyncio/streams calendar collections/__init__ configparser csv decimal difflib doctest email/message "
        "fractions ftplib functools gettext heapq http/client http/cookiejar imaplib inspect logging/__init__ mailbox "
        "optparse pathlib pdb random shutil ssl statistics tarfile tempfile threading turtle unittest/case"
    ),
    "golden": (
        "cmd copy datetime dis enum fileinput glob gzip locale multiprocessing/pool pickle platform poplib pprint "
        "queue sched selectors smtplib socket socketserver sqlite3/dbapi2 string subprocess telnetlib textwrap "
        "timeit trace traceback types urllib/request uuid warnings weakref webbrowser zipfile"
    ),
    "held_out": (
        "_pydatetime ast asyncio/events asyncio/tasks base64 cgi codecs compileall concurrent/futures/_base contextlib "
        "dataclasses email/headerregistry filecmp gzip hashlib html/parser http/server importlib/abc io ipaddress "
        "json/decoder linecache mimetypes nntplib operator os pkgutil plistlib profile pyclbr pydoc rlcompleter runpy "
        "shelve shlex site sre_parse statistics symtable sysconfig tokenize typing unittest/mock venv/__init__ wave "
        "wsgiref/handlers xml/etree/ElementTree zoneinfo/_common"
    ),
}
PEOPLE = (
    "my sister|the new teacher|an old fisherman|our neighbour|a young doctor|the night guard|the orchestra|a tired "
    "nurse|the village baker|two students|the mayor of the town|her grandfather|a group of tourists|the goalkeeper|"
    "an astronaut|the bus driver|a retired judge|the children|a software engineer|the librarian"
)
ACTIONS = (
    "bought {fresh bread|a second-hand bicycle|three tickets for the concert|a bag of oranges}|"
    "repaired {the broken radio|an old wooden boat|the roof of the barn|the school's computers}|"
    "is reading {a long letter from home|the weather report|a novel about the war|the results of the election}|"
    "forgot {the keys on the kitchen table|an umbrella on the train|to water the plants|the name of the street}|"
    "cooked {a spicy soup with lentils|dinner for twelve guests|rice and fish over an open fire}|"
    "complained about {the noise from the airport|rising rents|the cold food|the slow internet connection}|"
    "has been studying {marine biology|medieval history|the stars|the stock market} for years|"
    "won {the chess tournament|a small prize in the lottery|the race by two seconds}|"
    "waited {for the last ferry|two hours at the hospital|for an answer from the bank}|"
    "painted {the garden fence green|a portrait of a stranger|the harbour at dawn}|"
    "walked {through the empty museum|along the river with two dogs|up the mountain without a map}|"
    "lost {twenty pounds on a bet|the way in the fog|a contract worth millions}"
)
PLACES = (
    "in the old town|near the lake|behind the railway station|on a small island|at the university|in Lisbon|"
    "during the conference|outside the courtroom|at home|in the middle of the desert|on the fourth floor"
)
TIMES = (
    "yesterday|last winter|early in the morning|on Sunday|shortly before midnight|in 1987|after the storm|"
    "while everybody slept|every other week|for the first time"
)
FRAMES = (
    "{who} {did} {where} {when}.|{when}, {who} {did}.|Did you hear that {who} {did} {where}?|"
    "It surprised nobody that {who} {did}.|{who} {did}, although it was raining {where}.|"
    "Nobody knows why {who} {did} {when}.|{who} {did}; {other} {did2} {where}.|"
    "According to the newspaper, {who} {did}.|{who} {did}."
)

HELD_OUT = {
    "thing": "the kettle|this laptop|my winter coat|the lawn mower|a rented van|the office printer|our washing "
    "machine|the camera|his electric guitar|the tent|a pair of running shoes|the smoke alarm|the "
    "dishwasher|her hearing aid",
    "fault": "stopped working|makes a strange sound|got wet|is too heavy to carry|arrived with a scratch|needs a new "
    "battery|smells of petrol|works better than expected|cannot be returned|was stolen|is no longer sold|has "
    "never been used",
    "time": "after a week|within an hour|since the update|for no obvious reason|on the very first day|twice this month",
    "topic": "quantum physics|bread baking|tax law|the Roman empire|beekeeping|football tactics|tropical "
    "diseases|jazz|glaciers|compilers|modern dance|the price of "
    "wheat|sailing|vaccines|volcanoes|poker|ancient Greek|urban planning",
    "act": "Explain|Write a short poem about|List three books on|Tell me nothing about|Compare chess with|Summarize "
    "the debate on|Ask an expert about|Find a museum of",
    "claim": "is harder than it looks|should be taught at school|bores me to tears|has changed completely in ten "
    "years|costs more than most people can afford|keeps growing in popularity",
}
HELD_OUT_FRAMES = (
    "{thing} {fault} {time}.|Why is it that {thing} {fault}?|{act} {topic}.|I believe that {topic} "
    "{claim}.|{topic} {claim}, and so does {topic2}.|Please send someone: {thing} {fault}, and {thing2} "
    "{fault2}.|Is it true that {topic} {claim}?|We talked about {topic} until {thing} {fault}."
)


def sentences(part: str, written: int, documented: int) -> list[str]:
    """`written` and `documented` sentences, mixed; part: 'calibration', 'golden' or 'held_out', which share none."""
    text_rng = np.random.default_rng([SEED, list(MODULES).index(part)])
    documentation = _documentation(part)
    chosen = [documentation[i] for i in text_rng.permutation(len(documentation))[:documented]]
    part_index = list(MODULES).index(part)
    sections: dict[str, None] = {}
    while len(sections) < written:
        text = _held_out(text_rng) if part == "held_out" else _written(text_rng)
        if part == "held_out" or sum(map(ord, text)) % 2 == part_index:  # each first-grammar sentence has one part
            sections[text] = None
    mixed_sections = [*sections, *chosen]
    return [mixed_sections[i] for i in text_rng.permutation(len(mixed_sections))]


def _written(random: np.random.Generator) -> str:
    words = {name: _pick(random, choices) for name, choices in (
        ("who", PEOPLE), ("other", PEOPLE), ("where", PLACES), ("when", TIMES))}  # fmt: skip
    text = _pick(random, FRAMES).format(did=_action(random), did2=_action(random), **words)
    return text[0].upper() + text[1:]


def _held_out(random: np.random.Generator) -> str:
    words = {name: _pick(random, choices) for name, choices in HELD_OUT.items()}
    words |= {f"{name}2": _pick(random, HELD_OUT[name]) for name in ("thing", "fault", "topic")}
    text = _pick(random, HELD_OUT_FRAMES).format(**words)
    return text[0].upper() + text[1:]


def _action(random: np.random.Generator) -> str:
    verb, things, *rest = re.split(r"[{}]", _pick_outside(random))
    return verb + _pick(random, things) + "".join(rest)


def _pick_outside(random: np.random.Generator) -> str:
    actions = re.split(r"\|(?![^{]*})", ACTIONS)
    return actions[random.integers(len(actions))]


def _pick(random: np.random.Generator, choices: str) -> str:
    options = choices.split("|")
    return options[random.integers(len(options))]


def _documentation(part: str) -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    pages: dict[str, None] = {}
    for module in MODULES[part].split():
        file = library / f"{module}.py"
        if file.is_file():
            pages |= dict.fromkeys(_docstring_sentences(ast.parse(file.read_text("utf-8"))))
    return list(pages)


def _docstring_sentences(tree: ast.Module) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    paragraphs = [" ".join(piece.split()) for text in texts for piece in text.split("\n\n") if ">>>" not in piece]
    pieces = [piece for text in paragraphs for piece in re.split(r"(?<=[.!?]) (?=[A-Z])", text)]
    return [piece for piece in pieces if 25 <= len(piece) <= 300 and piece[-1] in ".!?" and piece[0].isupper()]
