"""`samestep bench`: throughput of several engines under one regime, in turn."""

from __future__ import annotations

from typing import Annotated

import typer

from samestep.cli.compare import EnginesOption, VariantsOption
from samestep.cli.options import (
    DebugOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    PrecisionOption,
    RanksOption,
    RecipeArgument,
    SetOption,
    known_name,
    load_recipe,
    names,
    output_folder,
    print_json,
)

_PEERS = ("fsdp2", "deepspeed", "accelerate-fsdp", "accelerate-deepspeed", "fabric")


def _peer_names(value: str | None) -> str | None:
    return None if value is None else ",".join(names(value, lambda name: known_name(name, _PEERS)))


AgainstOption = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        callback=_peer_names,
        help="Also run the same work in loops of other tools: " + ", ".join(_PEERS) + ".",
    ),
]
RoundsOption = Annotated[int, typer.Option(min=1, metavar="N", help="How often each takes its turn.")]
WarmupOption = Annotated[int, typer.Option(min=1, metavar="N", help="First steps of every round, which do not count.")]
StepsOption = Annotated[int, typer.Option(min=1, metavar="N", help="Timed steps of every round.")]
SplitOption = Annotated[
    int, typer.Option(min=0, metavar="N", help="Further steps of every round that are taken apart; 0 for none.")
]


def bench(
    recipe: RecipeArgument,
    engines: EnginesOption = None,
    variants: VariantsOption = None,
    against: AgainstOption = None,
    rounds: RoundsOption = 3,
    warmup: WarmupOption = 3,
    steps: StepsOption = 8,
    split: SplitOption = 2,
    overrides: SetOption = None,
    precision: PrecisionOption = None,
    ranks: RanksOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time RECIPE on several engines, in turn, under one regime: tokens/s/device, step time, MFU, memory.

    Engines that would not do the same work in the same dtypes are refused. Results go to runs/NAME-bench, or --out:
    bench.json, bench.md, rounds.jsonl, and a log for each. The exit code is 1 when engines of samestep did not have the
    same losses, bit for bit, on the CPU.
    """
    if (engines is None) == (variants is None):
        raise typer.BadParameter("give one of them", param_hint="--engines, --variants")
    listed = [tuple(text.split("+")) for text in variants.split(",")] if variants else []
    first = engines.split(",")[0] if engines else listed[0][0]
    if listed and precision is not None:
        raise typer.BadParameter("is part of --variants already", param_hint="--precision")
    checked = load_recipe(recipe, overrides, first, precision or (listed[0][1] if listed else None), ranks)
    pairs = [(engine, regime) for engine, regime in listed]
    if engines:
        pairs = [(engine, checked.precision.regime) for engine in engines.split(",")]
    folder = output_folder(out, f"{checked.name}-bench")
    from samestep.bench.report import Settings
    from samestep.bench.run import bench as run

    report = run(
        checked,
        pairs,
        folder,
        against=against.split(",") if against else (),
        settings=Settings(rounds=rounds, warmup=warmup, steps=steps, split=split),
        json_output=json_output,
        overwrite=overwrite,
    )
    if json_output:
        print_json(report)
    if not report["ok"]:
        raise typer.Exit(1)
