"""The command ``holdfast help COMMAND``, and the sections of ``holdfast run --help``."""

from __future__ import annotations

import click

from holdfast.cli.screen.escaping import echo
from holdfast.cli.start.flags import BY_KEY, FLAGS, RunFlag
from holdfast.errors import UsageError
from holdfast.text import closest

EXAMPLES = (
    ("holdfast run train.py", "one worker"),
    ("holdfast run --nproc-per-node gpu train.py --lr 1e-3", "one worker per GPU; --lr is the script's"),
    ("holdfast run --run-id bert --root ckpts train.py", "the same command again continues from ckpts"),
    ("holdfast run --nnodes 2 --nproc-per-node 8 --node-rank 0 --rdzv-endpoint HOST:29500 --token-file T train.py",
     "on the first of two hosts (docs/several-nodes.md)"),
    ("holdfast run --explain", "which value each flag has, and where it comes from"),
)  # fmt: skip
COMMON = ("nproc_per_node", "nnodes", "rdzv_endpoint", "run_id", "root", "max_restarts")
TOPICS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Common flags", COMMON),
    ("Several nodes", ("node_rank", "token_file", "encrypt", "master_addr", "master_port", "bind", "shrink_to",
                       "witness", "rank_table", "rdzv_backend", "rdzv_conf")),
    ("The script", ("module", "no_python", "run_path", "framework", "preload", "role")),
    ("Console and logs", ("tee", "redirects", "local_ranks_filter", "log_line_prefix_template", "run_dir", "log_dir")),
    ("Faults", ("spares", "on_fault", "restart_window", "node_faults", "node_window", "memory_every", "verify_every",
                "replace_slower_than")),
    ("Hangs", ("hang_factor", "hang_floor", "hang_start", "monitor_interval")),
    ("Leaving", ("grace_s", "shutdown_timeout", "signals_to_handle", "notices", "health", "health_every")),
    ("This command", ("explain", "print_completion")),
)  # fmt: skip
_METAVARS: dict[str, tuple[str, ...]] = {
    "N": ("nproc_per_node", "nnodes", "shrink_to", "node_rank", "max_restarts", "node_faults", "spares", "hang_factor",
          "verify_every", "replace_slower_than", "memory_every"),
    "SECONDS": ("restart_window", "node_window", "hang_floor", "hang_start", "monitor_interval", "grace_s",
                "shutdown_timeout", "health_every"),
    "DIR": ("root", "run_dir", "log_dir", "witness"),
    "FILE": ("rank_table", "token_file"),
    "HOST:PORT": ("rdzv_endpoint",),
    "HOST": ("master_addr", "local_addr"),
    "PORT": ("master_port",),
    "ADDRESS": ("bind",),
    "NAME": ("run_id", "role", "framework", "rdzv_backend", "rdzv_id", "start_method", "event_log_handler"),
    "MODULES": ("preload",),
    "RANKS": ("tee", "redirects", "local_ranks_filter"),
    "SIGNALS": ("signals_to_handle",),
    "SOURCES": ("notices",),
    "CMD": ("health",),
    "SHELL": ("print_completion",),
}  # fmt: skip
_METAVAR_OF = {key: name for name, keys in _METAVARS.items() for key in keys}


class RunCommand(click.Command):
    """A click command whose help shows examples, then the flags by topic. It is used for ``holdfast run``."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help page as click does, with the examples before the flags."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        with formatter.section("Examples"):
            for command, about in EXAMPLES:
                formatter.write(f"  {command}\n      {about}\n")
        self.format_options(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags by topic. Flags without effect and refused flags come last."""
        for title, keys in TOPICS:
            with formatter.section(title):
                formatter.write_dl([_row(BY_KEY[key]) for key in keys])
        for title, use in (("Accepted without effect", "no effect"), ("Refused by name", "refused")):
            with formatter.section(title):
                formatter.write_dl([_row(flag) for flag in FLAGS if flag.use == use])


def metavar(flag: RunFlag) -> str:
    """Return the placeholder for a flag's value in the help, such as ``SECONDS``; empty for a switch."""
    return "" if flag.kind == "switch" else _METAVAR_OF.get(flag.key, "TEXT")


def _row(flag: RunFlag) -> tuple[str, str]:
    names = f"{flag.short}, {flag.name}" if flag.short else flag.name
    shown = "" if flag.default in (None, False, "") else f"  [{flag.default}]"
    return f"{names} {metavar(flag)}".rstrip(), flag.about + shown


@click.command(name="help", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def help_on(ctx: click.Context, /, names: tuple[str, ...]) -> int:
    """Show the help of COMMAND, such as `run` or `ckpt ls`, or of holdfast."""
    context = ctx.find_root()
    for number, name in enumerate(names, 1):
        group = context.command
        found = group.get_command(context, name) if isinstance(group, click.Group) else None
        if found is None:
            close = closest(name, group.list_commands(context)) if isinstance(group, click.Group) else ""
            raise UsageError(
                f"holdfast has no command {' '.join(names[:number])}"
                + (f"; did you mean {close}?" if close else ""),
                hint=f"{context.command_path} --help",
            )
        context = click.Context(found, info_name=name, parent=context, **found.context_settings)
    echo(context.get_help())
    return 0
