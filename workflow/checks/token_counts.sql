-- title: Answers whose token counts disagree with their ids
-- unit: rows
-- limit: 0
-- advice: The file was changed after it was made: `shardmill discard` its shard, and run again.
SELECT count(*) FILTER (prompt_tokens <> prompt_ids_len OR completion_tokens <> output_ids_len) FROM answers;

-- examples:
SELECT prompt_id, prompt_tokens || '+' || completion_tokens || ' tokens, ' || prompt_ids_len || '+' || output_ids_len || ' ids'
FROM answers WHERE prompt_tokens <> prompt_ids_len OR completion_tokens <> output_ids_len
ORDER BY conversation_id LIMIT 3;
