"""The command line: quick help, exit codes, errors as one paragraph without a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import posttrain as package
from posttrain.cli import config as config_command
from posttrain.cli import (
    doctor,
    domains,
    evaluate,
    main,
    models,
    results,
    review,
    runs,
    sources,
    train,
)
from posttrain.cli.doctor import Finding, Status
from posttrain.core.containment import Bound, Capabilities, Reach, Snapshots
from posttrain.core.errors import ConfigError, LedgerError, PreflightError, RunError
from posttrain.core.events import Note
from posttrain.core.task import Isolation
from posttrain.engine.model import random_model
from posttrain.loop.driver import Ending
from posttrain.observe.journal import FileJournal
from posttrain.observe.ledger import FileLedger
from posttrain.sandbox import drivers
from posttrain.sandbox.source import Abilities
from posttrain.schedule.account import Account
from tests.evals.run_folder import write_run

Said = tuple[int, str, str]
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "my_domain.py")


@pytest.fixture
def posttrain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Runs a command in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Said:
        code = main.run(arguments)
        told = capsys.readouterr()
        assert "Traceback" not in told.out + told.err
        return code, told.out, told.err

    return call


def test_help_imports_nothing_heavy() -> None:
    """`posttrain --help` must answer in under 0.3 s: torch alone takes seconds to import."""
    program = (
        "import sys\nfrom posttrain.cli import main\n"
        "code = main.run(['--help'])\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'rich', 'jinja2', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\nsys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stderr.strip() == "[]"
    for command in ("doctor", "train", "eval", "report", "models", "domains", "config"):
        assert command in ended.stdout


def test_the_version_is_told(posttrain: Callable[..., Said]) -> None:
    assert posttrain("--version") == (0, f"posttrain {package.__version__}\n", "")


@pytest.mark.parametrize("group", [(), ("models",), ("domains",), ("config",), ("review",)])
def test_no_line_of_help_is_cut(
    posttrain: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, group: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, told, _ = posttrain(*group, "--help")
    assert code == 0
    usage, *lines = told.splitlines()
    assert usage.startswith("Usage: ")
    assert not [line for line in lines if line.endswith("...")]


def test_an_unknown_model_is_told_with_the_known_ones(
    posttrain: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_MODELS", str(tmp_path))
    code, _, said = posttrain("eval", "gpt2", "--preset", "demo")
    assert code == 3
    assert "(known: smollm2-135m)" in said
    assert "posttrain models fetch owner/name" in said


def test_threads_are_configured_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.engine import threads

    done: list[str] = []
    monkeypatch.setattr(threads, "configure", lambda: done.append("threads"))
    monkeypatch.setattr(main, "run", lambda arguments: done.append("run") or 7)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert done == ["threads", "run"]
    assert ended.value.code == 7


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "trian"),
        (["train", "--stepz", "3"], "--stepz"),
        (["train"], "posttrain train --preset smoke"),
        (["train", "--preset", "demmo"], "there is no preset 'demmo'"),
        (["train", "--resume", "nothing"], "there is no run 'nothing'"),
        (["train", "--resume", "x", "--preset", "demo"], "together with other options"),
        (["train", "--preset", "smoke", "--run", "../x"], "wanted a plain name for the run"),
        (["train", "--preset", "smoke", "--run", ""], "wanted a plain name for the run"),
        (["train", "--preset", "smoke", "--set", "run.name=a/b"], "wanted a plain name"),
        (["report", "nothing"], "there is no run 'nothing'"),
        (["models", "fetch", "smollm-135"], "did you mean 'smollm2-135m'?"),
        (["models", "fetch", "gpt2"], "next:  posttrain models fetch owner/gpt2"),
        (["domains", "show", "terminal.archiv"], "did you mean 'terminal.archive'?"),
        (["domains", "show", "easy.*"], "domains show wants one domain, and 'easy.*' names 18."),
        (["domains", "show", EXAMPLE], f"next:  name it {EXAMPLE}:MULTIPLES"),
        (["domains", "show", f"{EXAMPLE}:multiples"], f"next:  name it {EXAMPLE}:MULTIPLES"),
        (["domains", "check"], "wants names, or --all, or --sample"),
        (["config", "show", "--set", "rl.stepz=3"], "did you mean 'rl.steps'?"),
        (["config", "show", "--set", "steps=3"], "it belongs to section [sft]"),
        (["config", "show", "--config", "none.toml"], "there is no file none.toml"),
    ],
)
def test_a_persons_mistake_exits_with_2_and_says_what_to_do(
    posttrain: Callable[..., Said], arguments: list[str], expected: str
) -> None:
    code, _, said = posttrain(*arguments)
    assert code == 2
    assert expected in said


def test_all_misspelt_settings_stop_the_run_before_any_work(
    posttrain: Callable[..., Said], tmp_path: Path
) -> None:
    """BR-70: unknown keys were dropped and the run trained with defaults."""
    file = tmp_path / "my.toml"
    file.write_text("[rl]\nstepz = 3\nmax-staleness = 1\n[run]\nsteps = 4\n")
    code, _, said = posttrain("train", "--config", str(file), "--set", "sft.step=1")
    assert code == 2
    for part in ("rl.stepz", "rl.max-staleness", "run.steps", "sft.step", "line 2", "--set"):
        assert part in said
    assert not (tmp_path / "runs").exists()


def test_the_resolved_configuration_is_saved_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-70: and a run that goes on reads it with the same checks."""
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path))
    folder, resolved = sources.begin("smoke", None, ["train.rl.learning_rate=1e-5"], name="own")
    text = (folder / "config.toml").read_text()
    assert "learning_rate = 1e-05  # --set" in text
    assert sources.saved(folder).value == resolved.value
    assert resolved.value.train.rl.learning_rate == 0.00001
    (folder / "config.toml").write_text(text.replace("learning_rate", "learning_rat", 1))
    with pytest.raises(ConfigError, match=r"unknown key 'train\.\w+\.learning_rat'.*did you mean"):
        sources.saved(folder)


def test_config_show_is_toml_that_says_every_origin(posttrain: Callable[..., Said]) -> None:
    code, told, _ = posttrain("config", "show", "--set", "rl.steps=3")
    assert code == 0
    assert "steps = 3  # --set" in told
    assert tomllib.loads(told)["rl"]["steps"] == 3


def test_config_schema_tells_every_setting(posttrain: Callable[..., Said]) -> None:
    code, told, _ = posttrain("config", "schema")
    assert code == 0
    assert "rl.group_size  (int; default 8)" in told
    assert "Attempts at one task that are compared with one another." in told
    assert "rl" in json.loads(posttrain("config", "schema", "--json")[1])["properties"]


def test_every_preset_resolves() -> None:
    for name in sources.presets():
        assert sources.resolve(name, None, ()).value.run.name


def test_report_rebuilds_the_page_and_prints_the_table(
    posttrain: Callable[..., Said], tmp_path: Path
) -> None:
    write_run(tmp_path / "runs" / "first")
    code, told, _ = posttrain("report", "first")
    assert code == 0
    for part in ("rg.letter_counting (watched)", "after RL", "5 of 6 trained domains improved"):
        assert part in told
    assert told.strip().endswith("runs/first/report/index.html")
    assert (tmp_path / "runs" / "first" / "report" / "index.html").stat().st_size > 10_000


def test_warnings_and_quarantined_domains_stand_beside_the_table(
    posttrain: Callable[..., Said], tmp_path: Path
) -> None:
    """Warnings were told once while it ran, and a quarantined domain was not in the table."""
    journal = FileJournal(write_run(tmp_path / "runs" / "first") / "journal")
    for domain in ("own.sums", "rg.lcm"):
        journal.write(Note(kind="quarantine", data={"domain": domain, "evidence": "KeyError"}))
        message = f"Domain {domain} is quarantined: KeyError"
        journal.write(Note(kind="warning", data={"message": message}))
    journal.close()
    code, told, _ = posttrain("report", "first")
    assert code == 0
    for part in ("own.sums (quarantined)", "rg.lcm (watched, quarantined)", "no clear change"):
        assert part in told
    assert "warning: Domain own.sums is quarantined: KeyError" in told.split("domains improved")[1]


def test_a_checkpoint_is_evaluated_as_its_run_is_and_named_after_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`eval` refused the folder that a run's checkpoints are."""
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path))
    run, _ = sources.begin("smoke", None, ["evals.tasks=3"], name="first")
    folder = run / "checkpoints" / "step-000004"
    random_model(folder / "model")
    (folder / "manifest.json").write_text("{}")
    for number, target in enumerate((folder, folder / "model")):
        made, resolved = evaluate._of_model(str(target), None, None, [])
        assert made.name == f"eval-first-step-000004{'-2' * number}"
        chosen = resolved.value
        assert (chosen.model.name, chosen.evals.tasks) == (str(folder / "model"), 3)
        assert [spec.name for spec in chosen.domains.train] == ["toy.digit"]
        assert (chosen.sft.steps, chosen.rl.steps) == (0, 0)
    _, resolved = evaluate._of_model(str(folder), "demo", None, [])
    assert resolved.value.evals.tasks == 128


def test_domains_ls_lists_and_filters(posttrain: Callable[..., Said]) -> None:
    code, told, _ = posttrain("domains", "ls", "terminal.*", "--json")
    assert code == 0
    names = [entry["name"] for entry in json.loads(told)]
    assert len(names) >= 6
    assert all(name.startswith("terminal.") for name in names)


def test_an_unsound_domain_fails_the_check(posttrain: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("nonsense = 1\n")
    code, told, said = posttrain("domains", "check", "bad.toml")
    assert code == 1, said
    assert "refused" in told, said
    assert "checking bad.toml\n" in said
    assert "1 of 1 domains are not sound: bad.toml" in said
    assert "next:  correct what is told above, then check again." in said


MISSPELT = """
name = "own.misspelt"
[[tasks]]
objective = "Say a."
checks = [{ kind = "exakt", params = { answer = "a" } }]
oracle = { answer = "a" }
"""


def test_one_mistake_of_a_domain_is_told_once(
    posttrain: Callable[..., Said], tmp_path: Path
) -> None:
    """A misspelt kind of check gave the same line for each of eight probes."""
    (tmp_path / "own.toml").write_text(MISSPELT)
    code, told, said = posttrain("domains", "check", "own.toml", "--per-level", "1")
    assert code == 1
    assert told.count("no check kind 'exakt' (did you mean 'exact'?)") == 1
    assert "next:  posttrain domains show own.toml shows a task of it." in said


def test_what_is_under_examination_is_one_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    doing = domains.Doing()
    doing.begins("a")
    doing.begins("b")
    doing.ends("a")
    doing.ends("b")
    lines = capsys.readouterr().err.split("\r\x1b[K")
    assert lines == ["", "checking a …", "checking a, b …", "checking b …", ""]


TASK = """
[[tasks]]
objective = "Write the sum of {number} and 25 into total.txt."
executor = "tools"
tools = ["shell"]
environment = {{}}
artefacts = [{{ name = "total.txt", kind = "file", path = "total.txt" }}]
limits = {{ max_turns = 4, max_turn_tokens = 100, max_tokens = 400 }}
oracle = {{ commands = ["echo {total} > total.txt"], closing = "Written." }}

[[tasks.checks]]
kind = "program"

[tasks.checks.params]
source = '''
def check(order):
    return order.artefacts.read_text("total.txt") == order.files["wanted.txt"]
'''
files = {{ "wanted.txt" = "{total}\\n" }}
"""


def test_a_checker_of_ones_own_sees_what_the_oracle_left(
    posttrain: Callable[..., Said], tmp_path: Path
) -> None:
    """Attempts and checks had two sources of sandboxes, so that no such domain was ever sound."""
    problem = asyncio.run(drivers.probe("bubblewrap")).problem
    if problem:
        pytest.skip(problem)
    tasks = [TASK.format(number=number, total=number + 25) for number in range(6)]
    (tmp_path / "sums.toml").write_text('name = "office.sums"\n' + "".join(tasks))
    code, told, said = posttrain("domains", "check", "sums.toml", "--per-level", "1")
    assert (code, said) == (0, "checking sums.toml\n"), (told, said)
    assert "1 of 1 domains are sound" in told


def test_doctor_exits_with_3_exactly_where_something_is_missing(
    posttrain: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = Finding(name="fine", status=Status.OK, found="here")
    slow = Finding(name="slow", status=Status.WARNING, found="slow", next_step="wait")

    def check_model():  # type: ignore[no-untyped-def]
        raise PreflightError("it is missing.", "fetch it")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([fine]), lambda: iter([slow])))
    assert posttrain("doctor")[0] == 0
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([fine]), check_model))
    code, told, _ = posttrain("doctor", "--json")
    assert code == 3
    assert json.loads(told)["findings"][1] == {
        "name": "model", "status": "problem", "found": "it is missing.", "next_step": "fetch it",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("works", "statuses"),
    [
        ({"container"}, [Status.WARNING, Status.OK]),
        (set(), [Status.PROBLEM, Status.PROBLEM]),
        ({"bubblewrap", "container"}, [Status.OK, Status.OK]),
    ],
)
def test_doctor_tells_of_each_driver_and_wants_one_that_works(
    works: set[str], statuses: list[Status], monkeypatch: pytest.MonkeyPatch
) -> None:
    can = Capabilities(
        isolation=Isolation.CONTAINER, limits=Bound.TREE, snapshots=Snapshots.COPIES,
        reach=frozenset({Reach.NOTHING}), cores=True, freezes=False,
    )  # fmt: skip
    able = Abilities(
        capabilities=can, path="/bin/podman", source="podman with runc", version="5.1",
        sha256="ab" * 32, uid=None, seccomp=True,
    )  # fmt: skip

    async def probe(name: str) -> drivers.Probe:
        problem = f"no {name} here"
        return drivers.Probe(abilities=able if name in works else None, problem=problem)

    monkeypatch.setattr(drivers, "probe", probe)
    found = list(doctor.check_sandbox())
    assert [finding.name for finding in found] == ["sandbox: bubblewrap", "sandbox: container"]
    assert [finding.status for finding in found] == statuses
    assert [f.found for f in found if f.status is not Status.OK] == [
        f"no {name} here" for name in ("bubblewrap", "container") if name not in works
    ]
    if "container" in works:
        for words in ("/bin/podman 5.1", "sha256 " + "ab" * 8, "tree", "copies", "cannot freeze"):
            assert words in found[1].found


def test_doctor_says_that_a_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It named the GPU, and everything was computed on the CPU."""
    import torch

    for there, told in ((False, ", CPU"), (True, ", CPU (a GPU is here, but not used yet)")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        (finding,) = doctor.check_torch()
        assert finding.found == torch.__version__ + told


def test_doctor_sees_a_runs_folder_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path / "file" / "runs"))
    (finding,) = doctor.check_runs()
    assert finding.status is Status.PROBLEM
    assert "POSTTRAIN_RUNS" in finding.next_step


def test_an_unforeseen_error_is_a_paragraph_and_its_traceback_a_file(
    posttrain: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> dict[str, Path]:
        raise RuntimeError("boom")

    monkeypatch.setattr(sources, "presets", broken)
    code, _, said = posttrain("config", "show", "--preset", "demo")
    assert code == 1
    assert "internal error: RuntimeError: boom" in said
    assert "--debug" in said
    assert posttrain("--debug", "config", "show", "--preset", "demo")[0] == 1
    (file,) = tmp_path.glob("posttrain-error-*.txt")
    assert "in broken" in file.read_text()


def test_a_traceback_that_cannot_be_written_hides_no_error(
    posttrain: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only disk `--debug` itself ended in a traceback."""

    def full(self: Path, *arguments: object, **options: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", full)
    code, _, said = posttrain("--debug", "report", "nothing")
    assert code == 2
    assert "there is no run 'nothing'" in said
    assert "traceback cannot be written: [Errno 30]" in said
    with pytest.raises(RunError) as told, runs.crash_file(Path("run")):
        raise RunError("it tells all there is to know.")
    assert not hasattr(told.value, "__notes__")
    with pytest.raises(KeyError) as untold, runs.crash_file(Path("run")):
        raise KeyError("x")
    assert untold.value.__notes__ == ["The traceback could not be written to run/error.txt."]


def test_a_crash_leaves_its_traceback_in_the_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom") as caught, runs.crash_file(tmp_path):
        raise RuntimeError("boom")
    assert "RuntimeError: boom" in (tmp_path / "error.txt").read_text()
    assert caught.value.__notes__ == [f"The traceback is in {tmp_path / 'error.txt'}."]


def test_a_run_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    """The second process wrote a traceback into the folder of the first."""
    with (
        contextlib.closing(FileLedger(tmp_path / "ledger.jsonl")),
        pytest.raises(LedgerError, match="Another process is writing") as caught,
        runs.crash_file(tmp_path),
    ):
        FileLedger(tmp_path / "ledger.jsonl")
    assert not hasattr(caught.value, "__notes__")
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_a_run_that_a_full_disk_ended_says_so_though_no_report_fits_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in "internal error: OSError", and what had ended the run was not told."""
    from posttrain.evals import report

    def full(folder: Path) -> Path:
        raise OSError(28, "No space left on device")

    write_run(tmp_path / "mine")
    monkeypatch.setattr(report, "write", full)
    reason = "failed: Cannot write the ledger: No space left. Next: free space, then go on."
    ending = Ending(reason=reason, step=3, saved_step=2, account=Account().stats())
    with pytest.raises(RunError) as caught:
        train._conclude(tmp_path / "mine", ending)
    assert caught.value.message == (
        "the run failed after step 3 (saved at step 2: 1 step will be made again): Cannot write "
        "the ledger: No space left."
    )
    assert caught.value.next_step == "free space, then go on: posttrain train --resume mine"
    assert "mine cannot be written: No space left on device." in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_told_below_its_table(
    posttrain: Callable[..., Said], tmp_path: Path
) -> None:
    """It was an internal error."""
    write_run(tmp_path / "runs" / "first")
    (tmp_path / "runs/first/report").write_text("in the way")
    code, told, said = posttrain("report", "first")
    assert code == 3
    assert "5 of 6 trained domains improved" in told
    assert "first cannot be written: File exists." in said


def test_a_reader_that_went_away_is_no_error_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`posttrain report X | head` said that the report could not be written."""

    def closed(text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    write_run(tmp_path / "first")
    monkeypatch.setattr("typer.echo", closed)
    with pytest.raises(BrokenPipeError):  # which the command line ends by, quietly
        results.tell(tmp_path / "first")


def test_a_new_run_never_takes_the_folder_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path))
    assert runs.fresh("demo").name == "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert runs.fresh("demo").name == "demo-3"


def test_commands_are_wired_to_their_files() -> None:
    groups = {group.name: group.typer_instance for group in main.app.registered_groups}
    assert groups == {
        "models": models.app, "domains": domains.app, "config": config_command.app,
        "review": review.app,
    }  # fmt: skip


def test_only_a_run_that_never_began_is_forgotten(tmp_path: Path) -> None:
    for name, ledger in (("never", ""), ("began", "{}\n")):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "config.toml").write_text("")
        (tmp_path / name / "ledger.jsonl").write_text(ledger)
        runs.forget(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["began"]
    (tmp_path / "kept" / "journal").mkdir(parents=True)
    runs.forget(tmp_path / "kept")
    assert (tmp_path / "kept").exists()
