"""What may be wrong with a pipeline: stages that wait, take micro-batches in another order, or have unlike layers."""

from __future__ import annotations

from collections.abc import Callable

from sim.diagnose.options import options_of, with_option
from sim.schedule.model.pipeline.stages import Stages
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup


def unfilled(setup: Setup, found: Configuration, parts: int) -> Setup | None:
    """Return a pipeline whose micro-batches are merged, so that stages wait longer at both ends of a step."""
    turns = getattr(found.options, "micro_batches", 1)
    if found.mesh.pp == 1 or turns <= parts or turns % parts:
        return None
    return with_option(setup, found, "micro_batches", str(parts))


def of_one_chunk(name: str, value: str) -> Callable[[Setup, Configuration], Setup | None]:
    """Return the change of an option of pipelines to one of one chunk a stage, where these have equal layers."""

    def changed(setup: Setup, found: Configuration) -> Setup | None:
        other = with_option(setup, found, name, value) if _has_equal_stages(found) else None
        return other and other.replace(set={"schedule.pipeline_chunks": 1})

    return changed


def _has_equal_stages(found: Configuration) -> bool:
    return found.mesh.pp > 1 and options_of(found).get("pipeline_layers") == ""


def chunks_of(found: Configuration) -> int:
    """Return how many chunks of layers each stage has."""
    return int(options_of(found).get("pipeline_chunks", 1))


def uneven(setup: Setup, found: Configuration, part: int) -> Setup | None:
    """Return equal stages of one chunk with one part of the layers of the first moved to the last."""
    if not _has_equal_stages(found) or chunks_of(found) > 1:
        return None
    split = [*Stages(found.mesh, found.workload, found.options).split]
    moved = split[0] // part
    if not moved:
        return None
    split[0], split[-1] = split[0] - moved, split[-1] + moved
    return with_option(setup, found, "pipeline_layers", ",".join(map(str, split)))


def even(setup: Setup, found: Configuration) -> Setup | None:
    """Return stages with as many layers each, where they have others and these divide."""
    layers, chunks = found.workload.layers, found.mesh.pp * chunks_of(found)
    if found.mesh.pp == 1 or _has_equal_stages(found) or layers % chunks:
        return None
    return with_option(setup, found, "pipeline_layers", ",".join([str(layers // chunks)] * chunks))
