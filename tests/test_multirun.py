"""Multiruns that finish what is missing: what is skipped, resumed, tried again, left; the table; repeated runs."""

import gc
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from src import checkpoint, provenance
from tests.launching import config, fast, launch, record, rows, run_folders
from tests.test_stop import TASK, content, order

QUIET = "wandb.mode=disabled"


@pytest.fixture
def letters(tmp_path: Path) -> list[str]:
    """The words of a run on a user's task that fails where the file `order` says so."""
    failing = TASK.replace(
        "os.kill(os.getpid(), getattr(signal, name))", "raise {'V': ValueError, 'M': MemoryError}[name](name)"
    )
    (tmp_path / "letters.py").write_text(failing)
    source = f"task.source={tmp_path / 'letters.py'}:make"
    words = fast("task=custom", source, "task.held_out=3", "updates=5", "eval_every=2", QUIET, without="task.")
    words = [*(word for word in words if "warm_start" not in word), "model.warm_start=null"]
    return [f"root={tmp_path / 'outputs'}", *words]


def set_record(folder: Path, **fields: object) -> None:
    (folder / "run.json").write_text(json.dumps(record(folder) | fields))


def times(root: Path) -> dict[Path, int]:
    """When each file and folder was changed, Hydra's note of its last multirun apart."""
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if ".multirun" not in path.parts}


def states(out: str) -> list[str]:
    """The first column of the table's rows."""
    lines = out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("state "))
    return [line.split()[0] for line in lines[start + 1 :] if "/5 " in line]


def test_failed_and_out_of_memory_runs_are_tried_again_when_asked(letters, tmp_path):
    """F44, F52: the sweep goes on, a second start leaves them, retry_failed takes them up from their checkpoint."""
    assert launch(*letters, "seed=0").code == 0
    (undisturbed,) = run_folders(tmp_path / "outputs")
    expected = content(undisturbed)
    shutil.rmtree(tmp_path / "outputs")
    order(tmp_path, "update 4 V")
    ended = launch(*letters, "seed=0,1", "-m")
    assert ended.code == 1
    assert [line.split()[0] for line in ended.outcomes] == ["failed", "finished"] and states(ended.out) == [
        "failed",
        "finished",
    ]
    assert "in reward: ValueError: V" in ended.outcomes[0] and "retry_failed=true takes up" in ended.out
    again = launch(*letters, "seed=0,1", "-m")
    assert again.code == 1 and [line.split()[0] for line in again.outcomes] == ["failed", "skipped"]
    assert "in reward: ValueError: V; that was before, retry_failed=true tries again" in again.outcomes[0]
    order(tmp_path, "update 4 M")
    retried = launch(*letters, "seed=0,1", "-m", "retry_failed=true")
    assert retried.code == 0 and "had failed, goes on after update 2" in retried.out
    assert [line.split()[0] for line in retried.outcomes] == ["out_of_memory", "skipped"]
    left = launch(*letters, "seed=0")
    assert left.code == 0 and left.outcomes[0].startswith("out_of_memory")
    last = launch(*letters, "seed=0,1", "-m", "retry_failed=true")
    assert last.code == 0 and [line.split()[0] for line in last.outcomes] == ["finished", "skipped"]
    assert content(undisturbed) == expected
    assert [row["kind"] for row in rows(undisturbed, "events")] == [
        "started",
        "failed",
        "resumed",
        "out_of_memory",
        "resumed",
    ]


def test_on_failure_stop_leaves_the_rest(letters, tmp_path):
    """F44."""
    order(tmp_path, "update 2 V")
    ended = launch(*letters, "seed=0,1,2", "-m", "on_failure=stop")
    assert ended.code == 1 and [line.split()[0] for line in ended.outcomes] == ["failed"]
    assert states(ended.out) == ["failed", "left", "left"]
    order(tmp_path, "update 2 M")  # running out of memory is an outcome, not a failure
    ended = launch(*letters, "seed=3,1,2", "-m", "on_failure=stop")
    assert ended.code == 0
    assert [line.split()[0] for line in ended.outcomes] == ["out_of_memory", "finished", "finished"]


def test_dry_tells_what_would_run_and_touches_nothing(letters, tmp_path):
    order(tmp_path, "update 4 V")
    assert launch(*letters, "seed=0,1", "-m").code == 1
    before = times(tmp_path / "outputs")
    ended = launch(*letters, "seed=0,1,2", "-m", "dry=true", f"root={tmp_path / 'new'}")
    assert ended.code == 0 and states(ended.out) == ["left"] * 3 and not (tmp_path / "new").exists()
    ended = launch(*letters, "seed=0,1,2", "-m", "dry=true")
    assert ended.code == 0 and ended.err == ""
    assert states(ended.out) == ["failed", "finished", "left"]
    assert "ValueError: V" in ended.out and "to do: about" in ended.out and "MiB" in ended.out
    ended = launch(*letters, "seed=0,1,2", "-m", "dry=true", "retry_failed=true")
    assert states(ended.out) == ["left", "finished", "left"]
    ended = launch(*letters, "seed=0,1,2", "-m", "dry=true", "rerun=true")
    assert states(ended.out) == ["left", "left", "left"]
    assert times(tmp_path / "outputs") == before
    assert launch(*letters, "seed=1", "dry=true").out.count("finished") >= 1


def test_threads_of_another_number_are_refused_unless_asked(letters, tmp_path):
    """Before anything is loaded: the last bits depend on them."""
    assert launch(*letters).code == 0
    (folder,) = run_folders(tmp_path / "outputs")
    for path in (path for update, path in checkpoint.found(folder / "checkpoints") if update > 4):
        path.unlink()
    expected = content(folder)
    set_record(folder, status="interrupted")
    two = ["threads=2" if word.startswith("threads=") else word for word in letters]
    ended = launch(*two)
    assert ended.code == 1 and ended.out == ""
    assert ended.err.startswith("error: threads=2, but ") and "Type threads=1; or resume=any" in ended.err
    ended = launch(*two, "resume=any")
    assert ended.code == 0 and "goes on after update 4" in ended.out and "threads: 1 -> 2" in ended.out
    (changed,) = [row for row in rows(folder, "events") if row["kind"] == "conditions_changed"]
    assert "threads: 1 -> 2" in changed["changed"]
    set_record(folder, status="interrupted")
    ended = launch(*letters, "resume=never")
    assert ended.code == 0 and "starts again from its beginning" in ended.out
    assert content(folder) == expected
    assert [row["kind"] for row in rows(folder, "events")] == ["started", "conditions_changed", "resumed", "started"]


def test_a_changed_configuration_is_another_variant(letters, tmp_path):
    """Horizons have keys of their own: a longer run is a run of its own, with the same beginning."""
    assert launch(*letters).code == 0
    longer = ["updates=7" if word.startswith("updates=") else word for word in letters]
    assert launch(*longer).code == 0
    short, long = sorted(run_folders(tmp_path / "outputs"), key=lambda folder: len(rows(folder)))
    assert (len(rows(short)), len(rows(long))) == (5, 7) and rows(long)[:5] == rows(short)
    assert [row["kind"] for row in rows(long, "events")] == ["started"]


@pytest.mark.parametrize("damage", ["newest", "all", "rows"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(damage, letters, tmp_path):
    assert launch(*letters).code == 0
    (folder,) = run_folders(tmp_path / "outputs")
    expected = content(folder)
    found = checkpoint.found(folder / "checkpoints")
    assert [update for update, _ in found][:2] == [5, 4]
    if damage == "rows":
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[:4]))
    for _, path in found[: {"newest": 1, "all": len(found), "rows": 0}[damage]]:
        path.write_bytes(path.read_bytes()[:-7])
    set_record(folder, status="running", heartbeat=0)
    ended = launch(*letters)
    assert ended.code == 0, ended.err
    how = "starts again from its beginning" if damage == "all" else "goes on after update 4"
    assert f"was killed, {how}" in ended.out and found[0][1].name in ended.out
    reason = "metrics.jsonl has no row of update 5" if damage == "rows" else "is not what its name vouches for"
    assert reason in ended.out and found[0][1].with_name(f"{found[0][1].name}.refused").exists()
    assert content(folder) == expected


def test_no_checkpoints_means_from_the_beginning(letters, tmp_path):
    assert launch(*letters, "checkpoint.keep=0", "export=none").code == 0
    (folder,) = run_folders(tmp_path / "outputs")
    assert not (folder / "checkpoints").exists() and not (folder / "policy").exists()
    set_record(folder, status="interrupted")
    assert "starts again from its beginning" in launch(*letters).out and (folder / "policy").is_dir()


def test_the_best_by_held_out_accuracy_is_kept_and_can_be_exported(letters, tmp_path):
    """F40: of equals the earliest."""
    words = ["updates=8" if word.startswith("updates=") else word for word in letters]
    words = ["method.learning_rate=0.5" if word.startswith("method.learning_rate=") else word for word in words]
    assert launch(*words, "control=none", "checkpoint.keep=1", "export=best").code == 0
    (folder,) = run_folders(tmp_path / "outputs")
    accuracies = {row["update"]: row["eval/accuracy"] for row in rows(folder, "evals") if row["update"] > 0}
    best = max(accuracies, key=lambda update: (accuracies[update], -update))
    kept = [update for update, _ in checkpoint.found(folder / "checkpoints")]
    assert best != 8 and kept == [8, best], accuracies
    from safetensors.torch import load_file

    path = next(path for update, path in checkpoint.found(folder / "checkpoints") if update == best)
    weights = checkpoint.load(path, record(folder)["id"])["weights"]
    exported = load_file(folder / "policy" / "model.safetensors")
    assert all(bool((tensor == weights[name]).all()) for name, tensor in exported.items())
    assert f"after update {best}" in (folder / "policy" / "README.md").read_text()


def test_no_model_outlives_its_run(letters):
    from transformers import LlamaForCausalLM

    assert launch(*letters, "seed=0,1", "-m").code == 0
    assert not [thing for thing in gc.get_objects() if type(thing) is LlamaForCausalLM]


def test_a_stop_leaves_the_checkpoints_of_an_undisturbed_run(letters, tmp_path):
    """One written for a stop, at an update where none is due, takes no other's place."""
    (tmp_path / "letters.py").write_text(TASK)
    for place, text in (("undisturbed", None), ("stopped", "update 3 SIGTERM")):
        if text:
            order(tmp_path, text)
        assert launch(*letters, f"root={tmp_path / place}").code == (143 if text else 0)
    (stopped,), (undisturbed,) = run_folders(tmp_path / "stopped"), run_folders(tmp_path / "undisturbed")
    assert [update for update, _ in checkpoint.found(stopped / "checkpoints")][0] == 3
    assert launch(*letters, f"root={tmp_path / 'stopped'}").code == 0
    found = [[update for update, _ in checkpoint.found(folder / "checkpoints")] for folder in (stopped, undisturbed)]
    assert found[0] == found[1] and content(stopped) == content(undisturbed)


@pytest.mark.parametrize("spoiled", ["weights", "shapes", "method", "batch"])
def test_a_checkpoint_of_another_state_is_refused_and_the_one_before_used(spoiled, letters, tmp_path):
    """Well named, whole, of this run by its own word: only the model and the method can tell."""
    assert launch(*letters).code == 0
    (folder,) = run_folders(tmp_path / "outputs")
    expected = content(folder)
    path = checkpoint.found(folder / "checkpoints")[0][1]
    state = checkpoint.load(path, record(folder)["id"])
    wrong = {
        "weights": {"weights": {}},
        "shapes": {"weights": {name: tensor[:1].clone() for name, tensor in state["weights"].items()}},
        "method": {"method": {}},
        "batch": {"batch": {"a": 1}},
    }[spoiled]
    fields = ("update", "weights", "method", "batch", "wandb_id")
    saved = checkpoint.save(folder / "checkpoints", record(folder)["id"], {key: state[key] for key in fields} | wrong)
    path.unlink()
    set_record(folder, status="interrupted")
    ended = launch(*letters)
    assert ended.code == 0, ended.out
    assert f"{saved.name} is not used, and renamed" in ended.out and "goes on after update 4" in ended.out
    assert content(folder) == expected


def test_a_finished_run_is_exported_again_when_a_better_policy_is_asked_for(letters, tmp_path):
    """And nothing else of it changes: not its rows, not its record, whatever threads the command has."""
    words = ["method.learning_rate=0.5" if word.startswith("method.learning_rate=") else word for word in letters]
    words.append("control=none")
    assert launch(*words).code == 0
    (folder,) = run_folders(tmp_path / "outputs")
    before, about = rows(folder), record(folder)
    two = ["threads=2" if word.startswith("threads=") else word for word in words]
    ended = launch(*two, "export=best", "resume=never")
    assert ended.code == 0, ended.out
    accuracies = {row["update"]: row["eval/accuracy"] for row in rows(folder, "evals") if row["update"] > 0}
    best = max(accuracies, key=lambda update: (accuracies[update], -update))
    assert f"exported now with export=best, after update {best}" in ended.outcomes[0]
    assert rows(folder) == before and record(folder) == about | {"export": "best"}
    assert f"after update {best}," in (folder / "policy" / "README.md").read_text()
    for again in (["export=best"], []):  # neither does the plain command take the better one away
        assert launch(*words, *again).outcomes[0].startswith("skipped")
    assert f"after update {best}," in (folder / "policy" / "README.md").read_text()


def test_an_export_that_is_not_possible_leaves_the_run_finished(letters, tmp_path):
    assert launch(*letters, "checkpoint.keep=0", "export=none").code == 0
    (folder,) = run_folders(tmp_path / "outputs")
    about = record(folder)
    ended = launch(*letters)
    assert ended.code == 1 and "finished already, but export=last is not possible: no checkpoint" in ended.out
    assert record(folder) == about and not (folder / "policy").exists()
    assert launch(*letters, "export=none").outcomes[0].startswith("skipped")


def test_a_resumed_run_s_record_keeps_the_conditions_it_began_under(letters, tmp_path):
    (tmp_path / "letters.py").write_text(TASK)
    order(tmp_path, "update 2 SIGTERM")
    assert launch(*letters).code == 143
    (folder,) = run_folders(tmp_path / "outputs")
    about = record(folder)
    two = ["threads=2" if word.startswith("threads=") else word for word in letters]
    assert launch(*two, "resume=any").code == 0
    for key in ("threads", "versions", "hardware", "code_digest", "start", "warm_start"):
        assert record(folder)[key] == about[key]
    assert about["mixed"] == [] and record(folder)["mixed"] == ["threads: 1 -> 2"]
    assert config(folder)["threads"] == 1


def test_a_setting_named_source_is_no_source(letters):
    assert launch(*letters, "+task.settings.name=letters").code == 0
    ended = launch(*letters, "+task.settings.source=data.txt", "dry=true")
    assert "0/5" in ended.out and "fails with TypeError" in ended.err  # its own task knows no such setting


def test_a_source_that_changes_while_a_multirun_is_going_fails_what_comes_after(letters, tmp_path):
    """Its run would be recorded under the content that is no more there."""
    edits = TASK.replace("ORDER.unlink()", "ORDER.unlink(); edit(signals)")
    edits = edits.replace("os.kill(os.getpid(), getattr(signal, name))", "pass")
    edits += """
def edit(signals):
    path = pathlib.Path(__file__)
    path.unlink() if signals == ["remove"] else path.write_text(path.read_text() + "# edited")
"""
    for how in ("remove", "change"):
        (tmp_path / "letters.py").write_text(edits)
        order(tmp_path, f"update 2 {how}")
        ended = launch(*letters, "seed=0,1", "-m", f"study={how}")
        assert ended.code == 1 and [line.split()[0] for line in ended.outcomes] == ["finished", "failed"]
        assert "letters.py:make was changed since the command began" in ended.outcomes[1]
        assert states(ended.out) == ["finished", "left"]


def test_the_same_run_twice_is_one_and_a_key_that_makes_no_run_is_refused(letters, tmp_path):
    ended = launch(*letters, "seed=0,0", "-m")
    assert ended.code == 0 and len(ended.outcomes) == 1
    ended = launch(*letters, "export=last,best", "-m")
    assert ended.code == 1 and ended.out == "" and "export=last and export=best would be two runs in one" in ended.err


@pytest.mark.parametrize("missing", ["state_dict", "apply"])
def test_a_method_without_a_member_is_refused_before_it_trains(missing, letters, tmp_path):
    members = ["propose", "tangents", "apply", "state_dict", "load_state_dict"]
    bodies = "".join(f"    def {member}(self, *a): ...\n" for member in members if member != missing)
    text = f"class Plain:\n    param_groups = []\n{bodies}\ndef make(*a):\n    return Plain()\n"
    (tmp_path / "method.py").write_text(text)
    words = [word for word in letters if not word.startswith("method.")]
    ended = launch(*words, "method=custom", f"method.source={tmp_path / 'method.py'}:make")
    assert ended.code == 1 and f"makes a Plain without {missing}, which a method needs" in ended.out


def test_the_table_survives_a_record_of_wrong_types(letters, tmp_path):
    assert launch(*letters).code == 0
    (folder,) = run_folders(tmp_path / "outputs")
    for fields in (
        {"status": "running", "heartbeat": "text"},
        {"status": "running", "heartbeat": 10**400, "process": "text"},
        {"status": "running", "heartbeat": 1e9, "process": {"pid": 10**30, "host": "x"}},
        {"status": "running", "process": {"pid": 0, "host": None}},
        {"status": ["finished"], "updates_done": "three"},
        {"status": "failed", "checkpoint": "x", "error": 3},
        {"status": "interrupted", "checkpoint": {"update": "x"}, "warm_start": "text"},
    ):
        set_record(folder, **fields)
        ended = launch(*letters, "seed=0,1", "-m", "dry=true")
        assert ended.code == 0 and "2 runs in" in ended.out, fields
    assert launch(*letters, "retry_failed=true").outcomes[0].startswith("finished")


# --- rerun_from ---


def test_a_run_is_repeated_from_its_folder_alone(letters, tmp_path):
    """Its configuration, its file of the user's, edited and moved since, and its threads; the numbers are the same."""
    assert launch(*letters, "seed=3", "objective.updates_per_batch=2", "control=fixed").code == 0
    (original,) = run_folders(tmp_path / "outputs")
    moved = tmp_path / "elsewhere" / original.name
    shutil.move(original, moved)
    (tmp_path / "letters.py").write_text("nothing = 0\n")
    before = content(moved)
    ended = launch(f"rerun_from={moved}", f"root={tmp_path / 'again'}", QUIET)
    assert ended.code == 0, ended.err + ended.out
    (repeat,) = run_folders(tmp_path / "again")
    assert f"{repeat} has the numbers of {moved}" in ended.out and repeat.parent.name == "rerun"
    assert repeat.name == original.name and content(repeat) == before == content(moved)
    assert record(repeat)["variant"] == record(moved)["variant"] and config(repeat)["rerun_from"] == str(moved)


def test_a_difference_is_told_with_what_may_explain_it(letters, tmp_path):
    assert launch(*letters).code == 0
    (original,) = run_folders(tmp_path / "outputs")
    lines = (original / "metrics.jsonl").read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"reward/mean": 7.0})
    (original / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    set_record(original, versions=record(original)["versions"] | {"torch": "1.0"})
    ended = launch(f"rerun_from={original}", f"root={tmp_path / 'again'}", QUIET)
    assert ended.code == 1
    assert "metrics.jsonl, update 3: reward/mean is " in ended.out and " instead of 7.0" in ended.out
    assert "under other conditions: versions.torch: 1.0 -> " in ended.out


def test_a_configuration_from_before_a_key_existed_is_filled_up(letters, tmp_path):
    assert launch(*letters).code == 0
    (original,) = run_folders(tmp_path / "outputs")
    values = yaml.safe_load((original / "config.yaml").read_text())
    for key in ("checkpoint", "export", "resume", "dry"):
        del values[key]
    del values["objective"]["random_rewards"]
    (original / "config.yaml").write_text(yaml.safe_dump(values))
    ended = launch(f"rerun_from={original}", f"root={tmp_path / 'again'}", QUIET)
    assert ended.code == 0 and "has the numbers of" in ended.out


def test_a_run_is_not_repeated_onto_itself(letters, tmp_path):
    assert launch(*letters, "study=rerun").code == 0
    (original,) = run_folders(tmp_path / "outputs")
    before = content(original)
    for more in ([], ["rerun=true"]):
        ended = launch(f"rerun_from={original}/", f"root={tmp_path / 'outputs'}", QUIET, *more)
        assert ended.code == 1 and "would repeat the run in its own folder" in ended.err
    assert content(original) == before
    ended = launch(f"rerun_from={original}", f"root={tmp_path / 'outputs'}", QUIET, "study=again")
    assert ended.code == 0 and "has the numbers of" in ended.out


def test_a_repeat_made_under_other_conditions_proves_nothing(letters, tmp_path):
    assert launch(*letters, "samples_logged=1").code == 0
    (original,) = run_folders(tmp_path / "outputs")
    words = [f"rerun_from={original}", f"root={tmp_path / 'again'}", QUIET]
    assert launch(*words).code == 0
    (repeat,) = run_folders(tmp_path / "again")
    assert launch(*words).code == 0  # and again: it is compared, not made
    set_record(repeat, code_digest="0123456789abcdef")
    ended = launch(*words)
    assert ended.code == 1 and "was made under other conditions (code_digest: 0123" in ended.out
    assert launch(*words, "rerun=true").code == 0
    ended = launch(*words, "threads=2")
    assert ended.code == 1 and "was made under other conditions (threads: 1 -> 2)" in ended.out


def test_what_was_not_finished_again_or_has_no_rows_is_not_called_equal(letters, tmp_path):
    (tmp_path / "letters.py").write_text(TASK.replace("ORDER.unlink()", "raise MemoryError"))
    order(tmp_path, "update 3 M")
    assert launch(*letters).code == 0
    (original,) = run_folders(tmp_path / "outputs")
    (original / "sources" / "task" / "order").write_text("update 3 M")
    ended = launch(f"rerun_from={original}", f"root={tmp_path / 'again'}", QUIET)
    assert ended.code == 1 and "is not finished and was not compared with" in ended.out
    (original / "sources" / "task" / "order").unlink()
    for name in ("evals", "metrics"):
        (original / f"{name}.jsonl").unlink()
    ended = launch(f"rerun_from={original}", f"root={tmp_path / 'again'}", QUIET, "retry_failed=true")
    assert ended.code == 1 and "has no rows to compare with" in ended.out


def test_a_run_that_was_killed_is_repeated_and_compared_as_far_as_it_went(letters, tmp_path):
    (tmp_path / "letters.py").write_text(TASK)
    order(tmp_path, "update 3 SIGTERM")
    assert launch(*letters).code == 143
    (original,) = run_folders(tmp_path / "outputs")
    ended = launch(f"rerun_from={original}", f"root={tmp_path / 'again'}", QUIET)
    assert ended.code == 0 and f"has the numbers of {original}, as far as that went (update 3)" in ended.out


@pytest.mark.parametrize(
    "name", ["it's", 'q"q', "a,b", "back\\slash\\", "choice(a)", "sp ace", "a=b", "ü", "$HOME", "[x]", "{y}"]
)
def test_folders_of_any_name_can_be_repeated(name, tmp_path):
    """What Hydra makes of the word is the folder that was typed."""
    folder = tmp_path / name
    folder.mkdir()
    ended = launch(f"rerun_from={folder}", f"root={tmp_path / 'root'}")
    assert ended.code == 1 and ended.err.startswith(f"error: rerun_from={folder} is no run's folder"), ended.err


def test_an_edit_within_a_second_is_seen(tmp_path):
    """Python's importer takes compiled code for current by size and second, and leaves some beside the file."""
    from src.custom import load_source

    path = tmp_path / "mine.py"
    for version in (1, 2, 3):
        path.write_text(f"def make():\n    return {version}\n")
        os.utime(path, (1e9, 1e9))
        assert load_source(f"{path}:make", "task.source")() == version
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rerun_from=nowhere"], "rerun_from=nowhere is no run's folder"),
        (["rerun_from=nowhere", "updates=3"], "repeats that run as it was, which updates=3 would change"),
        (["rerun_from=nowhere", "+ablation=decay"], "repeats that run as it was, which ablation=decay would change"),
        (["max_seconds=0"], "max_seconds must be a number above 0"),
        (["on_failure=never"], "on_failure must be one of continue, stop"),
        (["checkpoint.keep=-1"], "checkpoint.keep must be a whole number at least 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(words, sentence, tmp_path):
    ended = launch(*words, f"root={tmp_path}")
    assert ended.code == 1 and ended.err.startswith("error: ") and sentence in ended.err and ended.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# --- provenance ---


def test_conditions_name_code_versions_and_machine():
    found = provenance.conditions("cpu", 3)
    assert {"python", "torch", "transformers", "numpy"} <= set(found["versions"])
    assert len(found["code_digest"]) == 16 and found["threads"] == 3 and found["hardware"]["cores"] >= 1
    assert found == provenance.conditions("cpu", 3)


def test_differences_are_told_by_key_and_what_is_missing_is_none():
    before = {"threads": 1, "versions": {"torch": "1"}, "warm_start": None, "start": 1.0}
    now = {"threads": 2, "versions": {"torch": "1", "new": "3"}, "warm_start": {"hash": "a"}, "start": 2.0}
    assert provenance.differences(before, now) == ["threads: 1 -> 2"]
    assert provenance.differences({}, now) == [] == provenance.differences(now, now)
