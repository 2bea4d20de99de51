"""The `parity` command. `run` calls pytest; every other command calls the room that does its work.

Named errors end in one message on standard error and exit status 2; `parity --debug …` shows the traceback.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness import PROJECT
from harness.contract.errors import HarnessError, UsageError
from harness.contract.topology import DEFAULT_ENGINES
from harness.machine.targets import default_pair

if TYPE_CHECKING:
    from harness.driving.process import HostProcess
    from harness.proving.prove import Plan, Request
    from harness.records.verdict import Judgement
    from harness.running.cluster import Cluster
    from harness.running.matrix import MatrixFolder, Order, Outcome

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
BASELINE, CANDIDATE = default_pair()
PROFILES = "removal (default for another implementation), upgrade (another release), patch (the same release)"


EngineChoice = Literal["auto", "cpu", "cuda"]
DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
StartChoice = Literal["ray", "fork"]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs",
        help="Compile the model and replay CUDA graphs; on --engine cuda only. Default: eager, like SkyRL's default.",
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Answers do not depend on the rest of the batch, and equal calls must give equal tokens in every dtype. "
        "On --engine cuda, compute capability 9.0 (H100) or later; slower.",
    ),
]
Engine = Annotated[EngineChoice, typer.Option(help="auto: cuda if nvidia-smi lists a GPU.")]
Profile = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"What the step from baseline to candidate needs: {PROFILES}. scenarios/profiles.toml says what each asks for.",
    ),
]
Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="A run's folder, or its name below .parity/runs.")]
Waves = Annotated[
    list[int] | None, typer.Option(min=1, max=6, help="Only this wave's scenarios (repeatable; default all).")
]
Matching = Annotated[str | None, typer.Option("-k", metavar="EXPR", help="Only scenarios whose name matches.")]
Topologies = Annotated[
    list[str] | None, typer.Option(help="Only this topology (repeatable; default all): see `parity topologies`.")
]
Pythons = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[TARGET=]PATH", help="Interpreter of local: targets (repeatable; TARGET=PATH is for one target)."
    ),
]
Checkouts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[TARGET=]PATH",
        help="Git working tree of local: targets (repeatable). Their environment is made from what the tree pins.",
    ),
]
RunDir = Annotated[Path | None, typer.Option(help="Where to write (default: a new folder in .parity/runs).")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name below .parity/runs.")]
TO_PYTEST_ITSELF = ("wave", "k", "router", "router_policy", "verbose", "pytest_arguments")
"""Parameters of `parity run` that are no option of the plugin."""


def option_of(parameter: str) -> str:
    """The plugin's option for a parameter of `parity run`. pytest lists its own `--python…` options under another name."""
    return "--target-python" if parameter == "python" else f"--{parameter.replace('_', '-')}"


def main() -> None:
    """Entry point of the `parity` command."""
    options: dict[str, bool] = {}
    try:
        app(obj=options)
    except HarnessError as error:
        if options.get("debug"):
            raise
        typer.echo(f"parity: {error}", err=True)
        sys.exit(2)


@app.callback()
def common(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a named error.")] = False,
) -> None:
    """Conformance and parity of rollout inference stacks.

    \b
    First time on a machine:
      parity doctor              what this machine can run, and what it lacks
      parity run --wave 1        both SkyRL stacks on CPU, ends with a report
    """
    context.obj["debug"] = debug


@app.command()
def run(
    *,
    wave: Waves = None,
    k: Matching = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET|RUN",
            help=f"Default {BASELINE}. An earlier run stands for the stack that it recorded with a twin: nothing of it is started.",
        ),
    ] = None,
    candidate: Annotated[str | None, typer.Option(metavar="TARGET", help=f"Default {CANDIDATE}.")] = None,
    stack: Annotated[
        list[str] | None, typer.Option(metavar="TARGET", help="Judge only this stack, compare nothing (repeatable).")
    ] = None,
    python: Pythons = None,
    checkout: Checkouts = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE==VERSION",
            help="Another version of the candidate's router, or of that of each --stack. All else stays.",
        ),
    ] = None,
    router_policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How that router chooses a server, in place of the stack's own choice."),
    ] = None,
    reference_python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Interpreter of the oracle, if its environment cannot be made.")
    ] = None,
    dtype: Annotated[
        DtypeChoice | None,
        typer.Option(help="Dtype of the engines (default float32 on CPU, bfloat16 on CUDA; auto: the checkpoint's)."),
    ] = None,
    cuda_graphs: CudaGraphs = False,
    batch_invariant: BatchInvariant = False,
    colocate: Annotated[
        bool,
        typer.Option("--colocate", help="Drive disaggregated scenarios on colocated engines, which one GPU can hold."),
    ] = False,
    engine: Annotated[EngineChoice | None, typer.Option(help="auto: cuda if nvidia-smi lists a GPU.")] = None,
    start: Annotated[
        StartChoice | None,
        typer.Option(help="ray: as SkyRL ships it (default). fork: starts in seconds, for development."),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, help="Engines of each stack, if the topology sets no number (default 2).")
    ] = None,
    topology: Topologies = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Checkpoint folder, or smollm2: SmolLM2-135M-Instruct, fetched and converted once. Default: a tiny model, made "
            "on first use. Topologies for one architecture (moe…) take the model if it has that architecture, and a tiny model "
            "otherwise.",
        ),
    ] = None,
    run_dir: RunDir = None,
    profile: Profile = None,
    ledger: Annotated[Path | None, typer.Option(help="Known divergences, in place of the project's.")] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="How much of what scenarios enumerate is driven (fields, pairs, forms, hops, sequences): 0.2 is a fifth, 5 more "
            "values and pairs (default 1).",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Draws other prompts. A correct stack is green with any seed. Runs are compared only with runs of the same seed "
            "(default 0).",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            help="Also drive what takes long: scenarios that send hundreds of requests, start other stacks or spoil their own, "
            "and topologies that few scenarios need. Otherwise only -k selects them, and --topology a topology.",
        ),
    ] = False,
    repeat: Annotated[int | None, typer.Option(min=1, help="Number of times to drive each scenario.")] = None,
    base_port: Annotated[int | None, typer.Option(help="First port of the servers of the remote placement.")] = None,
    twin: Annotated[
        bool,
        typer.Option(
            "--twin",
            help="Drive everything of the baseline twice, not only where it differs from the candidate. With --stack, everything "
            "of each stack, so that the run can be a --baseline later.",
        ),
    ] = False,
    no_twin: Annotated[
        bool, typer.Option("--no-twin", help="Drive nothing of the baseline twice: no noise floor.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start every stack for this run, also if one of `parity up` would fit.")
    ] = False,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Stream the stack's own log.")] = 0,
    pytest_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- PYTEST ARGUMENTS", help="Passed to pytest as they are.")
    ] = None,
) -> None:
    """Drive scenarios on both stacks, judge them, compare them, and write a report.

    \b
    Wave 1 on both stacks of SkyRL 0.2.0, as shipped:
      parity run --wave 1
    One stack alone, started in seconds, only scenarios about ordering:
      parity run --stack skyrl-0.2.0:http --start fork -k ordering
    Your own checkout against a release:
      parity run --wave 1 --baseline skyrl-0.3.0:http --candidate local:http --checkout ~/SkyRL
    Two checkouts, told apart by labels of yours:
      parity run --baseline local:http#old --candidate local:http#new --checkout local:http#old=~/a --checkout local:http#new=~/b
    In an environment of your own:
      parity run --wave 1 --candidate local:http --python ~/skyrl/.venv/bin/python
    An upgrade with one start: record the old release once, then compare candidates with the recording:
      parity run --wave 1 --stack skyrl-0.3.0:http --twin --run-dir recorded
      parity run --wave 1 --baseline recorded --candidate skyrl-0.4.0:http
    Another version of the router, or another policy, with all else as it was:
      parity run --baseline skyrl-0.4.0:http --candidate skyrl-0.4.0:http --router vllm-router==0.1.13 -k routing
      parity run --stack skyrl-0.4.0:http --router-policy round_robin -k routing
    On a machine with one GPU, everything that it can hold:
      parity run --engine cuda --colocate
    On a GPU node, four engines, colocated, with your model:
      parity run --wave 1 --engine cuda --engines 4 --topology colocated --model ~/models/qwen
    A real model of 135 million parameters, on CPU:
      parity run --wave 1 --topology disaggregated --model smollm2
    With the scenarios that send hundreds of requests; these alone, a fifth of their cases, or five times as many over night:
      parity run --wave 1 --everything
      parity run --start fork -k bulk --budget 0.2
      parity run --start fork -k bulk --budget 5
    Stop at the first red, look around:
      parity run --wave 1 -- -x --pdb
    Write a scenario, and try it in seconds on a stack that stays up (`parity up --help`):
      parity up --stack skyrl-0.2.0:http --start fork
      parity run --stack skyrl-0.2.0:http --start fork -k my_scenario

    It calls pytest and ends with pytest's exit status: 0 everything green or explained in the ledger, 1 something is
    red, 2 interrupted, 4 wrong usage, 5 no scenario selected.
    """
    given = {name: value for name, value in locals().items() if name not in TO_PYTEST_ITSELF}
    import pytest

    from harness.driving.models import absolute
    from harness.machine.targets import registry, with_router
    from harness.records.run_folder import find_run

    if router or router_policy:
        if stack:
            stack = [with_router(name, router, router_policy) for name in stack]
        else:
            candidate = with_router(candidate or CANDIDATE, router, router_policy)
    earlier = find_run(baseline, PROJECT) if baseline is not None and baseline not in registry() else None
    target = None if earlier or "/" in (baseline or "") else baseline
    names = [name for name in (target, candidate, *(stack or ())) if name]
    _check_targets(names, python or (), checkout or ())
    given |= {
        "baseline": earlier or baseline,
        "candidate": candidate,
        "stack": stack,
        "python": _of_local("--python", python),
        "checkout": _of_local("--checkout", checkout),
        "model": model and absolute(model),
    }
    arguments = [
        "scenarios",
        *_arguments({"-m": " or ".join(f"wave{number}" for number in wave or ()), "-k": k}),
        *_arguments({option_of(name): value for name, value in given.items()}),
        *["-v"] * verbose,
        *(pytest_arguments or ()),
    ]
    with contextlib.chdir(PROJECT), _terminable():  # what was recorded is kept, and reported
        status = pytest.main(arguments)
    raise typer.Exit(int(status))


@app.command()
def up(
    *,
    stack: Annotated[str, typer.Option(help="The stack to start.")],
    topology: Annotated[str, typer.Option(help="Its topology: see `parity topologies`.")] = "disaggregated",
    start: Annotated[StartChoice, typer.Option(help="As in `parity run`.")] = "ray",
    engine: Engine = "auto",
    engines: Annotated[int, typer.Option(min=1, help="As in `parity run`.")] = DEFAULT_ENGINES,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="As in `parity run`.")] = None,
    dtype: Annotated[DtypeChoice | None, typer.Option(help="As in `parity run`.")] = None,
    cuda_graphs: CudaGraphs = False,
    batch_invariant: BatchInvariant = False,
    python: Annotated[Path | None, typer.Option(metavar="PATH", help="Interpreter of a local: target.")] = None,
    checkout: Annotated[Path | None, typer.Option(metavar="PATH", help="Git working tree of a local: target.")] = None,
    reference_python: Annotated[Path | None, typer.Option(metavar="PATH", help="As in `parity run`.")] = None,
    base_port: Annotated[int | None, typer.Option(help="As in `parity run`.")] = None,
    idle: Annotated[float, typer.Option(min=0.1, help="Minutes without a run after which it ends by itself.")] = 30.0,
) -> None:
    """Start a stack and its reference, and leave them running for `parity run`, so that a scenario is tried in seconds.

    \b
    Start it once, then change the scenario and drive it as often as you like, with the same options:
      parity up --stack skyrl-0.2.0:http --start fork
      parity run --stack skyrl-0.2.0:http --start fork -k my_scenario
      parity down

    A run that would start the same stack uses this one; any other says what differs and starts its own. Ctrl-C in the middle of a
    scenario, a hang, a death, or a scenario that breaks the stack ends it. If an adapter or other loaded code changed, a run
    refuses the stack. `parity doctor` lists what is up.

    Exit status: 0 it is up; 2 a named error, or Ctrl-C, and nothing is left running.
    """
    from harness.contract.topology import topology as shaped
    from harness.driving.models import absolute
    from harness.machine import kept
    from harness.machine.environments import detect_engine
    from harness.machine.progress import console_progress
    from harness.machine.targets import known
    from harness.records.run_folder import new_run_dir
    from harness.running.session import Options, Seat, Session

    trees = {name: [str(path)] if path else [] for name, path in (("python", python), ("checkout", checkout))}
    _check_targets([stack], trees["python"], trees["checkout"])
    seat = Seat(target=stack, topology=shaped(topology, engines))
    if known(stack).inline:
        raise UsageError(f"{stack} has no process: each run makes it in no time", next_step="`parity run --stack`")
    if seat.name in kept.names():
        raise UsageError(f"{seat.name} is up already", next_step="use it, or end it with `parity down`")
    options = Options(
        baseline=stack,
        candidate=stack,
        stacks=[stack],
        engine=_fixed(engine) or detect_engine(),
        start=start,
        engines=engines,
        model=model and absolute(model),
        dtype=dtype,
        cuda_graphs=cuda_graphs,
        batch_invariant=batch_invariant,
        target_python={"": python.expanduser().absolute()} if python else {},
        checkouts={"": checkout.expanduser().absolute()} if checkout else {},
        reference_python=reference_python and reference_python.expanduser().absolute(),
        base_port=base_port,
        run_dir=kept.new_folder(new_run_dir(PROJECT).name),
        idle_s=idle * 60,
        reuse=True,
        record=False,
        command=_typed(),
    )
    options.check()
    with _terminable():
        session = Session(options, console_progress(), tell=_told)
        try:
            session.keep(seat)
        except KeyboardInterrupt:
            typer.echo("parity: interrupted; nothing is left running", err=True)
            raise typer.Exit(2) from None
        finally:
            session.close()
    typer.echo(f"{seat.name} is up. It ends by `parity down`, or after {idle:g} minutes without a run.")


@app.command()
def down() -> None:
    """End all stacks and references of `parity up`. One that a run is driving stays up, and the others end.

    \b
    Example:
      parity down
    Exit status: 0 nothing is up any more; 2 something could not be ended.
    """
    import asyncio

    from harness.contract.errors import StackError
    from harness.driving.process import HostProcess
    from harness.machine import kept

    busy = []
    for one in kept.running():
        try:
            host = HostProcess.of_kept(one)
            host.outlives = False
            asyncio.run(_taken_down(host))
        except StackError as error:
            busy.append(f"{one.name} was not ended: {error.message}")
        else:
            typer.echo(f"{one.name}: ended")
    if busy:
        raise UsageError("; ".join(busy), next_step="end the run that drives it, then `parity down` again")


async def _taken_down(host: HostProcess) -> None:
    await host.launch()
    await host.close()


@app.command(name="matrix")
def drive_matrix(
    *,
    stack: Annotated[
        list[str] | None, typer.Option(help="A column, in this order (repeatable). With --from: default all.")
    ] = None,
    topology: Topologies = None,
    wave: Waves = None,
    k: Matching = None,
    start: Annotated[StartChoice | None, typer.Option(help="As in `parity run`.")] = None,
    engine: Annotated[EngineChoice | None, typer.Option(help="As in `parity run`.")] = None,
    python: Pythons = None,
    checkout: Checkouts = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only every Nth cell, from the Ith on: for several machines.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Drive the cells as tasks of this Ray cluster, many at once.")
    ] = None,
    ray_python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="An interpreter with the cluster's releases of Ray and Python.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The matrix's folder (default: a new one in .parity/runs). An existing one is resumed."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Drive finished cells again if the harness or the selection changed.")
    ] = False,
    from_runs: Annotated[
        bool, typer.Option("--from", help="Drive nothing: put the named runs and matrices together.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where to write page, data and badges (default: the matrix's folder).")
    ] = None,
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]... [-- OPTIONS]", help="With --from: runs. Without: options for each `parity run`."
        ),
    ] = None,
) -> None:
    """Drive targets × topologies × waves, and show on one page which promise each release keeps.

    \b
    Two releases side by side, everything that this machine can drive:
      parity matrix --stack skyrl-0.2.0:http --stack skyrl-0.3.0:http --run-dir releases
    Go on after Ctrl-C, a crash or a cell that failed: the same command. Finished cells are not driven again.
    The second of eight machines; then, on one of them, all shards as one:
      parity matrix --stack skyrl-0.2.0:http --stack skyrl-0.3.0:http --shard 2/8 --run-dir shard-2
      parity matrix --from shard-1 shard-2 shard-3 --run-dir whole
    On a Ray cluster whose nodes all see this folder, each cell with the GPUs that it needs:
      parity matrix --stack skyrl-0.4.0:http --engine cuda --ray 10.0.0.1:6379 --ray-python ~/ray/bin/python
    A page of runs that were made one by one, of single stacks or pairs:
      parity matrix --from .parity/runs/monday .parity/runs/tuesday --stack skyrl-0.2.0:http --out docs/releases
    Other options of `parity run`, for every cell:
      parity matrix --stack local:http --checkout ~/SkyRL --wave 1 -- --dtype bfloat16

    Each cell is a run of one target in its own process and folder. A cell that does not run is red, with its reason. All cells of
    a target are then merged and judged as one run. It writes matrix.html, matrix.json and a badge for each target.

    Exit status: 0 every verdict is green or in the ledger and every cell was driven; 1 something is red or left to drive; 2 Ctrl-C,
    or a named error.
    """
    from harness.commands import matrix
    from harness.machine.progress import console_progress
    from harness.machine.targets import of_local
    from harness.running.matrix import MatrixFolder, plan

    _check_targets(stack or [], python or (), checkout or ())
    if from_runs and (topology or wave or k or start or engine or python or checkout or shard or again or ray):
        raise UsageError("--from drives nothing", next_step="leave out what selects cells; --stack selects columns")
    if not from_runs and rest and not rest[0].startswith("-"):
        raise UsageError(f"{rest[0]!r} is no option of `parity run`", next_step="write --from before the names of runs")
    if not (rest if from_runs else stack):
        raise UsageError("the matrix has no column", next_step="name targets with --stack, or runs after --from")
    cluster = _cluster(ray, ray_python, engine)
    whole = _folder(run_dir)
    sources = [run_folder(name) for name in rest or ()] if from_runs else [whole]
    folder = MatrixFolder(whole)
    own = {"--ledger", "--stack", "--baseline", "--candidate", "--wave", "--topology", "--run-dir", "--checkout"}
    own |= {"--router", "--router-policy"}
    if not from_runs and (taken := sorted(own & {word.partition("=")[0] for word in rest or ()})):
        raise UsageError(f"a matrix cannot hand {', '.join(taken)} on", next_step="leave them out after --")
    with _terminable(), contextlib.nullcontext() if from_runs else folder.held():
        if not from_runs:
            options = _arguments({"--start": start, "--engine": engine, "-k": k})
            orders = plan(
                stack or (),
                topology or (),
                wave or (),
                k or "",
                arguments=[*options, *(rest or ())],
                pythons=of_local("--python", python or ()),
                trees=of_local("--checkout", checkout or ()),
            )
            _drive_cells(folder, orders, shard, cluster, again=again)
        found = matrix.releases(sources, whole, _read_report, console_progress(), stack or [])
        target = out.expanduser().absolute() if out is not None else whole
        made, page = matrix.write(found, target, matrix.command_of(sys.argv[1:]))
    typer.echo("\n".join(matrix.summary(made)))
    typer.echo(f"page: {page}")
    raise typer.Exit(made.exit_status)


def _cluster(address: str | None, python: Path | None, engine: EngineChoice | None) -> Cluster | None:
    """The Ray cluster that drives the cells; None for this machine. Raises UsageError if half of it is named."""
    from harness.running.cluster import Cluster

    if address is None and python is None:
        return None
    if address is None or python is None or engine not in ("cpu", "cuda"):
        raise UsageError(
            "a matrix on a Ray cluster needs --ray ADDRESS, --ray-python PATH and --engine cpu or cuda",
            next_step="name all three: this machine does not know what the cluster's nodes have",
        )
    return Cluster(address=address, python=python.expanduser().absolute(), engine=engine)


def _drive_cells(
    folder: MatrixFolder, orders: Sequence[Order], shard: str | None, cluster: Cluster | None, *, again: bool
) -> None:
    """Drive the cells of a matrix, or of a shard of it, that are not finished. After Ctrl-C it ends with status 2."""
    from harness.machine.progress import console_progress
    from harness.running import child
    from harness.running.matrix import drive, drive_on, shard_of

    mine = orders if shard is None else shard_of(orders, shard)
    left = folder.to_drive(mine, again=again)
    folder.extend(orders)
    finished = len(mine) - len(left)
    typer.echo(f"{folder.path}: {len(orders)} cells, {len(mine)} of them here, {finished} finished", err=True)
    launch, progress = (*child.COMMAND, "--everything"), console_progress()

    def told(outcome: Outcome) -> None:
        typer.echo(outcome.told, err=True)

    try:
        if cluster is None:
            drive(folder, left, launch, progress, told)
        elif left:
            drive_on(cluster, folder, left, launch, progress=progress, told=told)
    except KeyboardInterrupt:
        done = sum(one is not None and not one.failed for one in (folder.outcome(order.cell) for order in mine))
        typer.echo(f"interrupted: {done} of {len(mine)} cells are finished; the same command goes on", err=True)
        raise typer.Exit(2) from None


@app.command(name="bench")
def bench_stacks(
    *,
    baseline: Annotated[str, typer.Option(metavar="TARGET")] = BASELINE,
    candidate: Annotated[str, typer.Option(metavar="TARGET")] = CANDIDATE,
    python: Pythons = None,
    checkout: Checkouts = None,
    topology: Annotated[str, typer.Option(help="Where engines live: see `parity topologies`.")] = "disaggregated",
    engine: Engine = "auto",
    start: Annotated[StartChoice, typer.Option(help="As in `parity run`.")] = "ray",
    engines: Annotated[int, typer.Option(min=1, help="Engines of each stack.")] = DEFAULT_ENGINES,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="As in `parity run`.")] = None,
    minutes: Annotated[float, typer.Option(help="Most minutes of measuring, without the starts.")] = 10.0,
    precision: Annotated[
        float,
        typer.Option(
            metavar="PERCENT", help="Smaller differences are of no interest. Half the value takes 4 times as long."
        ),
    ] = 10.0,
    error: Annotated[
        float, typer.Option(metavar="PERCENT", help="Probability that any row of the run is wrong about a difference.")
    ] = 5.0,
    in_flight: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", help="Requests in flight (repeatable; default 1, 8, 64, and more than the engines take)."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of an answer.")] = 16,
    seed: Annotated[int | None, typer.Option(help="Draws the order of blocks (default: drawn, and printed).")] = None,
    slowdown: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make the candidate slow on purpose: does the bench see it?")
    ] = None,
    run_dir: RunDir = None,
) -> None:
    """Is the candidate slower than the baseline? Both are up at once and take turns; each row is a verdict with a stated error.

    \b
    Both stacks of SkyRL 0.2.0, started in seconds:
      parity bench --start fork
    An upgrade, to 5 %, in half an hour at most:
      parity bench --baseline skyrl-0.3.0:http --candidate skyrl-0.4.0:http --precision 5 --minutes 30
    Your checkout against itself, to see what two starts of one stack differ by:
      parity bench --baseline local:http --candidate local:http --checkout ~/SkyRL
    Can it turn red? Without a real stack, on simulated time:
      parity bench --baseline miniature --candidate miniature --slowdown slow/share

    It stops once every row is decided, or the minutes are up. Ctrl-C keeps the pairs of blocks that were measured. It writes
    bench.json and bench.html (docs/benchmarking.md).

    Exit status: 0 nothing is slower and every row is decided; 1 something is slower; 2 Ctrl-C, a stack failed, or a named error;
    3 nothing is slower, and rows are inconclusive.
    """
    from harness.contract.topology import topology as placed
    from harness.driving.models import absolute
    from harness.machine.environments import detect_engine
    from harness.machine.progress import console_progress
    from harness.machine.targets import of_local
    from harness.running.bench import Order, bench
    from harness.running.session import Options
    from reports.bench import show, write_all

    _check_targets([baseline, candidate], python or (), checkout or ())
    options = Options(
        baseline=baseline,
        candidate=candidate,
        engine=_fixed(engine) or detect_engine(),
        start=start,
        engines=engines,
        model=model and absolute(model),
        run_dir=run_dir and run_dir.expanduser().absolute(),
        target_python=of_local("--python", python or ()),
        checkouts=of_local("--checkout", checkout or ()),
        command=_typed(),
        record=False,
    )
    order = Order(
        options=options,
        topology=placed(topology, engines),
        in_flight=tuple(sorted(set(in_flight or ()))),
        tokens=tokens,
        minutes=minutes,
        precision=precision / 100,
        error=error / 100,
        seed=seed,
        slowdown=slowdown,
    )
    with _interruptible():  # finished pairs are kept
        made, folder = bench(order, console_progress(), _told)
        page = write_all(made, folder)["bench.html"]
    show(made, page=page)
    raise typer.Exit(made.exit_status)


@app.command()
def shrink(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="As reports name it: sequences.test_all_3.")],
    *,
    stack: Annotated[str, typer.Option(metavar="TARGET", help="The stack on which a check of it is red.")],
    check: Annotated[
        str, typer.Option(metavar="CHECK", help="The check (default: the first red one that no other explains).")
    ] = "",
    cases: Annotated[
        str, typer.Option(metavar="N,N,…", help="Begin with these cases only, by their numbers (default: all).")
    ] = "",
    fault: Annotated[str, typer.Option(metavar="ID", help="Drive the stack under this fault of `parity prove`.")] = "",
    drives: Annotated[int, typer.Option(min=2, help="Most drives of the scenario.")] = 200,
    topology: Annotated[str, typer.Option(help="Where engines live (default: the scenario's first topology).")] = "",
    python: Pythons = None,
    checkout: Checkouts = None,
    engine: Engine = "auto",
    start: Annotated[StartChoice, typer.Option(help="As in `parity run`.")] = "fork",
    engines: Annotated[int, typer.Option(min=1, help="Engines of the stack.")] = DEFAULT_ENGINES,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="As in `parity run`.")] = None,
    dtype: Annotated[DtypeChoice | None, typer.Option(help="As in `parity run`.")] = None,
    seed: Annotated[int, typer.Option(help="As in `parity run`.")] = 0,
    run_dir: RunDir = None,
) -> None:
    """Find the fewest cases of one scenario (of its hundreds of requests, or twenty steps) with which a check stays red.

    \b
    Which steps of a sequence does it take?
      parity shrink sequences.test_all_asleep_1 --stack skyrl-0.2.0:http
    These alone, as often as you like:
      parity shrink sequences.test_all_asleep_1 --stack skyrl-0.2.0:http --cases 3,4,9
    Without a real stack:
      parity shrink sequences.test_all_asleep_1 --stack miniature --fault pause_ended_early/by_wake_up

    A case is what a scenario enumerates: a field with a value, a form of an argument, a broken hop, a step. The check has to stay red
    for the same reason; entries of the ledger are left aside. What is found is driven once more.

    Exit status: 0 found; 1 cut short by --drives, or not red when driven once more; 2 nothing is red, a named error, or Ctrl-C, which
    shows the fewest so far.
    """
    from harness.driving.models import absolute
    from harness.machine.environments import detect_engine
    from harness.machine.progress import console_progress
    from harness.machine.targets import of_local
    from harness.running.session import Options
    from harness.running.shrink import Order
    from harness.running.shrink import shrink as find
    from reports.shrunk import lines

    _check_targets([stack], python or (), checkout or ())
    options = Options(
        baseline=stack,
        candidate=stack,
        stacks=[stack],
        engine=_fixed(engine) or detect_engine(),
        start=start,
        engines=engines,
        model=model and absolute(model),
        dtype=dtype,
        seed=seed,
        run_dir=run_dir and run_dir.expanduser().absolute(),
        target_python=of_local("--python", python or ()),
        checkouts=of_local("--checkout", checkout or ()),
        twin=False,
        fault_taps=bool(fault),
        command=_typed(),
        record=False,
    )
    order = Order(
        options=options,
        scenario=scenario,
        topology=topology,
        check=check,
        cases=_numbers("--cases", cases),
        fault=fault,
        drives=drives,
    )
    with _interruptible():  # once something is red, Ctrl-C shows the fewest so far
        found = find(order, console_progress(), _told)
    typer.echo("\n".join(lines(found, _without(sys.argv[1:], "--cases", "--run-dir"))))
    raise typer.Exit(found.exit_status)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of "1,2,3". Raises UsageError for anything else."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{option} {text} is no list of numbers", next_step="write it as 3,4,9")
    return tuple(int(part) for part in parts)


def _without(arguments: Sequence[str], *options: str) -> list[str]:
    """Command line arguments without these options and their values."""
    kept: list[str] = []
    rest = iter(arguments)
    for one in rest:
        if one in options:
            next(rest, None)
        elif one.partition("=")[0] not in options:
            kept.append(one)
    return kept


PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that hand options of `parity run` on to it."""
Tree = Annotated[Path, typer.Option("--checkout", metavar="PATH", help="Git working tree of the stack.")]
Kind = Annotated[str, typer.Option("--target", help="Local target that the tree is driven as.")]


@app.command(context_settings=PASSED_ON)
def bisect(
    context: typer.Context,
    *,
    checkout: Tree,
    good: Annotated[str, typer.Option(metavar="REV", help="A commit at which the check is green.")],
    bad: Annotated[str, typer.Option(metavar="REV", help="A later commit at which it is red.")] = "HEAD",
    check: Annotated[str, typer.Option(metavar="CHECK", help="The check, as reports name it.")],
    target: Kind = "local:http",
    run_dir: RunDir = None,
) -> None:
    """Name the commit that turned a check red. All other options are those of `parity run`: they select what is driven.

    \b
    Which commit broke the order of rows?
      parity bisect --checkout ~/SkyRL --good skyrl-v0.3.0 --bad main --check ordering -k ordering
    Started in seconds, in one topology:
      parity bisect --checkout ~/SkyRL --good HEAD~40 --check ordering -k ordering --start fork --topology disaggregated

    It uses `git bisect` in a worktree of its own, and leaves your working tree alone. Both ends are judged first. A commit at which
    the check cannot be judged is skipped. A commit with other requirements gets another environment. What an entry of the ledger
    explains is green; --ledger names another ledger.

    Exit status: 0 the commit is named; 1 commits that could not be judged hide it; 2 a named error, or Ctrl-C.
    """
    from harness.commands.trees import judge_of, state_of
    from harness.machine.progress import console_progress
    from harness.running.bisect import bisect as find

    _check_targets([target], checkout=[str(checkout)])
    folder = _folder(run_dir)
    tree = Path(state_of(target, checkout.expanduser().absolute()).path)
    judge = judge_of(target, check, context.args, folder, console_progress())
    with _interruptible():
        found = find(tree, good, bad, judge, typer.echo)
    if found.first_bad is None:
        typer.echo("commits that could not be judged hide it; it is one of:\n" + "\n".join(found.possible))
        raise typer.Exit(1)
    typer.echo(
        f"\n{check} is red from this commit on ({len(found.steps)} commits judged, their runs are in {folder}):\n"
    )
    typer.echo(found.description)


@app.command(context_settings=PASSED_ON)
def pr(
    context: typer.Context,
    *,
    checkout: Tree,
    base: Annotated[str, typer.Option(metavar="REV", help="Branch or commit that the change is for.")],
    target: Kind = "local:http",
    comment: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the Markdown comment here.")] = None,
    run_dir: RunDir = None,
) -> None:
    """Compare a working tree with the commit where it left REV, and write the Markdown comment for its pull request.

    \b
    Everything that the tree can be asked:
      parity pr --checkout ~/SkyRL --base origin/main --comment comment.md
    All other options are those of `parity run`:
      parity pr --checkout ~/SkyRL --base origin/main --wave 1 --start fork --topology disaggregated

    The base is driven in a worktree of its own; the head is the working tree as it stands, with uncommitted changes. Exit status as
    that of `parity run`.
    """
    import shutil

    from harness.commands.trees import run_pair, state_of

    _check_targets([target], checkout=[str(checkout)])
    folder = _folder(run_dir)
    written = folder / "report.md"
    if written.exists():
        raise UsageError(f"{folder} holds a run already", next_step="give another --run-dir, or none")
    if comment is not None:
        comment.parent.mkdir(parents=True, exist_ok=True)
        comment.unlink(missing_ok=True)  # an older comment must not stand for this run
    head = state_of(target, checkout.expanduser().absolute())
    with _interruptible():
        status = run_pair(target, head, base, context.args, folder)
    if not written.is_file():
        raise UsageError(
            f"the run ended with status {status} and wrote no report", next_step="look at its output above"
        )
    if comment is not None:
        shutil.copyfile(written, comment)
    typer.echo(f"comment: {comment or written}")
    raise typer.Exit(status)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the command with status 2, once worktrees and stacks are cleaned up."""
    with _terminable():
        try:
            yield
        except KeyboardInterrupt:
            typer.echo("parity: interrupted; worktrees and stacks are removed", err=True)
            raise typer.Exit(2) from None


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C, so that worktrees and stacks are cleaned up. A second one is ignored: timeout(1) sends two."""

    def terminate(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.raise_signal(signal.SIGINT)  # whose handler a loop may have replaced by its own

    # In a script's background SIGINT is ignored, and runs that are started here would inherit that.
    handlers = {signal.SIGTERM: terminate, signal.SIGINT: signal.default_int_handler}
    before = {one: signal.signal(one, handler) for one, handler in handlers.items()}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@app.command()
def prove(
    *,
    stack: Annotated[
        list[str] | None, typer.Option(help="Prove on this stack (repeatable; default both miniatures).")
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only faults whose id or name matches (repeatable).")
    ] = None,
    k: Matching = None,
    run_dir: RunDir = None,
    start: Annotated[StartChoice, typer.Option(help="How real stacks are started.")] = "fork",
    dtype: Annotated[DtypeChoice | None, typer.Option(help="Dtype of the real stacks (as in `parity run`).")] = None,
    cuda_graphs: CudaGraphs = False,
    batch_invariant: BatchInvariant = False,
    engine: Engine = "auto",
    jobs: Annotated[int, typer.Option(min=0, help="Worker processes for the miniatures (0: one per core).")] = 0,
    whole: Annotated[
        str,
        typer.Option(
            metavar="K/N",
            help="Miniatures: the whole suite under every N-th fault only, from the K-th. Others end once their checks are red.",
        ),
    ] = "1/1",
    beside_ledger: Annotated[
        bool,
        typer.Option("--ledger", help="Also drive the ledger's entries under other faults, which have to stay red."),
    ] = False,
    mutants: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Change the stacks' own code instead: drive N mutants.")
    ] = None,
    mutant: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Drive this mutant, not a sample (repeatable).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sample (default: a new one, printed).")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Minutes of driving mutants per stack, after its control.")
    ] = None,
    topology: Annotated[
        list[str] | None, typer.Option(help="Drive mutants in this topology only (repeatable).")
    ] = None,
    at_start: Annotated[
        bool,
        typer.Option("--at-start", help="Drive only mutants whose code runs while a stack starts: one start each."),
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run of mutants: what it has judged is kept.")
    ] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put the figures into README.md.")] = False,
) -> None:
    """Break stacks on purpose and show that exactly the right checks turn red: the kill matrix.

    \b
    The whole suite on both miniatures, every fault, in minutes:
      parity prove
    Quicker: the whole suite under each third fault, the others until their last catch:
      parity prove --whole 1/3
    One fault, in all its variants, on one stack:
      parity prove --stack miniature --fault 'session_moves*'
    The faults of the real stacks, on the wire:
      parity prove --stack skyrl-0.2.0:http --stack skyrl-0.2.0:legacy --start fork
    Does an entry of the ledger hide other faults?
      parity prove --stack skyrl-0.2.0:http --start fork --ledger

    \b
    Mutants, made by machine from a real stack's own code (client, router glue, engine wrappers, weight sync):
      parity prove --mutants 20 --stack skyrl-0.2.0:http --minutes 20
    One of them again, with the control of an earlier run:
      parity prove --mutant ID --stack skyrl-0.2.0:http --resume RUN

    It writes kill_matrix.json and kill_matrix.html; for mutants, mutants.json and mutants.md. Exit status: 0 every fault was
    killed by exactly the checks that it names, every check is killed by a fault, and the correct stacks are green; 1 something is
    red, or Ctrl-C; 2 a named error. Mutants: 0 if the instrument worked and all were driven, whatever the score.
    """
    import random

    from harness.machine.environments import detect_engine

    on = _fixed(engine) or detect_engine()
    where = run_dir and run_dir.expanduser().absolute()
    _check_targets(stack or [])
    if mutants or mutant:
        raise typer.Exit(
            _prove_mutants(
                resume,
                stacks=tuple(stack or ()),
                sample=mutants or 0,
                seed=random.randrange(2**32) if seed is None else seed,
                minutes=minutes,
                mutants=tuple(mutant or ()),
                at_start=at_start,
                expression=k or "",
                topologies=tuple(topology or ()),
                run_dir=where,
                start=start,
                engine=on,
            )
        )
    from harness.proving.prove import MINIATURES, Request, plans

    part = _part(whole)
    if readme and (fault or k or dtype == "auto"):
        raise UsageError(
            "the README shows runs of all faults only, in a dtype that has a name",
            next_step="leave out --fault, -k and --dtype auto, or --readme",
        )
    request = Request(
        stacks=tuple(stack or MINIATURES),
        faults=tuple(fault or ()),
        expression=k or "",
        run_dir=where,
        start=start,
        engine=on,
        dtype=dtype,
        cuda_graphs=cuda_graphs,
        batch_invariant=batch_invariant,
        ledger=beside_ledger,
        whole=part,
        jobs=jobs,
        command=_typed(),
    )
    raise typer.Exit(_prove(request, plans(request), readme=readme))


def _part(text: str) -> tuple[int, int]:
    """K and N of "K/N". Raises UsageError unless 1 ≤ K ≤ N."""
    first, _, every = text.partition("/")
    if not (first.isdecimal() and every.isdecimal() and 1 <= int(first) <= int(every)):
        raise UsageError(f"--whole {text} is no part of a whole", next_step="give K/N with K from 1 to N, such as 2/3")
    return int(first), int(every)


def _prove_mutants(resume: Path | None, **asked: Any) -> int:
    """Drive mutants, write the reports, show the summary. Returns the exit status."""
    from harness.machine.progress import console_progress
    from harness.proving.mutants import Request, prove_mutants
    from reports import mutants

    if not asked["stacks"]:
        raise UsageError("--mutants needs a stack", next_step="add --stack; `parity targets` lists them")
    request = Request(earlier=tuple(mutants.read(resume)) if resume else (), command=_typed(), **asked)
    with _terminable():  # finished results are written
        finished = prove_mutants(request, console_progress(), _told)
    report = mutants.write_all(finished.run, finished.folder)
    typer.echo("\n".join(line for proof in finished.run.proofs for line in mutants.summary(proof)))
    typer.echo(f"report: {report}")
    if finished.error is not None:
        raise finished.error
    return finished.run.exit_status


def _prove(request: Request, planned: Sequence[Plan], *, readme: bool) -> int:
    """Drive, write the reports, show the summary. Returns the exit status."""
    from harness.machine.progress import console_progress, counted
    from harness.proving.prove import prove, told
    from reports import kill_figures, kill_matrix, kill_matrix_terminal

    steps = sum(len(one.faults) + 1 for one in planned)
    bar = all(one.inline for one in planned)
    with _terminable(), counted("proving", steps, bar=bar) as done:  # finished results are written
        run = prove(request, planned, console_progress(), lambda *news: done(told(*news)))
    report = kill_matrix.write_all(run.matrix, run.folder)["kill_matrix.html"]
    kill_matrix_terminal.show(run.matrix, report=report)
    if run.error is not None:
        raise run.error
    if readme:
        kill_figures.renew(PROJECT / "README.md", run.matrix)
    return run.matrix.exit_status


@app.command()
def targets() -> None:
    """List the stacks that can be driven, with the capabilities that each declares.

    \b
    Example:
      parity targets
    """
    from harness.machine.targets import registry

    for target in registry().values():
        home = (
            "your checkout (--checkout PATH) or interpreter (--python PATH)"
            if target.local
            else f"environment {target.environment}"
        )
        home = "nothing but Python, driven in the driver's own process" if target.inline else home
        typer.echo(f"{target.name}\n    {target.about}\n    {home}\n    {', '.join(sorted(target.capabilities))}")


@app.command()
def contract() -> None:
    """Print the contract (Markdown): every promise with its id, level and source, every scenario, every check with its fault.

    \b
    Examples:
      parity contract
      parity contract > contract.md
    """
    from harness.running.catalogue import declared
    from harness.suite.plan import load_plan
    from reports.catalogue import catalogue

    typer.echo(catalogue(declared(), load_plan()), nl=False)


@app.command(name="concessions")
def list_concessions(
    stacks: Annotated[list[str] | None, typer.Argument(metavar="[TARGET]...", help="Default: every stack.")] = None,
) -> None:
    """List the places where the suite gives way because a stack differs, and the differences that each place can hide.

    \b
    Examples:
      parity concessions
      parity concessions skyrl-0.2.0:http
    """
    from harness.machine.targets import known, real_stacks
    from harness.suite.concessions import load, of_stacks

    found = load()
    chosen = of_stacks(found, real_stacks(known(name).name for name in stacks)) if stacks else found
    for one in chosen:
        typer.echo(
            f"{one.id} ({one.kind}): {one.what}\n    {one.name}, {one.place}; for {', '.join(one.stacks)}\n    {one.why}"
        )
        typer.echo(
            f"    hides: {one.hides or 'nothing'}" + (f"\n    take back: {one.take_back}" if one.take_back else "")
        )
    typer.echo(f"\n{len(chosen)} concessions, {sum(bool(one.hides) for one in chosen)} of them can hide a difference")


@app.command()
def topologies() -> None:
    """List the topologies: how engines are started and where they live. `parity run --topology NAME` selects one.

    \b
    Example:
      parity topologies
    """
    from harness.contract.topology import names, started_by_default, topology
    from harness.running.catalogue import declared

    for name in names():
        one = topology(name)
        waves = sorted({s.wave for s in declared().values() if name in s.topologies})
        shown = (
            ", ".join(f"{wave}{'' if started_by_default(name, wave) else ' if asked for'}" for wave in waves) or "none"
        )
        typer.echo(f"{name}\n    {one.about}\n    {one.world_size} workers; waves {shown}")


@app.command()
def setup(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[TARGET]...", help="Default: all that have an environment.")
    ] = None,
    *,
    engine: Engine = "auto",
    python: Annotated[Path | None, typer.Option(metavar="PATH", help="Python 3.12 to make them with.")] = None,
    checkout: Checkouts = None,
    recreate: Annotated[bool, typer.Option("--recreate", help="Remove them first.")] = False,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Also make this model: smollm2.")] = None,
    download: Annotated[
        Path | None,
        typer.Option(metavar="KIT", help="Only put all packages into this folder, for a machine without an index."),
    ] = None,
    offline: Annotated[
        Path | None, typer.Option(metavar="KIT", help="Take all packages from this folder; use no network.")
    ] = None,
) -> None:
    """Make and check the environments of targets before the first run.

    \b
    All that the default run needs:
      parity setup
    Replace a broken one:
      parity setup skyrl-0.2.0:http --recreate
    The environment of a checkout:
      parity setup local:http --checkout ~/SkyRL
    The model of `parity run --model smollm2` as well:
      parity setup --model smollm2
    For a GPU machine without a package index, on a machine with an index and the same platform:
      parity setup --download kit --engine cuda skyrl-0.2.0:legacy skyrl-0.2.0:http reference
    Then on the GPU machine, with copies of the kit and this project:
      pip install --no-index --find-links kit -e '.[test]'
      parity setup --offline kit --engine cuda skyrl-0.2.0:legacy skyrl-0.2.0:http reference
    """
    from harness.driving import models
    from harness.machine import checkouts, environments
    from harness.machine.environments import detect_engine
    from harness.machine.progress import console_progress
    from harness.machine.targets import known, needs_of, of_local, registry, resolve

    chosen = [known(name) for name in names] if names else [t for t in registry().values() if t.environment]
    _check_targets([target.name for target in chosen], checkout=checkout or ())
    trees = [resolve(t.name, {}, of_local("--checkout", checkout or ())) for t in chosen if t.local and checkout]
    if trees and (download or offline):
        raise UsageError(
            "a checkout's requirements are resolved with a package index",
            next_step="leave --download and --offline out",
        )
    if local := [target.name for target in chosen if target.environment is None and not (target.local and checkout)]:
        raise UsageError(
            f"{', '.join(local)} has no environment to make",
            next_step="a local target takes your checkout (--checkout) or your interpreter in `parity run`, a miniature needs none",
        )
    if download is not None and (offline is not None or recreate):
        raise UsageError("--download makes no environment", next_step="leave --offline and --recreate out")
    if offline is not None and not offline.is_dir():
        raise UsageError(
            f"there is no kit {offline}", next_step="make it with `parity setup --download KIT`, and copy it here"
        )
    on = _fixed(engine) or detect_engine()
    wanted = list(dict.fromkeys(target.environment for target in chosen if target.environment))
    if download is not None:
        locks = [environments.requirement_file(environment, on) for environment in wanted]
        environments.download([*locks, *models.packages(model)], download, python=python)
        typer.echo(f"{on}: {download}")
        return
    for environment in wanted:
        made = environments.ensure(environment, on, root=PROJECT, python=python, recreate=recreate, kit=offline)
        typer.echo(f"{environment}-{on}: {made}")
    for tree in trees:
        made = checkouts.environment(
            needs_of(tree, on), on, root=PROJECT, progress=console_progress(), python=python, recreate=recreate
        )
        typer.echo(f"{tree.name}-{on}: {made}")
    if model is not None:
        by = environments.ensure(str(known("reference").environment), on, root=PROJECT, python=python, kit=offline)
        typer.echo(f"{model}: {models.checkpoint(model, by, console_progress(), offline)}")


@app.command()
def judge(run: Run, profile: Profile = None) -> None:
    """Judge a run's recordings again, with today's checks and ledger, and write its reports again. Drives nothing.

    \b
    Examples:
      parity judge .parity/runs/20261121-1500
      parity judge 20261121-1500 --profile upgrade
    """
    from harness.running.run import judge_run
    from reports.render import write_all

    folder = run_folder(run)
    judgement = judge_run(folder, profile=profile)
    write_all(judgement, folder)
    _show(judgement)


@app.command()
def track(
    faults: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Only these (default: all).")] = None,
    *,
    add: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            help="Take recordings from this run (repeatable), for the named faults, or for those that have none.",
        ),
    ] = None,
) -> None:
    """Judge again the faults that releases really had, with today's checks: each must be red where it was, green where it was not.

    \b
    Does today's judge still tell all of them?
      parity track
    One of them:
      parity track seeded-samples-are-copies
    Recordings for a new row of scenarios/track_record.toml, from runs of both releases:
      parity track my-fault --add .parity/runs/monday --add .parity/runs/tuesday

    It drives nothing and takes seconds. Exit status: 0 each release that has its fault is told from the one that does not; 1 one is
    not; 2 a named error.
    """
    from harness.running.track import Runs, chosen, recorded, replay

    rows = chosen(faults or [])
    if add:
        runs = Runs(run_folder(name) for name in add)
        for row in rows if faults else [row for row in rows if not recorded(row)]:
            runs.add(row)
            typer.echo(f"recorded {row.id}", err=True)
    replayed = [replay(row) for row in rows]
    for one in replayed:
        typer.echo(f"{'ok ' if one.problem is None else 'RED'}  {one.fault.told}\n     {one.problem or one.fault.met}")
    told = sum(one.problem is None for one in replayed)
    typer.echo(f"{told} of {len(replayed)} faults are told from the release that does not have them")
    raise typer.Exit(int(told < len(replayed)))


@app.command()
def compare(
    baseline: Annotated[Path, typer.Argument(help="A recording, or a run's folder.")],
    candidate: Annotated[Path, typer.Argument(help="A recording, or a run's folder.")],
    out: Annotated[Path | None, typer.Option(help="Also write the reports into this folder.")] = None,
    profile: Profile = None,
) -> None:
    """Compare two recordings of any origin: yesterday's against today's, a GPU node's against another's.

    \b
    Examples:
      parity compare before/legacy.jsonl after/http.jsonl
      parity compare .parity/runs/monday .parity/runs/tuesday --out comparison
    """
    from harness.running.run import compare_recordings
    from reports.render import write_all

    for path in (baseline, candidate):
        if not path.exists():
            raise UsageError(
                f"there is no recording {path}", next_step="name a .jsonl file or a folder of .parity/runs"
            )
    judgement = compare_recordings(baseline, candidate, profile=profile)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_all(judgement, out)
    _show(judgement)


@app.command()
def report(
    runs: Runs,
    *,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the runs into one, judge it and report it.")] = False,
    run_dir: RunDir = None,
    all_pictures: Annotated[bool, typer.Option("--all-pictures", help="A timeline of every scenario.")] = False,
    readme: Annotated[bool, typer.Option("--readme", help="Put the plan's table into README.md.")] = False,
    profile: Profile = None,
) -> None:
    """Render a run's reports again from its report.json. Judges nothing; recordings, if present, only give the pictures.

    With --merge: merge shards, the runs of the same stacks by separate jobs, and judge them as one run from their
    recordings. Shards that do not belong together, overlap or are not whole are refused, and nothing is written.

    \b
    Examples:
      parity report .parity/runs/20261121-1500
      parity report 20261121-1500 --readme
      parity report --merge shards/wave-1 shards/wave-2 --run-dir whole
    """
    from harness.running.merge import merging
    from harness.running.run import judge_run
    from harness.suite.plan import load_plan
    from reports import plan_figures
    from reports.render import write_all

    if merge:
        folder = _folder(run_dir)
        with merging([run_folder(name) for name in runs], folder) as merged:
            judgement = judge_run(merged, profile=profile)
            write_all(judgement, merged, all_pictures=all_pictures)
    elif len(runs) > 1 or run_dir is not None:
        raise UsageError(
            "without --merge one run is rendered, in its own folder", next_step="add --merge to merge runs"
        )
    elif profile is not None:
        raise UsageError(
            "without --merge nothing is judged, so --profile has no effect",
            next_step=f"parity judge {runs[0]} --profile {profile}",
        )
    else:
        folder = run_folder(runs[0])
        judgement = _read_report(folder)
        write_all(judgement, folder, all_pictures=all_pictures)
    if readme:
        plan_figures.renew(PROJECT / "README.md", judgement, load_plan())
    _show(judgement, report=folder / "report.html")


@app.command(name="ledger")
def used_entries(
    runs: Runs,
    all_driven: Annotated[
        bool, typer.Option("--all", help="The runs cover everything: an entry about nothing that they judged is red.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the figures of each entry to this file.")
    ] = None,
) -> None:
    """Add up what each entry of the ledger explains in several runs. An entry that was judged and explains nothing is red.

    One run with a selection cannot say that an entry is needed nowhere; all runs together can. Reads each run's report.json.
    Shows the entries that were judged; with --all, the others too.

    \b
    Examples:
      parity ledger .parity/runs/monday .parity/runs/tuesday
      parity ledger .parity/runs/ci-* --json ledger.json

    Exit status: 0 every entry that was judged explains something; 1 an entry explains nothing, or with --all nothing about it
    was judged; 2 a named error.
    """
    import msgspec

    from harness.judging.ledger import load, uses

    found = uses(load(), {name: _read_report(run_folder(name)).verdicts for name in runs})
    stale, unjudged = [use for use in found if use.stale], [use for use in found if not use.judged]
    shown = found if all_driven else [use for use in found if use.judged]
    width = max((len(use.name) for use in shown), default=0)
    typer.echo(f"{'entry (target)':<{width}}  explains  judged  runs")
    for use in shown:
        said = "" if use.judged else "nothing about it was judged"
        in_runs = f"{len(use.runs)} of {len(runs)}"
        typer.echo(f"{use.name:<{width}}  {use.explained:>8}  {use.judged:>6}  {in_runs:<8}{said}".rstrip())
    typer.echo(
        f"{len(found)} entries: {len(found) - len(stale) - len(unjudged)} explain something, {len(stale)} were judged and explain "
        f"nothing, about {len(unjudged)} nothing was judged"
    )
    for use in stale:
        typer.echo(f"red: {use.name} explains nothing (judged: {use.judged}): remove it", err=True)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode({"runs": runs, "entries": found})) + b"\n")
    raise typer.Exit(int(bool(stale) or (all_driven and bool(unjudged))))


@app.command()
def doctor(engine: Engine = "auto") -> None:
    """Say what this machine can run, what runs on it now, and how to fix what it lacks. Changes nothing.

    \b
    Example:
      parity doctor
    Exit status 1 if something must be fixed before a run can work.
    """
    from harness.machine.doctor import examine

    found = examine(PROJECT, _fixed(engine))
    for diagnosis in found:
        typer.echo(f"{diagnosis.status:<5} {diagnosis.name}: {diagnosis.finding}")
        if diagnosis.next_step:
            typer.echo(f"      next: {diagnosis.next_step}")
    raise typer.Exit(int(any(diagnosis.status == "fail" for diagnosis in found)))


def run_folder(run: str) -> Path:
    """The folder of a run, by path or by name. Raises UsageError naming the latest ones."""
    from harness.records.run_folder import RUNS, find_run

    if (folder := find_run(run, PROJECT)) is not None:
        return folder
    runs = PROJECT / RUNS
    there = sorted(runs.iterdir(), key=lambda path: path.stat().st_mtime)[-3:] if runs.is_dir() else []
    named = (
        f"the latest are {', '.join(path.name for path in there)}" if there else "none has been made yet: `parity run`"
    )
    raise UsageError(f"there is no run {run!r}", next_step=named)


def _typed() -> str:
    """The command as it was typed."""
    return shlex.join(["parity", *sys.argv[1:]])


def _told(line: str) -> None:
    typer.echo(line, err=True)


def _folder(run_dir: Path | None) -> Path:
    """Where a command writes: into this folder, or else into a new one."""
    from harness.records.run_folder import new_run_dir

    return run_dir.expanduser().absolute() if run_dir is not None else new_run_dir(PROJECT)


def _fixed(engine: EngineChoice) -> Literal["cpu", "cuda"] | None:
    """The requested engine; None if the machine decides."""
    return None if engine == "auto" else engine


def _read_report(folder: Path) -> Judgement:
    """A run's judgement. Raises UsageError for a run without a report."""
    from reports.json_report import read_report

    source = folder / "report.json"
    if not source.is_file():
        raise UsageError(f"{folder} has no report.json", next_step=f"judge its recordings first: parity judge {folder}")
    return read_report(source)


def _show(judgement: Judgement, report: Path | None = None) -> None:
    from reports.terminal import show

    show(judgement, report=report)
    raise typer.Exit(judgement.exit_status)


def _check_targets(names: Sequence[str], python: Sequence[str] = (), checkout: Sequence[str] = ()) -> None:
    from harness.machine.targets import known

    local = [name for name in names if known(name).local]
    for option, given, what in (("--python", python, "interpreter"), ("--checkout", checkout, "source tree")):
        if given and not local:
            raise UsageError(
                f"{option} names the {what} of a local target, but none is selected",
                next_step="name a `local:` target of `parity targets`",
            )


def _of_local(option: str, given: Sequence[str] | None) -> list[str]:
    """The values of an option of local targets, with absolute paths."""
    from harness.machine.targets import of_local

    return [f"{name}={path}" if name else str(path) for name, path in of_local(option, given or ()).items()]


def _arguments(options: dict[str, Any]) -> list[str]:
    """The given options as pytest's arguments. A list repeats its option, a path is absolute."""
    given: list[str] = []
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            match one:
                case None | False | "":
                    pass
                case True:
                    given.append(name)
                case Path():
                    given.append(f"{name}={one.expanduser().absolute()}")
                case _:
                    given += [name, str(one)] if name in ("-m", "-k") else [f"{name}={one}"]
    return given


if __name__ == "__main__":
    main()
