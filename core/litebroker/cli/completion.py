"""``litebroker completion``: the script that lets a shell complete the command's words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what completes commands and options in a shell.

    \b
    eval "$(litebroker completion bash)"    # in ~/.bashrc
    eval "$(litebroker completion zsh)"     # in ~/.zshrc
    """  # noqa: D301 (\b is click's own: it keeps the lines apart)
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click has both
    click.echo(kind(ctx.find_root().command, {}, "litebroker", "_LITEBROKER_COMPLETE").source())
