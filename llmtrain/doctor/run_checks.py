"""All checks in order, for a single process or for all ranks together."""

from __future__ import annotations

from llmtrain.config import ParallelSection, Recipe
from llmtrain.doctor.cluster_check import ClusterCheck
from llmtrain.doctor.environment import environment
from llmtrain.doctor.finding import Finding, has_problem, ok, problem
from llmtrain.doctor.findings_table import console, show
from llmtrain.doctor.interfaces import cards, listed, named_by_environment
from llmtrain.doctor.machine import machine
from llmtrain.doctor.recipe_fit import fit
from llmtrain.doctor.software import software
from llmtrain.errors import DONE, FAILED, TrainingError, UserError
from llmtrain.launch.process_count import processes_per_node
from llmtrain.parallel.network import Networks
from llmtrain.parallel.rendezvous import rendezvous
from llmtrain.parallel.world import World, node_name
from llmtrain.train.devices import memory_of_rank

Sections = dict[str, list[Finding]]


def run_checks(recipe: Recipe | None, world: World, timeout_seconds: float) -> int:
    """Run all checks, print the report on rank 0, and return the exit code: 1 if there is a problem.

    Every wait for other ranks ends after `timeout_seconds`. If ranks do not meet or a check across ranks fails, the
    error is a problem in rank 0's report and a TrainingError on the other ranks.
    """
    parallel = recipe.parallel if recipe else ParallelSection()
    found = cards()
    sections: Sections = {"software": software(), "machine": machine(world)}
    sections["network"] = [listed(found), *named_by_environment(found), *environment()]
    if world.size == 1:
        sections["network"] += _given_networks(parallel)
        if recipe is not None:
            sections["recipe"] = _alone(recipe)
    else:
        try:
            peers = rendezvous(world, parallel, lambda: memory_of_rank(world), timeout_seconds)
            ClusterCheck(recipe, world, peers, timeout_seconds).add_to(sections)
        except (TrainingError, UserError) as error:
            if world.rank != 0:
                raise TrainingError(str(error)) from error
            sections["ranks"] = [*sections.get("ranks", []), problem(str(error), "")]
    if world.rank == 0:
        show(sections, console())
    return FAILED if has_problem(sections) else DONE


def _given_networks(parallel: ParallelSection) -> list[Finding]:
    try:
        Networks.from_recipe(parallel)
    except UserError as error:
        return [problem(str(error), "")]
    return []


def _alone(recipe: Recipe) -> list[Finding]:
    """Return findings on the recipe on this machine alone, as launch/train.sh would start it."""
    processes = processes_per_node(recipe.parallel, 1)
    each = memory_of_rank(World(0, processes, 0, processes))
    findings, _ = fit(recipe, [node_name()] * processes, [each] * processes)
    how_many = "1 process" if processes == 1 else f"{processes} processes"
    return [ok(f"launch/train.sh would start {how_many} on this machine alone"), *findings]
