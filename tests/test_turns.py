"""Which turns are asked, by policy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.turns import NoPrompt, asked_turns


def chat(roles: str) -> list[dict[str, Any]]:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[role], "content": str(index)} for index, role in enumerate(roles)]


def shape(turns: list[list[dict[str, Any]]]) -> list[str]:
    return ["".join(message["role"][0] if message["role"] != "tool" else "t" for message in turn) for turn in turns]


@pytest.mark.parametrize(
    ("roles", "policy", "expected"),
    [
        ("sua", "user_only", ["su"]),
        ("uauau", "user_only", ["uuu"]),
        ("suatau", "user_only", ["suu"]),
        ("sua", "final", ["su"]),
        ("uaua", "final", ["uau"]),
        ("uau", "final", ["uau"]),
        ("uat", "final", ["uat"]),
        ("sua", "regenerate", ["su"]),
        ("suaua", "regenerate", ["su", "u"]),
        ("uuaua", "regenerate", ["uu", "u"]),
        ("uau", "regenerate", ["u", "u"]),
        ("uaasua", "regenerate", ["u", "su"]),
        ("uas", "regenerate", ["u"]),
        ("aua", "regenerate", ["u"]),
    ],
)
def test_turns(roles: str, policy: str, expected: list[str]) -> None:
    assert shape(asked_turns(chat(roles), policy)) == expected


@pytest.mark.parametrize("policy", ["user_only", "final", "regenerate"])
@pytest.mark.parametrize("roles", ["", "s", "a", "sa"])
def test_no_user_turn_asks_nothing(roles: str, policy: str) -> None:
    with pytest.raises(NoPrompt) as refused:
        asked_turns(chat(roles), policy)
    assert refused.value.args[0] == "no_user_turn"


def test_tool_results_are_not_replayed() -> None:
    with pytest.raises(NoPrompt) as refused:
        asked_turns(chat("uatau"), "regenerate")
    assert refused.value.args[0] == "tools_not_supported"


def test_final_needs_its_earlier_answers() -> None:
    messages = chat("uaua")
    messages[1]["content"] = " \n\u200b"
    with pytest.raises(NoPrompt) as refused:
        asked_turns(messages, "final")
    assert refused.value.args[0] == "empty_assistant"
    messages[1]["content"], messages[3]["content"] = "fine", ""
    assert shape(asked_turns(messages, "final")) == ["uau"]


@given(st.text("sua", max_size=12).filter(lambda roles: "u" in roles))
def test_regenerate_asks_every_user_message_once_in_order(roles: str) -> None:
    messages = chat(roles)
    turns = asked_turns(messages, "regenerate")
    asked = [message for turn in turns for message in turn if message["role"] == "user"]
    assert asked == [message for message in messages if message["role"] == "user"]
    assert all(any(message["role"] == "user" for message in turn) for turn in turns)
    assert not any(message["role"] == "assistant" for turn in turns for message in turn)
