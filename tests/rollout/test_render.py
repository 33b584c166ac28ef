from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.core.task import Description, ToolCall
from posttrain.core.trajectory import Turn
from posttrain.rollout.render import Renderer
from posttrain.rollout.template import History, probe
from posttrain.rollout.tokenizer import TransformersTokenizer
from tests.rollout.doubles import (
    APPENDING,
    BOS,
    CHATML,
    FILES,
    SHELL,
    SPECIAL,
    TEMPLATES,
    answer_task,
    hf_tokenizer,
    renderer,
    tokenizer,
    tool_task,
)

CALL = ToolCall(id="c1", name="shell", arguments={"command": "ls"})


def turn(text: str, *observations: str) -> Turn:
    calls = tuple(
        ToolCall(id=f"c{i}", name="shell", arguments={"command": "ls"})
        for i in range(len(observations))
    )
    return Turn(text=text, tool_calls=calls, observations=observations)


def text_of(name: str, ids: tuple[int, ...]) -> str:
    return tokenizer(name).decode(ids)


# --- the class of a template ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "history", "lacks", "hermes", "end"),
    [
        ("chatml", History.APPEND_ONLY, ("tool",), False, "<|im_end|>"),
        ("llama3", History.APPEND_ONLY, (), False, "<|eot_id|>"),
        ("thinking", History.REWRITTEN, ("tool",), False, "<|im_end|>"),
        ("alternating", History.APPEND_ONLY, ("system", "tool"), False, "<end_of_turn>"),
        ("merging", History.APPEND_ONLY, (), False, "<|im_end|>"),
        ("hermes", History.APPEND_ONLY, (), True, "<|im_end|>"),
    ],
)
def test_probe_finds_out_what_a_template_does(name, history, lacks, hermes, end):
    profile = probe(tokenizer(name))
    assert profile.history is history
    roles = {"system": profile.system_role, "tool": profile.tool_role}
    assert tuple(role for role, has in roles.items() if not has) == lacks
    assert profile.hermes_calls is hermes
    assert profile.end_id == tokenizer(name).added[end]


def test_sampling_stops_at_the_turns_end_although_another_token_is_named_end_of_sequence():
    misnamed = TransformersTokenizer(hf_tokenizer(CHATML, eos="<|im_start|>"))
    ends = [misnamed.added["<|im_end|>"], misnamed.added["<|im_start|>"]]
    assert list(probe(misnamed).stop_ids) == ends


def test_template_that_drops_assistant_turns_is_refused_with_the_next_move():
    forgetful = TransformersTokenizer(hf_tokenizer("{{ messages[0].content }}"))
    with pytest.raises(UsageError, match=r"0 times, not once.*Next: "):
        Renderer(forgetful)


def test_tokenizer_without_a_template_is_refused():
    with pytest.raises(UsageError, match="chat template"):
        Renderer(TransformersTokenizer(hf_tokenizer("")))


def test_tokenizer_without_a_fast_backend_is_refused():
    with pytest.raises(UsageError, match="wanted a fast tokenizer"):
        TransformersTokenizer(object())


def test_turn_that_nothing_ends_is_refused():
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(UsageError, match="nothing ends an assistant turn"):
        Renderer(TransformersTokenizer(hf_tokenizer(bare, eos=None)))


# --- what the policy reads --------------------------------------------------------------------


def test_answer_task_is_rendered_with_nothing_around_it():
    assert text_of("chatml", renderer().prompt(answer_task())) == (
        "<|im_start|>system\nReply with only the final answer.<|im_end|>\n"
        "<|im_start|>user\nWhat is 40 + 2?<|im_end|>\n"
        "<|im_start|>assistant\nAnswer:"
    )


def test_template_without_system_role_gets_the_constraint_before_the_objective():
    assert text_of("alternating", renderer("alternating").prompt(answer_task())) == (
        f"{BOS}<start_of_turn>user\nReply with only the final answer.\n\nWhat is 40 + 2?"
        "<end_of_turn>\n<start_of_turn>model\nAnswer:"
    )


def test_several_sections_are_labelled():
    description = Description(
        objective="Do it.",
        constraints=("Be quick.", "Be brief."),
        verification="A file is looked for.",
        tools=(SHELL,),
    )
    system, user = renderer().messages(answer_task(description=description))
    assert user.text == "Do it."
    assert system.text == (
        "Constraints:\n- Be quick.\n- Be brief.\nVerification: A file is looked for.\n"
        "Tools:\nRuns a command.\nTo run a command, write\n```sh\ncommand\n```\n"
        "When you are done, reply without a call."
    )


def test_tools_are_left_to_a_template_that_lists_them():
    text = text_of("hermes", renderer("hermes").prompt(tool_task()))
    assert text.count("Runs a command.") == 1
    assert "```sh" not in text


def test_several_tools_are_listed_with_their_arguments():
    (system, _) = renderer().messages(tool_task(tools=FILES))
    assert "write_file(path, content): Writes a file." in system.text
    assert 'call: {"name": "…", "arguments": {…}}' in system.text


def test_private_payload_is_never_rendered():
    task = answer_task(private={"answer": "sesame-4711"})
    assert "sesame" not in text_of("chatml", renderer().prompt(task))


# --- one BOS (BR-16) --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "alternating"])
def test_exactly_one_bos_whether_the_template_or_the_tokenizer_writes_it(name):
    bos = tokenizer(name).added[BOS]
    spelt = answer_task(description=Description(objective=f"What does {BOS} mean?"))
    rendered = text_of(name, renderer(name).prompt(answer_task()))
    for ids in (
        renderer(name).prompt(answer_task()),
        renderer(name).prompt(spelt),
        renderer(name).raw("abc"),
        renderer(name).raw(rendered),
    ):
        assert ids[0] == bos
        assert ids.count(bos) == 1
    assert renderer(name).raw(rendered) == renderer(name).prompt(answer_task())


def test_bos_is_put_before_a_template_that_writes_none():
    eos = "<|im_end|>"
    own = TransformersTokenizer(hf_tokenizer(CHATML, eos=eos, bos=BOS, adds_bos=True))
    ids = Renderer(own).prompt(answer_task())
    assert ids[0] == own.added[BOS]
    assert ids.count(own.added[BOS]) == 1


def test_no_bos_where_the_tokenizer_adds_none():
    own = TransformersTokenizer(hf_tokenizer(CHATML, bos="<|im_start|>"))
    assert Renderer(own).raw("abc") == own.encode("abc")
    opening = Renderer(own).prompt(answer_task())
    assert opening == own.encode(own.decode(opening))


# --- special tokens are not spelt -------------------------------------------------------------

MEAN = st.lists(
    st.sampled_from(
        [*SPECIAL, "<think>", "</tool_call>", "<|im_", "start|>", "<", "<|", "|>", "a b", "\n", "é"]
    ),
    max_size=8,
).map("".join)


def added_in(name: str, ids: tuple[int, ...]) -> list[int]:
    added = set(tokenizer(name).added.values())
    return [index for index in ids if index in added]


@pytest.mark.parametrize("name", TEMPLATES)
@given(text=MEAN)
def test_task_text_never_becomes_a_special_token(name, text):
    harmless = answer_task(description=Description(objective="x"))
    spelling = answer_task(description=Description(objective=f"x{text}x"), prefix=text)
    ids = renderer(name).prompt(spelling)
    assert added_in(name, ids) == added_in(name, renderer(name).prompt(harmless))
    assert f"x{text}x" in text_of(name, ids)


@pytest.mark.parametrize("name", APPENDING)
@given(text=MEAN, more=MEAN)
def test_observation_text_never_becomes_a_special_token(name, text, more):
    task = tool_task()
    ids = renderer(name).suffix(task, turn("ls", f"x{text}", f"{more}x"), last_id=None)
    plain = renderer(name).suffix(task, turn("ls", "x", "x"), last_id=None)
    assert added_in(name, ids) == added_in(name, plain)
    assert text.strip() in text_of(name, ids)  # some templates trim


@given(text=st.text(max_size=40))
def test_text_without_special_spelling_is_encoded_as_one_piece(text):
    task = answer_task(description=Description(objective=f"x{text}x"))
    ids = renderer().prompt(task)
    if not any(token[:1] in text for token in SPECIAL):
        assert ids == tokenizer("chatml").encode(tokenizer("chatml").decode(ids))


def test_words_added_to_the_vocabulary_are_still_recognised_in_task_text():
    own = hf_tokenizer(CHATML, bos="<|eot_id|>")
    own.add_tokens(["heliocentric"])
    rendering = Renderer(TransformersTokenizer(own))
    ids = rendering.prompt(answer_task(description=Description(objective="a heliocentric b")))
    assert own.convert_tokens_to_ids("heliocentric") in ids


def test_lone_surrogates_in_a_task_are_rendered_as_replacement_characters():
    task = answer_task(description=Description(objective="bad \ud800 good \ud83d\ude00"))
    assert "bad � good 😀" in text_of("chatml", renderer().prompt(task))


# --- between turns ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", APPENDING)
@given(replies=st.lists(st.text("ab <>/\n", min_size=1, max_size=12), min_size=1, max_size=4))
def test_prompts_of_append_only_templates_start_with_everything_so_far(name, replies):
    """Ids so far + suffix is the next prompt, and reads as the template would write it."""
    by, task = renderer(name), tool_task()
    ids, turns = by.prompt(task), []
    for text in replies:
        said = f"x{text}x"
        turns.append(turn(said, "seen", "seen too"))
        longer = ids + by.reply_ids(said)
        longer += by.suffix(task, turns[-1], last_id=longer[-1])
        assert longer[: len(ids)] == ids
        assert text_of(name, longer) == text_of(name, by.prompt(task, turns))
        ids = longer


def test_turn_that_was_cut_is_closed_by_the_suffix():
    by, task = renderer(), tool_task()
    end = by.profile.end_id
    closed = by.suffix(task, turn("ls", "seen"), last_id=end)
    cut = by.suffix(task, turn("ls", "seen"), last_id=by.reply_ids("ls")[0])
    assert cut == (end, *closed)
    assert text_of("chatml", cut) == (
        "<|im_end|>\n<|im_start|>user\nseen<|im_end|>\n<|im_start|>assistant\n"
    )


def test_observations_are_one_user_message_where_there_is_no_tool_role():
    ids = renderer("alternating").suffix(tool_task(), turn("ls", "one", "two"), last_id=None)
    assert text_of("alternating", ids) == (
        "<end_of_turn>\n<start_of_turn>user\none\ntwo<end_of_turn>\n<start_of_turn>model\n"
    )


def test_observations_name_the_call_they_answer_where_a_template_shows_it():
    """BR-21: the error about c1 is the answer to c1."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}"
        "{{ ' ' ~ m.tool_call_id if m.role == 'tool' else '' }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    own = TransformersTokenizer(hf_tokenizer(template))
    calls = (ToolCall(id="c1", name="shell", arguments=None, error="x"), replace(CALL, id="c2"))
    said = Turn(text="ls", tool_calls=calls, observations=("malformed call: x", "/w"))
    suffix = Renderer(own).suffix(tool_task(), said, last_id=None)
    assert own.decode(suffix) == (
        "<|im_end|>\n<|im_start|>tool c1\nmalformed call: x<|im_end|>\n"
        "<|im_start|>tool c2\n/w<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_without_text_is_a_turn_of_empty_text(name):
    """BR-21: a message without a content field raised. A turn's text is never missing; that of a
    turn in which nothing was said is '' (reading OpenAI's shapes comes with its endpoint).
    """
    silent = turn("", "seen")
    ids = renderer(name).prompt(tool_task(), [silent])
    assert "seen" in text_of(name, ids)


def test_observations_use_the_templates_own_form_where_it_has_one():
    ids = renderer("hermes").suffix(tool_task(), turn("ls", "one", "two"), last_id=None)
    text = text_of("hermes", ids)
    assert text.count("<tool_response>") == 2
    assert text.count("<|im_start|>user") == 1


def test_rewriting_template_renders_earlier_turns_without_their_thoughts():
    by, task = renderer("thinking"), tool_task()
    text = text_of("thinking", by.prompt(task, [turn("<think>\nhm\n</think>\n\nls", "seen")]))
    assert "hm" not in text
    assert "<|im_start|>assistant\nls<|im_end|>\n<|im_start|>user\nseen<|im_end|>" in text


def test_prefix_belongs_to_the_first_turn_only():
    by = renderer("thinking")
    task = tool_task(prefix="First:")
    text = text_of("thinking", by.prompt(task, [turn(" ls", "seen")]))
    assert "assistant\nFirst: ls<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


# --- replies ----------------------------------------------------------------------------------


def test_written_reply_is_a_continuation_with_the_end_token():
    by = renderer()
    ids = by.reply_ids(" 42")
    assert ids == (*tokenizer("chatml").encode("Answer: 42")[-len(ids) + 1 :], by.profile.end_id)
    assert by.reply_text(ids) == " 42"


def test_characters_split_over_tokens_are_decoded_whole_and_broken_ones_once():
    """BR-19: the text of a turn comes from all its ids together."""
    by = renderer()
    emoji = by.reply_ids("a😀é")
    assert len(emoji) > 5
    assert by.reply_text(emoji) == "a😀é"
    assert by.reply_text(emoji[:3]) == "a�"


def test_renderer_reads_a_copy_of_the_tokenizer():
    hf = hf_tokenizer(CHATML, bos="<start_of_turn>")
    by = Renderer(TransformersTokenizer(hf))
    before = by.prompt(answer_task())
    hf.backend_tokenizer.enable_truncation(max_length=3)
    try:
        assert by.prompt(answer_task(seed=2)) == before
    finally:
        hf.backend_tokenizer.no_truncation()


def test_smollm2_renders_as_its_own_template_does():
    folder = Path.home() / ".cache/posttrain/models/smollm2-135m"
    if not folder.exists():
        pytest.skip("model smollm2-135m is not fetched")
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    by = Renderer(TransformersTokenizer(hf))
    assert by.appends
    assert by.profile.end_id == hf.convert_tokens_to_ids("<|im_end|>")
    opening = by.prompt(answer_task())
    assert list(opening) == hf.apply_chat_template(
        [
            {"role": "system", "content": "Reply with only the final answer."},
            {"role": "user", "content": "What is 40 + 2?"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    ) + list(hf("Answer:", add_special_tokens=False)["input_ids"])
    assert hf.decode(by.reply_ids(" 42")) == " 42<|im_end|>"
