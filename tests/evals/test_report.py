"""The report: rebuilt from disk, self-contained, and deaf to what a policy writes into it."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from posttrain.core import events
from posttrain.core.errors import UsageError
from posttrain.core.events import Note
from posttrain.evals import report
from posttrain.observe.journal import FileJournal
from tests.evals.run_folder import _finished, write_run

HOSTILE = (
    '<img src=x onerror="alert(1)">',
    "</script><script>alert(2)</script>",
    "[link](javascript:alert(3))",
    "<svg onload=alert(4)></svg>",
    "</pre></title></style><b onclick='x'>",
)


class Page(HTMLParser):
    """Collects what a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.shown = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.shown += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "synthetic")


def test_the_report_is_rebuilt_from_the_folder_alone(folder: Path) -> None:
    page = report.write(folder)
    assert page == folder / "report" / "index.html"
    shown = Page(page.read_text(encoding="utf-8")).shown
    assert "5 of 6 trained domains improved" in shown
    assert "none of 8 evaluated domains fell" in shown
    assert "below constant" in shown
    for part in ("rg.letter_counting", "after SFT", "after RL", "# preset demo:3", "2.13.0"):
        assert part in shown
    assert "1 point is not finite" in shown
    assert [path.name for path in page.parent.iterdir()] == ["index.html"]


def test_the_page_needs_no_network_and_holds_no_script(folder: Path) -> None:
    page = Page(report.render(report.load(folder)))
    assert not {"script", "iframe", "img", "link", "object", "form"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "srcset", "action"}
    assert not [name for name in names if name.startswith("on")]
    links = [value or "" for name, value in page.attributes if name == "href"]
    assert links
    assert all(link.startswith("#") for link in links)
    policy = [value or "" for name, value in page.attributes if name == "content"]
    assert any("default-src 'none'" in value and "script-src" not in value for value in policy)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_policies_tasks_and_tools_write_is_shown_literally(tmp_path: Path, text: str) -> None:
    """BR-67: model text, tool arguments, task text, metric and domain names ran as markup."""
    folder = write_run(tmp_path / "run", text=text)
    journal = FileJournal(folder / "journal")
    domains = {text: {"reward": 0.5, "n": 1}}
    results = [{"task": text, "passed": True}]
    data = {"step": 99, "phase": text, "metrics": {text: 1.0}, "domains": domains}
    journal.write(Note(kind="step", data=data))
    for point in ("base", "sft", "rl"):
        entry = {"results": results, "constant": 0.0, "constant_text": text}
        journal.write(Note(kind="eval", data={"point": point, "domains": {text: entry}}))
    journal.write(Note(kind="warning", data={"message": text}))
    journal.write(Note(kind="environment", data={text: text}))
    journal.close()
    (folder / "config.toml").write_text(f"[run]\nname = '''{text}'''\n")
    clean = Page(report.render(report.load(write_run(tmp_path / "clean"))))
    page = Page(report.render(report.load(folder)))
    assert set(page.tags) <= set(clean.tags) | {"ul", "li", "h3"}
    assert {name for name, _ in page.attributes} <= {name for name, _ in clean.attributes}
    assert page.shown.count(text) >= 10


def test_a_gained_and_a_lost_task_are_both_shown(folder: Path) -> None:
    pairs = report.load(folder).pairs
    assert 1 < len(pairs) <= report.MAX_PAIRS
    rewards = [(pair.before.reward, pair.after.reward) for pair in pairs]
    assert (0.0, 1.0) in rewards
    assert (1.0, 0.0) in rewards
    assert all(pair.before.task.id == pair.after.task.id for pair in pairs)


def test_the_account_follows_rewinds() -> None:
    ledger = [
        events.Entered(key="a", draw=0, member=0),
        events.Entered(key="b", draw=1, member=0),
        *(_finished(key, "scored") for key in "ab"),
        events.Trained(step=1, version=1, keys=("a",)),
        events.Trained(step=2, version=2, keys=("b",)),
        events.Rewound(step=1, version=1),
        events.Entered(key="c", draw=2, member=0),
        events.Dropped(keys=("c",), reason="stale"),
    ]
    account = report.account_of(ledger)
    assert (account.entered, account.trained, account.pending) == (3, 1, 1)
    assert account.dropped == {"stale": 1}


def test_what_was_dropped_is_told_by_domain_and_exception() -> None:
    """Every seed that a domain raised for was an entry of its own."""
    ledger: list[events.LedgerEvent] = []
    reasons = (
        "domain_error: domain 'own.sums': catalogue:drawn raised DomainError: domain 'own.sums "
        "(seed {0}, level 0)' raised KeyError: 'x{0}'",
        "verifier_failed: exact: RuntimeError: no scorer for {0}",
        "infra_failed: lost {0}",
        "phase_over",
    )
    for draw in range(8):
        ledger.append(
            events.Drawn(draw=draw, domain="own.sums", level=0, seed=draw, size=1, phase="rl")
        )
        ledger.append(events.Entered(key=str(draw), draw=draw, member=0))
        reason = reasons[draw % 4].format(draw)
        ledger.append(events.Dropped(keys=(str(draw),), reason=reason))
    account = report.account_of(ledger)
    assert account.dropped == {
        "domain error: own.sums, KeyError": 2,
        "verifier failed: own.sums, RuntimeError": 2,
        "infra failed: own.sums": 2,
        "phase over": 2,
    }
    assert account.pending == 0


def test_domains_of_files_are_watched_only_where_they_were_named_for_it(tmp_path: Path) -> None:
    """A domain named by its path was "watched" until one of its attempts was trained."""
    folder = write_run(tmp_path / "run")
    paths = 'train = [{name = "mine.py:SUMS"}]\nwatch = [{name = "mine.py:LCM"}]'
    (folder / "config.toml").write_text(f"[domains]\n{paths}\n")
    changes = report.load(folder).outcomes.changes
    assert {change.domain for change in changes if change.watch} == {
        "rg.lcm", "rg.letter_counting",
    }  # fmt: skip


def test_warnings_stand_above_everything_else_and_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    journal = FileJournal(folder / "journal")
    for _ in range(2):
        journal.write(Note(kind="warning", data={"message": "the source ran dry"}))
    journal.close()
    shown = Page(report.render(report.load(folder))).shown
    assert shown.count("the source ran dry") == 1
    assert shown.index("the source ran dry") < shown.index("Held-out tasks that were never")


def test_a_run_that_was_killed_at_once_still_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    shown = Page(report.write(tmp_path).read_text(encoding="utf-8")).shown
    assert "This run has not been evaluated yet." in shown


def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        report.write(tmp_path)


def test_a_long_name_may_be_broken_and_is_still_one_name(folder: Path, tmp_path: Path) -> None:
    page = report.render(report.load(write_run(tmp_path / "run")))
    assert "terminal.<wbr>find_<wbr>and_<wbr>edit" in page
    assert "terminal.find_and_edit" in Page(page).shown


MEASURE = """<pre id="found"></pre><script>
const parts = [document.documentElement, ...document.querySelectorAll("main *:not(svg *)")];
const wide = parts.filter(e => getComputedStyle(e).display != "inline"
  && e.clientWidth && e.scrollWidth > e.clientWidth + 1);
const names = wide.map(e => `${e.tagName} ${e.className} ${e.scrollWidth} > ${e.clientWidth}`);
document.getElementById("found").textContent = names.join("\\n") || "all fits";
</script></body>"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="Chromium is not installed")
@pytest.mark.parametrize("width", [1300, 800])
def test_nothing_scrolls_sideways_on_a_screen(folder: Path, tmp_path: Path, width: int) -> None:
    """The table before and after did, and hid its p-values."""
    text = report.write(folder).read_text(encoding="utf-8")
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    text = text.replace("rg.<wbr>", "reasoning_<wbr>gym.<wbr>").replace("</body>", MEASURE)
    page = tmp_path / "page.html"
    page.write_text(text, encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
               "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}",
               f"--window-size={width},900", "--dump-dom", page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert '<pre id="found">all fits</pre>' in done.stdout, done.stdout[-2000:]


def test_evaluations_of_weights_that_were_left_behind_are_left_out() -> None:
    notes = [Note(kind="eval", data={"point": p, "version": v}) for p, v in
             (("base", 0), ("sft", 2), ("rl", 3))]  # fmt: skip
    ledger = [events.Published(version=v, parent=v - 1, step=v) for v in (1, 2, 3)]
    assert report.surviving(notes, ledger) == notes
    back = [*ledger, events.Rewound(step=2, version=2)]
    assert report.surviving(notes, back) == notes[:2]
    again = [*back, events.Published(version=4, parent=2, step=3)]
    later = Note(kind="eval", data={"point": "rl", "version": 4})
    assert report.surviving([*notes, later], again) == [*notes[:2], later]
