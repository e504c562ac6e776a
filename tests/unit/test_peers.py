"""Tests of benchmarks/peers.py, the comparison with torch and torchft over a slow network: its loops, its model that
sleeps, its processes and its table."""

from __future__ import annotations

import importlib
import sys
import time
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from llmtrain.compare.cluster.hosts import loopback_cluster
from llmtrain.config import OptimSection, ParallelSection
from llmtrain.model import build, model_config
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.engine_parts import EngineParts
from llmtrain.parallel.single_device import SingleDeviceEngine
from llmtrain.recipe_check import check
from llmtrain.recipe_diff import differences
from tests import ROOT
from tests.distributed.pool import RankPool

emulated_model, hosts, loops = map(importlib.import_module, ("emulated_model", "hosts", "loops"))
peer_loops, peer_measure, peers = map(importlib.import_module, ("peer_loops", "peer_measure", "peers"))
table = importlib.import_module("table")

TASK = {"replicas": 4, "every": 20, "rounds": 1, "step_ms": 600.0, "common": ["optim.lr=0.002"], "overrides": None}
EVERY, STEPS, CLIP, VOCABULARY = 3, 8, 0.5, 7


# ---- the peers' loops, compared with steps computed by hand


class SmallModel(nn.Module):
    """Model of two layers in float64, with equal weights on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.embedding, self.head = drawn(VOCABULARY, 4), drawn(VOCABULARY, 4)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.embedding[inputs] @ self.head.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def rate_at(step: int) -> float:
    return 0.5 / step


def _weights_after_each_step(loop: str) -> list[list[torch.Tensor]]:
    model, steps = SmallModel(), iter(range(1, STEPS + 1))
    job = peer_loops.Job(
        model=model,
        batches=lambda: [batch_of(dist.get_rank(), next(steps))],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=99.0),
        lr=rate_at,
        clip_norm=CLIP,
        every=EVERY,
    )
    training, weights = peer_loops.LOOPS[loop](job), []
    for step in range(1, STEPS + 1):
        training.step(step)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    training.close()
    dist.barrier()
    return weights


def by_hand(averages_gradients: bool, averaged_after: set[int]) -> list[list[list[torch.Tensor]]]:
    """Return the weights of two replicas, by rank and step, under SGD on clipped gradients. Gradients are averaged in all
    steps or in none, and weights after the given steps."""
    models, weights = [SmallModel(), SmallModel()], [[], []]
    for step in range(1, STEPS + 1):
        gradients = []
        for rank, model in enumerate(models):
            batch = batch_of(rank, step)
            loss = model(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        if averages_gradients:
            gradients = [[(a + b) / 2 for a, b in zip(*gradients, strict=True)]] * 2
        with torch.no_grad():
            for model, own in zip(models, gradients, strict=True):
                norm = sum(gradient.square().sum() for gradient in own).sqrt()
                for parameter, gradient in zip(model.parameters(), own, strict=True):
                    parameter -= rate_at(step) * min(1.0, CLIP / (norm + 1e-6)) * gradient
            if step in averaged_after:
                for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    mean = (first + second) / 2
                    first.copy_(mean)
                    second.copy_(mean)
        for rank, model in enumerate(models):
            weights[rank].append([parameter.detach().clone() for parameter in model.parameters()])
    return weights


@pytest.mark.parametrize(
    ("loop", "averages_gradients", "averaged_after"),
    [("alone", False, set()), ("ddp", True, set()), ("ddp_small", True, set()), ("post_local_sgd", False, {1, 4, 7})],
)
def test_loops_of_torch_take_the_steps_of_their_methods(
    loop: str, averages_gradients: bool, averaged_after: set[int], ranks: RankPool
) -> None:
    found = ranks.run(_weights_after_each_step, loop, world_size=2, timeout=60)
    torch.testing.assert_close(found, by_hand(averages_gradients, averaged_after), rtol=1e-10, atol=1e-12)


# ---- the model that sleeps


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the sleeps of the emulated model, which take no time here."""
    taken: list[float] = []
    clock = loops.Pace(lambda: sum(taken), taken.append)
    monkeypatch.setattr(emulated_model, "Pace", lambda: clock)
    return taken


def test_the_emulated_model_takes_its_time_block_by_block(naps: list[float]) -> None:
    recipe = peer_measure.recipe_of(TASK | {"loop": "alone"})
    alone = Comms(None)
    mesh = SimpleNamespace(device=torch.device("cpu"), replicas=1, replica_comms=alone, shard_comms=alone)
    model = build(model_config(recipe.model, 2048), recipe.parallel.loss_chunk)
    parallel = ParallelSection(precision="fp32")
    engine = SingleDeviceEngine(EngineParts(model=model, mesh=mesh, parallel=parallel, optim=OptimSection(), seed=0))
    emulated_model.emulate(model, 0.6, seed=3)
    hooks: list[tuple[int, int]] = []
    engine.register_block_hook(lambda index: hooks.append((index, len(naps))))
    there: list[int] = []
    for index, parameters in enumerate(engine.masters):
        parameters[0].register_post_accumulate_grad_hook(lambda _, index=index: there.append(index))
    engine.forward_backward([torch.zeros(2, 9, dtype=torch.int64)])
    blocks = len(engine.blocks)
    assert hooks == [(index, index) for index in range(blocks)]  # each hook is called before its block sleeps
    assert there == list(reversed(range(blocks)))
    assert sum(naps) == pytest.approx(0.6) and sum(naps[:blocks]) == pytest.approx(0.2)
    assert naps[0] == naps[-1] == 0  # the embedding has no matrix products
    assert naps[1:blocks] == pytest.approx([naps[1]] * 4 + [naps[1] * 192 * 2048 / (4 * 192**2 + 3 * 192 * 512)])
    norms = [master.grad.norm() for masters in engine.masters for master in masters]
    assert len(norms) == 39 and min(norms) > 0
    engine.step(1e-3)
    assert not engine.skipped


def test_a_sleep_that_takes_too_long_shortens_the_next() -> None:
    now, naps = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        naps.append(seconds)
        now += seconds + 0.25

    clock = loops.Pace(lambda: now, sleep)
    for seconds in (1.0, 1.0, 0.125, 1.0):
        clock.sleep(seconds)
    assert naps == [1.0, 0.75, 0.0, 0.625]


# ---- processes on hosts


def test_bytes_of_an_interface() -> None:
    devices = (
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed\n"
        "    lo: 10 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0\n"
        "  eth0:111 2 0 0 0 0 0 0 333 4 0 0 0 0 0 0\n"
    )
    assert (hosts.sent_by("eth0", devices), hosts.sent_by("lo", devices)) == (333, 20)


@pytest.mark.deep
def test_hosts_answer_in_order_and_are_replaced_after_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys, time; sys.path.append({str(ROOT / 'benchmarks')!r}); from hosts import serves\n"
        "def measure(task, member):\n"
        "    if task['what'] == 'failing' and member.rank == 1: raise ValueError('broken  as\\nasked')\n"
        "    if task['what'] == 'dying' and member.rank == 0: os._exit(3)\n"
        "    if task['what'] == 'slow': time.sleep(60)\n"
        "    member.barrier('done')\n"
        "    return [task['what'], member.rank, member.size, member.sent(), os.getpid()]\n"
        "serves(measure)\n"
    )
    with (
        loopback_cluster(2) as two,
        (tmp_path / "log").open("w") as log,
        hosts.HostRanks(str(script), two, log) as ranks,
    ):
        first, again = ranks.ask({"what": "a"}, 60), ranks.ask({"what": "b"}, 60)
        assert [answer[:4] for answer in first] == [["a", 0, 2, None], ["a", 1, 2, None]]
        assert [answer[0] for answer in again] == ["b", "b"]
        pids = {answer[4] for answer in first}
        assert pids == {answer[4] for answer in again}
        with pytest.raises(loops.RowFailed, match=r"failed on rank 1: broken as asked"):
            ranks.ask({"what": "failing"}, 60)
        assert not pids & {answer[4] for answer in ranks.ask({"what": "c"}, 60)}
        with pytest.raises(loops.RowFailed, match=r"failed on rank 0: its process has died"):
            ranks.ask({"what": "dying"}, 60)
        started = time.monotonic()
        with pytest.raises(loops.RowFailed, match=r"took longer than 1 s on rank 0, 1"):
            ranks.ask({"what": "slow"}, 1)
        assert time.monotonic() - started < 59
    assert "broken  as" in (tmp_path / "log").read_text()


# ---- what is measured


def test_our_loops_differ_in_sync_alone_and_can_be_trained() -> None:
    recipes = {
        loop: peer_measure.recipe_of(TASK | {"loop": loop, "overrides": keys})
        for loop, (_, keys) in peer_measure.OURS.items()
    }
    peer = peer_measure.recipe_of(TASK | {"loop": "ddp"})
    assert peer.optim.lr == 0.002
    for loop, recipe in recipes.items():
        check(recipe, 4)
        assert not differences(peer, recipe, ignore=("sync",)), loop
        assert recipe.sync.warmup_steps == 0
        if loop == "synchronous":
            assert recipe.sync.period.averages_gradients
        else:
            assert recipe.sync.period.every == (10**9 if loop == "never" else 20)
    assert recipes["diloco"].sync.outer == recipes["diloco"].sync.outer.model_copy(update={"lr": 0.7, "momentum": 0.9})
    streaming = [recipes[loop].sync for loop in ("streaming_fp32", "streaming_int4")]
    assert [sync.wire.kind for sync in streaming] == ["fp32", "int4"]
    assert {(sync.schedule.steps, sync.schedule.fragments, sync.schedule.alpha) for sync in streaming} == {(4, 4, 0.5)}


def test_a_row_of_ones_own_keeps_its_fragments() -> None:
    keys = ["sync.method=streaming_diloco", "sync.schedule.steps=2", "sync.schedule.fragments=3"]
    recipe = peer_measure.recipe_of(TASK | {"loop": "row 1", "overrides": keys})
    assert (recipe.sync.schedule.steps, recipe.sync.schedule.fragments) == (2, 3)
    assert [peer_measure.delay_of(every) for every in (8, 20, 24, 100)] == [1, 4, 5, 5]


def test_minimum_bytes() -> None:
    def minimum(loop: str, keys: list[str] | None = None) -> float | None:
        return peers.minimum_bytes(TASK | {"loop": loop, "overrides": keys}, parameters=1000)

    once = 2 * 3 / 4 * 1000 * 4
    assert minimum("ddp_small") == minimum("ddp")
    assert (minimum("ddp"), minimum("post_local_sgd"), minimum("torchft_streaming")) == (20 * once, once, once)
    assert minimum("synchronous", peer_measure.OURS["synchronous"][1]) == 20 * once
    assert minimum("streaming_int4", peer_measure.OURS["streaming_int4"][1]) == once / 4 * (1 / 2 + 4 / 128)
    assert minimum("row 1", ["sync.method=diloco", "sync.period.every=5"]) == 4 * once
    assert (
        minimum("row 1", ["sync.method=local_sgd", "sync.period.every=41"])
        == 0
        == minimum("never", peer_measure.OURS["never"][1])
    )
    assert minimum("row 1", ["sync.method=wagma"]) is None
    rounded = [*peer_measure.OURS["synchronous"][1], "sync.wire.kind=bf16", "sync.wire.gradients=true"]
    assert minimum("row 1", rounded) == 10 * once


def test_the_command_line_makes_tasks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def options(*words: str):
        monkeypatch.setattr(sys, "argv", ["peers.py", *words])
        return peers.options_of(table.parser("What it does."))

    chosen = options(
        "--loops",
        "edit",
        "ddp",
        "--row",
        "EDiT, int8",
        "sync.method=edit",
        "sync.wire=int8",
        "--real",
        "--override",
        "optim.lr=0.1",
    )
    tasks, names = peers.tasks_of(chosen)
    assert names == {"alone": "alone", "ddp": "torch DDP", "edit": "llmtrain EDiT", "row 1": "EDiT, int8"}
    overrides = {loop: task["overrides"] for loop, task in tasks.items()}
    own = ["sync.method=edit", "sync.wire=int8"]
    assert overrides == {"alone": None, "ddp": None, "edit": ["sync.method=edit"], "row 1": own}
    assert {(task["step_ms"], *task["common"]) for task in tasks.values()} == {(None, "optim.lr=0.1")}
    assert options().bandwidth == [100, 300, None] and options("--bandwidth", "50", "none").bandwidth == [50, None]
    for words, wrong in (
        (["--every", "10"], "--every is 10, expected a multiple of 4"),
        (["--row", "EDiT"], "--row needs a name and at least one KEY=VALUE"),
        (["--bandwidth", "-3"], "'-3' is not a bandwidth"),
    ):
        with pytest.raises(SystemExit):
            options(*words)
        assert wrong in capsys.readouterr().err
    with pytest.raises(ArgumentTypeError):
        peers.bandwidth_option("nan")


def test_rows_are_relative_to_the_same_turn_alone() -> None:
    def answers(seconds: float, sent: float | None = 1.6e6, loss: float | None = None) -> list[dict]:
        return [{"tokens": 1000, "seconds": seconds, "bytes": sent, "loss": loss, "parameters": 10}] * 2

    turns = [
        {"alone": answers(1.0, 0.0), "edit": answers(1.25, loss=2.5)},
        {"alone": answers(2.0, 0.0), "edit": answers(4.0, loss=2.5), "ddp": answers(8.0)},
        {"edit": answers(9.0, loss=2.5), "ddp": answers(10.0)},  # without `alone` there is nothing to compare with
    ]
    names = {"alone": "alone", "ddp": "torch DDP", "edit": "llmtrain EDiT", "co2": "never measured"}
    rows = peers.rows_of(100.0, names, turns, {"ddp": 1e6, "edit": None})
    assert rows == [
        ("100 Mbit/s", "alone (2 of 3 turns)", "1,500", "100.0 %", "100.0 to 100.0", "0.00", "", "", ""),
        ("100 Mbit/s", "torch DDP (1 of 3 turns)", "250", "25.0 %", "25.0 to 25.0", "1.60", "1.00", "+60.0 %", ""),
        ("100 Mbit/s", "llmtrain EDiT (2 of 3 turns)", "1,050", "65.0 %", "50.0 to 80.0", "1.60", "", "", "2.5000"),
        ("100 Mbit/s", "never measured (0 of 3 turns)", *[""] * 7),
    ]
    assert all(len(row) == len(peers.COLUMNS) for row in rows)
    [never] = peers.rows_of(None, {"ddp": "never"}, turns[1:2], {"ddp": 0.0})
    assert never[1] == "never", "the name has no number of turns if none is missing"
    assert never[5:8] == ("1.60", "0.00", "")
    [unlimited] = peers.rows_of(None, {"alone": "alone"}, [{"alone": answers(1.0, None)}], {})
    assert unlimited[0] == "no limit" and unlimited[5:8] == ("", "", "")


def test_a_loop_that_fails_is_left_out_of_its_turn(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def ask(task: dict, patience: float) -> list[dict]:
        asked.append(task["loop"])
        if asked == ["alone", "ddp"]:
            raise loops.RowFailed("measuring", "failed on rank 2: lost")
        return [task]

    tasks = {loop: {"loop": loop} for loop in ("alone", "ddp")}
    turns = peers.take_turns(SimpleNamespace(ask=ask), tasks, 2, "no limit")
    assert asked == ["alone", "ddp", "ddp", "alone"]
    assert [sorted(turn) for turn in turns] == [["alone"], ["alone", "ddp"]]
    assert "failed on rank 2: lost" in capsys.readouterr().err


@pytest.mark.deep
def test_loops_on_hosts_start_equal_and_send_what_they_should(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    documents = (f"Text {number}, for a loss that falls. " * 100 for number in range(60))
    text.write_text("<|endoftext|>".join(documents))
    data = [f"data.source={text}", f"data.cache_dir={tmp_path}", "data.tokenizer=train:300", "eval.tokens=5000"]
    shape = ["--replicas", "2", "--bandwidth", "none", "--every", "8", "--turns", "1", "--real"]
    loops_of_torch_and_ours = ["--loops", "ddp", "synchronous", "diloco", "torchft_diloco"]
    words = [*loops_of_torch_and_ours, *shape, "--override", *data, "model.config.vocab_size=300", "optim.lr=1.0e-3"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *words])
    monkeypatch.setattr(peer_loops, "torchft_release", lambda: "")
    found = {}
    monkeypatch.setattr(peers, "show", lambda title, columns, rows, words: found.update({row[1]: row for row in rows}))
    peers.main()
    assert "torchft is not installed here" in capsys.readouterr().out
    assert list(found) == ["alone", "torch DDP", "llmtrain synchronous", "llmtrain DiLoCo"]
    losses = {name: float(row[-1]) for name, row in found.items()}
    assert losses["llmtrain synchronous"] == pytest.approx(losses["torch DDP"], abs=2e-3)
    assert len(set(losses.values())) >= 3 and all(loss < 4.5 for loss in losses.values())
    if found["alone"][5]:  # the hosts have network cards of their own
        sent = {name: float(row[5]) / float(row[6]) for name, row in found.items() if name != "alone"}
        assert float(found["alone"][5]) < 0.05 and all(1.0 <= share < 1.1 for share in sent.values()), sent
