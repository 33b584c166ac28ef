"""What is practised: a task, its checks, artefacts, tools, environment and limits, all as values.

A task has a public half (what the policy reads) and a private payload (what only verifiers read).
It names its checks, environment and executor; it imports and holds none of them. The one thing
that must stay true: nothing of `Task.private` is ever rendered into a prompt or put where the
policy's processes can read it.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from posttrain.core import seeds
from posttrain.core.errors import UsageError

Json = Any
"""A value that `json.dumps` can write: the only kind of value a task may carry."""


class Lane(StrEnum):
    """A class of work, highest priority first (`rank` 0 is served first)."""

    SERVE = "serve"
    EVAL = "eval"
    TRAIN = "train"
    RECHECK = "recheck"
    IDLE = "idle"

    @property
    def rank(self) -> int:
        """0 for `serve` up to 4 for `idle`."""
        return list(Lane).index(self)


# --- messages ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A text part of a message."""

    text: str


@dataclass(frozen=True, slots=True)
class Media:
    """A media part of a message: the bytes live in the blob store under their hash."""

    sha256: str
    mime: str


Part = Text | Media


class Role(StrEnum):
    """Who a message is from."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One action: a tool call as the policy wrote it.

    `arguments` is None when `raw` did not parse to a JSON object; `error` then says why, and the
    call is answered with that error instead of being executed.
    """

    id: str
    name: str
    arguments: Mapping[str, Json] | None
    raw: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    parts: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """For `Role.TOOL`: the call this message answers."""

    @property
    def text(self) -> str:
        """All text parts, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @staticmethod
    def of(role: Role, text: str) -> Message:
        """A message of one text part."""
        return Message(role=role, parts=(Text(text),))


# --- what a task is made of -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool a task allows. `kind` names who carries it out (`rollout.tools.Kind`)."""

    name: str
    description: str
    parameters: Mapping[str, Json]
    """JSON Schema of the arguments object."""
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The unified description, as the policy reads it and as authors write it."""

    objective: str
    constraints: tuple[str, ...] = ()
    verification: str = ""
    tools: tuple[Tool, ...] = ()


class Place(StrEnum):
    """The layer a check belongs to; later layers run only where earlier gates allow."""

    GUARD = "guard"
    DETERMINISTIC = "deterministic"
    RULE = "rule"
    JUDGE = "judge"
    PEOPLE = "people"

    @property
    def rank(self) -> int:
        """0 for `guard` up to 4 for `people`."""
        return list(Place).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One verification step as a value. `verify` resolves `kind`; the domain only names it."""

    kind: str
    params: Mapping[str, Json] = field(default_factory=dict)
    """Parameters of the check; private, they are never shown to the policy."""
    assets_sha256: str | None = None
    """Content hash of files the check needs, in the blob store; None: it needs none."""
    weight: float = 1.0
    """Share in the weighted sum of the reward; ignored where `gate` is set."""
    gate: bool = False
    """A gate multiplies: value below 1 makes the reward 0."""
    place: Place = Place.DETERMINISTIC
    version: int = 1


class ArtefactKind(StrEnum):
    """What an attempt leaves for checking."""

    FILE = "file"
    TREE = "tree"
    PROBE = "probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """`file`: copied, no links; `tree`: the sealed file system, mounted read-only beside the
    checker; `probe`: a command fixed by the task, run before sealing (evidence only).
    """

    name: str
    kind: ArtefactKind
    path: str = ""
    """For `file` and `tree`: path inside the attempt's workspace."""
    command: str = ""
    """For `probe`: the shell command."""


class EntryKind(StrEnum):
    """What stands at a path."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something in a workspace, itself and not what a link leads to."""

    path: str
    """Relative to the workspace; bytes that are no UTF-8 are written as `\\xff`."""
    kind: EntryKind
    mode: int
    """Permission bits."""
    size: int
    """Bytes, of a file or of what a link says."""


class Isolation(StrEnum):
    """How strongly code is contained, weakest first."""

    NONE = "none"
    NAMESPACE = "namespace"
    CONTAINER = "container"
    USER_KERNEL = "user_kernel"
    """A container whose system calls a kernel of its own answers, in user space: gVisor."""
    VIRTUAL_MACHINE = "vm"

    @property
    def rank(self) -> int:
        """0 for `none` up to 4 for `vm`."""
        return list(Isolation).index(self)


_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)+(?![0-9]){_LABEL}")
_TARGET = re.compile(r"(?:\[(?P<inside>[^\]]+:[^\]]*)\]|(?P<host>[^:]+)):(?P<port>[1-9][0-9]{0,4})")


def is_host(text: str) -> bool:
    """Whether a host is written in the one spelling in which hosts are compared: a name of two or
    more labels in lower-case ASCII (IDNA, RFC 5890) without a final dot, or an address as
    `ipaddress` prints it. A last label that begins with a digit is none: libraries take it for a
    number of an address.

    >>> is_host("api.example.org"), is_host("Example.org"), is_host("192.0.2.1"), is_host("0x7f.1")
    (True, False, True, False)
    """
    if _NAME.fullmatch(text[:254]):
        return len(text) <= 253
    try:
        return "%" not in text and str(ipaddress.ip_address(text)) == text
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What of the outside an attempt's commands may reach, through a proxy; by default nothing.

    Private, loopback, link-local and metadata addresses stay out of reach in every case.

    >>> Network(allow=("a.example.org:443", "*.example.org:80")).targets
    (('a.example.org', 443), ('*.example.org', 80))

    Raises:
        UsageError: `allow` holds something other than `host:port`, or stands beside `open`.
    """

    allow: tuple[str, ...] = ()
    """`host:port` each: a name in lower-case ASCII, an address (IPv6 in brackets), or
    `*.example.org` for every name below `example.org`, though not `example.org` itself.
    """
    open: bool = False
    """Every public host and port. Never a default: whoever wants it writes it."""

    def __post_init__(self) -> None:
        if not isinstance(self.allow, tuple):
            raise UsageError(
                f"wanted a tuple of 'host:port' as network.allow, got {self.allow!r:.80}.",
                next_step='write it as a list, allow = ["a.example.org:443"].',
            )
        for entry in self.allow:
            if not isinstance(entry, str) or not _is_entry(entry):
                raise UsageError(
                    f"wanted 'host:port' in network.allow, got {entry!r:.80}.",
                    next_step="write a lower-case name as 'example.org:443' or '*.example.org:443' "
                    "(international ones in their xn-- form, none with a final dot), or an address "
                    "in its usual form, as '[2001:db8::1]:443'; the port is 1 to 65535.",
                )
        if self.open and self.allow:
            raise UsageError(
                f"network.open allows every public host, network.allow lists {self.allow[0]!r}.",
                next_step="keep one of the two; the list is the safer one.",
            )

    @property
    def reaches_out(self) -> bool:
        """Whether anything outside may be reached."""
        return self.open or bool(self.allow)

    @property
    def targets(self) -> tuple[tuple[str, int], ...]:
        """Host, without brackets, and port of every entry."""
        return tuple(_split(entry) for entry in self.allow)


def _split(entry: str) -> tuple[str, int]:
    """Host and port of a well-formed entry; ("", 0) of any other."""
    match = _TARGET.fullmatch(entry)
    return (match["inside"] or match["host"], int(match["port"])) if match else ("", 0)


def _is_entry(entry: str) -> bool:
    host, port = _split(entry)
    if host.startswith("*."):
        return port <= 65_535 and _NAME.fullmatch(host[2:]) is not None and len(host) <= 253
    return port <= 65_535 and is_host(host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where an attempt's tools run, as a value; files are laid before it starts."""

    isolation: Isolation = Isolation.NAMESPACE
    files: Mapping[str, str] = field(default_factory=dict)
    """Workspace-relative path → text content."""
    setup: tuple[str, ...] = ()
    """Shell commands run once in the workspace after the files are laid."""
    read_only: tuple[str, ...] = ()
    """Paths of the workspace that commands can read and not change, from the set-up on."""
    hidden: tuple[str, ...] = ()
    """Paths that commands find empty: of the workspace from the set-up on, and, where absolute, of
    the system.
    """
    memory_bytes: int = 512 << 20
    disk_bytes: int = 64 << 20
    max_processes: int = 64
    max_open_files: int = 1024
    """Of a process."""
    cores: float = 1.0
    """Processor time of all its processes together, in seconds a second. Where the machine cannot
    limit that, `posttrain doctor` says so.
    """
    exec_timeout_s: float = 10.0
    max_output_bytes: int = 16_384
    network: Network = field(default_factory=Network)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one attempt. Each has its own stop reason; time counts active seconds only."""

    max_turns: int = 1
    max_tokens: int = 512
    """Tokens sampled over the whole attempt."""
    max_turn_tokens: int = 256
    """Tokens sampled in one turn."""
    max_context_tokens: int = 4096
    """Prompt, sampled and observed tokens together."""
    time_s: float = 120.0
    loop_limit: int = 3
    """Stop once the same set of tool calls was issued this many times in a row; 0: never."""
    max_observation_chars: int = 2_000
    """Longer observations keep their head and tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem instance: public description, private payload, and how it is carried out."""

    domain: str
    level: int
    seed: int
    description: Description
    executor: str = "answer"
    """Entry of the executor registry: `answer`, `tools` or `agent`."""
    prefix: str = ""
    """Text the assistant turn starts with; given, not sampled, and never trained on."""
    checks: tuple[Check, ...] = ()
    artefacts: tuple[Artefact, ...] = ()
    environment: Environment | None = None
    limits: Limits = field(default_factory=Limits)
    private: Mapping[str, Json] = field(default_factory=dict)
    """Only verifiers read this."""

    @property
    def id(self) -> str:
        """Identity of this instance: domain, level and seed, readable."""
        return f"{self.domain}/{self.level}/{self.seed}"

    @property
    def content_key(self) -> str:
        """Hash of what the policy reads; equal tasks under different seeds share it."""
        shown = json.dumps([self.description.objective, list(self.description.constraints)])
        files = json.dumps(dict(self.environment.files) if self.environment else {}, sort_keys=True)
        return seeds.hex_key(self.domain, shown, files)


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleTurn:
    """One assistant turn of a reference solution: closing text, or text with tool calls."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """A reference solution: the turns that, carried out, earn reward 1."""

    turns: tuple[OracleTurn, ...]
