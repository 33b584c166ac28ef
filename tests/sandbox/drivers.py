"""Every driver by name, for tests that run over all that work on this machine."""

from posttrain.core.containment import ExecResult
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.command_line import Choice
from posttrain.sandbox.container import ContainerSandboxes
from posttrain.sandbox.scripted import ScriptedSandboxes


def containers(*choices):
    return lambda: ContainerSandboxes(choices=[Choice(*choice) for choice in choices])


REAL = {
    "layers": BubblewrapSandboxes,
    "copies": lambda: BubblewrapSandboxes(share=False),
    "podman": containers(("podman",), ("podman", "runc")),
    "docker": containers(("docker",)),
    "gvisor": containers(("podman", "runsc"), ("docker", "runsc")),
}
"""A driver that does not work on a machine is skipped with the reason that it gives."""


def scripted():
    def script(command):
        return ExecResult(exit_code=int(command.line == "false"), stdout="", stderr="")

    return ScriptedSandboxes(script)


ALL = {**REAL, "scripted": scripted}
