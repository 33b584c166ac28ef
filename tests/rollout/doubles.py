"""Tokenizers with templates of every behaviour, and scripted policies, sandboxes and verifiers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.core.containment import ExecResult
from posttrain.core.errors import SandboxError
from posttrain.core.ports import AttemptRequest, SampleRequest
from posttrain.core.task import Description, Isolation, Limits, Place, Task, Tool
from posttrain.core.trajectory import AttemptKey, FinishReason, Sampled, Sampling
from posttrain.core.verdict import Component, Verdict
from posttrain.rollout.render import Renderer
from posttrain.rollout.tokenizer import TransformersTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (  # no system and no tool role
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MERGES_ROLES = (  # neighbours of one role share a turn; tool results join the user's turn
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% set role = 'user' if m.role == 'tool' else m.role %}"
    "{% if role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}"
    "{% endif %}{% if role != ns.last %}{% if ns.last %}<|im_end|>\n{% endif %}"
    "<|im_start|>{{ role }}\n{% endif %}{{ m.content }}"
    "{% set ns.last = role %}{% endfor %}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content ~ '\n\n' "
    "if messages[0].role == 'system' else '' }}"
    "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call as <tool_call>{json}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif not (tools and loop.first and m.role == 'system') "
    "and m.role in ['system', 'user', 'assistant'] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = [
    "<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip
_CORPUS = [
    "Answer: 42 assistant user system the quick brown fox jumps over Reply with only the final",
    "```sh\nls -l\n``` call: name arguments command path content <think> weigh </think>",
] * 4


@functools.cache
def hf_tokenizer(
    template: str, *, eos: str = "<|im_end|>", bos: str | None = None, adds_bos: bool = False
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(str(bos), backend.token_to_id(str(bos)))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


BOS = "<|begin_of_text|>"


def tokenizer(name: str) -> TransformersTokenizer:
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "chatml": (CHATML, {}),
        "llama3": (LLAMA3, {"eos": "<|eot_id|>", "bos": BOS, "adds_bos": True}),
        "thinking": (STRIPS_THINKING, {}),
        "alternating": (ALTERNATING, {"eos": "<end_of_turn>", "bos": BOS, "adds_bos": True}),
        "merging": (MERGES_ROLES, {}),
        "hermes": (HERMES, {}),
    }
    template, options = settings[name]
    return TransformersTokenizer(hf_tokenizer(template, **options))


TEMPLATES = ("chatml", "llama3", "thinking", "alternating", "merging", "hermes")
APPENDING = ("chatml", "llama3", "alternating", "merging", "hermes")


@functools.cache
def renderer(name: str = "chatml") -> Renderer:
    return Renderer(tokenizer(name))


# --- tasks ------------------------------------------------------------------------------------

SHELL = Tool(
    name="shell",
    description="Runs a command.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}},
    kind="shell",
)
FILES = (
    SHELL,
    Tool(
        name="write_file",
        description="Writes a file.",
        parameters={
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        },
        kind="write_file",
    ),
    Tool(
        name="read_file",
        description="",
        parameters={"type": "object", "properties": {"path": {"type": "string"}}},
        kind="read_file",
    ),
    Tool(
        name="python",
        description="Runs Python.",
        parameters={"type": "object", "properties": {"code": {"type": "string"}}},
        kind="python",
    ),
)


def answer_task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "domain": "sum",
        "level": 0,
        "seed": 1,
        "description": Description(
            objective="What is 40 + 2?", constraints=("Reply with only the final answer.",)
        ),
        "prefix": "Answer:",
    }
    return Task(**{**fields, **changes})


def tool_task(
    *, tools: Sequence[Tool] = (SHELL,), limits: Limits | None = None, **changes: Any
) -> Task:
    fields: dict[str, Any] = {
        "domain": "terminal.touch",
        "level": 0,
        "seed": 1,
        "description": Description(objective="Make a file named done.", tools=tuple(tools)),
        "executor": "tools",
        "limits": limits or Limits(max_turns=8, max_tokens=4000, max_turn_tokens=400),
    }
    return Task(**{**fields, **changes})


def request(task: Task, *, member: int = 0, **changes: Any) -> AttemptRequest:
    fields: dict[str, Any] = {
        "key": AttemptKey(run="r", draw=7, member=member),
        "task": task,
        "sampling": Sampling(max_tokens=1000),
    }
    return AttemptRequest(**{**fields, **changes})


# --- a policy ---------------------------------------------------------------------------------


def reply(ids: Sequence[int], *, version: int = 3, **changes: Any) -> Sampled:
    count = len(ids)
    fields: dict[str, Any] = {
        "ids": tuple(ids),
        "logprobs": tuple(-0.25 - index for index in range(count)),
        "versions": (version,) * count,
        "kv_versions": (version,) * count,
        "finish": FinishReason.STOP,
    }
    return Sampled(**{**fields, **changes})


class Sayings:
    """A policy that says texts (or raises), the last one for ever."""

    def __init__(
        self,
        *sayings: str | Exception,
        by: Renderer | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.sayings = list(sayings)
        self.requests: list[SampleRequest] = []
        self._by = by or renderer()
        self._before = before

    async def sample(self, request: SampleRequest) -> Sampled:
        self.requests.append(request)
        self._before()
        saying = self.sayings.pop(0) if len(self.sayings) > 1 else self.sayings[0]
        if isinstance(saying, Exception):
            raise saying
        ids = self._by.reply_ids(saying)
        cut = ids[: request.sampling.max_tokens]
        finish = FinishReason.STOP if len(cut) == len(ids) else FinishReason.LENGTH
        return reply(cut, finish=finish)


# --- sandboxes --------------------------------------------------------------------------------


class MemorySealed:
    def __init__(self, files: dict[str, bytes], *, lost: bool = False) -> None:
        self.files = files
        self.closed = 0
        self._lost = lost

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        if self._lost:
            raise SandboxError("layer lost")
        data = self.files.get(path)
        return None if data is None else data[:max_bytes]

    async def close(self) -> None:
        self.closed += 1


Run = Callable[[dict[str, bytes], Sequence[str], bytes, float], ExecResult]


def default_run(
    files: dict[str, bytes], argv: Sequence[str], stdin: bytes, timeout_s: float
) -> ExecResult:
    """`touch NAME` and `echo TEXT` as bash would; anything else prints nothing."""
    words = argv[-1].split()
    if words and words[0] == "touch":
        files[words[1]] = b""
    out = " ".join(words[1:]) + "\n" if words and words[0] == "echo" else ""
    return ExecResult(exit_code=0, stdout=out, stderr="")


class MemorySandboxes:
    """Sandboxes whose workspace is a dictionary."""

    isolation = Isolation.NONE

    def __init__(
        self, run: Run = default_run, *, fail: Exception | None = None, lose_seals: bool = False
    ) -> None:
        self.lose_seals = lose_seals
        self._run = run
        self._fail = fail
        self.leased = self.returned = 0
        self.executed: list[tuple[str, ...]] = []
        self.timeouts_s: list[float] = []
        self.sealed: list[MemorySealed] = []
        self.sealed_when_returned: list[int] = []

    @asynccontextmanager
    async def lease(
        self, environment: Any, *, beside: Any = None, over: Any = None, ahead: Any = ()
    ) -> Any:
        if self._fail is not None:
            raise self._fail
        self.leased += 1
        try:
            yield _MemorySandbox(self, dict(environment.files))
        finally:
            self.returned += 1
            self.sealed_when_returned.append(len(self.sealed))


class _MemorySandbox:
    def __init__(self, owner: MemorySandboxes, files: dict[str, str]) -> None:
        self._owner = owner
        self._files = {path: text.encode() for path, text in files.items()}

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> ExecResult:
        self._owner.executed.append(tuple(argv))
        self._owner.timeouts_s.append(timeout_s or 0.0)
        return self._owner._run(self._files, argv, stdin, timeout_s or 0.0)

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        data = self._files.get(path)
        return None if data is None else data[:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        self._files[path] = data

    async def seal(self) -> MemorySealed:
        self._owner.sealed.append(MemorySealed(self._files, lost=self._owner.lose_seals))
        return self._owner.sealed[-1]

    async def close(self) -> None:
        return None


# --- verifiers --------------------------------------------------------------------------------


def verdict(value: float | None, *, error: str | None = None) -> Verdict:
    part = Component(name="exact", place=Place.DETERMINISTIC, value=value, error=error)
    return Verdict(components=(part,))


class Judge:
    """A verifier that answers with a function of the trajectory and the seal."""

    def __init__(self, judge: Callable[[Any, Any], Verdict]) -> None:
        self._judge = judge
        self.seen = 0

    async def verify(self, trajectory: Any, sealed: Any) -> Verdict:
        self.seen += 1
        return self._judge(trajectory, sealed)
