"""SkyRL's own fully asynchronous trainer over an adapter's client. Written for skyrl 0.1.0 to 0.4.0.

Its loop, its workers, its staleness manager, its pause and resume and its generator are SkyRL's. What it does with accelerators of
its own it asks the caller for: a training step, and weights in the engines.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import queue
import threading
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from backends.skyrl import gym, lives
from harness.contract import gym_rule
from harness.contract.messages import GymRequest, RolloutGroup, TrainerRunRequest, TrainerWants

LAST_S = 10.0
"""Time for the workers of a run that is given up."""
_OF_RUN: ContextVar[Run | None] = ContextVar("_OF_RUN", default=None)
"""The run in which a task was begun: a task inherits it from the one that begins it."""


class _GivenUpError(Exception):
    """The run was given up by its caller."""


class NotDoneError(Exception):
    """What the trainer asked for could not be done."""


class _ExitedError(Exception):
    """In place of the process's exit."""


class Run:
    """One run. `threaded`: the trainer sends weights by a call that blocks its loop, so that it needs a thread of its own."""

    def __init__(self, *, threaded: bool) -> None:
        self._wants: queue.SimpleQueue[TrainerWants] = queue.SimpleQueue()
        self._go: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = lives.Thread() if threaded else None
        self._task: asyncio.Task[None] | None = None
        self._replaced = ExitStack()
        self._client: Any = None
        self.workers: list[asyncio.Task[Any]] = []
        """The trainer's own tasks. Nobody in SkyRL awaits those that fail, which Python would tell within a later scenario."""
        self._over = threading.Event()
        self._evaluated: list[int] = []
        """The steps under which evaluations were logged."""

    async def start(self, cfg: Any, client: Any, tokenizer: Any, request: TrainerRunRequest, checkpoints: Path) -> None:
        """Make the trainer, whose checkpoints are in this folder, and begin its run."""
        self._client = client
        trainer = await asyncio.to_thread(self._made, cfg, client, tokenizer, request, checkpoints)
        run = self._run(trainer)
        ours = run if self._thread is None else self._thread.run(lambda: run, (), {})
        self._task = asyncio.create_task(ours)

    async def _run(self, trainer: Any) -> None:
        ended = None
        _OF_RUN.set(self)
        try:
            await trainer.train()
        except _GivenUpError:
            return
        except Exception as e:  # noqa: BLE001 - whatever ends the run is told to the caller
            ended = f"{type(e).__name__}: {e}"
        finally:
            await self._cancel_the_rest()
            self._over.set()
        self._tell(what="nothing", ended=ended)

    async def _cancel_the_rest(self) -> None:
        """Cancel every task that the run has left behind, and wait for it, as asyncio.run does at the end of SkyRL's process.

        A rollout that is only forgotten goes on beside the next scenario. Once its loop is closed it is collected, and its `finally`
        runs in whatever loop runs then: it begins a connection there that nobody ends, and the loop waits for the next one for ever.
        """
        begun = asyncio.all_tasks() - {asyncio.current_task()}
        # get_context() is new in Python 3.12, which every environment of a stack has
        ours = [task for task in begun if task.get_context().get(_OF_RUN) is self]  # type: ignore[attr-defined]
        rest = [task for task in ours if not _of_an_engine(task)]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, *self.workers, return_exceptions=True)

    async def wants(self, within_s: float) -> TrainerWants:
        """What the trainer asks for next; "unknown" if it asks for nothing in time."""
        try:
            return await asyncio.to_thread(self._wants.get, timeout=within_s)
        except queue.Empty:
            return TrainerWants(what="unknown")

    def goes_on(self, *, fails: bool) -> None:
        """The trainer has what it asked for, or it could not be done."""
        self._go.put(NotDoneError("the caller could not do it") if fails else None)

    async def end(self) -> None:
        """Give the run up, with its workers."""
        self._go.put(_GivenUpError())
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await asyncio.to_thread(self._over.wait, LAST_S)
        if self._thread is not None:
            await self._thread.run(self._client.teardown, (), {})
            self._thread.stop()
        self._replaced.close()

    def ask(self, what: Any, trainer: Any, groups: Any = ()) -> None:
        """Ask the caller, and block until it has done it."""
        self._tell(what=what, step=trainer.global_step, groups=[_group(group) for group in groups])
        if (failure := self._go.get()) is not None:
            raise failure

    def _tell(self, **what: Any) -> None:
        self._wants.put(TrainerWants(**what, evaluated=list(self._evaluated)))

    def _logs(self, metrics: dict[str, Any], step: int, **_given: Any) -> None:
        """In place of the trainer's tracker (SkyRL, Tracking.log)."""
        if any(name.startswith("eval/") for name in metrics):
            self._evaluated.append(step)

    def _exits(self, status: Any = None) -> None:
        self._tell(what="nothing", ended=f"the process exits with status {status}")
        raise _ExitedError

    def _made(self, cfg: Any, client: Any, tokenizer: Any, request: TrainerRunRequest, checkpoints: Path) -> Any:
        from skyrl.train import fully_async_trainer as shipped

        for module, name in (("os", "_exit"), ("sys", "exit")):
            if (found := getattr(shipped, module, None)) is not None:
                self._replaced.enter_context(mock.patch.object(shipped, module, _Instead(found, name, self._exits)))
        configured = _configured(cfg, request, checkpoints)
        rollouts = GymRequest(
            prompts=[],
            env_extras=[],
            max_turns=request.max_turns,
            sampling_params={
                "max_tokens": request.max_tokens,
                "logprobs": configured.generator.sampling_params.logprobs,
            },
        )
        trainer = _driven(shipped.FullyAsyncRayPPOTrainer, self)(
            cfg=configured,
            tracker=SimpleNamespace(log=self._logs, finish=lambda: None),
            tokenizer=tokenizer,
            train_dataset=[
                {"prompt": prompt, "env_class": gym_rule.ENV_CLASS, "env_extras": extras, "uid": str(number)}
                for number, (prompt, extras) in enumerate(zip(request.prompts, request.env_extras, strict=True))
            ],
            inference_engine_client=client,
            generator=_greedy(gym.generator(configured, client, tokenizer, rollouts)),
        )
        trainer.dispatch = _dispatch(self, trainer) if self._thread is not None else _Dispatch()
        return trainer


class _Instead:
    """A module with one function replaced."""

    def __init__(self, module: Any, name: str, ours: Any) -> None:
        self._module = module
        setattr(self, name, ours)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Dispatch:
    """Of SkyRL's dispatch to its workers: their part of a checkpoint, which is nothing. The policy is the caller's."""

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """There are no parameters and no optimizer to save."""

    def load_checkpoint(self, *_: Any, **__: Any) -> None:
        """There is nothing to load."""


def _of_an_engine(task: asyncio.Task[Any]) -> bool:
    """True for a task that an engine within this process began for itself, in whatever request came first."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("vllm.")


def _configured(cfg: Any, request: TrainerRunRequest, checkpoints: Path) -> Any:
    """The configuration of a run whose checkpoints are in this folder."""
    cfg = copy.deepcopy(cfg)
    trainer, generator = cfg.trainer, cfg.generator
    trainer.train_batch_size = trainer.policy_mini_batch_size = request.mini_batch_size
    trainer.fully_async.num_parallel_generation_workers = request.workers
    trainer.fully_async.max_staleness_steps = request.max_staleness_steps
    for section, key, value in (
        (trainer.fully_async, "enabled", True),
        (trainer, "enable_ray_gpu_monitor", False),  # these two watch Ray's nodes
        (generator.inference_engine, "enable_ray_prometheus_stats", False),
    ):
        if hasattr(section, key):
            setattr(section, key, value)
    trainer.epochs = request.epochs
    trainer.ckpt_path = trainer.export_path = str(checkpoints)
    trainer.ckpt_interval = 1 if request.saves or request.resumes else -1
    trainer.resume_mode = "latest" if request.resumes else "none"
    trainer.hf_save_interval = -1
    trainer.eval_interval = 1 if request.evaluates else -1
    trainer.eval_before_train = request.evaluates
    trainer.dump_eval_results = False
    generator.eval_n_samples_per_prompt = 1
    generator.eval_sampling_params.temperature = 0.0
    generator.eval_sampling_params.max_generate_length = request.max_tokens
    trainer.algorithm.policy_loss_type = "rollout_is"
    generator.n_samples_per_prompt = request.samples
    generator.batched = False
    generator.sampling_params.temperature = 0.0
    generator.sampling_params.max_generate_length = request.max_tokens
    return cfg


def _greedy(generator: Any) -> Any:
    """The generator, whose first tokens are the model's own choice. SkyRL's parameters ask for one token at least, and a greedy
    choice that would end the answer is then another."""
    shipped = generator.generate

    @functools.wraps(shipped)
    async def generate(batch: Any, **given: Any) -> Any:
        return await shipped({**batch, "sampling_params": {**batch["sampling_params"], "min_tokens": 0}}, **given)

    generator.generate = generate
    return generator


def _driven(shipped: Any, run: Run) -> Any:
    """SkyRL's trainer, which asks for what needs accelerators of its own."""

    class Driven(shipped):
        def _build_train_dataloader_and_compute_training_steps(self) -> None:
            from torchdata.stateful_dataloader import StatefulDataLoader

            self.train_dataloader = StatefulDataLoader(self.train_dataset, batch_size=1, collate_fn=list)
            self.num_steps_per_epoch = len(self.train_dataloader) // self.mini_batch_size
            self.total_training_steps = self.num_steps_per_epoch * self.cfg.trainer.epochs

        def _cleanup_old_checkpoints(self) -> None:
            """Ray's nodes would do it: all checkpoints stay."""

        def init_weight_sync_state(self) -> None:
            """The caller has joined trainer and engines."""

        def convert_generation_group_mini_batch_to_training_input(self, groups: Any, *_dropped: Any) -> Any:
            return groups

        async def _run_generate_for_a_group_loop(self, buffer: Any) -> None:
            worker = asyncio.current_task()
            assert worker is not None
            run.workers.append(worker)
            await super()._run_generate_for_a_group_loop(buffer)

        async def _run_training(self, groups: Any) -> dict[str, Any]:
            await asyncio.to_thread(run.ask, "training", self, groups)
            return {}

        async def eval(self, *given: Any, **named: Any) -> Any:
            self.eval_dataloader = [self.train_dataset[:1]]
            return await super().eval(*given, **named)

        async def async_sync_policy_weights_to_inference_engines(self) -> None:
            await asyncio.to_thread(run.ask, "weights", self)

    return Driven


def _dispatch(run: Run, trainer: Any) -> Any:
    """SkyRL's protocol of a weight sync (from 0.3.0 on), whose broadcast is the caller's."""
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

    class Dispatch(_Dispatch, WorkerDispatch):
        def __init__(self) -> None:
            self.cfg, self.colocate_all = trainer.cfg, False
            self._inference_engine_client = trainer.inference_engine_client
            self._actor_groups: dict[str, Any] = {}
            self._gpu_state: dict[str, Any] = {}
            self.last_weight_sync_seconds = None

        def _broadcast_to_inference_engines(self, *_: Any, **__: Any) -> None:
            run.ask("weights", trainer)

        def finalize_pending_saves(self, _model: str) -> None:
            """Nothing is saved."""

    return Dispatch()


def _group(group: Any) -> RolloutGroup:
    """A group as the trainer holds it (SkyRL, GeneratedOutputGroup)."""
    output = group.generator_output
    return RolloutGroup(
        uid=str(group.uid),
        begun_at=int(group.global_step_when_scheduled),
        responses=[[int(token) for token in row] for row in output["response_ids"]],
    )
