-- title: Rows with the conversation and turn of another row
-- unit: rows
-- limit: 0
-- advice: A prompt was answered twice. `shardmill discard` the shards that the examples are in, and run again.
SELECT count(*) - count(DISTINCT (conversation_id, turn)) FROM completions;

-- examples:
SELECT any_value(prompt_id), count(*) || ' times: conversation ' || conversation_id || ', turn ' || turn
FROM completions GROUP BY conversation_id, turn HAVING count(*) > 1 ORDER BY conversation_id LIMIT 3;
