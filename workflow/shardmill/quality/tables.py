"""What checks read besides the catalog's views: settings, the prompts step's counts, and narrow facts of each row.

The lists of ids and the texts are most of a build's bytes. They are read once, here, into two narrow tables, so that
thirty checks over 914,000 rows cost one scan:

- `answers`: a row an ok completion. `training_rows`: a row of tokens. workflow/checks/README.md lists their columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardmill.catalog import quoted
from shardmill.quality import repetition
from shardmill.settings import Settings

if TYPE_CHECKING:
    import duckdb

COUNTS = ("records", "joined", "rejected", "duplicates", "beyond_limit", "conversations", "prompts")

# Long loops are looked for anywhere (repetition.py). Short ones end an answer: they are looked for in its last ids (the
# very last, a stop token, left out): the last half, at most this many, and a period that fits in four times.
_TAIL = 256
_LEAST_TAIL = 24
# Characters of a prompt and an answer that tell their script, letters below which they don't, and how far the shares
# of a script may lie apart.
_SCRIPT_CHARACTERS = 500
_SCRIPT_LETTERS = 20
_SCRIPT_APART = 0.7
_CJK = "\\p{Han}\\p{Hiragana}\\p{Katakana}\\p{Hangul}"
# How refusals begin, in the languages that chat data is mostly in.
_REFUSAL = (
    r"^(i['’]?m sorry,? but|i apologi[sz]e,? but|sorry,? (but )?i (can|am|won)|i (can['’]?t|cannot|can not|won['’]?t|"
    r"am unable to|['’]?m unable to|am not able to) (help|assist|provide|fulfil|comply|do|create|write|engage)|"
    r"as an ai|(很)?抱歉|对不起|我无法|lo siento,? pero|je suis désolé|es tut mir leid|извините|к сожалению, я не)"
)


def prepare(connection: duckdb.DuckDBPyConnection, settings: Settings, facts: Mapping[str, Any]) -> None:
    """Makes the tables settings, counts, shard_prompts, answers and training_rows over the connection's views."""
    model = facts.get("model") or {}
    connection.execute("SET preserve_insertion_order = false")
    _settings(connection, settings, model)
    _counts(connection, facts.get("counts") or {})
    _prompt_scripts(connection)
    _answers(connection, model)
    _training_rows(connection)


def leave_out_reused(connection: duckdb.DuckDBPyConnection) -> None:
    """From the views, before `prepare`: rows of other builds, with their training rows and prompts."""
    for kind in ("completions", "tokens"):
        connection.execute(f"ALTER VIEW {kind} RENAME TO all_{kind}")
        connection.execute(f"CREATE VIEW {kind} AS SELECT * FROM all_{kind} WHERE reused_from IS NULL")
    connection.execute("ALTER VIEW prompts RENAME TO all_prompts")
    connection.execute(
        "CREATE VIEW prompts AS SELECT * FROM all_prompts SEMI JOIN completions USING (conversation_id, turn)"
    )


def _settings(connection: duckdb.DuckDBPyConnection, settings: Settings, model: Mapping[str, Any]) -> None:
    connection.execute(
        "CREATE TEMP TABLE settings AS SELECT $1::VARCHAR AS model, $2::BOOLEAN AS thinking, "
        "$3::INTEGER AS max_new_tokens, $4::INTEGER AS context, $5::INTEGER AS max_prompt_tokens, "
        "$6::VARCHAR AS turns, $7::DOUBLE AS temperature, $8::INTEGER AS vocab_size, $9::INTEGER[] AS stop_ids, "
        "$10::INTEGER[] AS think_close_ids",
        [
            settings.model.name,
            settings.model.thinking,
            settings.sampling.max_new_tokens,
            settings.model.context,
            settings.prompts.max_prompt_tokens,
            settings.prompts.turns,
            settings.sampling.temperature,
            model.get("vocab_size"),
            model.get("stop_ids"),
            model.get("think_close_ids"),
        ],
    )


def _counts(connection: duckdb.DuckDBPyConnection, counts: Mapping[str, Any]) -> None:
    columns = ", ".join(f"${index}::BIGINT AS {name}" for index, name in enumerate(COUNTS, start=1))
    connection.execute(f"CREATE TEMP TABLE counts AS SELECT {columns}", [counts.get(name) for name in COUNTS])
    connection.execute("CREATE TEMP TABLE shard_prompts (shard VARCHAR, prompts BIGINT)")
    by_shard = counts.get("prompts_by_shard") or {}
    if by_shard:
        connection.execute(
            "INSERT INTO shard_prompts SELECT unnest($1::VARCHAR[]), unnest($2::BIGINT[])",
            [list(by_shard), list(by_shard.values())],
        )


def _prompt_scripts(connection: duckdb.DuckDBPyConnection) -> None:
    """Share of Latin and of CJK letters in each prompt's last message; null where it has few letters."""
    connection.execute(
        "CREATE TEMP MACRO letters(t, class) AS length(regexp_replace(t, '[^' || class || ']', '', 'g'));"
        # Text of as many bytes as characters is ASCII: its letters are Latin, and no expression need run.
        "CREATE TEMP MACRO latin_share(t) AS CASE WHEN strlen(t) = length(t) THEN 1.0 "
        "ELSE letters(t, '\\p{Latin}') / letters(t, '\\p{L}') END;"
        "CREATE TEMP MACRO cjk_share(t) AS CASE WHEN strlen(t) = length(t) THEN 0.0 "
        f"ELSE letters(t, '{_CJK}') / letters(t, '\\p{{L}}') END;"
        f"CREATE TEMP MACRO has_script(t) AS letters(t, '\\p{{L}}') >= {_SCRIPT_LETTERS};"
    )
    connection.execute(
        "CREATE TEMP TABLE prompt_scripts AS "
        "SELECT conversation_id, turn, latin_share(t) AS prompt_latin, cjk_share(t) AS prompt_cjk FROM ("
        "  SELECT conversation_id, turn, "
        f"     left(json_extract_string(messages, '$[#-1].content'), {_SCRIPT_CHARACTERS}) AS t FROM prompts"
        ") WHERE has_script(t)"
    )


def _answers(connection: duckdb.DuckDBPyConnection, model: Mapping[str, Any]) -> None:
    stops = [f"list_position(output_ids, {int(token)})" for token in model.get("stop_ids") or []]
    first_stop = f"least({', '.join(stops)})" if stops else "NULL"
    repetition.register(connection)
    connection.execute(f"""
        CREATE TEMP TABLE answers AS
        WITH marked AS (
            SELECT *, least({_TAIL}, len(output_ids) // 2) AS tail_len, {first_stop} AS first_stop,
                starts_with(ltrim(text), '<think>') AS opened, {_closing(model)} AS closing,
                CASE WHEN closing > 0 THEN strpos(text, '</think>') ELSE 0 END AS close_at, closing > 0 AS closed
            FROM completions WHERE status = 'ok'
        ), said AS (
            SELECT *, opened OR closed OR thinking AS thinks,
                CASE WHEN closed THEN left(text, close_at - 1) WHEN thinks THEN text ELSE '' END AS thought,
                CASE WHEN closed THEN ltrim(substr(text, close_at + 8, 1200), e' \\n\\t')
                    WHEN thinks THEN NULL ELSE ltrim(left(text, 1200), e' \\n\\t') END AS said,
                output_ids[-tail_len - 1:-2] AS tail
            FROM marked CROSS JOIN (SELECT thinking FROM settings)
        ), measured AS (
            SELECT shard, prompt_id, conversation_id, turn, finish_reason, server, finished_at, accept_length,
                prompt_tokens, completion_tokens, len(prompt_ids) AS prompt_ids_len, len(output_ids) AS output_ids_len,
                hash(output_ids) AS answer_hash, hash(list_concat(prompt_ids, output_ids)) AS ids_hash,
                least(list_min(prompt_ids), list_min(output_ids)) AS lowest_id,
                greatest(list_max(prompt_ids), list_max(output_ids)) AS highest_id,
                first_stop, closed, thinks, length(trim(replace(thought, '<think>', ''), e' \\n\\t')) AS thought_chars,
                CASE WHEN NOT thinks THEN 0 WHEN closed THEN closing ELSE completion_tokens END::INTEGER
                    AS thinking_tokens,
                length(said) AS said_chars,
                regexp_matches(lower(left(said, 200)), {quoted(_REFUSAL)}) AS refuses,
                left(said, {_SCRIPT_CHARACTERS}) AS script_text,
                CASE WHEN tail_len >= {_LEAST_TAIL} AND list_unique(tail) <= tail_len // 4
                    AND list_bool_or(
                        list_transform(range(1, tail_len // 4 + 1), lambda p: tail[:-p - 1] = tail[p + 1:]))
                    THEN len(output_ids) - tail_len ELSE loop_at(output_ids) END::INTEGER AS loop_at
            FROM said
        ), scripts AS (
            SELECT * EXCLUDE (script_text),
                CASE WHEN has_script(script_text) THEN latin_share(script_text) END AS latin,
                CASE WHEN has_script(script_text) THEN cjk_share(script_text) END AS cjk
            FROM measured
        )
        SELECT scripts.* EXCLUDE (latin, cjk), loop_at > 0 AS loops,
            greatest(abs(latin - prompt_latin), abs(cjk - prompt_cjk)) > {_SCRIPT_APART} AS other_script
        FROM scripts LEFT JOIN prompt_scripts USING (conversation_id, turn)
    """)


def _closing(model: Mapping[str, Any]) -> str:
    """SQL for the place of </think> among the output ids, 0 where there is none.

    A tokenizer that needs several tokens for it spells it in several ways: then the text decides whether it is there,
    and its share of the text where.
    """
    ids = model.get("think_close_ids") or []
    if len(ids) == 1:
        return f"coalesce(list_position(output_ids, {int(ids[0])}), 0)"
    return "(completion_tokens * strpos(text, '</think>') / greatest(length(text), 1))::INTEGER"


def _training_rows(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute("""
        CREATE TEMP TABLE training_rows AS
        SELECT shard, prompt_id, conversation_id, turn, finish_reason, accept_length, prompt_len, seq_len,
            len(input_ids) AS ids_len, len(loss_mask) AS mask_len, hash(input_ids) AS ids_hash,
            input_ids[-1] AS last_id, loss_mask[-1] AS last_mask,
            list_sum(loss_mask)::BIGINT AS supervised, list_max(loss_mask) AS highest_mask,
            coalesce(list_position(loss_mask, 1), 0) AS first_supervised
        FROM tokens
    """)
