-- title: Answers cut by max_new_tokens or the context
-- unit: share
-- limit: 0.15
-- advice: Raise sampling.max_new_tokens, or model.context where prompts are long. Only cut rows are generated again.
SELECT avg((finish_reason = 'length')::INTEGER) FROM answers;

-- examples:
SELECT a.prompt_id, a.completion_tokens || ' tokens, ends: ' || right(c.text, 120)
FROM (SELECT answers.* FROM answers WHERE finish_reason = 'length' ORDER BY conversation_id LIMIT 3) a
JOIN completions c USING (conversation_id, turn)
ORDER BY a.conversation_id;
