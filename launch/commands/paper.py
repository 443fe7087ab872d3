"""`auto3d paper`."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from launch.commands import options
from launch.commands.consoles import err
from launch.commands.exit_codes import INTERRUPTED, RUN_FAILED, complain
from launch.commands.runs import interrupted, next_commands
from launch.console.progress import sweep_progress
from launch.drivers.sweep import Retry, print_submissions
from launch.papers.alternatives import read_alternatives
from launch.papers.item import Item, file_of, names, predicted_parts, read_item
from launch.recipe.error import RecipeError
from launch.recipe.overrides import replaced
from launch.slurm.executor import on_slurm
from launch.store.trials import Command, ItemRun

RESULTS = Path("results/papers")
OWN_RESULTS = Path("tables/papers")  # folder of what a user has changed or measured; git ignores it


@click.command()
@click.argument("words", metavar="[ITEMS]... [OVERRIDES]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Make all items.")
@click.option("--list", "listing", is_flag=True, help="List the items; make none.")
@click.option("--run", "runs", is_flag=True, help="Measure the plans of predicted parts, too.")
@click.option(
    "--only",
    multiple=True,
    metavar="LABEL",
    help="Keep this setting or system; may be given several times. An axis of which none is given stays whole.",
)
@click.option(
    "--alternatives",
    "tried",
    multiple=True,
    metavar="PAPER",
    help="Try the paper's alternatives on all its items, as in --alternatives merak; may be given several times.",
)
@options.retry
@options.dry_run
@options.test_only
@options.detach
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Write here. [{RESULTS}; {OWN_RESULTS} with --run, --only or overrides]",
)
def paper(
    words: tuple[str, ...],
    every: bool,
    listing: bool,
    runs: bool,
    only: tuple[str, ...],
    tried: tuple[str, ...],
    retry: bool,
    dry_run: bool,
    test_only: bool,
    detach: bool,
    output: Path | None,
) -> int:
    """Make tables and figures of papers again, and compare them.

    ITEMS are files of recipes/papers/, such as merak-fig10a, or paths of your own. Each gives a Markdown page, two CSV
    files and a plot, and its claims join those of the others in README.md. Predicted parts need no devices; emulated
    and measured ones run here, scaled down.

    With OVERRIDES of recipe keys, as in cluster=h100 cluster.nodes=2, the predicted parts alone are made, for that
    cluster. With --run the plans that are the fastest by prediction are measured as well: all rows are one sweep, where
    launch.executor says, and the page has what was measured beside the prediction and the paper. The same command goes
    on where it was interrupted; status, logs, cancel and resume take the name paper-ITEM.

    With --alternatives, all claims of a paper are made again under each of the assumptions that it has in
    recipes/papers/alternatives/, and stand beside those of its items, which must have been made before.
    """
    if listing:
        for name in names():
            item = read_item(file_of(name))
            click.echo(f"{name}\t{item.paper}, {item.place}: {item.title}")
        return 0
    if tried:
        if words or every or runs or only:
            raise click.UsageError("--alternatives takes no items, overrides, --all, --run or --only")
        return _try_alternatives(tried, output or RESULTS)
    overrides = [word for word in words if "=" in word]
    chosen = names() if every else [word for word in words if "=" not in word]
    if not chosen:
        raise click.UsageError(f"name an item, or give --all; there are {', '.join(names())}")
    for option, given in {"--retry": retry, "--dry-run": dry_run, "--test-only": test_only, "--detach": detach}.items():
        if given and not runs:
            raise click.UsageError(f"{option} belongs to --run")
    changed = bool(overrides or only or runs)
    output = output or (OWN_RESULTS if changed else RESULTS)
    which = [ItemRun(item_name, [*only], str(output)) for item_name in chosen]
    if every and changed:
        which = [run for run in which if _has_rows(run)]
    items = [_item(run) if changed else read_item(file_of(run.item)) for run in which]  # all, before the first is made
    again = Retry.ALL if retry else Retry.NONE
    if dry_run or test_only:
        for item_run in which:
            _print_submissions(item_run, overrides, again, ask_slurm=test_only)
        return 0
    if runs:
        codes = []
        for item_run in which:
            codes.append(run_item(item_run, overrides, again, follow=not detach))
            if codes[-1] == INTERRUPTED:
                break
        return max(codes)
    # These imports load torch, which takes seconds, so a list is printed and a bad item refused before them.
    from launch.papers.make import make_item
    from launch.papers.predict import predict_items
    from launch.papers.write import write_item

    ready = {}
    if len(which) > 1:
        with sweep_progress(err) as watcher:
            files = [file_of(run.item) for run in which]
            ready = predict_items(dict(zip(files, items, strict=True)), overrides, watcher.tell)
    for item_run, item in zip(which, items, strict=True):
        file = file_of(item_run.item)
        with sweep_progress(err) as watcher:
            made = make_item(file.stem, item, file, watcher, overrides, ready.get(file))
        for written in write_item(file.stem, item, made, output, _command(item_run, overrides) if changed else ""):
            click.echo(written)
    click.echo(_write_index(which, output, all_shipped=not changed))
    return 0


def run_item(which: ItemRun, overrides: Sequence[str], retry: Retry, *, follow: bool = True) -> int:
    """Predict and measure an item, and write its page; returns the exit code."""
    from launch.papers.make import measure_item
    from launch.papers.rows import RowMaker
    from launch.papers.write import write_item

    item, file = _item(which), file_of(which.item)
    command = Command("paper", [*overrides], item=which)
    with sweep_progress(err) as watcher:
        maker = RowMaker(file.stem, file, watcher, overrides)
        store = maker.store(item.parts)
        if not follow and not on_slurm(store):
            raise click.UsageError("--detach: trials run on this machine; give launch.executor=slurm")
        try:
            made = measure_item(maker, item, command, retry=retry, follow=follow)
        except KeyboardInterrupt:
            return interrupted(store)
    if not follow:
        print(next_commands(store))
        return 0
    output = Path(which.output)
    files = write_item(file.stem, item, made, output, _command(which, overrides, "--run"))
    for written in [*files, _write_index([which], output)]:
        click.echo(written)
    if not any(row.values for part in made for row in part.here):
        return complain("no trial succeeded", RUN_FAILED)
    return 0


def _try_alternatives(papers: Sequence[str], output: Path) -> int:
    for paper_name in papers:  # all, before the first is tried
        read_alternatives(paper_name)
    from launch.papers.tried import try_alternatives

    for paper_name in papers:
        with sweep_progress(err) as watcher:
            files = try_alternatives(paper_name, output, watcher.tell)
        for written in files:
            click.echo(written)
    click.echo(_write_index([], output))
    return 0


def _write_index(made: Sequence[ItemRun], output: Path, *, all_shipped: bool = False) -> Path:
    """Write the page of all claims of the items in ``output``: of ``made``, and others that were made before."""
    from launch.papers.tried import explained, summary
    from launch.papers.write import items_in, write_index

    files = {file_of(run.item).stem: file_of(run.item) for run in made}
    shipped = {name: file_of(name) for name in names() if all_shipped or name in items_in(output)}
    items = {name: read_item(file) for name, file in (shipped | files).items()}
    return write_index(items, output, summary(output), explained(output))


def _has_rows(which: ItemRun) -> bool:
    """Whether a part of the item is predicted, and has the labels that are chosen."""
    try:
        _item(which)
    except RecipeError:
        return False
    return True


def _command(which: ItemRun, overrides: Sequence[str], *options: str) -> str:
    """The command that makes this again."""
    only = [word for label in which.only for word in ("--only", label)]
    written = [] if which.output == str(OWN_RESULTS) else ["--output", which.output]
    return shlex.join(["auto3d", "paper", which.item, *overrides, *only, *options, *written])


def _item(which: ItemRun) -> Item:
    """The predicted parts of the item, cut to what is chosen of them."""
    return predicted_parts(read_item(file_of(which.item)), which.only)


def _print_submissions(which: ItemRun, overrides: Sequence[str], retry: Retry, *, ask_slurm: bool) -> None:
    from launch.papers.rows import RowMaker

    item, file = _item(which), file_of(which.item)
    with sweep_progress(err) as watcher:
        maker = RowMaker(file.stem, file, watcher, replaced(overrides, ["launch.executor=slurm"]))
        print_submissions(maker.store(item.parts), lambda _: maker.left(item.parts, retry), ask_slurm=ask_slurm)
