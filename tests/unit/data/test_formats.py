"""Every format, to token ids and labels that are worked out by hand.

Ids: <pad> 0, <s> 1, </s> 2, <unk> 3, <|system|> 4, <|user|> 5, <|assistant|> 6, <|end|> 7, ### 8, Instruction: 9,
Input: 10, Response: 11, a 12, b 13, c 14, d 15, e 16, bc 17, 7 18, Q: 19, A: 20.
"""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from samestep.data import Examples, Loader, prepare
from samestep.data.files import read_rows
from samestep.data.formats import build_format
from samestep.errors import DataError, ModelError
from samestep.recipe.schema import Data
from tests.unit.data.conftest import CHAT_TEMPLATE, build_tokenizer

NO = -100


def byte_level_tokenizer(*, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """a 0, b 1, space 2, space and b 3, </s> 4, newline 5; nothing in front."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "Ġ": 2, "Ġb": 3, "</s>": 4, "Ċ": 5}, [("Ġ", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def rows_of(examples: Examples) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of every row, from batches of one."""
    loader = Loader(examples, ranks=1, micro_batch=1, accumulation=1, seed=0, shuffle=False, drop_last=False, pad_id=0)
    batches = [loader.step(index).batch(0, 0) for index in range(loader.steps_per_epoch)]
    return [(batch.input_ids[0].tolist(), batch.labels[0].tolist()) for batch in batches]


def test_alpaca(write, tokenizer):
    path = write(
        {"instruction": "a b", "input": "c", "output": "d e"},
        {"instruction": "a", "input": "", "output": "b"},
        {"instruction": "a", "output": "b"},
    )
    rows = rows_of(prepare(Data(path=path), tokenizer, seed=0).train)
    # <s> ### Instruction: a b ### Input: c ### Response: d e </s>
    assert rows[0] == ([1, 8, 9, 12, 13, 8, 10, 14, 8, 11, 15, 16, 2], [NO] * 9 + [15, 16, 2, NO])
    without_input = ([1, 8, 9, 12, 8, 11, 13, 2], [NO] * 5 + [13, 2, NO])
    assert rows[1:] == [without_input, without_input]


def test_alpaca_text_is_exact(write):
    layout = build_format(Data(path=""), chat=lambda *_: [])
    path = write({"instruction": "I", "input": "x\ny", "output": " O"}, {"instruction": "I", "output": "O"})
    with_input, without = (layout.text(row).segments for row in read_rows(path))
    assert with_input == [("### Instruction:\nI\n\n### Input:\nx\ny\n\n### Response:\n", False), (" O", True)]
    assert without == [("### Instruction:\nI\n\n### Response:\n", False), ("O", True)]


def test_prompt_and_completion_by_naming_columns(write, tokenizer):
    path = write({"question": "a b", "answer": " c d"}, {"question": "a", "answer": " 7"})
    data = Data(path=path, format="prompt_completion", columns={"prompt": "question", "completion": "answer"})
    assert rows_of(prepare(data, tokenizer, seed=0).train) == [
        ([1, 12, 13, 14, 15, 2], [NO, NO, 14, 15, 2, NO]),
        ([1, 12, 18, 2], [NO, 18, 2, NO]),
    ]


def test_renamed_alpaca_columns(write, tokenizer):
    path = write({"task": "a", "context": "c", "answer": "b"})
    data = Data(path=path, columns={"instruction": "task", "input": "context", "output": "answer"})
    assert rows_of(prepare(data, tokenizer, seed=0).train)[0][0] == [1, 8, 9, 12, 8, 10, 14, 8, 11, 13, 2]


def test_numbers_become_text_and_null_is_empty(write, tokenizer):
    path = write({"prompt": None, "completion": 7}, {"completion": "a b"}, {"prompt": "", "completion": float("nan")})
    prepared = prepare(Data(path=path, format="prompt_completion"), tokenizer, seed=0)
    assert rows_of(prepared.train) == [([1, 18, 2], [18, 2, NO]), ([1, 12, 13, 2], [12, 13, 2, NO])]
    assert prepared.train_report.dropped_empty == 1


def test_text_counts_whole(write, tokenizer):
    path = write({"text": "a b"}, {"text": "c"})
    data = Data(path=path, format="text", append_end_token=False)
    assert rows_of(prepare(data, tokenizer, seed=0).train) == [([1, 12, 13], [12, 13, NO]), ([1, 14], [14, NO])]


def test_loss_on_all(write, tokenizer):
    path = write({"prompt": "a b", "completion": " c"})
    data = Data(path=path, format="prompt_completion", loss_on="all")
    assert rows_of(prepare(data, tokenizer, seed=0).train) == [([1, 12, 13, 14, 2], [12, 13, 14, 2, NO])]


def test_the_text_is_tokenised_whole_and_a_token_across_the_boundary_counts(write, tokenizer):
    path = write({"prompt": "a b", "completion": "c d"})  # together "a bc d"
    data = Data(path=path, format="prompt_completion")
    assert rows_of(prepare(data, tokenizer, seed=0).train) == [([1, 12, 17, 15, 2], [NO, 17, 15, 2, NO])]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_space_at_the_end_of_the_prompt_does_not_hide_the_first_word(write, trim_offsets):
    """Byte-level tokens hold the space in front of a word; offsets leave it out or not, as the tokenizer says."""
    tokenizer = byte_level_tokenizer(trim_offsets=trim_offsets)
    path = write({"prompt": "aa ", "completion": "b"})
    rows = rows_of(prepare(Data(path=path, format="prompt_completion"), tokenizer, seed=0).train)
    assert rows == [([0, 0, 3, 4], [NO, 3, 4, NO])]


def test_the_first_token_is_no_label_without_a_token_in_front(write):
    prepared = prepare(Data(path=write({"text": "ab"}), format="text"), byte_level_tokenizer(), seed=0)
    assert rows_of(prepared.train) == [([0, 1, 4], [1, 4, NO])]
    assert (prepared.train_report.tokens, prepared.train_report.label_tokens) == (3, 2)


def test_end_token_in_front_of_a_last_newline_is_not_doubled(write):
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '</s>\\n' }}{% endfor %}"
    path = write({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    rows = rows_of(prepare(Data(path=path, format="messages"), tokenizer, seed=0).train)
    assert rows == [([0, 4, 5, 1, 4, 5], [NO, NO, 1, 4, 5, NO])]


def test_template_with_marker(write, tokenizer):
    path = write({"q": "a", "a": "b c"}, {"q": "A: a", "a": "b"}, {"q": "a", "a": ""})
    data = Data(path=path, template="Q: {q}\n A: {a}", response_marker=" A:")
    prepared = prepare(data, tokenizer, seed=0)
    assert rows_of(prepared.train) == [
        ([1, 19, 12, 20, 13, 14, 2], [NO, NO, NO, 13, 14, 2, NO]),
        # The row quotes the marker: the one that the template wrote is the one that counts.
        ([1, 19, 20, 12, 20, 13, 2], [NO, NO, NO, NO, 13, 2, NO]),
    ]
    assert prepared.train_report.dropped_without_labels == 1


def test_marker_inside_the_rows(write, tokenizer):
    path = write({"body": "a A: b A: c"}, {"body": "a b"})
    prepared = prepare(Data(path=path, template="{body}", response_marker="A:"), tokenizer, seed=0)
    assert rows_of(prepared.train) == [([1, 12, 20, 13, 20, 14, 2], [NO, NO, 13, 20, 14, 2, NO])]
    assert prepared.train_report.dropped_without_labels == 1


def test_template_braces_repeats_and_renaming(write, tokenizer):
    path = write({"x": "a"})
    data = Data(path=path, template="{{ {p} b {p} }}", columns={"p": "x"}, loss_on="all", append_end_token=False)
    assert rows_of(prepare(data, tokenizer, seed=0).train)[0][0] == [1, 3, 12, 13, 12, 3]


def test_values_are_never_templates(write, tokenizer):
    path = write({"p": "{p} {0.__class__}", "q": "a"})
    data = Data(path=path, template="{p} {q}", loss_on="all", append_end_token=False)
    assert rows_of(prepare(data, tokenizer, seed=0).train)[0][0] == [1, 3, 3, 12]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [("user", "a"), ("assistant", "b c")],
            # <s> <|user|> a <|end|> <|assistant|> b c <|end|> </s>
            ([1, 5, 12, 7, 6, 13, 14, 7, 2], [NO, NO, NO, NO, 13, 14, 7, 2, NO]),
        ),
        (
            [("system", "e"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
            (
                [1, 4, 16, 7, 5, 12, 7, 6, 13, 7, 5, 14, 7, 6, 15, 7, 2],
                [NO] * 7 + [13, 7] + [NO] * 4 + [15, 7, 2, NO],
            ),
        ),
        (
            [("user", "a"), ("assistant", "b"), ("user", "c")],
            # The user has the last word: the end token does not count, because nothing of the assistant ends there.
            ([1, 5, 12, 7, 6, 13, 7, 5, 14, 7, 2], [NO] * 4 + [13, 7] + [NO] * 5),
        ),
    ],
)
def test_messages(write, tokenizer, rows, expected):
    path = write({"messages": [{"role": role, "content": content} for role, content in rows]})
    assert rows_of(prepare(Data(path=path, format="messages"), tokenizer, seed=0).train) == [expected]


def test_messages_loss_on_all(write, tokenizer):
    path = write({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    data = Data(path=path, format="messages", loss_on="all")
    ids = [1, 5, 12, 7, 6, 13, 7, 2]
    assert rows_of(prepare(data, tokenizer, seed=0).train) == [(ids, [*ids[1:], NO])]


def test_messages_end_token_of_the_template_is_not_doubled(write):
    tokenizer = build_tokenizer(eos="<|end|>", chat_template=CHAT_TEMPLATE)  # the template writes <|end|> and a newline
    path = write({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    rows = rows_of(prepare(Data(path=path, format="messages"), tokenizer, seed=0).train)
    assert rows == [([1, 5, 12, 7, 6, 13, 7], [NO, NO, NO, NO, 13, 7, NO])]


def test_messages_in_a_renamed_column_with_null_keys(write, tokenizer):
    turns = [{"role": "user", "content": "a", "tool": None}, {"role": "assistant", "content": "b", "tool": None}]
    data = Data(path=write({"chat": turns}), format="messages", columns={"messages": "chat"}, append_end_token=False)
    assert rows_of(prepare(data, tokenizer, seed=0).train)[0][0] == [1, 5, 12, 7, 6, 13, 7]


def test_a_template_that_rewrites_earlier_turns_is_refused(write):
    rewriting = (
        "{% for m in messages %}<|{{ m.role }}|> {% if loop.last %}{{ m.content }}{% else %}e{% endif %} <|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = build_tokenizer(chat_template=rewriting)
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "assistant")]
    path = write({"messages": messages})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: message 2: the chat template changes") as caught:
        prepare(Data(path=path, format="messages"), tokenizer, seed=0)
    assert "data.loss_on: all" in str(caught.value)
    assert len(prepare(Data(path=path, format="messages", loss_on="all"), tokenizer, seed=0).train) == 1


def test_end_token_that_the_tokenizer_adds_itself(write):
    tokenizer = build_tokenizer(ending="</s>")
    path = write({"prompt": "a", "completion": " b"})
    for append in (True, False):
        data = Data(path=path, format="prompt_completion", append_end_token=append)
        assert rows_of(prepare(data, tokenizer, seed=0).train) == [([1, 12, 13, 2], [NO, 13, 2, NO])]


def test_no_end_token(write):
    tokenizer = build_tokenizer(eos=None)
    path = write({"text": "a b"})
    with pytest.raises(DataError, match=r"data\.append_end_token: the tokenizer has no end token\. Set it to false"):
        prepare(Data(path=path, format="text"), tokenizer, seed=0)
    data = Data(path=path, format="text", append_end_token=False)
    assert rows_of(prepare(data, tokenizer, seed=0).train) == [([1, 12, 13], [12, 13, NO])]


def test_no_chat_template(write):
    with pytest.raises(DataError, match="no chat template"):
        prepare(Data(path=write({"messages": []}), format="messages"), build_tokenizer(), seed=0)


def test_slow_tokenizer(write):
    class Slow:
        is_fast = False
        eos_token_id = 2

    with pytest.raises(ModelError, match=r"model\.tokenizer: Slow .*tokenizer\.json"):
        prepare(Data(path=write({"text": "a"}), format="text"), Slow(), seed=0)
