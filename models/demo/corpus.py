"""Turn the HTML documentation that ships with the Rust toolchain into a corpus.

The output folder receives `sections.jsonl` (training sections: source, weight,
heading variants, body) and `heldout.txt` (validation sections as plain text).
Everything is deterministic: sources are read in sorted order, duplicates are
dropped by exact text, and held-out sections are picked by a hash.
"""

import argparse
import hashlib
import json
import re
import subprocess
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

from headings import ALIASES, heading_variants, item_variants

END_OF_SECTION = "<|endoftext|>"
HELDOUT_PER_MILLE = 18
HELDOUT_LIMIT_BYTES = 190_000
SHORTEST_BODY = 120
LONGEST_CODE_LINES = 40

# Books: folder, file pattern, how often a section is seen per pass.
BOOKS = [
    ("book", "*.html", 4.0),
    ("rust-by-example", "**/*.html", 1.5),
    ("nomicon", "*.html", 1.0),
    ("reference", "**/*.html", 0.4),
    ("edition-guide", "**/*.html", 0.4),
    ("cargo", "guide/*.html", 1.0),
]
KNOWN_TOPIC_WEIGHT = 7.0
SKIPPED_PARTS = {"es", "ja", "ko", "zh", "2018-edition", "second-edition", "first-edition"}
SKIPPED_NAMES = {"print.html", "SUMMARY.html", "toc.html", "404.html", "grammar.html"}

# Standard library pages whose methods are worth learning.
METHOD_PAGES = [
    "option/enum.Option", "result/enum.Result", "vec/struct.Vec", "string/struct.String",
    "primitive.str", "primitive.slice", "primitive.char", "primitive.i32", "primitive.f64",
    "boxed/struct.Box", "rc/struct.Rc", "sync/struct.Arc", "sync/struct.Mutex", "sync/struct.RwLock",
    "cell/struct.Cell", "cell/struct.RefCell", "collections/struct.HashMap",
    "collections/struct.HashSet", "collections/struct.BTreeMap", "collections/struct.VecDeque",
    "iter/trait.Iterator", "fs/struct.File", "path/struct.Path", "thread/fn.spawn",
    "io/trait.Read", "io/trait.Write", "time/struct.Duration", "borrow/enum.Cow",
]
SKIPPED_MODULES = {"arch", "os", "intrinsics", "simd", "autodiff", "f16", "f128", "assert_matches"}
TYPOGRAPHY = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "\u00a0": " ", "\u200b": ""})
BLOCK_TAGS = {"p", "li", "h1", "h2", "h3", "h4", "h5", "h6", "tr", "figcaption", "dt", "dd"}
SILENT_TAGS = {"script", "style", "button", "svg", "nav", "noscript", "summary"}
SILENT_CLASSES = {
    "boring", "buttons", "rightside", "src", "test-arrow", "doc-anchor", "since",
    "tooltip", "footnote-definition", "stab", "rule-link", "out-of-band", "filename-label",
}
VOID_TAGS = {"br", "hr", "img", "input", "meta", "link", "wbr", "col"}


@dataclass
class Block:
    """One paragraph, list item, heading or code listing."""

    kind: str
    text: str
    level: int = 0


@dataclass
class Section:
    """A heading with the text under it."""

    source: str
    weight: float
    heading: str
    blocks: list = field(default_factory=list)
    variants: list = field(default_factory=list)

    def body(self):
        """The text below the heading, in a Markdown-like form."""
        return join_blocks(self.blocks)


class BlockReader(HTMLParser):
    """Collects readable blocks from one HTML fragment."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.blocks = []
        self.pieces = []
        self.kind = "p"
        self.level = 0
        self.code_depth = 0
        self.open_tags = []

    def silent(self):
        """Whether an enclosing element is not part of the text."""
        return any(silent for _, silent in self.open_tags)

    def handle_starttag(self, tag, attributes):
        if tag in VOID_TAGS:
            if tag == "br":
                self.pieces.append("\n" if self.code_depth else " ")
            return
        classes = set((dict(attributes).get("class") or "").split())
        self.open_tags.append((tag, tag in SILENT_TAGS or bool(classes & SILENT_CLASSES)))
        if self.silent():
            return
        if tag == "pre":
            self.flush()
            self.code_depth = 1
        elif self.code_depth:
            return
        elif tag in BLOCK_TAGS:
            self.flush()
            self.start_block(tag)
        elif tag == "code":
            self.pieces.append("`")

    def start_block(self, tag):
        """Begin a block of the kind that the tag stands for."""
        if tag[0] == "h" and tag[1:].isdigit():
            self.kind, self.level = "heading", int(tag[1])
        elif tag in {"li", "dd"}:
            self.kind = "item"
        elif tag == "p" and self.kind == "item" and any(name == "li" for name, _ in self.open_tags):
            self.kind = "item"
        else:
            self.kind = "p"

    def handle_endtag(self, tag):
        if tag in VOID_TAGS or not any(name == tag for name, _ in self.open_tags):
            return
        was_silent = self.silent()
        while self.open_tags.pop()[0] != tag:
            pass
        if was_silent:
            return
        if tag == "pre":
            self.flush_code()
        elif self.code_depth:
            return
        elif tag == "code":
            self.pieces.append("`")
        elif tag in {"td", "th"}:
            self.pieces.append(" | ")
        elif tag in BLOCK_TAGS:
            self.flush()
            self.kind = "p"

    def handle_data(self, data):
        if not self.silent():
            self.pieces.append(data)

    def flush(self):
        """End the current paragraph-like block."""
        text = " ".join("".join(self.pieces).translate(TYPOGRAPHY).split()).strip(" |")
        self.pieces = []
        if text:
            self.blocks.append(Block(self.kind, text, self.level))

    def flush_code(self):
        """End the current code listing."""
        self.code_depth = 0
        lines = "".join(self.pieces).translate(TYPOGRAPHY).rstrip().split("\n")
        self.pieces = []
        lines = [line.rstrip() for line in lines]
        while lines and not lines[0]:
            lines.pop(0)
        if lines and len(lines) <= LONGEST_CODE_LINES:
            self.blocks.append(Block("code", "\n".join(lines)))


def read_blocks(html):
    """The readable blocks of an HTML fragment."""
    reader = BlockReader()
    reader.feed(html)
    reader.close()
    reader.flush()
    return reader.blocks


def join_blocks(blocks):
    """Write blocks as text; list items stay on adjacent lines."""
    parts = []
    previous = ""
    for block in blocks:
        if block.kind == "code":
            text = "```\n" + block.text + "\n```"
        elif block.kind == "item":
            text = "- " + block.text
        elif block.kind == "heading":
            text = "## " + block.text
        else:
            text = block.text
        separator = "\n" if previous == "item" and block.kind == "item" else "\n\n"
        parts.append(separator + text if parts else text)
        previous = block.kind
    return "".join(parts)


def clean_heading(text):
    """A heading without numbering and without listing marks."""
    text = re.sub(r"^(\d+\.)*\d+\.?\s+", "", text.strip("§ "))
    return " ".join(text.split())


def book_sections(root):
    """Sections of the books made with mdBook."""
    for folder, pattern, weight in BOOKS:
        for path in sorted((root / folder).glob(pattern)):
            relative = path.relative_to(root)
            if set(relative.parts) & SKIPPED_PARTS or path.name in SKIPPED_NAMES:
                continue
            if folder == "book" and not re.match(r"(ch\d|appendix)", path.name):
                continue
            page = path.read_text(encoding="utf-8")
            main = re.search(r"<main>(.*)</main>", page, re.S)
            if main:
                yield from split_at_headings(folder, weight, read_blocks(main.group(1)))


def split_at_headings(source, weight, blocks):
    """Cut a page into sections, one for each heading."""
    section = None
    for block in blocks:
        if block.kind == "heading" and block.level <= 4:
            if section:
                yield section
            heading = clean_heading(block.text)
            known = source == "book" and heading in ALIASES
            section = Section(source, KNOWN_TOPIC_WEIGHT if known else weight, heading)
            section.variants = heading_variants(heading, ALIASES if source == "book" else {})
        elif section:
            section.blocks.append(block)
    if section:
        yield section


def library_pages(root):
    """Pages of the standard library that describe one item or module each."""
    for path in sorted((root / "std").glob("**/*.html")):
        relative = path.relative_to(root / "std")
        if len(relative.parts) > 3 or set(relative.parts) & SKIPPED_MODULES:
            continue
        if "!" in path.name or path.name in {"all.html", "sidebar-items.html"}:
            continue
        if re.match(r"(type|constant|static|traitalias|attr)\.", path.name):
            continue
        yield relative, path.read_text(encoding="utf-8")


def item_name(relative):
    """The kind and the path of the item that a library page describes."""
    stem = relative.name[: -len(".html")]
    parent = "::".join(("std",) + relative.parts[:-1])
    if stem == "index":
        return "module", parent
    kind, _, name = stem.partition(".")
    if kind in {"primitive", "keyword"}:
        return kind, name
    return kind, parent + "::" + name


def docblock(page, start):
    """The HTML of the documentation block that begins after `start`."""
    opening = page.find('<div class="docblock', start)
    if opening < 0:
        return ""
    depth = 0
    for tag in re.compile(r"<(/?)div\b").finditer(page, opening):
        depth += -1 if tag.group(1) else 1
        if depth == 0:
            return page[opening:tag.start()]
    return ""


def library_sections(root):
    """Sections from the standard library: one per item, one per useful method."""
    for relative, page in library_pages(root):
        kind, name = item_name(relative)
        start = page.find('class="toggle top-doc"')
        if start >= 0:
            blocks = read_blocks(docblock(page, start))
            weight = 2.0 if kind in {"keyword", "primitive", "module", "struct", "enum", "trait"} else 1.0
            yield from item_sections(kind, name, weight, blocks)
        if str(relative)[: -len(".html")] in METHOD_PAGES:
            yield from method_sections(name.split("::")[-1], page)


def item_sections(kind, name, weight, blocks):
    """One section for the item's introduction, one for each part after it."""
    short = name.split("::")[-1]
    section = Section("std", weight, short, variants=item_variants(kind, name))
    for block in blocks:
        if block.kind != "heading" or block.text.strip("§ ") in {"Examples", "Example", "Panics", "Safety", "Errors"}:
            section.blocks.append(block)
            continue
        yield section
        heading = clean_heading(block.text)
        variants = [f"`{short}`: {heading}", f"{heading} (`{short}`)", heading]
        section = Section("std", min(weight, 1.0), heading, variants=variants)
    yield section


def method_sections(owner, page):
    """One section for each documented method of a page, trait implementations left out."""
    end = re.search(r'id="(trait-implementations|deref-methods|foreign-impls|synthetic-implementations)', page)
    page = page[: end.start()] if end else page
    pattern = re.compile(r'<section id="(?:method|tymethod)\.([A-Za-z0-9_]+)"[^>]*>(.*?)</section>', re.S)
    for match in pattern.finditer(page):
        name = f"{owner}::{match.group(1)}"
        signature = re.search(r'<h4 class="code-header">(.*?)</h4>', match.group(2), re.S)
        following = page[match.end(): match.end() + 400]
        if not signature or '<div class="docblock"' not in following or "<section" in following.split('<div class="docblock"')[0]:
            continue
        blocks = [Block("code", plain_signature(signature.group(1)))]
        blocks += read_blocks(docblock(page, match.end()))
        variants = [f"`{name}`", name, f"What does `{name}` do?", f"What does {name} do?"]
        yield Section("std-methods", 0.6, f"`{name}`", blocks, variants)


def plain_signature(html):
    """A method signature as text on one line."""
    text = re.sub(r"<[^>]+>", "", html.replace("<div", " <div").replace("<br", " <br"))
    return " ".join(unescape(text).replace("ⓘ", "").translate(TYPOGRAPHY).split())


def without_duplicates(sections):
    """Drop repeated paragraphs and listings, then sections left too short."""
    seen = set()
    for section in sections:
        kept = []
        for block in section.blocks:
            key = (block.kind == "code", block.text)
            if len(block.text) > 60 and key in seen:
                continue
            seen.add(key)
            kept.append(block)
        while kept and kept[-1].kind == "heading":
            kept.pop()
        section.blocks = kept
        if len(section.body()) >= SHORTEST_BODY and any(block.kind in {"p", "item"} for block in kept):
            yield section


def is_held_out(section):
    """Deterministic choice of validation sections; demonstration topics are never held out."""
    if section.heading in ALIASES:
        return False
    digest = hashlib.sha256((section.source + section.heading + section.body()).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELDOUT_PER_MILLE


def documentation_root():
    """The folder of the documentation of the installed toolchain."""
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True)
    return Path(sysroot.stdout.strip()) / "share/doc/rust/html"


def write_corpus(sections, output, heldout_path):
    """Write the training sections and the held-out text; report sizes."""
    sizes = {}
    heldout = []
    with open(output / "sections.jsonl", "w", encoding="utf-8") as file:
        for section in sections:
            body = section.body()
            if is_held_out(section):
                heldout.append(f"# {section.heading}\n\n{body}\n\n")
                continue
            record = {
                "source": section.source,
                "weight": section.weight,
                "headings": section.variants,
                "body": body,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            count, size = sizes.get(section.source, (0, 0))
            sizes[section.source] = (count + 1, size + len(body))
    text = "".join(heldout)
    assert len(text.encode()) <= HELDOUT_LIMIT_BYTES, "held-out text is too large"
    heldout_path.write_text(text, encoding="utf-8")
    for source, (count, size) in sizes.items():
        print(f"{source:16} {count:6} sections {size:9} characters")
    print(f"{'held out':16} {len(heldout):6} sections {len(text):9} characters")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for sections.jsonl")
    parser.add_argument("--heldout", type=Path, default=Path(__file__).parent / "heldout.txt")
    parser.add_argument("--docs", type=Path, help="documentation folder (default: of the installed rustc)")
    arguments = parser.parse_args()
    root = arguments.docs or documentation_root()
    arguments.output.mkdir(parents=True, exist_ok=True)
    sections = list(book_sections(root)) + list(library_sections(root))
    write_corpus(without_duplicates(sections), arguments.output, arguments.heldout)


if __name__ == "__main__":
    main()
