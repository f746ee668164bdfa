"""Is this distributed training step the single-device model it was made from?

Exit codes: 0 PROVED (validate: VALID), 1 REFUTED or INVALID, 2 unreadable input or usage,
3 UNKNOWN, 4 internal error, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from trainverify.limits import default_megabytes, limited, seldom_collected
from trainverify.terminal import INTERNAL, INTERRUPTED, USAGE, attempt, fail, open_streams

# Every command is `command` in the module of its name. What `--help` lists is the first sentence of its docstring.
COMMANDS: Final = {
    "zoo": "Models at real sizes, and plans for them: build one, check that it is well-formed, write it to files.",
    "verify": "Is the training step in PLAN equal to the one in LOGICAL?",
    "nnscaler": "Is the training step of an nnScaler plan equal to that of the plan for one device?",
    "torch": "Is the training step of PyTorch code on N ranks equal to the one on a single device?",
    "torchtitan": "Is the training step of torchtitan, with its own options, equal to the same without parallelism?",
    "megatron": "Is the training step of Megatron-core, with its own options, equal to the same without parallelism?",
    "transformers": "Is the training step of Transformers' Trainer, with its own options, equal to the same without parallelism?",
    "deepspeed": "Is the training step of DeepSpeed's engine (ZeRO 1, 2, 3), with its own configuration, equal to PyTorch's on one device?",
    "jax": "Is the training step that JAX runs on a mesh equal to the one on a single device?",
    "sweep": "Every configuration of a matrix: one table, one exit code.",
    "lineage": "Which logical tensor every tensor of PLAN is, and how it lies on the mesh: discovered, not declared.",
    "reduce": "The shapes of FILE (a program or a plan) at the reduced sizes of staged proofs.",
    "validate": "Is FILE (a program or a plan) well-formed?",
    "show": "A program or plan as text.",
    "diff": "What changed between two plans, programs or reports: exit code 0 if nothing, 1 if something.",
    "ops": "The operators, or the meaning, shapes and derivative of one.",
    "mutate": "Random single mistakes anywhere in a plan: what is said of each.",
    "bugs": "Real bugs of distributed training, each as a right and a wrong plan: verdicts, and explanations against what is expected.",
    "doctor": "Versions of what is installed, what they support, and what is missing.",
    "bench": "Measure what proofs cost.",
}


class Commands(TyperGroup):
    """Imports the module of a command when that command is called, not to list or to suggest it."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for name, text in COMMANDS.items():
            self.add_command(TyperCommand(name, help=text, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None
        return name, loaded(name), rest


def loaded(name: str) -> Any:
    """The command with its options."""
    module = importlib.import_module(f"trainverify.cli.{name}")
    command = module.command
    if isinstance(command, typer.Typer):
        return typer.main.get_group(command)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, context_settings=getattr(module, "SETTINGS", None))(command)
    return typer.main.get_command(single)


def print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"trainverify {importlib.metadata.version('trainverify')}")
        raise typer.Exit(0)


COMPLETION: Final = "_TRAINVERIFY_COMPLETE"  # a shell asks for completions
HELP: Final = {"help_option_names": ["-h", "--help"]}  # of every command: contexts inherit it

app = typer.Typer(
    cls=Commands, context_settings=HELP, add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__
)


@app.callback(invoke_without_command=False, help=__doc__)
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.", callback=print_version)] = False,
) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command line."""
    as_json = "--json" in arguments
    return attempt(lambda: _run(arguments, as_json), as_json)


def _run(arguments: Sequence[str], as_json: bool) -> int:
    try:
        code = app(list(arguments), prog_name="trainverify", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SystemExit as done:  # a shell was answered; nothing else ends the process
        if COMPLETION not in os.environ and not any(a.endswith("-completion") for a in arguments):
            raise
        return done.code if isinstance(done.code, int) else 0
    except Exception as error:
        if not hasattr(error, "format_message"):  # what the parser raises for wrong usage
            raise
        context = getattr(error, "ctx", None)
        path = "trainverify" if context is None else context.command_path
        return fail(f"{error.format_message().rstrip('.')}; see {path} --help", USAGE, as_json)
    if not isinstance(code, int):  # every command returns its code; 0 is never a default
        return fail("internal error, no verdict: a command without an exit code", INTERNAL, as_json)
    return code


def main() -> None:
    open_streams()
    asked = any(a.startswith("--memory") for a in sys.argv)
    with limited(None, None if asked else default_megabytes()), seldom_collected():
        code = run(sys.argv[1:])
    sys.exit(code)
