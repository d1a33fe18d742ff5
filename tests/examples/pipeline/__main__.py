"""make pipeline: run the pipeline."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from . import RECORDS, run_pipeline


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--server", type=click.Choice(["auto", "local", "embedded", "docker"]), default="auto", show_default=True,
    help="Which server to start.",
)  # fmt: skip
@click.option(
    "--kill", "kills", type=click.IntRange(0, 20), default=0, help="Kill the streaming job so many times."
)
@click.option("--keep", is_flag=True, help="Leave the server up.")
@click.option(
    "--records", "number", type=click.IntRange(1), default=RECORDS, show_default=True,
    help="How many records; the real ones are repeated if there are fewer.",
)  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Where the plot goes.")
def main(server: str, kills: int, keep: bool, number: int, plot: Path | None) -> None:
    """Send real records through Spark and two queues, and compare what comes out with what went in."""
    sys.exit(run_pipeline(server=server, kills=kills, keep=keep, number=number, plot=plot))


if __name__ == "__main__":
    main()
