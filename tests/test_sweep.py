"""hydra/sweeper=layouts: only layouts that exist, each once, every result kept, a ranked answer at the end."""

import csv
import os
import re
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes import ROOT, Outcome, body_lines, clean_environment, python, run, start

pytestmark = pytest.mark.processes

TRAIN = ROOT / "examples/train.py"
SWEEP = ("-m", "hydra/sweeper=layouts", "hydra.sweep.dir=sweep")
ONE = (*SWEEP, "hydra/launcher=basic")


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "sweep/results.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(folder: Path, name: str) -> list[str]:
    return [row[name] for row in rows(folder)]


def ranking(outcome: Outcome) -> list[list[str]]:
    """Places and layouts of the table at the end."""
    table = outcome.text.split("status\n")[1].splitlines()
    return [re.split(r"\s{2,}", line)[:2] for line in table if re.match(r"(\d+|-)  ", line)]


def train(*arguments: str) -> list[str]:
    return [sys.executable, str(TRAIN), *SWEEP, "hydra.launcher.nproc_per_node=4", "train.steps=2", *arguments]


def test_what_does_not_fit_is_skipped_with_a_reason(tmp_path: Path) -> None:
    outcome = run(train("parallelism=fsdp", "parallelism.tp_size=1,2,3,4", "hydra.sweeper.objective=loss"), tmp_path)
    assert outcome.code == 0, outcome.text
    assert "layouts: 3 to run, 1 skipped\n" in outcome.text
    assert (
        "    -      -  skipped               parallelism.tp_size=3: dp_shard=-1 * tp_size=3: dp_shard takes what is left, but "
        "the others multiply to 3 and hydra.launcher.nproc_per_node=4: 4 % 3 = 1\n"
    ) in outcome.text
    assert [(row["dp_shard"], row["tp_size"], row["world_size"], row["status"]) for row in rows(tmp_path)] == [
        ("4", "1", "4", "ok"), ("2", "2", "4", "ok"), ("1", "4", "4", "ok"),
    ]  # fmt: skip
    losses = [float(loss) for loss in column(tmp_path, "loss")]
    assert max(losses) - min(losses) < 1e-4
    assert all(float(rate) > 0 for rate in column(tmp_path, "tokens_per_s"))
    assert [len(peaks.split()) for peaks in column(tmp_path, "peak_memory_mib_per_rank")] == [4, 4, 4]
    assert all(50 < float(peak) < 2000 for peak in column(tmp_path, "peak_memory_mib"))
    assert column(tmp_path, "folder") == [str(tmp_path / f"sweep/{number}") for number in range(3)]
    assert (tmp_path / "sweep/multirun.yaml").exists()


def test_fail_starts_nothing(tmp_path: Path) -> None:
    outcome = run(train("parallelism=fsdp", "parallelism.tp_size=1,3", "hydra.sweeper.on_invalid=fail"), tmp_path)
    assert outcome.code == 1
    assert "layouts: 1 to run, 1 skipped\n" in outcome.text
    assert (
        "1 of 2 combinations do not fit, and hydra.sweeper.on_invalid=fail: nothing was started\n"
        "  try: hydra.sweeper.on_invalid=skip\n"
    ) in outcome.text
    assert not list((tmp_path / "sweep").iterdir())


def test_equal_layouts_run_once(tmp_path: Path) -> None:
    outcome = run(train("parallelism=fsdp", "parallelism.dp_shard=-1,4", "parallelism.tp_size=1",
                        "hydra.sweeper.objective=loss"), tmp_path)  # fmt: skip
    assert outcome.code == 0, outcome.text
    assert "layouts: 1 to run, 1 equal to another\n" in outcome.text
    assert "    -      4  dp_shard=4  parallelism.dp_shard=4: same as job 0, not run again\n" in outcome.text
    assert column(tmp_path, "overrides") == ["parallelism.dp_shard=-1"]


def test_jobs_that_differ_in_anything_else_all_run(tmp_path: Path) -> None:
    more = '+hydra.sweeper.params={batch:"8,16"}'
    outcome = run(python("tell.py", *ONE, "value=1,2", "parallelism.dp_replicate=1,-1", more),
                  tmp_path)  # fmt: skip
    assert outcome.code == 0, outcome.text
    assert "layouts: 4 to run, 4 equal to another\n" in outcome.text
    assert column(tmp_path, "objective") == ["1.0", "2.0", "1.0", "2.0"]


@pytest.mark.parametrize("extra", [(), ("hydra.launcher.max_parallel_jobs=2",)], ids=["one", "two at a time"])
def test_every_fate_is_a_row(extra: tuple[str, ...], tmp_path: Path) -> None:
    outcome = run(python("fate.py", *SWEEP, "hydra.launcher.nproc_per_node=2", "rank=1", "fate=none,oom,raise,kill,quit",
                         "value=1,5", *extra), tmp_path, deadline=150)  # fmt: skip
    assert outcome.code == 1
    found = {row["job"]: row for row in rows(tmp_path)}
    statuses = [found[str(number)]["status"] for number in range(10)]
    assert statuses == ["ok"] * 2 + ["out_of_memory"] * 2 + ["failed"] * 2 + ["killed"] * 4
    assert found["2"]["error"].endswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.")
    assert found["4"]["error"] == "ValueError: boom-1"
    assert "was killed by SIGKILL" in found["6"]["error"]
    assert [found[number]["objective"] for number in ("0", "1", "2")] == ["1.0", "5.0", ""]
    assert [place for place, _ in ranking(outcome)] == ["1", "2", *"--------"]
    assert (tmp_path / "sweep/results.png").stat().st_size > 10_000
    picture = (tmp_path / "sweep/results.svg").read_text()
    assert "out of memory" in picture
    assert "Traceback" not in outcome.text.split("by objective")[1]


def test_a_killed_sweep_keeps_its_rows_and_goes_on(tmp_path: Path) -> None:
    command = python("fate.py", *SWEEP, "hydra.launcher.nproc_per_node=2", "value=1,2,3,4", "seconds=0.5")
    process = start(command, tmp_path)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if (tmp_path / "sweep/results.csv").exists() and len(rows(tmp_path)) == 2:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    assert column(tmp_path, "objective") == ["1.0", "2.0"]
    outcome = run(command, tmp_path)
    assert outcome.code == 0, outcome.text
    assert "layouts: 2 to run, 2 with a result already\n" in outcome.text
    assert [line.split()[-1] for line in body_lines(outcome)] == ["3", "4"]
    assert column(tmp_path, "objective") == ["1.0", "2.0", "3.0", "4.0"]
    assert column(tmp_path, "job") == ["0", "1", "2", "3"]
    again = run(command, tmp_path)
    assert again.code == 0
    assert "layouts: 0 to run, 4 with a result already\n" in again.text
    assert [place for place, _ in ranking(again)] == ["1", "2", "3", "4"]


def test_only_what_failed_runs_again(tmp_path: Path) -> None:
    first = run(python("tell.py", *ONE, "value=1,2", "fail=null,broken"), tmp_path)
    assert first.code == 1
    assert column(tmp_path, "status") == ["ok", "failed", "ok", "failed"]
    second = run(python("tell.py", *ONE, "value=1,2,3", "fail=null,broken"), tmp_path)
    assert second.code == 1
    assert "layouts: 4 to run, 2 with a result already\n" in second.text
    assert column(tmp_path, "status") == ["ok", "failed", "ok", "failed", "ok", "failed"]
    assert len(set(column(tmp_path, "folder"))) == 6


def test_an_interrupted_sweep_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(python("fate.py", *SWEEP, "hydra.launcher.nproc_per_node=2", "fate=none,sleep"), tmp_path)
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if sum(each.startswith("BODY") for each in seen) == 2:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=20)
    text = "".join(seen) + rest
    assert process.returncode == 130, text
    assert "the sweep is not over: 1 of 2 jobs have ended; the same command with hydra.sweep.dir=sweep runs the others" in text
    assert "Traceback" not in text
    assert column(tmp_path, "status") == ["ok"]


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    slow = start(python("fate.py", *SWEEP, "hydra.launcher.nproc_per_node=1", "fate=sleep"), tmp_path)
    assert slow.stdout is not None
    for line in slow.stdout:
        if line.startswith("BODY"):
            break
    outcome = run(python("tell.py", *ONE, "value=1,2"), tmp_path)
    slow.send_signal(signal.SIGINT)
    slow.communicate(timeout=20)
    assert outcome.code == 1
    assert "another sweep is writing to sweep\n  try: hydra.sweep.dir=another/folder, or wait for it\n" in outcome.text


def test_one_launcher_for_one_process(tmp_path: Path) -> None:
    outcome = run(python("tell.py", *ONE, "parallelism.dp_shard=1,2"), tmp_path)
    assert outcome.code == 1
    assert (
        "hydra/launcher=basic runs each job in one process, but parallelism.dp_shard=2 asks for 2 (dp_shard=2)\n"
        "  try: hydra/launcher=torchrun\n"
    ) in outcome.text
    assert not (tmp_path / "sweep").exists()


def test_numbers_by_name_and_direction(tmp_path: Path) -> None:
    values = "value={loss:1.5,speed:10},{loss:1.25,speed:5},{loss:1.75,speed:20}"
    outcome = run(
        python("tell.py", *ONE, values, "hydra.sweeper.objective=speed", "hydra.sweeper.direction=maximize"), tmp_path
    )
    assert outcome.code == 0, outcome.text
    assert "by speed, highest first:\n" in outcome.text
    assert column(tmp_path, "loss") == ["1.5", "1.25", "1.75"]
    order = [label for _, label in ranking(outcome)]
    assert [re.findall(r"speed:(\d+)", label) for label in order] == [["20"], ["10"], ["5"]]
    unknown = run(python("tell.py", *ONE, values, "hydra.sweeper.objective=sped"), tmp_path)
    assert unknown.code == 0
    assert (
        "hydra.sweeper.objective=sped: the jobs returned loss, speed\n  try: hydra.sweeper.objective=speed\n"
        "  with hydra.sweep.dir=sweep nothing runs again\nresults: sweep/results.csv\n"
    ) in unknown.text
    several = run(python("tell.py", *ONE, "value={loss:1.5,speed:10},{loss:2,speed:20}", "batch=16"), tmp_path)
    assert several.text.count("the jobs will not be ranked: the jobs returned loss, speed: which one ranks them?") == 1


def test_a_value_that_is_no_number_is_told(tmp_path: Path) -> None:
    outcome = run(python("tell.py", *ONE, "value=word,2"), tmp_path)
    assert outcome.code == 0, outcome.text
    assert "#0: the task returns 'word' (str), which is no number" in outcome.text
    assert column(tmp_path, "status") == ["ok", "ok"]


def test_constraints_of_the_model(tmp_path: Path) -> None:
    few = ("hydra.launcher.nproc_per_node=4", "hydra.sweeper.axes=[dp_shard,tp_size]", "hydra.sweeper.max_jobs=1")
    model = ("hydra.sweeper.constraints.num_heads=6", "hydra.sweeper.constraints.num_kv_heads=2")
    outcome = run(python("tell.py", *SWEEP, *few, *model, "hydra.sweeper.constraints.global_batch=6"), tmp_path)
    assert outcome.code == 0, outcome.text
    assert "layouts: 1 to run, 1 left out by the constraints, 1 left out by max_jobs\n" in outcome.text
    assert [(row["dp_shard"], row["tp_size"]) for row in rows(tmp_path)] == [("2", "2")]
    typed = run(python("tell.py", *SWEEP, few[0], *model, "parallelism=fsdp", "parallelism.tp_size=4"), tmp_path)
    assert typed.code == 1
    assert "skipped  parallelism=fsdp parallelism.tp_size=4: num_heads=6 does not divide by tp_size=4\n" in typed.text
    assert "there is nothing to run: num_heads=6 does not divide by tp_size=4\n" in typed.text


def test_what_the_resolvers_refuse_is_skipped(tmp_path: Path) -> None:
    outcome = run(python("tell.py", *SWEEP, "parallelism=fsdp", "hydra.launcher.nproc_per_node=2", "batch=4,5"), tmp_path)
    assert outcome.code == 0, outcome.text
    assert (
        "skipped     batch=5: local_batch: ${parallelism.per_dp_rank:5}: 5 does not divide over dp_shard=2 = 2" in outcome.text
    )
    assert column(tmp_path, "overrides") == ["batch=4"]


def test_too_many_layouts_need_a_limit(tmp_path: Path) -> None:
    six = "hydra.sweeper.axes=[pp_size,dp_replicate,dp_shard,ring_degree,ulysses_degree,tp_size]"
    outcome = run(python("tell.py", *SWEEP, "hydra.launcher.nproc_per_node=1048576", six), tmp_path)
    assert outcome.code == 1
    assert f"{six} gives 53,130 layouts of hydra.launcher.nproc_per_node=1048576, more than 1,000\n  try: " in outcome.text
    assert not (tmp_path / "sweep").exists()


def test_axes_need_a_number_of_processes(tmp_path: Path) -> None:
    outcome = run(python("tell.py", *SWEEP, "hydra.sweeper.axes=[dp_shard,tp_size]"), tmp_path,
                  env=clean_environment(CUDA_VISIBLE_DEVICES=""))  # fmt: skip
    assert outcome.code == 1
    assert (
        "hydra.sweeper.axes=[dp_shard,tp_size] needs a number of processes, and there is no accelerator to count\n"
        "  try: hydra.launcher.nproc_per_node=4\n"
    ) in outcome.text


def test_a_typing_error_is_no_layout_to_skip(tmp_path: Path) -> None:
    outcome = run(python("tell.py", *ONE, "parallelism.tp_sise=1,2"), tmp_path)
    assert outcome.code == 1
    assert "tp_sise" in outcome.text
    assert "skipped" not in outcome.text


def test_without_matplotlib_a_line_says_so(tmp_path: Path) -> None:
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n")
    paths = os.pathsep.join([str(hide), clean_environment()["PYTHONPATH"]])
    outcome = run(python("tell.py", *ONE, "value=1,2"), tmp_path, env=clean_environment(PYTHONPATH=paths))
    assert outcome.code == 0, outcome.text
    assert (
        "no picture of the results: matplotlib is not installed\n  try: pip install 'hydra-parallelism[plots]'\n"
        in outcome.text
    )
    assert not (tmp_path / "sweep/results.png").exists()


@pytest.mark.skipif(find_spec("submitit") is None, reason="hydra-submitit-launcher is not installed (no release for Hydra 1.4)")
def test_jobs_through_submitit(tmp_path: Path) -> None:
    local = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=2", "parallelism=fsdp")
    two = python("fate.py", *SWEEP, *local, "hydra.launcher.tasks_per_node=2", "parallelism.tp_size=1,3", warnings="ignore")
    outcome = run(two, tmp_path)
    assert outcome.code == 0
    assert (
        "but the others multiply to 3 and hydra.launcher.nodes=1 * hydra.launcher.tasks_per_node=2: 2 % 3 = 2" in outcome.text
    )
    [row] = rows(tmp_path)
    assert (row["status"], row["objective"], row["folder"]) == ("ok", "1.0", str(tmp_path / "sweep/0"))
    assert len(row["peak_memory_mib_per_rank"].split()) == 2
    outcome = run(python("fate.py", *SWEEP, *local, "rank=0", "fate=raise,kill,none", warnings="ignore"), tmp_path)
    assert outcome.code == 1
    found = sorted(rows(tmp_path)[1:], key=lambda row: row["job"])
    assert [(row["job"], row["status"]) for row in found] == [("1", "failed"), ("2", "killed"), ("3", "ok")]
    assert found[0]["error"] == "boom-0"
    assert re.match(r"Job \d+ .* has not produced any output", found[1]["error"])


@pytest.mark.skipif(find_spec("optuna") is None, reason="hydra-optuna-sweeper is not installed (no release for Hydra 1.4)")
def test_an_impossible_trial_of_optuna_fails_as_a_trial(tmp_path: Path) -> None:
    command = python("tell.py", "-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweep.dir=sweep",
                     "hydra.sweeper.sampler.seed=4", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1",  # draws 3, then 1
                     "hydra.sweeper.max_failure_rate=1.0",
                     "hydra.launcher.nproc_per_node=2", "parallelism=fsdp", "parallelism.tp_size=choice(1,2,3)",
                     warnings="ignore")  # fmt: skip
    outcome = run(command, tmp_path, deadline=120)
    assert outcome.code == 0, outcome.text
    assert "dp_shard takes what is left, but the others multiply to 3 and hydra.launcher.nproc_per_node=2" in outcome.text
    assert "best_value: 1.0" in (tmp_path / "sweep/optimization_results.yaml").read_text()


def test_what_only_hydra_knows_tells_jobs_apart(tmp_path: Path) -> None:
    """Two options of a group that compose to the same config: the task may ask for ``${hydra:runtime.choices.flavour}``."""
    outcome = run(python("tell.py", *ONE, "+flavour=a,b"), tmp_path)
    assert outcome.code == 0, outcome.text
    assert "layouts: 2 to run\n" in outcome.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("hydra.sweeper.axes={tp_size:4}",), "hydra.sweeper.axes={'tp_size': 4}: must be a list of axes\n  try: "),
        (("hydra.sweeper.axes=5",), "hydra.sweeper.axes=5: must be a list of axes\n"),
        (("hydra.sweeper.constraints.num_heads=0",), "constraints.num_heads=0: must be a whole number of at least 1"),
        (("+hydra.sweeper.foo=1",), "hydra.sweeper is not valid: Key 'foo' not in 'LayoutsConfig'"),
        (("parallelism.tp_size=0,1",), "parallelism.tp_size=0: must be a whole number of at least 1, or -1 for what is left"),
        (("hydra.sweep.dir=file",), "hydra.sweep.dir=file cannot be used: "),
        (("hydra.sweeper.max_jobs=0",), "hydra.sweeper.max_jobs=0: must be at least 1, or null for all"),
    ],
)  # fmt: skip
def test_mistakes_are_told_without_a_traceback(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = run(python("tell.py", *ONE, *options), tmp_path)
    assert outcome.code == 1
    assert message in outcome.text
    assert "Traceback" not in outcome.text
    assert "to run" not in outcome.text


def test_values_and_errors_that_cannot_be_shown(tmp_path: Path) -> None:
    outcome = run(python("odd.py", *ONE, "kind=repr,mute,quit,leave,good"), tmp_path)
    assert outcome.code == 1
    assert column(tmp_path, "status") == ["ok", "failed", "killed", "ok", "ok"]
    assert column(tmp_path, "error") == [
        "the task returns one that cannot be shown (Odd), which is no number",
        "(its __str__ raises RuntimeError)",
        "left by sys.exit(3)",
        "",
        "",
    ]


def test_configs_of_ended_jobs_are_let_go(tmp_path: Path) -> None:
    outcome = run(python("odd.py", *ONE, "kind=count1,count2,count3,count4"), tmp_path)
    assert outcome.code == 0, outcome.text
    alive = [float(number) for number in column(tmp_path, "objective")]
    assert alive[3] - alive[1] < 5, "a job has 44 of them"
