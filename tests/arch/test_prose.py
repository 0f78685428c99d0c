"""The prose of pages and sources: sentences that end, riddles that were solved, links that lead somewhere.

docs/contributing/style.md says how we write. A pattern of `RIDDLES` is a phrase that readers had to read twice; the
reason beside it says what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SOURCES = sorted((ROOT / "src").rglob("*.py"))

#: a sentence of a page has at most this number of words
LONGEST_SENTENCE = 40
#: a page has at most this number of words
LONGEST_PAGE = 2500
#: pages that may be longer, with the reason
LONG_PAGES = {
    "docs/notebook.md": "a collection of short entries, read one by one",
    "CHANGELOG.md": "a list of changes",
}
#: pages whose sentences are not checked yet, with the reason
UNCHECKED_PAGES = {
    "docs/status.md": "rewritten at the end of each stage of work",
    "CHANGELOG.md": "a list of changes",
}
#: docs/contributing/style.md quotes what it advises against
QUOTES = ("docs/contributing/style.md",)

#: (pattern, reason); case does not matter
RIDDLES = (
    (r"\bwho is done\b", "name the subject: 'a worker that finishes its own part'"),
    (r"\bwhat is what\b", "say which things are told apart"),
    (r"\bnobody (knows|knew)\b", "write 'unknown'"),
    (r"\bpython's lock\b", "write 'the GIL'"),
    (r"\bso (many|much)\b(?![^.;:]{0,60}\b(that|as)\b)", "write 'this number of', or name the parameter"),
    (r"\bin vain\b", "write 'wasted', or 'without success'"),
    (r"\bof its own alone\b", "write 'only its own'"),
    (r"\bothers' meanwhile\b", "say who holds what: 'the call releases the GIL'"),
    (r"\bof what little\b", "write 'of the little that'"),
    (r"\b(is|are) known by\b", "write 'the key of', or 'is identified by'"),
    (r"\bwhich so\b", "begin a new sentence with 'Therefore' or 'It'"),
    (r"\bwith his\b|\bto his own\b", "a thread, a process and a caller are 'it'"),
    (r"\bas it was, where\b", "say what is kept, and why"),
    (r"\bmakes much of\b", "write 'amplifies'"),
    (r"\b(somebody|anybody|everybody|whoever)\b", "name the subject: a caller, a thread, a process, a reader"),
    (r"\bin one go\b", "write 'in one pass', or 'at once'"),
    (r"\bdearest\b", "write 'most expensive'"),
    (r'"""Of\b', "begin a docstring with what it returns: 'The bytes of', 'Whether', 'Find'"),
    (r"\bis nobody's\b|\bnobody's (mistake|fault)\b", "say whose it is, or is not: 'not the user's mistake'"),
)


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def line_of(whole: str, position: int) -> int:
    return whole.count("\n", 0, position) + 1


def prose(page: str) -> Iterator[tuple[int, str]]:
    """(line, paragraph) of a page, without code: list items, cells of tables and headings are paragraphs."""
    lines: list[str] = []
    begin, code = 1, False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            code = not code
            line = ""
        elif code:
            line = ""
        starts = re.match(r"\s*([-*|#>]|\d+\.)\s*", line)
        if lines and (not line.strip() or starts):
            yield begin, " ".join(lines)
            lines = []
        if line.startswith("#"):
            yield number, line.lstrip("# ")
        elif line.startswith("|"):
            yield from ((number, cell) for cell in re.split(r"(?<!\\)\|", line) if cell.strip())
        elif line.strip():
            if not lines:
                begin = number
            lines.append(line[starts.end() :] if starts else line.strip())


def sentences(paragraph: str) -> list[str]:
    """A colon or a semicolon ends one, too: what stands behind it can be read by itself."""
    bare = re.sub(r"`[^`]*`", "code", paragraph)
    bare = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", bare)
    return re.split(r"[.:;!?]\)?\s", bare)


def joined(source: str) -> str:
    """The same text with the marks of comments blanked, so that phrases may go over the end of a line."""
    return re.sub(r"\n[ \t]*(#:?)?[ \t]*", lambda match: "\n" + " " * (len(match[0]) - 1), source)


def riddles(whole: str) -> Iterator[tuple[int, str, str]]:
    """(line, phrase, reason) of each riddle in a text."""
    whole = joined(whole)
    for pattern, reason in RIDDLES:
        for match in re.finditer(pattern.replace(" ", r"\s+"), whole, re.IGNORECASE):
            yield line_of(whole, match.start()), " ".join(match[0].split()), reason


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", bare).replace(" ", "-")


@cache
def anchors(path: Path) -> frozenset[str]:
    bare = re.sub(r"^```.*?^```", "", text(path), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", bare, re.M)
    return frozenset([*map(slug, headings), *re.findall(r'<a id="([^"]+)">', bare)])


def test_no_sentence_of_a_page_is_too_long() -> None:
    wrong = []
    for path in PAGES:
        if name(path) in UNCHECKED_PAGES:
            continue
        for line, paragraph in prose(text(path)):
            for sentence in sentences(paragraph):
                words = len(re.findall(r"\w[\w'-]*", sentence))
                if words > LONGEST_SENTENCE:
                    wrong.append(f"{name(path)}:{line}: {words} words: {sentence[:60]}...")
    assert not wrong, "\n".join(wrong)


def test_no_riddles() -> None:
    wrong = []
    for path in [*PAGES, *SOURCES]:
        if name(path) not in {*UNCHECKED_PAGES, *QUOTES}:
            wrong += [f"{name(path)}:{line}: '{found}': {why}" for line, found, why in riddles(text(path))]
    assert not wrong, "\n".join(wrong)


def test_no_page_is_too_long() -> None:
    long = {name(path): len(re.findall(r"\S*\w\S*", text(path))) for path in PAGES if name(path) not in LONG_PAGES}
    assert not {page: words for page, words in long.items() if words > LONGEST_PAGE}


def test_the_index_lists_every_page() -> None:
    index = text(ROOT / "docs" / "index.md")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.is_relative_to(ROOT / "docs")]
    assert [page for page in pages if page != "index.md" and f"({page})" not in index] == []


def test_the_glossary_is_short_and_sorted() -> None:
    rows = re.findall(r"^\| (?!term )(.*?) \|", text(ROOT / "docs" / "glossary.md"), re.M)
    assert len(rows) <= 40
    assert rows == sorted(rows, key=str.lower)


def test_links_lead_to_pages_and_headings() -> None:
    wrong = []
    for path in PAGES:
        if path.name == "CHANGELOG.md":
            continue  # it names headings of the time of each change
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text(path), flags=re.M | re.S)):
            if "://" in link:
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            checked = anchor and name(path) not in UNCHECKED_PAGES
            if not target.exists() or (checked and anchor not in anchors(target)):
                wrong.append(f"{name(path)}: {link}")
    assert not wrong, "\n".join(wrong)


def test_the_lint_finds_what_it_looks_for() -> None:
    puzzle = "Who is done\n    # with his takes so many chunks, and nobody\n  knows why."
    found = [phrase for _, phrase, _ in riddles(puzzle)]
    assert found == ["Who is done", "nobody knows", "so many", "with his"]
    assert not list(riddles("It is so much slower that nobody waits, and as many as fit run."))
    assert [len(s.split()) for s in sentences("One two. Three (see [four](a.md)); five `a. b` six")] == [2, 3, 3]
    assert [p for _, p in prose("# H\nA\nb.\n\n```\ncode\n```\n- c\n| d | e |\n")] == ["H", "A b.", "c", " d ", " e "]
