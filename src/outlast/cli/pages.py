"""Help pages as plain text: typer's own import rich, and that takes as long as all the rest of `outlast --help`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _write_options(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    """Arguments, the command's own options, then those of every command."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            section = "Arguments" if param.param_type_name == "argument" else getattr(param, "rich_help_panel", None) or "Options"
            sections.setdefault(section, []).append(record)
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


class Command(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each with all that it says of itself, in the order in which they were made."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join((c.help or "").split())) for name, c in found if c is not None and not c.hidden])
